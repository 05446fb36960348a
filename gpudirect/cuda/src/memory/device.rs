//! VMM allocations (`cuMemCreate`), exportable as file descriptors and mapped for peer devices.

use core::ffi::c_int;
use std::ptr;
use std::sync::Arc;

use super::{DevicePtr, Memory, Sealed};
use crate::context::Context;
use crate::device::{Attribute, Device};
use crate::driver::Driver;
use crate::error::Error;
use crate::resource::{Body, MemorySpace, Region, Resource};
use crate::sys::{self, AccessDesc, Address, AllocationHandle, AllocationProp, Location, status};

/// A reference-counted VMM allocation of device memory, freed when no handle or work uses it.
///
/// Its initial contents are unspecified. Its bytes are accessed only by copies and kernels.
#[derive(Clone)]
#[doc(alias = "CUmemGenericAllocationHandle")]
pub struct DeviceMemory {
    resource: Arc<Resource>,
    /// Owned by the resource.
    handle: AllocationHandle,
    mapped: usize,
    home: c_int,
    gpu_direct: bool,
}

/// Options of a [`DeviceMemory`] allocation.
#[derive(Debug, Clone)]
pub struct DeviceMemoryOptions<'a> {
    context: &'a Context,
    peers: Vec<Device>,
}

impl DeviceMemory {
    /// Allocates `len` bytes on the device of `context`, mapped for that device alone.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::NotSupported`], [`Error::Empty`], or another driver error.
    #[doc(alias("cuMemCreate", "cuMemMap", "cuMemAlloc", "cudaMalloc"))]
    pub fn alloc(context: &Context, len: usize) -> Result<Self, Error> {
        Self::options(context).alloc(len)
    }

    /// Options for memory on the device of `context` that peers also access.
    #[must_use]
    pub fn options(context: &Context) -> DeviceMemoryOptions<'_> {
        DeviceMemoryOptions {
            context,
            peers: Vec::new(),
        }
    }

    /// The mapped bytes: its length, rounded up to the allocation granularity (2 MiB).
    #[must_use]
    pub fn mapped_len(&self) -> usize {
        self.mapped
    }

    /// Whether it is `gpuDirectRDMACapable`: every allocation on a device that supports it is.
    #[must_use]
    pub fn is_gpu_direct(&self) -> bool {
        self.gpu_direct
    }

    /// Its device pointer.
    #[must_use]
    pub fn device_ptr(&self) -> DevicePtr {
        self.all().device_ptr()
    }

    /// The device it resides on; `None` for imported memory of one not visible to this process.
    #[must_use]
    pub fn device(&self) -> Option<Device> {
        let home = usize::try_from(self.home).ok()?;
        self.context().driver().device(home).ok()
    }

    pub(super) fn handle(&self) -> AllocationHandle {
        self.handle
    }

    /// The context it was made in.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.resource.context()
    }
}

impl DeviceMemoryOptions<'_> {
    /// Maps it for peer access by `devices` too.
    #[must_use]
    pub fn peers(mut self, devices: &[Device]) -> Self {
        self.peers.extend_from_slice(devices);
        self
    }

    /// Allocates `len` bytes.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::NoPeerAccess`] if a peer cannot access the device;
    /// [`Error::NotSupported`] if it cannot map memory so; [`Error::Empty`]; another driver error.
    pub fn alloc(&self, len: usize) -> Result<DeviceMemory, Error> {
        if len == 0 {
            return Err(Error::Empty);
        }
        let device = self.context.device();
        let driver = device.driver();
        let gpu_direct = device.has(Attribute::GpuDirectRdmaWithVmmSupported);
        let prop = AllocationProp {
            kind: sys::ALLOCATION_PINNED,
            handle_types: sys::HANDLE_POSIX_FD,
            location: location(device),
            gpu_direct_rdma_capable: gpu_direct.into(),
            ..AllocationProp::NONE
        };

        let _entered = self.context.enter()?;
        let (granularity, mapped) = round_up(device, &prop, len)?;
        let mut handle = 0;
        // SAFETY: the pointers are to local values.
        let mut create = || unsafe { (driver.table().mem_create)(&raw mut handle, mapped, &raw const prop, 0) };
        let mut status = create();
        if status == status::OUT_OF_MEMORY {
            // Dropped memory whose work is done may not have been reaped yet.
            self.context.reap();
            status = create();
        }
        driver.check(status, "cuMemCreate", format_args!("{mapped} bytes on {device}"))?;
        self.map(handle, &prop, granularity, len, mapped)
    }

    /// Maps the allocation `handle` and takes ownership of it; the context is current.
    pub(super) fn map(
        &self,
        handle: AllocationHandle,
        prop: &AllocationProp,
        granularity: usize,
        len: usize,
        mapped: usize,
    ) -> Result<DeviceMemory, Error> {
        let device = self.context.device();
        let mut mapping = Mapping::of(handle, mapped);
        if let Err(error) = mapping.map(device, granularity, &self.peers) {
            // Undo what was done; the first error is reported.
            drop(mapping.release(device.driver()));
            return Err(error);
        }
        let region = Region {
            address: mapping.address,
            len,
            space: MemorySpace::Device,
        };
        Ok(DeviceMemory {
            resource: Resource::new(self.context, region, mapping),
            handle,
            mapped,
            home: prop.location.id,
            gpu_direct: prop.gpu_direct_rdma_capable != 0,
        })
    }

    pub(super) fn context(&self) -> &Context {
        self.context
    }
}

pub(super) fn round_up(device: Device, prop: &AllocationProp, len: usize) -> Result<(usize, usize), Error> {
    let driver = device.driver();
    let mut granularity = 0;
    // SAFETY: the pointers are to local values.
    let status = unsafe {
        (driver.table().mem_get_allocation_granularity)(
            &raw mut granularity,
            ptr::from_ref(prop),
            sys::GRANULARITY_MINIMUM,
        )
    };
    driver.check(status, "cuMemGetAllocationGranularity", format_args!("{device}"))?;
    let granularity = granularity.max(1);
    let mapped = len.checked_next_multiple_of(granularity).ok_or(Error::OutOfBounds {
        start: 0,
        end: len,
        len: isize::MAX as usize,
    })?;
    Ok((granularity, mapped))
}

fn location(device: Device) -> Location {
    Location {
        kind: sys::LOCATION_DEVICE,
        // A device's number in this process: its ordinal.
        id: device.raw(),
    }
}

/// An allocation and its mapping. Release undoes only the steps that were done.
struct Mapping {
    handle: Option<AllocationHandle>,
    address: Address,
    bytes: usize,
    is_mapped: bool,
}

impl Mapping {
    fn of(handle: AllocationHandle, bytes: usize) -> Self {
        Self {
            handle: Some(handle),
            address: 0,
            bytes,
            is_mapped: false,
        }
    }

    fn map(&mut self, device: Device, alignment: usize, peers: &[Device]) -> Result<(), Error> {
        let driver = device.driver();
        let table = driver.table();
        let bytes = self.bytes;
        let Some(handle) = self.handle else { return Ok(()) };
        for peer in peers.iter().filter(|peer| **peer != device) {
            check_peer_access(*peer, device)?;
        }
        // SAFETY: the pointer is to a local address.
        let status = unsafe { (table.mem_address_reserve)(&raw mut self.address, bytes, alignment, 0, 0) };
        driver.check(status, "cuMemAddressReserve", format_args!("{bytes} bytes"))?;
        // SAFETY: the addresses were just reserved for this; the allocation is live.
        let status = unsafe { (table.mem_map)(self.address, bytes, 0, handle, 0) };
        driver.check(status, "cuMemMap", format_args!("{bytes} bytes on {device}"))?;
        self.is_mapped = true;
        let mut accesses = vec![access(device)];
        accesses.extend(peers.iter().filter(|peer| **peer != device).map(|peer| access(*peer)));
        // SAFETY: the addresses are mapped; the length is that of the descriptor array.
        let status = unsafe { (table.mem_set_access)(self.address, bytes, accesses.as_ptr(), accesses.len()) };
        if accesses.len() == 1 {
            driver.check(status, "cuMemSetAccess", format_args!("{bytes} bytes on {device}"))
        } else {
            driver.check(
                status,
                "cuMemSetAccess",
                format_args!("{bytes} bytes on {device} for {peers:?}"),
            )
        }
    }
}

/// Checked here because the driver's error for a mapping would not name the cause.
pub(super) fn check_peer_access(device: Device, other: Device) -> Result<(), Error> {
    if device.peer(other)?.is_some() {
        return Ok(());
    }
    device.driver().check(
        status::PEER_ACCESS_UNSUPPORTED,
        "cuDeviceCanAccessPeer",
        format_args!("{device} to {other}"),
    )
}

fn access(device: Device) -> AccessDesc {
    AccessDesc {
        location: location(device),
        flags: sys::ACCESS_READ_WRITE,
    }
}

impl Body for Mapping {
    fn release(&mut self, driver: Driver) -> Result<(), Error> {
        let table = driver.table();
        let (address, bytes) = (self.address, self.bytes);
        // All steps are tried even if one fails; the first error is reported.
        let mut result = Ok(());
        if std::mem::take(&mut self.is_mapped) {
            // SAFETY: mapped as a whole by this value, and no work uses it.
            let status = unsafe { (table.mem_unmap)(address, bytes) };
            result = result.and(driver.check(status, "cuMemUnmap", format_args!("{bytes} bytes")));
        }
        if std::mem::take(&mut self.address) != 0 {
            // SAFETY: reserved as a whole by this value, and unmapped.
            let status = unsafe { (table.mem_address_free)(address, bytes) };
            result = result.and(driver.check(status, "cuMemAddressFree", format_args!("{bytes} bytes")));
        }
        if let Some(handle) = self.handle.take() {
            // SAFETY: owned by this value, and used no more.
            let status = unsafe { (table.mem_release)(handle) };
            result = result.and(driver.check(status, "cuMemRelease", format_args!("{bytes} bytes")));
        }
        result
    }
}

impl Sealed for DeviceMemory {
    #[allow(private_interfaces)] // As declared in the trait.
    fn resource(&self) -> &Arc<Resource> {
        &self.resource
    }
}

impl Memory for DeviceMemory {}

debug_fields!(
    DeviceMemory,
    self,
    device = self.context().device(),
    address = self.device_ptr(),
    len = self.len()
);
