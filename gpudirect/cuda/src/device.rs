//! GPUs: enumeration, attributes, and peer access between two of them.

use core::ffi::{c_char, c_int};
use core::fmt;
use core::ptr;

use crate::context::Context;
use crate::driver::Driver;
use crate::error::Error;
use crate::sys::{self, RawDevice};

/// A GPU visible to this process. `Copy`.
#[derive(Clone, Copy, PartialEq, Eq)]
#[doc(alias = "CUdevice")]
pub struct Device {
    driver: Driver,
    ordinal: usize,
    raw: RawDevice,
}

/// A device attribute: `CUdevice_attribute`, with its numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
#[repr(i32)]
#[doc(alias("CUdevice_attribute", "cudaDeviceAttr"))]
pub enum Attribute {
    /// Bytes of shared memory per thread block without opt-in.
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
    /// 1 if cooperative launches are supported: all blocks resident, so they may synchronize.
    CooperativeLaunch = 95,
    /// Bytes of shared memory per thread block with opt-in.
    MaxSharedMemoryPerBlockOptin = 97,
    /// 1 if the host accesses managed memory on the device directly over a coherent link.
    DirectManagedMemoryAccessFromHost = 101,
    /// 1 if the device supports VMM allocations (`cuMemMap`).
    VirtualMemoryManagementSupported = 102,
    /// 1 if VMM allocations can be exported as file descriptors.
    HandleTypePosixFileDescriptorSupported = 103,
    /// 1 if VMM allocations can be made GPUDirect RDMA capable.
    GpuDirectRdmaWithVmmSupported = 110,
    /// 1 if GPUDirect RDMA works, through nvidia_peermem or dma-buf.
    GpuDirectRdmaSupported = 116,
    /// Bits of [`FlushOptions`].
    GpuDirectRdmaFlushWritesOptions = 117,
    /// The [`WritesOrdering`] of the device without a flush.
    GpuDirectRdmaWritesOrdering = 118,
    /// 1 if stream memory operations support 64-bit words.
    CanUse64BitStreamMemOps = 122,
    /// 1 where memory can be exported as a dma-buf.
    DmaBufSupported = 124,
    /// 1 where events can be shared between processes.
    IpcEventSupported = 125,
    /// 1 if contexts that this process creates are shared with others by NVIDIA's MPS daemon
    /// (known since CUDA 12.2).
    MpsEnabled = 133,
}

/// The version of a device's architecture: 9.0 is Hopper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ComputeCapability {
    /// The number before the point.
    pub major: u32,
    /// The number after the point.
    pub minor: u32,
}

impl fmt::Display for ComputeCapability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// A device's UUID, the same in every process and container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[doc(alias = "CUuuid")]
pub struct Uuid(pub [u8; 16]);

impl fmt::Display for Uuid {
    /// In the format of nvidia-smi.
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

/// How GPUDirect RDMA writes into a device's memory can be flushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(alias = "CUflushGPUDirectRDMAWritesOptions")]
pub struct FlushOptions {
    /// By `cuFlushGPUDirectRDMAWrites`.
    pub host: bool,
    /// By a stream wait on a memory word with the flush flag.
    pub memops: bool,
}

/// The observers for which GPUDirect RDMA writes are ordered without a flush, weak to strong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[doc(alias = "CUGPUDirectRDMAWritesOrdering")]
pub enum WritesOrdering {
    /// No observer.
    None,
    /// The device that owns the memory.
    Owner,
    /// All devices of the machine.
    AllDevices,
}

/// Peer access from one device to another's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// The interconnect.
    pub link: PeerLink,
    /// The driver's relative performance rank of the link: 0 is the fastest.
    pub performance_rank: i32,
}

/// The interconnect of two devices with peer access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerLink {
    /// NVLink: the link supports native atomics.
    NvLink,
    /// PCIe.
    Pcie,
}

impl Driver {
    /// The device of this ordinal, from 0.
    ///
    /// # Errors
    /// [`Error::NoSuchDevice`], or the driver's error.
    #[doc(alias = "cuDeviceGet")]
    pub fn device(self, ordinal: usize) -> Result<Device, Error> {
        let count = self.device_count();
        let number = c_int::try_from(ordinal).ok().filter(|_| ordinal < count);
        let Some(number) = number else {
            return Err(Error::NoSuchDevice { ordinal, count });
        };
        let mut raw = 0;
        // SAFETY: the pointer is to a local CUdevice.
        let status = unsafe { (self.table().device_get)(&raw mut raw, number) };
        self.check(status, "cuDeviceGet", format_args!("GPU {ordinal}"))?;
        Ok(Device {
            driver: self,
            ordinal,
            raw,
        })
    }

    /// The device of the calling thread's current context; `None` if it has no context.
    #[doc(alias("cuCtxGetDevice", "cudaGetDevice"))]
    pub fn current_device(self) -> Result<Option<Device>, Error> {
        let mut context = ptr::null_mut();
        // SAFETY: the pointer is to a local CUcontext.
        let status = unsafe { (self.table().ctx_get_current)(&raw mut context) };
        self.check(status, "cuCtxGetCurrent", format_args!("this thread"))?;
        if context.is_null() {
            return Ok(None);
        }
        let mut raw = 0;
        // SAFETY: the pointer is to a local CUdevice.
        let status = unsafe { (self.table().ctx_get_device)(&raw mut raw) };
        self.check(status, "cuCtxGetDevice", format_args!("this thread"))?;
        Ok(self.devices()?.into_iter().find(|device| device.raw == raw))
    }

    /// All devices visible to this process.
    pub fn devices(self) -> Result<Vec<Device>, Error> {
        (0..self.device_count()).map(|ordinal| self.device(ordinal)).collect()
    }
}

impl Device {
    /// Its driver.
    #[must_use]
    pub fn driver(self) -> Driver {
        self.driver
    }

    /// Its ordinal in this process, from 0.
    #[must_use]
    pub fn ordinal(self) -> usize {
        self.ordinal
    }

    pub(crate) fn raw(self) -> RawDevice {
        self.raw
    }

    /// Its product name.
    #[doc(alias = "cuDeviceGetName")]
    pub fn name(self) -> Result<String, Error> {
        self.text("cuDeviceGetName", self.driver.table().device_get_name)
    }

    /// Its PCIe address in sysfs format: `0000:18:00.0`.
    #[doc(alias("cuDeviceGetPCIBusId", "cudaDeviceGetPCIBusId"))]
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
        // SAFETY: the function writes at most as many bytes as the length that is passed.
        let status = unsafe { function(room.as_mut_ptr().cast(), ROOM as c_int, self.raw) };
        self.driver.check(status, call, format_args!("{self}"))?;
        let end = room.iter().position(|byte| *byte == 0).unwrap_or(ROOM);
        Ok(String::from_utf8_lossy(&room[..end]).into_owned())
    }

    /// Its UUID.
    #[doc(alias = "cuDeviceGetUuid")]
    pub fn uuid(self) -> Result<Uuid, Error> {
        let mut bytes = [0; 16];
        // SAFETY: the pointer is to the 16 bytes of a CUuuid.
        let status = unsafe { (self.driver.table().device_get_uuid)(&raw mut bytes, self.raw) };
        self.driver.check(status, "cuDeviceGetUuid", format_args!("{self}"))?;
        Ok(Uuid(bytes))
    }

    /// Bytes of its memory.
    #[doc(alias = "cuDeviceTotalMem")]
    pub fn total_memory(self) -> Result<usize, Error> {
        let mut bytes = 0;
        // SAFETY: the pointer is to a local size_t.
        let status = unsafe { (self.driver.table().device_total_mem)(&raw mut bytes, self.raw) };
        self.driver.check(status, "cuDeviceTotalMem", format_args!("{self}"))?;
        Ok(bytes)
    }

    /// The value of `attribute`.
    ///
    /// # Errors
    /// The driver's error: `CUDA_ERROR_INVALID_VALUE` for an attribute that it does not know.
    #[doc(alias("cuDeviceGetAttribute", "cudaDeviceGetAttribute"))]
    pub fn attribute(self, attribute: Attribute) -> Result<i32, Error> {
        let mut value = 0;
        // SAFETY: the pointer is to a local c_int.
        let status =
            unsafe { (self.driver.table().device_get_attribute)(&raw mut value, attribute as c_int, self.raw) };
        self.driver
            .check(status, "cuDeviceGetAttribute", format_args!("{attribute:?} of {self}"))?;
        Ok(value)
    }

    /// Whether `attribute` is nonzero; `false` for an attribute that the driver does not know.
    #[must_use]
    pub fn has(self, attribute: Attribute) -> bool {
        self.attribute(attribute).is_ok_and(|value| value != 0)
    }

    /// Its compute capability.
    pub fn compute_capability(self) -> Result<ComputeCapability, Error> {
        let number = |attribute| Ok::<_, Error>(u32::try_from(self.attribute(attribute)?).unwrap_or(0));
        Ok(ComputeCapability {
            major: number(Attribute::ComputeCapabilityMajor)?,
            minor: number(Attribute::ComputeCapabilityMinor)?,
        })
    }

    /// How GPUDirect RDMA writes into its memory can be flushed.
    pub fn flush_options(self) -> Result<FlushOptions, Error> {
        let bits = self.attribute(Attribute::GpuDirectRdmaFlushWritesOptions)?;
        Ok(FlushOptions {
            host: bits & 1 != 0,
            memops: bits & 2 != 0,
        })
    }

    /// The ordering of GPUDirect RDMA writes without a flush.
    pub fn writes_ordering(self) -> Result<WritesOrdering, Error> {
        Ok(match self.attribute(Attribute::GpuDirectRdmaWritesOrdering)? {
            200.. => WritesOrdering::AllDevices,
            100.. => WritesOrdering::Owner,
            _ => WritesOrdering::None,
        })
    }

    /// Its peer access to the memory of `other`; `None` if it has none.
    #[doc(alias("cuDeviceCanAccessPeer", "cuDeviceGetP2PAttribute", "cudaDeviceCanAccessPeer"))]
    pub fn peer(self, other: Self) -> Result<Option<Peer>, Error> {
        let mut can = 0;
        // SAFETY: the pointer is to a local c_int.
        let status = unsafe { (self.driver.table().device_can_access_peer)(&raw mut can, self.raw, other.raw) };
        self.driver
            .check(status, "cuDeviceCanAccessPeer", format_args!("{self} to {other}"))?;
        if can == 0 {
            return Ok(None);
        }
        let p2p_attribute = |attribute| {
            let mut value = 0;
            // SAFETY: as above.
            let status = unsafe {
                (self.driver.table().device_get_p2p_attribute)(&raw mut value, attribute, self.raw, other.raw)
            };
            self.driver
                .check(status, "cuDeviceGetP2PAttribute", format_args!("{self} to {other}"))?;
            Ok::<_, Error>(value)
        };
        Ok(Some(Peer {
            link: if p2p_attribute(sys::P2P_NATIVE_ATOMICS)? != 0 {
                PeerLink::NvLink
            } else {
                PeerLink::Pcie
            },
            performance_rank: p2p_attribute(sys::P2P_PERFORMANCE_RANK)?,
        }))
    }

    /// Its primary context, shared with the CUDA runtime and PyTorch.
    ///
    /// # Errors
    /// The driver's error. The first context takes some hundred megabytes of device memory.
    #[doc(alias = "cuDevicePrimaryCtxRetain")]
    pub fn context(self) -> Result<Context, Error> {
        Context::primary(self)
    }

    /// Creates a context of its own beside the primary one: calls in it do not wait for locks that
    /// the driver holds for the other, as while a launch waits for space in a full queue.
    ///
    /// Memory mapped by `cuMemMap` can be used in both, any other only where it was allocated.
    ///
    /// # Errors
    /// The driver's error. A context takes some hundred megabytes of device memory.
    #[doc(alias = "cuCtxCreate")]
    pub fn separate_context(self) -> Result<Context, Error> {
        Context::separate(self)
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
