//! Pinned host memory, mapped for devices, which no model can include. The owner of a word chooses
//! its ordering; copies are relaxed, and ordered by the event or word that reports completion.

use core::ffi::c_void;
use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::ptr;
use std::slice;
use std::sync::Arc;

use super::{DevicePtr, Memory, Sealed};
use crate::context::Context;
use crate::driver::Driver;
use crate::error::Error;
use crate::resource::{Body, MemorySpace, Region, Resource};
use crate::stream::Owner;
use crate::sys;

/// Pinned host memory, never write-combined; reference-counted, freed when no handle or work uses
/// it. Allocation and freeing may wait for other work of the device, so allocate early.
///
/// A device may write it at any time, so a slice is given only to the last handle, when no work
/// uses it ([`HostMemory::bytes_mut`]); otherwise bytes are copied, and words are atomics.
#[derive(Clone)]
pub struct HostMemory {
    resource: Arc<Resource>,
    host: ptr::NonNull<u8>,
}

// SAFETY: the resource keeps the memory of the pointer, which is dereferenced only as the methods
// document.
unsafe impl Send for HostMemory {}
// SAFETY: shared handles access the bytes by atomics only.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Allocates `len` zeroed bytes, mapped for the devices of all contexts.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Empty`], or another driver error.
    #[doc(alias("cuMemHostAlloc", "cudaHostAlloc"))]
    pub fn alloc(context: &Context, len: usize) -> Result<Self, Error> {
        if len == 0 {
            return Err(Error::Empty);
        }
        let _entered = context.enter()?;
        let driver = context.driver();
        let mut host = ptr::null_mut();
        // SAFETY: the pointer is to a local pointer; the context is current.
        let status =
            unsafe { (driver.table().mem_host_alloc)(&raw mut host, len, sys::HOST_PORTABLE | sys::HOST_DEVICE_MAP) };
        driver.check(status, "cuMemHostAlloc", format_args!("{len} bytes of pinned memory"))?;
        // SAFETY: the driver has just allocated these bytes, and no other reference to them exists.
        unsafe { ptr::write_bytes(host.cast::<u8>(), 0, len) };
        Self::mapped(context, host, len, Pinned::Allocated(host.expose_provenance()))
    }

    /// Pins and maps existing memory until it is dropped.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] beyond the locked-memory limit, [`Error::Empty`], or another driver
    /// error; the memory is then dropped.
    #[doc(alias("cuMemHostRegister", "cudaHostRegister"))]
    pub fn register(context: &Context, memory: Box<[u8]>) -> Result<Self, Error> {
        let len = memory.len();
        if len == 0 {
            return Err(Error::Empty);
        }
        let _entered = context.enter()?;
        let driver = context.driver();
        // From here on the bytes are accessed through the raw pointer only.
        let memory = Box::into_raw(memory);
        let host = memory.cast::<c_void>();
        // SAFETY: this value owns the bytes, which stay in place until they are unregistered; the
        // context is current.
        let status =
            unsafe { (driver.table().mem_host_register)(host, len, sys::HOST_PORTABLE | sys::HOST_DEVICE_MAP) };
        if let Err(error) = driver.check(status, "cuMemHostRegister", format_args!("{len} bytes")) {
            // SAFETY: from `Box::into_raw` above, and not registered.
            drop(unsafe { Box::from_raw(memory) });
            return Err(error);
        }
        let owner = Pinned::Registered {
            host: host.expose_provenance(),
            len,
        };
        Self::mapped(context, host, len, owner)
    }

    /// Pins memory owned elsewhere, such as a shared mapping; `owner` is dropped when unpinned.
    ///
    /// # Safety
    /// `host` must have `len` bytes, accessed by atomics only, until `owner` is dropped.
    #[doc(alias("cuMemHostRegister", "cudaHostRegister"))]
    pub unsafe fn register_raw(
        context: &Context,
        host: ptr::NonNull<u8>,
        len: usize,
        owner: Owner,
    ) -> Result<Self, Error> {
        if len == 0 {
            return Err(Error::Empty);
        }
        let _entered = context.enter()?;
        let driver = context.driver();
        let host = host.as_ptr().cast::<c_void>();
        // SAFETY: by the caller's promise; the owner is kept until they are unregistered; the
        // context is current.
        let status =
            unsafe { (driver.table().mem_host_register)(host, len, sys::HOST_PORTABLE | sys::HOST_DEVICE_MAP) };
        driver.check(status, "cuMemHostRegister", format_args!("{len} bytes"))?;
        let pinned = Pinned::Borrowed {
            host: host.expose_provenance(),
            owner,
        };
        Self::mapped(context, host, len, pinned)
    }

    fn mapped(context: &Context, host: *mut c_void, len: usize, mut owner: Pinned) -> Result<Self, Error> {
        let driver = context.driver();
        let mut address = 0;
        // SAFETY: the pointer is to a local address; the memory is pinned and mapped; the context
        // is current.
        let status = unsafe { (driver.table().mem_host_get_device_pointer)(&raw mut address, host, 0) };
        let checked = driver.check(status, "cuMemHostGetDevicePointer", format_args!("{len} bytes"));
        let (Ok(()), Some(pointer)) = (&checked, ptr::NonNull::new(host.cast::<u8>())) else {
            // The first error is reported.
            drop(owner.release(driver));
            return Err(checked.err().unwrap_or(Error::Empty));
        };
        let region = Region {
            address,
            len,
            space: MemorySpace::Host {
                at: host.expose_provenance(),
            },
        };
        Ok(Self {
            resource: Resource::new(context, region, owner),
            host: pointer,
        })
    }

    /// Its host address. Devices may write the bytes at any time.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.host.as_ptr()
    }

    /// Its device pointer.
    #[must_use]
    pub fn device_ptr(&self) -> DevicePtr {
        self.all().device_ptr()
    }

    /// Waits for work that uses it, then frees or unpins it; with other handles, the last does.
    ///
    /// # Errors
    /// [`Error::Lost`] if work has failed (freed once it is known to be over), or the driver's.
    #[doc(alias("cuMemFreeHost", "cuMemHostUnregister", "cudaFreeHost"))]
    pub fn free(self) -> Result<(), Error> {
        Arc::into_inner(self.resource).map_or(Ok(()), Resource::free)
    }

    /// Its bytes, after waiting for all work that uses it.
    ///
    /// # Errors
    /// [`Error::Shared`] if there are other handles; [`Error::Lost`] if work has failed.
    pub fn bytes_mut(&mut self) -> Result<&mut [u8], Error> {
        let Some(resource) = Arc::get_mut(&mut self.resource) else {
            return Err(Error::Shared);
        };
        resource.wait_for_work()?;
        // SAFETY: the memory has this many bytes. This is the only handle, and it is borrowed as
        // long as the slice lives, so no new work can start with it; earlier work is done.
        Ok(unsafe { slice::from_raw_parts_mut(self.host.as_ptr(), resource.region().len) })
    }

    /// Copies `bytes` to `offset`, in bytes or words, in no order that device work could rely on.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] if they exceed the memory.
    pub fn copy_in(&self, offset: usize, bytes: &[u8]) -> Result<(), Error> {
        self.check(offset, bytes.len())?;
        let target = self.host.as_ptr().wrapping_add(offset);
        let head = target.align_offset(size_of::<u64>()).min(bytes.len());
        let (head, rest) = bytes.split_at(head);
        let (words, tail) = rest.as_chunks::<8>();
        for (at, byte) in head.iter().enumerate() {
            self.byte(offset + at).store(*byte, Ordering::Relaxed);
        }
        let at = offset + head.len();
        for (index, word) in words.iter().enumerate() {
            self.word(at + 8 * index)
                .store(u64::from_ne_bytes(*word), Ordering::Relaxed);
        }
        let at = at + 8 * words.len();
        for (index, byte) in tail.iter().enumerate() {
            self.byte(at + index).store(*byte, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Copies the bytes at `offset` to `bytes`. Concurrent device writes may be seen in part.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] if they exceed the memory.
    pub fn copy_out(&self, offset: usize, bytes: &mut [u8]) -> Result<(), Error> {
        self.check(offset, bytes.len())?;
        let source = self.host.as_ptr().wrapping_add(offset);
        let head = source.align_offset(size_of::<u64>()).min(bytes.len());
        let (head, rest) = bytes.split_at_mut(head);
        let (words, tail) = rest.as_chunks_mut::<8>();
        let mut at = offset;
        for byte in head {
            *byte = self.byte(at).load(Ordering::Relaxed);
            at += 1;
        }
        for word in words {
            *word = self.word(at).load(Ordering::Relaxed).to_ne_bytes();
            at += 8;
        }
        for byte in tail {
            *byte = self.byte(at).load(Ordering::Relaxed);
            at += 1;
        }
        Ok(())
    }

    /// The 32-bit word at `offset`, a multiple of 4, shared with kernels and streams.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::Misaligned`].
    pub fn atomic_u32(&self, offset: usize) -> Result<&AtomicU32, Error> {
        self.check(offset, 4)?;
        let pointer = self.host.as_ptr().wrapping_add(offset).cast::<u32>();
        if !pointer.is_aligned() {
            return Err(Error::Misaligned { offset, word: 4 });
        }
        // SAFETY: the word lies aligned in memory that this value keeps; shared handles access it
        // by atomics only.
        Ok(unsafe { AtomicU32::from_ptr(pointer) })
    }

    /// The 64-bit word at `offset`, a multiple of 8, shared with kernels and streams.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::Misaligned`].
    pub fn atomic_u64(&self, offset: usize) -> Result<&AtomicU64, Error> {
        self.check(offset, 8)?;
        if !self.host.as_ptr().wrapping_add(offset).cast::<u64>().is_aligned() {
            return Err(Error::Misaligned { offset, word: 8 });
        }
        Ok(self.word(offset))
    }

    fn check(&self, offset: usize, len: usize) -> Result<(), Error> {
        self.span(offset..offset.saturating_add(len)).map(|_| ())
    }

    fn byte(&self, offset: usize) -> &AtomicU8 {
        // SAFETY: the callers have checked that it lies in memory that this value keeps; shared
        // handles access it by atomics only.
        unsafe { AtomicU8::from_ptr(self.host.as_ptr().add(offset)) }
    }

    /// The word at `offset`, within the memory and a multiple of 8.
    fn word(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: as above, and aligned.
        unsafe { AtomicU64::from_ptr(self.host.as_ptr().add(offset).cast()) }
    }
}

/// The owner of the memory. Addresses are exposed, so that this can be sent to other threads.
enum Pinned {
    Allocated(usize),
    /// A `Box<[u8]>` of this value.
    Registered {
        host: usize,
        len: usize,
    },
    /// Owned elsewhere; kept forever if unregistering fails, as devices may still write it.
    Borrowed {
        host: usize,
        owner: Owner,
    },
    Gone,
}

impl Body for Pinned {
    fn release(&mut self, driver: Driver) -> Result<(), Error> {
        match std::mem::replace(self, Self::Gone) {
            Self::Allocated(host) => {
                // SAFETY: the driver allocated it, and this is its last owner.
                let status = unsafe { (driver.table().mem_free_host)(ptr::with_exposed_provenance_mut(host)) };
                driver.check(status, "cuMemFreeHost", format_args!("pinned memory"))
            }
            Self::Registered { host, len } => {
                unregister(driver, host)?;
                let bytes = ptr::slice_from_raw_parts_mut(ptr::with_exposed_provenance_mut::<u8>(host), len);
                // SAFETY: from `Box::into_raw` at registration. If unregistering failed, devices
                // might still write it: then this is not reached.
                drop(unsafe { Box::from_raw(bytes) });
                Ok(())
            }
            Self::Borrowed { host, owner } => unregister(driver, host).inspect_err(|_| std::mem::forget(owner)),
            Self::Gone => Ok(()),
        }
    }
}

fn unregister(driver: Driver, host: usize) -> Result<(), Error> {
    // SAFETY: registered once, and no work uses it any more.
    let status = unsafe { (driver.table().mem_host_unregister)(ptr::with_exposed_provenance_mut(host)) };
    driver.check(status, "cuMemHostUnregister", format_args!("pinned memory"))
}

impl Sealed for HostMemory {
    #[allow(private_interfaces)] // As declared in the trait.
    fn resource(&self) -> &Arc<Resource> {
        &self.resource
    }
}

impl Memory for HostMemory {}

debug_fields!(HostMemory, self, address = self.host, len = self.len());
