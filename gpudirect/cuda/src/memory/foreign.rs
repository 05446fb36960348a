//! Device memory that somebody else has allocated: PyTorch's, or another process's by the older kind of sharing (`cuIpc*`); and what the driver knows of any address.

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
use crate::resource::{Body, Place, Region, Resource};
use crate::stream::Owner;
use crate::sys::{self, Address, IpcBytes, pointer, status};

/// What kind of memory an address is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryType {
    /// The host's, pinned or mapped by CUDA.
    Host,
    /// A device's.
    Device,
    /// Managed: the driver moves it between host and device.
    Managed,
}

/// What the driver knows of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PointerInfo {
    /// The kind of memory.
    pub memory_type: MemoryType,
    /// The number of the device that it was allocated on or for.
    pub device: usize,
    /// Where its allocation, or for mapped memory its mapping, begins, and its bytes; `None` where the driver does not say, as it need not of the host's.
    pub allocation: Option<(DevicePtr, usize)>,
    /// A number that no other allocation of this process has or will have.
    pub buffer_id: u64,
    /// Mapped by `cuMemMap`, so that it is shared by file descriptor where it was made for that.
    pub is_mapped: bool,
    /// Whether it was made to be shared by file descriptor.
    pub shares_by_fd: bool,
    /// Whether [`Foreign::ipc_handle`] can share it.
    pub shares_by_ipc: bool,
    /// Whether NICs can reach it, by a dma-buf or nvidia_peermem.
    pub is_gpu_direct: bool,
}

impl Driver {
    /// The kind of memory that an address is of, and the number of its device; `None` of one that is not CUDA's. Unlike [`Context::pointer_info`] this needs no context, and makes none on a device that the program does not use.
    ///
    /// # Errors
    /// What the driver says.
    pub fn locate(self, address: DevicePtr) -> Result<Option<(MemoryType, usize)>, Error> {
        let Some(memory_type) = memory_type(self, address)? else {
            return Ok(None);
        };
        let device = usize::try_from(number(self, pointer::DEVICE_ORDINAL, address)?).unwrap_or(0);
        Ok(Some((memory_type, device)))
    }
}

impl Context {
    /// What the driver knows of an address; `None` of one that is not CUDA's, such as of a `Vec`.
    ///
    /// # Errors
    /// What the driver says.
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

/// The kind of memory; `None` of an address that is not CUDA's.
fn memory_type(driver: Driver, address: DevicePtr) -> Result<Option<MemoryType>, Error> {
    let mut kind: u32 = 0;
    // SAFETY: this attribute is written as an unsigned int; the driver only looks the address up.
    let answer =
        unsafe { (driver.table().pointer_get_attribute)((&raw mut kind).cast(), pointer::MEMORY_TYPE, address.0) };
    if answer == status::INVALID_VALUE {
        return Ok(None);
    }
    driver.check(answer, "cuPointerGetAttribute", format_args!("{address:?}"))?;
    Ok(Some(match kind {
        _ if flag(driver, pointer::IS_MANAGED, address) => MemoryType::Managed,
        1 => MemoryType::Host,
        _ => MemoryType::Device,
    }))
}

/// An attribute that is written as an int. Some are written as a bool: then the other bytes stay 0.
fn number(driver: Driver, attribute: c_int, address: DevicePtr) -> Result<c_int, Error> {
    let mut value: c_int = 0;
    // SAFETY: these attributes are written as an int or less.
    let answer = unsafe { (driver.table().pointer_get_attribute)((&raw mut value).cast(), attribute, address.0) };
    driver.check(
        answer,
        "cuPointerGetAttribute",
        format_args!("attribute {attribute} of {address:?}"),
    )?;
    Ok(value)
}

/// Whether it is so; not where the driver is older than the attribute.
fn flag(driver: Driver, attribute: c_int, address: DevicePtr) -> bool {
    number(driver, attribute, address).is_ok_and(|value| value != 0)
}

fn buffer_id(driver: Driver, address: DevicePtr) -> Result<u64, Error> {
    let mut id: u64 = 0;
    // SAFETY: this attribute is written as an unsigned long long.
    let answer = unsafe { (driver.table().pointer_get_attribute)((&raw mut id).cast(), pointer::BUFFER_ID, address.0) };
    driver.check(
        answer,
        "cuPointerGetAttribute",
        format_args!("BUFFER_ID of {address:?}"),
    )?;
    Ok(id)
}

/// The allocation that an address lies in; the context is current.
fn range(driver: Driver, address: DevicePtr) -> Result<(DevicePtr, usize), Error> {
    let (mut base, mut size) = (0, 0);
    // SAFETY: the pointers are to values of ours.
    let answer = unsafe { (driver.table().mem_get_address_range)(&raw mut base, &raw mut size, address.0) };
    driver.check(answer, "cuMemGetAddressRange", format_args!("{address:?}"))?;
    Ok((DevicePtr(base), size))
}

/// Whether an address was mapped by `cuMemMap`, and whether what is mapped can be exported.
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
    // SAFETY: the pointer is to a handle of ours; the driver only looks the address up.
    let answer = unsafe { (driver.table().mem_retain_allocation_handle)(&raw mut handle, at) };
    (answer == status::SUCCESS).then_some(handle)
}

/// Device memory of somebody else's. Handles are cloned freely; it is let go of when the last is dropped and no work uses it.
#[derive(Clone)]
pub struct Foreign(Arc<Resource>);

/// What another process opens an allocation by: `CUipcMemHandle`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct IpcHandle(pub [u8; 64]);

impl Foreign {
    /// `len` bytes from `address` on, kept by `owner`, which is dropped when no work uses them any longer.
    ///
    /// # Safety
    /// They must be memory that work of `context` can read and write, until `owner` is dropped.
    ///
    /// # Errors
    /// [`Error::Empty`]; [`Error::OutOfBounds`] where the driver knows that the allocation is shorter; or what the driver says otherwise, of an address that it does not know.
    pub unsafe fn wrap(context: &Context, address: DevicePtr, len: usize, owner: Owner) -> Result<Self, Error> {
        if len == 0 {
            return Err(Error::Empty);
        }
        let (base, size) = {
            let _entered = context.enter()?;
            range(context.driver(), address)?
        };
        let offset = usize::try_from(address.0 - base.0).unwrap_or(usize::MAX);
        // Of mapped memory the range is one mapping's; an owner may have put several side by side.
        if offset.saturating_add(len) > size && !mapped(context.driver(), address).0 {
            return Err(Error::OutOfBounds {
                start: offset,
                end: offset.saturating_add(len),
                len: size,
            });
        }
        Ok(Self::of(context, address.0, len, Kept::Owner { _owner: owner }))
    }

    /// All of the allocation that another process has shared by [`Foreign::ipc_handle`] or `cuIpcGetMemHandle`; never one of this process.
    ///
    /// # Safety
    /// The other process must keep the allocation until this one has let go of it: the driver does not. Nobody else in this process must have it open for the same device: drivers differ in what
    /// becomes of the one when the other is closed. What this function has opened it knows, and gives again.
    ///
    /// # Errors
    /// [`Error::NoPeerAccess`] where it is on a device that the context's does not reach, [`Error::StillOpen`], or what the driver says otherwise.
    pub unsafe fn open(context: &Context, handle: &IpcHandle) -> Result<Self, Error> {
        let driver = context.driver();
        let device = context.device();
        let key = (device.raw(), *handle);
        let _opening = OPENING.lock();
        if matches!(opened(key), Some(None)) {
            // It may only not have been looked at since its work was done.
            context.reap();
        }
        match opened(key) {
            Some(Some(resource)) => return Ok(Self(resource)),
            Some(None) => return Err(Error::StillOpen),
            None => {}
        }
        let _entered = context.enter()?;
        let mut address: Address = 0;
        // SAFETY: the pointer is to an address of ours, and the context is current; the driver looks through the handle for an allocation that it knows.
        let answer = unsafe {
            (driver.table().ipc_open_mem_handle)(&raw mut address, IpcBytes(handle.0), sys::IPC_LAZY_PEER_ACCESS)
        };
        driver.check(
            answer,
            "cuIpcOpenMemHandle",
            format_args!("another process's memory for {device}"),
        )?;
        match range(driver, DevicePtr(address)) {
            Ok((_, size)) => {
                let foreign = Self::of(context, address, size, Kept::Opened(Open { key, address }));
                OPENED.lock().push((key, Arc::downgrade(&foreign.0)));
                Ok(foreign)
            }
            Err(error) => {
                // The first error is the one to tell.
                drop(Open { key, address }.close(driver));
                Err(error)
            }
        }
    }

    fn of(context: &Context, address: Address, len: usize, kept: Kept) -> Self {
        let region = Region {
            address,
            len,
            place: Place::Device,
        };
        Self(Resource::new(context, region, kept))
    }

    /// Where it begins.
    #[must_use]
    pub fn device_ptr(&self) -> DevicePtr {
        self.all().device_ptr()
    }

    /// The device that the driver has it on.
    ///
    /// # Errors
    /// What the driver says.
    pub fn device(&self) -> Result<Device, Error> {
        let driver = self.0.context().driver();
        let _entered = self.0.context().enter()?;
        let ordinal = number(driver, pointer::DEVICE_ORDINAL, self.device_ptr())?;
        driver.device(usize::try_from(ordinal).unwrap_or(usize::MAX))
    }

    /// Bytes of the allocation that it begins in, or of the mapping, and whether it is one.
    pub(super) fn allocation(&self) -> Result<(usize, bool), Error> {
        let driver = self.0.context().driver();
        let _entered = self.0.context().enter()?;
        let (_, size) = range(driver, self.device_ptr())?;
        Ok((size, mapped(driver, self.device_ptr()).0))
    }

    /// What another process opens the allocation by that it lies in, and where in that it begins. Of memory that `cuMemAlloc` made; mapped memory goes by [`Foreign::export_fd`].
    /// It must be kept until the other process has let go of it.
    ///
    /// # Errors
    /// What the driver says: of mapped memory, and of an allocation that was opened from another process.
    pub fn ipc_handle(&self) -> Result<(IpcHandle, usize), Error> {
        let driver = self.0.context().driver();
        let _entered = self.0.context().enter()?;
        let (base, _) = range(driver, self.device_ptr())?;
        let mut bytes = IpcBytes([0; 64]);
        // SAFETY: the pointer is to the bytes of a handle.
        let answer = unsafe { (driver.table().ipc_get_mem_handle)(&raw mut bytes, base.0) };
        driver.check(
            answer,
            "cuIpcGetMemHandle",
            format_args!("memory of {}", self.0.context().device()),
        )?;
        let offset = usize::try_from(self.device_ptr().0 - base.0).unwrap_or(usize::MAX);
        Ok((IpcHandle(bytes.0), offset))
    }

    /// A descriptor of the mapping that it begins in, where that was made to be shared so, and where in that it begins.
    ///
    /// # Errors
    /// What the driver says: of memory that is not mapped, and of what was not made to be exported.
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

/// Who keeps the memory.
enum Kept {
    Owner {
        _owner: Owner,
    },
    /// Another process's, opened here.
    Opened(Open),
}

/// The device that an allocation was opened for, and what it was opened by.
type Key = (c_int, IpcHandle);

/// Another process's allocations that are open here, until they are closed.
static OPENED: Mutex<Vec<(Key, Weak<Resource>)>> = Mutex::new(Vec::new());
/// Held by who opens one, so that nobody else does at the same time. What is closed meanwhile needs [`OPENED`] alone.
static OPENING: Mutex<()> = Mutex::new(());

/// What an allocation is that is open; in it, `None` where nobody has a handle of it any more.
fn opened(key: Key) -> Option<Option<Arc<Resource>>> {
    let opened = OPENED.lock();
    let (_, resource) = opened.iter().find(|(one, _)| *one == key)?;
    Some(resource.upgrade())
}

/// An allocation that is open, with an entry in [`OPENED`] for as long as this is there.
struct Open {
    key: Key,
    address: Address,
}

impl Open {
    /// The context is current, and no work uses it any more.
    fn close(&self, driver: Driver) -> Result<(), Error> {
        // SAFETY: opened once by whoever has made this, and closed once.
        let answer = unsafe { (driver.table().ipc_close_mem_handle)(self.address) };
        driver.check(answer, "cuIpcCloseMemHandle", format_args!("another process's memory"))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        OPENED.lock().retain(|(key, _)| *key != self.key);
    }
}

impl Body for Kept {
    fn release(&mut self, driver: Driver) -> Result<(), Error> {
        match self {
            // It goes with this value.
            Self::Owner { .. } => Ok(()),
            Self::Opened(open) => open.close(driver),
        }
    }
}

impl Sealed for Foreign {
    #[allow(private_interfaces)] // As the trait has it.
    fn resource(&self) -> &Arc<Resource> {
        &self.0
    }
}

impl Memory for Foreign {}

impl fmt::Debug for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Foreign")
            .field("address", &self.device_ptr())
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for IpcHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("IpcHandle(..)")
    }
}
