//! GPUs: which there are, what they can do, and how two of them reach each other.

use core::ffi::{c_char, c_int};
use core::fmt;

use crate::context::Context;
use crate::driver::Driver;
use crate::error::Error;
use crate::sys::{self, RawDevice};

/// One GPU of this process. A small handle, copied freely.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Device {
    driver: Driver,
    ordinal: usize,
    raw: RawDevice,
}

/// What a device can be asked about: `CUdevice_attribute`, whose numbers these are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
#[repr(i32)]
pub enum Attribute {
    /// Bytes of shared memory that a block has without asking for more.
    MaxSharedMemoryPerBlock = 8,
    /// Streaming multiprocessors.
    MultiprocessorCount = 16,
    /// 1 where it shares the host's memory.
    Integrated = 18,
    /// Bytes of second-level cache.
    L2CacheSize = 38,
    /// Copy engines.
    AsyncEngineCount = 40,
    /// Major compute capability.
    ComputeCapabilityMajor = 75,
    /// Minor compute capability.
    ComputeCapabilityMinor = 76,
    /// 1 where kernels can be launched whose blocks wait for each other.
    CooperativeLaunch = 95,
    /// Bytes of shared memory that a block can ask for.
    MaxSharedMemoryPerBlockOptin = 97,
    /// 1 where the host reaches managed memory that lies on the device, over a coherent link.
    DirectManagedMemoryAccessFromHost = 101,
    /// 1 where memory can be mapped by `cuMemMap`.
    VirtualMemoryManagementSupported = 102,
    /// 1 where such memory can be exported as a file descriptor.
    HandleTypePosixFileDescriptorSupported = 103,
    /// 1 where such memory can be made for GPUDirect RDMA.
    GpuDirectRdmaWithVmmSupported = 110,
    /// 1 where GPUDirect RDMA works, by nvidia_peermem or dma-buf.
    GpuDirectRdmaSupported = 116,
    /// Bits of [`FlushOptions`].
    GpuDirectRdmaFlushWritesOptions = 117,
    /// Which [`WritesOrdering`] the device gives without a flush.
    GpuDirectRdmaWritesOrdering = 118,
    /// 1 where streams can write and wait for words of 64 bits.
    CanUse64BitStreamMemOps = 122,
    /// 1 where memory can be exported as a dma-buf.
    DmaBufSupported = 124,
    /// 1 where events can be shared between processes.
    IpcEventSupported = 125,
}

/// The version of a device's architecture: 9.0 is Hopper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ComputeCapability {
    /// The number before the point.
    pub major: u32,
    /// The number behind it.
    pub minor: u32,
}

impl fmt::Display for ComputeCapability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// A device's identity, the same in every process and container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Uuid(pub [u8; 16]);

impl fmt::Display for Uuid {
    /// As nvidia-smi writes it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU")?;
        for (at, byte) in self.0.iter().enumerate() {
            if matches!(at, 0 | 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

/// By which ways writes of another device (a NIC) into this one's memory can be flushed: `CUflushGPUDirectRDMAWritesOptions`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlushOptions {
    /// By `cuFlushGPUDirectRDMAWrites`.
    pub host: bool,
    /// By a stream that waits for a word with the flush flag.
    pub memops: bool,
}

/// For whom writes of another device are in order without a flush: `CUGPUDirectRDMAWritesOrdering`. Ordered so that more is greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum WritesOrdering {
    /// For nobody.
    None,
    /// For the device whose memory it is.
    Owner,
    /// For all devices of the machine.
    AllDevices,
}

/// How one device reaches the memory of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// By what.
    pub link: PeerLink,
    /// How fast the driver takes the link to be beside the machine's others: 0 is the fastest.
    pub performance_rank: i32,
}

/// What joins two devices that reach each other's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerLink {
    /// NVLink: the link that carries atomics.
    NvLink,
    /// The PCIe bus.
    Pcie,
}

impl Driver {
    /// The device `ordinal`, from 0, as this process counts them.
    ///
    /// # Errors
    /// [`Error::NoSuchDevice`], or what the driver says.
    pub fn device(self, ordinal: usize) -> Result<Device, Error> {
        let count = self.device_count();
        let number = c_int::try_from(ordinal).ok().filter(|_| ordinal < count);
        let Some(number) = number else {
            return Err(Error::NoSuchDevice { ordinal, count });
        };
        let mut raw = 0;
        // SAFETY: the pointer is to a CUdevice of ours.
        let answer = unsafe { (self.table().device_get)(&raw mut raw, number) };
        self.check(answer, "cuDeviceGet", format_args!("GPU {ordinal}"))?;
        Ok(Device {
            driver: self,
            ordinal,
            raw,
        })
    }

    /// All devices of this process.
    ///
    /// # Errors
    /// What the driver says.
    pub fn devices(self) -> Result<Vec<Device>, Error> {
        (0..self.device_count()).map(|ordinal| self.device(ordinal)).collect()
    }
}

impl Device {
    /// The driver that it is of.
    #[must_use]
    pub fn driver(self) -> Driver {
        self.driver
    }

    /// Its number in this process, from 0.
    #[must_use]
    pub fn ordinal(self) -> usize {
        self.ordinal
    }

    pub(crate) fn raw(self) -> RawDevice {
        self.raw
    }

    /// Its product's name.
    ///
    /// # Errors
    /// What the driver says.
    pub fn name(self) -> Result<String, Error> {
        self.text("cuDeviceGetName", self.driver.table().device_get_name)
    }

    /// Its address on the PCIe bus, as sysfs writes it: `0000:18:00.0`.
    ///
    /// # Errors
    /// What the driver says.
    pub fn pci_bus_id(self) -> Result<String, Error> {
        let mut id = self.text("cuDeviceGetPCIBusId", self.driver.table().device_get_pci_bus_id)?;
        id.make_ascii_lowercase();
        Ok(id)
    }

    fn text(
        self,
        call: &'static str,
        function: unsafe extern "C" fn(*mut c_char, c_int, RawDevice) -> c_int,
    ) -> Result<String, Error> {
        const ROOM: usize = 256;
        let mut room = [0u8; ROOM];
        // SAFETY: the function writes at most as many bytes as it is told there are.
        let answer = unsafe { function(room.as_mut_ptr().cast(), ROOM as c_int, self.raw) };
        self.driver.check(answer, call, format_args!("{self}"))?;
        let end = room.iter().position(|byte| *byte == 0).unwrap_or(ROOM);
        Ok(String::from_utf8_lossy(&room[..end]).into_owned())
    }

    /// Its identity.
    ///
    /// # Errors
    /// What the driver says.
    pub fn uuid(self) -> Result<Uuid, Error> {
        let mut bytes = [0; 16];
        // SAFETY: the pointer is to the 16 bytes of a CUuuid.
        let answer = unsafe { (self.driver.table().device_get_uuid)(&raw mut bytes, self.raw) };
        self.driver.check(answer, "cuDeviceGetUuid", format_args!("{self}"))?;
        Ok(Uuid(bytes))
    }

    /// The bytes of its memory.
    ///
    /// # Errors
    /// What the driver says.
    pub fn total_memory(self) -> Result<usize, Error> {
        let mut bytes = 0;
        // SAFETY: the pointer is to a size_t of ours.
        let answer = unsafe { (self.driver.table().device_total_mem)(&raw mut bytes, self.raw) };
        self.driver.check(answer, "cuDeviceTotalMem", format_args!("{self}"))?;
        Ok(bytes)
    }

    /// What the device says of `attribute`.
    ///
    /// # Errors
    /// What the driver says: `CUDA_ERROR_INVALID_VALUE` of an attribute that is younger than it.
    pub fn attribute(self, attribute: Attribute) -> Result<i32, Error> {
        let mut value = 0;
        // SAFETY: the pointer is to a c_int of ours.
        let answer =
            unsafe { (self.driver.table().device_get_attribute)(&raw mut value, attribute as c_int, self.raw) };
        self.driver
            .check(answer, "cuDeviceGetAttribute", format_args!("{attribute:?} of {self}"))?;
        Ok(value)
    }

    /// Whether the device says 1 of `attribute`; not of one that is younger than the driver.
    #[must_use]
    pub fn has(self, attribute: Attribute) -> bool {
        self.attribute(attribute).is_ok_and(|value| value != 0)
    }

    /// The version of its architecture.
    ///
    /// # Errors
    /// What the driver says.
    pub fn compute_capability(self) -> Result<ComputeCapability, Error> {
        let number = |attribute| Ok::<_, Error>(u32::try_from(self.attribute(attribute)?).unwrap_or(0));
        Ok(ComputeCapability {
            major: number(Attribute::ComputeCapabilityMajor)?,
            minor: number(Attribute::ComputeCapabilityMinor)?,
        })
    }

    /// How writes of other devices into its memory can be flushed.
    ///
    /// # Errors
    /// What the driver says.
    pub fn flush_options(self) -> Result<FlushOptions, Error> {
        let bits = self.attribute(Attribute::GpuDirectRdmaFlushWritesOptions)?;
        Ok(FlushOptions {
            host: bits & 1 != 0,
            memops: bits & 2 != 0,
        })
    }

    /// For whom such writes are in order without a flush.
    ///
    /// # Errors
    /// What the driver says.
    pub fn writes_ordering(self) -> Result<WritesOrdering, Error> {
        Ok(match self.attribute(Attribute::GpuDirectRdmaWritesOrdering)? {
            200.. => WritesOrdering::AllDevices,
            100.. => WritesOrdering::Owner,
            _ => WritesOrdering::None,
        })
    }

    /// How it reaches the memory of `other`; `None` where it does not.
    ///
    /// # Errors
    /// What the driver says.
    pub fn peer(self, other: Self) -> Result<Option<Peer>, Error> {
        let mut can = 0;
        // SAFETY: the pointer is to a c_int of ours.
        let answer = unsafe { (self.driver.table().device_can_access_peer)(&raw mut can, self.raw, other.raw) };
        self.driver
            .check(answer, "cuDeviceCanAccessPeer", format_args!("{self} to {other}"))?;
        if can == 0 {
            return Ok(None);
        }
        let asked = |attribute| {
            let mut value = 0;
            // SAFETY: as above.
            let answer = unsafe {
                (self.driver.table().device_get_p2p_attribute)(&raw mut value, attribute, self.raw, other.raw)
            };
            self.driver
                .check(answer, "cuDeviceGetP2PAttribute", format_args!("{self} to {other}"))?;
            Ok::<_, Error>(value)
        };
        Ok(Some(Peer {
            link: if asked(sys::P2P_NATIVE_ATOMICS)? != 0 {
                PeerLink::NvLink
            } else {
                PeerLink::Pcie
            },
            performance_rank: asked(sys::P2P_PERFORMANCE_RANK)?,
        }))
    }

    /// Its primary context, the one that CUDA's runtime and PyTorch use too.
    ///
    /// # Errors
    /// What the driver says: the first context of a process takes some hundred megabytes of the device's memory.
    pub fn context(self) -> Result<Context, Error> {
        Context::primary(self)
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU {}", self.ordinal)
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(&self.ordinal).finish()
    }
}
