//! Device memory of PyTorch, or of other processes by CUDA IPC (`cuIpc*`); pointer attributes.

use core::ffi::{c_int, c_void};
use core::fmt;
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::{DevicePtr, Memory, Sealed, share};
use crate::context::Context;
use crate::device::Device;
use crate::driver::Driver;
use crate::error::Error;
use crate::resource::{Body, MemorySpace, Region, Resource};
use crate::stream::Owner;
use crate::sys::{self, Address, IpcBytes, pointer, status};

/// The memory type of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(alias("CUmemorytype", "cudaMemoryType"))]
pub enum MemoryType {
    /// Host memory, pinned or mapped by CUDA.
    Host,
    /// Device memory.
    Device,
    /// Managed memory: the driver migrates it between host and device.
    Managed,
}

/// Pointer attributes of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PointerInfo {
    /// The memory type.
    pub memory_type: MemoryType,
    /// The ordinal of the device on or for which it was allocated.
    pub device: usize,
    /// Start and bytes of its allocation or VMM mapping, if the driver reports it.
    pub allocation: Option<(DevicePtr, usize)>,
    /// An allocation id, unique in this process.
    pub buffer_id: u64,
    /// Mapped by `cuMemMap`: shareable by file descriptor if it was allocated so.
    pub is_mapped: bool,
    /// Whether it was allocated as shareable by file descriptor.
    pub shares_by_fd: bool,
    /// Whether [`Foreign::ipc_handle`] can export it.
    pub shares_by_ipc: bool,
    /// Whether NICs can access it, through a dma-buf or nvidia_peermem.
    pub is_gpu_direct: bool,
}

impl Driver {
    /// The memory type of an address and the ordinal of its device; `None` if unknown to CUDA.
    /// Unlike [`Context::pointer_info`] it needs no context, and creates none.
    pub fn locate(self, address: DevicePtr) -> Result<Option<(MemoryType, usize)>, Error> {
        let Some(memory_type) = memory_type(self, address)? else {
            return Ok(None);
        };
        let device = usize::try_from(number(self, pointer::DEVICE_ORDINAL, address)?).unwrap_or(0);
        Ok(Some((memory_type, device)))
    }
}

impl Context {
    /// The pointer attributes of an address; `None` if unknown to CUDA, such as of a `Vec`.
    #[doc(alias("cuPointerGetAttribute", "cudaPointerGetAttributes"))]
    pub fn pointer_info(&self, address: DevicePtr) -> Result<Option<PointerInfo>, Error> {
        let driver = self.driver();
        let _entered = self.enter()?;
        let Some(memory_type) = memory_type(driver, address)? else {
            return Ok(None);
        };
        let (is_mapped, shares_by_fd) = mapped(driver, address);
        Ok(Some(PointerInfo {
            memory_type,
            device: usize::try_from(number(driver, pointer::DEVICE_ORDINAL, address)?).unwrap_or(0),
            allocation: range(driver, address).ok(),
            buffer_id: buffer_id(driver, address)?,
            is_mapped,
            shares_by_fd,
            shares_by_ipc: flag(driver, pointer::IS_LEGACY_IPC_CAPABLE, address),
            is_gpu_direct: flag(driver, pointer::IS_GPU_DIRECT_RDMA_CAPABLE, address),
        }))
    }
}

/// The memory type; `None` for an address unknown to CUDA.
fn memory_type(driver: Driver, address: DevicePtr) -> Result<Option<MemoryType>, Error> {
    let mut kind: u32 = 0;
    // SAFETY: this attribute is written as an unsigned int; the driver does not dereference the
    // address.
    let status =
        unsafe { (driver.table().pointer_get_attribute)((&raw mut kind).cast(), pointer::MEMORY_TYPE, address.0) };
    if status == status::INVALID_VALUE {
        return Ok(None);
    }
    driver.check(status, "cuPointerGetAttribute", format_args!("{address:?}"))?;
    Ok(Some(match kind {
        _ if flag(driver, pointer::IS_MANAGED, address) => MemoryType::Managed,
        1 => MemoryType::Host,
        _ => MemoryType::Device,
    }))
}

/// An attribute written as an int, or as a bool, which leaves the other bytes 0.
fn number(driver: Driver, attribute: c_int, address: DevicePtr) -> Result<c_int, Error> {
    let mut value: c_int = 0;
    // SAFETY: these attributes are written as an int or less.
    let status = unsafe { (driver.table().pointer_get_attribute)((&raw mut value).cast(), attribute, address.0) };
    driver.check(
        status,
        "cuPointerGetAttribute",
        format_args!("attribute {attribute} of {address:?}"),
    )?;
    Ok(value)
}

/// Whether the attribute is nonzero; `false` if the driver does not know it.
fn flag(driver: Driver, attribute: c_int, address: DevicePtr) -> bool {
    number(driver, attribute, address).is_ok_and(|value| value != 0)
}

fn buffer_id(driver: Driver, address: DevicePtr) -> Result<u64, Error> {
    let mut id: u64 = 0;
    // SAFETY: this attribute is written as an unsigned long long.
    let status = unsafe { (driver.table().pointer_get_attribute)((&raw mut id).cast(), pointer::BUFFER_ID, address.0) };
    driver.check(
        status,
        "cuPointerGetAttribute",
        format_args!("BUFFER_ID of {address:?}"),
    )?;
    Ok(id)
}

/// The allocation that contains the address; the context is current.
fn range(driver: Driver, address: DevicePtr) -> Result<(DevicePtr, usize), Error> {
    let (mut base, mut size) = (0, 0);
    // SAFETY: the pointers are to local values.
    let status = unsafe { (driver.table().mem_get_address_range)(&raw mut base, &raw mut size, address.0) };
    driver.check(status, "cuMemGetAddressRange", format_args!("{address:?}"))?;
    Ok((DevicePtr(base), size))
}

/// Whether the address was mapped by `cuMemMap`, and whether that allocation can be exported.
fn mapped(driver: Driver, address: DevicePtr) -> (bool, bool) {
    let Some(handle) = retain(driver, address) else {
        return (false, false);
    };
    let exports = share::properties(driver, handle).is_ok_and(|prop| prop.handle_types & sys::HANDLE_POSIX_FD != 0);
    share::release(driver, handle);
    (true, exports)
}

fn retain(driver: Driver, address: DevicePtr) -> Option<sys::AllocationHandle> {
    let mut handle = 0;
    let at = ptr::without_provenance_mut::<c_void>(usize::try_from(address.0).ok()?);
    // SAFETY: the pointer is to a local handle; the driver does not dereference the address.
    let status = unsafe { (driver.table().mem_retain_allocation_handle)(&raw mut handle, at) };
    (status == status::SUCCESS).then_some(handle)
}

/// Reference-counted device memory allocated elsewhere, released when no handle or work uses it.
#[derive(Clone)]
pub struct Foreign(Arc<Resource>);

/// The IPC handle of an allocation: `CUipcMemHandle`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[doc(alias("CUipcMemHandle", "cudaIpcMemHandle_t"))]
pub struct IpcHandle(pub [u8; 64]);

impl Foreign {
    /// Wraps `len` bytes from `address`; `owner`, which keeps them, is dropped after all work.
    ///
    /// # Safety
    /// Work of `context` must be able to read and write them until `owner` is dropped.
    ///
    /// # Errors
    /// [`Error::Empty`]; [`Error::OutOfBounds`] beyond the allocation; the driver's error.
    pub unsafe fn wrap(context: &Context, address: DevicePtr, len: usize, owner: Owner) -> Result<Self, Error> {
        if len == 0 {
            return Err(Error::Empty);
        }
        let (base, size) = {
            let _entered = context.enter()?;
            range(context.driver(), address)?
        };
        let offset = usize::try_from(address.0 - base.0).unwrap_or(usize::MAX);
        // For VMM memory the range is that of one mapping; the owner may have several.
        if offset.saturating_add(len) > size && !mapped(context.driver(), address).0 {
            return Err(Error::OutOfBounds {
                start: offset,
                end: offset.saturating_add(len),
                len: size,
            });
        }
        Ok(Self::of(context, address.0, len, Backing::Owner { _owner: owner }))
    }

    /// Names `len` bytes from `address` without a call of the driver, and keeps nothing: for memory
    /// of a caller that itself keeps it until all work is done.
    ///
    /// # Safety
    /// Work of `context` must be able to read and write them until it is done, however long after
    /// the handle is dropped.
    ///
    /// # Errors
    /// [`Error::Empty`].
    pub unsafe fn name(context: &Context, address: DevicePtr, len: usize) -> Result<Self, Error> {
        if len == 0 {
            return Err(Error::Empty);
        }
        let region = Region {
            address: address.0,
            len,
            space: MemorySpace::Device,
        };
        Ok(Self(Resource::unkept(context, region)))
    }

    /// Opens a whole allocation of another process, never of this one, by its IPC handle.
    ///
    /// # Safety
    /// The other process must keep the allocation until this one has closed it: the driver does
    /// not. No other code in this process may have it open for the same device: drivers differ in
    /// what closing one then does to the other. This function tracks its own openings and returns
    /// the open one again.
    ///
    /// # Errors
    /// [`Error::NoPeerAccess`] to the memory's device, [`Error::StillOpen`], or the driver's.
    #[doc(alias("cuIpcOpenMemHandle", "cudaIpcOpenMemHandle"))]
    pub unsafe fn open(context: &Context, handle: &IpcHandle) -> Result<Self, Error> {
        let driver = context.driver();
        let device = context.device();
        let key = (device.raw(), *handle);
        let _opening = OPENING.lock();
        if matches!(opened(key), Some(None)) {
            // It may be dropped with its work done, and not reaped yet.
            context.reap();
        }
        match opened(key) {
            Some(Some(resource)) => return Ok(Self(resource)),
            Some(None) => return Err(Error::StillOpen),
            None => {}
        }
        let _entered = context.enter()?;
        let mut address: Address = 0;
        // SAFETY: the pointer is to a local address, and the context is current; the driver
        // validates the handle.
        let status = unsafe {
            (driver.table().ipc_open_mem_handle)(&raw mut address, IpcBytes(handle.0), sys::IPC_LAZY_PEER_ACCESS)
        };
        driver.check(
            status,
            "cuIpcOpenMemHandle",
            format_args!("another process's memory for {device}"),
        )?;
        match range(driver, DevicePtr(address)) {
            Ok((_, size)) => {
                let foreign = Self::of(context, address, size, Backing::Opened(Open { key, address }));
                OPENED.lock().push((key, Arc::downgrade(&foreign.0)));
                Ok(foreign)
            }
            Err(error) => {
                // The first error is reported.
                drop(Open { key, address }.close(driver));
                Err(error)
            }
        }
    }

    fn of(context: &Context, address: Address, len: usize, kept: Backing) -> Self {
        let region = Region {
            address,
            len,
            space: MemorySpace::Device,
        };
        Self(Resource::new(context, region, kept))
    }

    /// Its device pointer.
    #[must_use]
    pub fn device_ptr(&self) -> DevicePtr {
        self.all().device_ptr()
    }

    /// The device it resides on, according to the driver.
    pub fn device(&self) -> Result<Device, Error> {
        let driver = self.0.context().driver();
        let _entered = self.0.context().enter()?;
        let ordinal = number(driver, pointer::DEVICE_ORDINAL, self.device_ptr())?;
        driver.device(usize::try_from(ordinal).unwrap_or(usize::MAX))
    }

    /// Bytes of the allocation or mapping in which it starts, and whether it is a mapping.
    pub(super) fn allocation(&self) -> Result<(usize, bool), Error> {
        let driver = self.0.context().driver();
        let _entered = self.0.context().enter()?;
        let (_, size) = range(driver, self.device_ptr())?;
        Ok((size, mapped(driver, self.device_ptr()).0))
    }

    /// The IPC handle of its allocation by `cuMemAlloc`, and its offset there; keep it until the
    /// other process has closed it. Mapped memory is exported by [`Foreign::export_fd`].
    ///
    /// # Errors
    /// The driver's error: for mapped memory, and for an allocation opened from another process.
    #[doc(alias("cuIpcGetMemHandle", "cudaIpcGetMemHandle"))]
    pub fn ipc_handle(&self) -> Result<(IpcHandle, usize), Error> {
        let driver = self.0.context().driver();
        let _entered = self.0.context().enter()?;
        let (base, _) = range(driver, self.device_ptr())?;
        let mut bytes = IpcBytes([0; 64]);
        // SAFETY: the pointer is to the bytes of a handle.
        let status = unsafe { (driver.table().ipc_get_mem_handle)(&raw mut bytes, base.0) };
        driver.check(
            status,
            "cuIpcGetMemHandle",
            format_args!("memory of {}", self.0.context().device()),
        )?;
        let offset = usize::try_from(self.device_ptr().0 - base.0).unwrap_or(usize::MAX);
        Ok((IpcHandle(bytes.0), offset))
    }

    /// A descriptor of the mapping in which it starts, if shareable, and its offset there.
    ///
    /// # Errors
    /// The driver's error: for memory that is not mapped or not exportable.
    pub fn export_fd(&self) -> Result<(OwnedFd, usize), Error> {
        let driver = self.0.context().driver();
        let _entered = self.0.context().enter()?;
        let (base, _) = range(driver, self.device_ptr())?;
        let Some(handle) = retain(driver, base) else {
            let failure = driver.failure(
                status::NOT_SUPPORTED,
                "cuMemRetainAllocationHandle",
                format_args!("memory that cuMemMap has not mapped"),
            );
            return Err(failure.into());
        };
        let exported = share::export(driver, handle);
        share::release(driver, handle);
        let offset = usize::try_from(self.device_ptr().0 - base.0).unwrap_or(usize::MAX);
        Ok((exported?, offset))
    }
}

enum Backing {
    Owner { _owner: Owner },
    Opened(Open),
}

/// The device for which an allocation was opened, and its IPC handle.
type OpenKey = (c_int, IpcHandle);

/// Another process's allocations that are open here, until they are closed.
static OPENED: Mutex<Vec<(OpenKey, Weak<Resource>)>> = Mutex::new(Vec::new());
/// Serializes openings. Closing needs [`OPENED`] alone.
static OPENING: Mutex<()> = Mutex::new(());

/// The entry of an open allocation; `Some(None)` if its last handle is gone, not yet closed.
fn opened(key: OpenKey) -> Option<Option<Arc<Resource>>> {
    let opened = OPENED.lock();
    let (_, resource) = opened.iter().find(|(one, _)| *one == key)?;
    Some(resource.upgrade())
}

/// An open allocation; it has an entry in [`OPENED`] for its lifetime.
struct Open {
    key: OpenKey,
    address: Address,
}

impl Open {
    /// Closes it; the context is current, and no work uses it any more.
    fn close(&self, driver: Driver) -> Result<(), Error> {
        // SAFETY: opened once by the value's creator, and closed once.
        let status = unsafe { (driver.table().ipc_close_mem_handle)(self.address) };
        driver.check(status, "cuIpcCloseMemHandle", format_args!("another process's memory"))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        OPENED.lock().retain(|(key, _)| *key != self.key);
    }
}

impl Body for Backing {
    fn release(&mut self, driver: Driver) -> Result<(), Error> {
        match self {
            // Dropped with this value.
            Self::Owner { .. } => Ok(()),
            Self::Opened(open) => open.close(driver),
        }
    }
}

impl Sealed for Foreign {
    #[allow(private_interfaces)] // As declared in the trait.
    fn resource(&self) -> &Arc<Resource> {
        &self.0
    }
}

impl Memory for Foreign {}

debug_fields!(Foreign, self, address = self.device_ptr(), len = self.len());

impl fmt::Debug for IpcHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("IpcHandle(..)")
    }
}
