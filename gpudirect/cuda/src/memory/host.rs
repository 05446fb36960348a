//! The host's memory, pinned so that devices copy from and to it by themselves, and mapped for their kernels.

use core::ffi::c_void;
use core::fmt;
use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::ptr;
use std::slice;
use std::sync::Arc;

use super::{DevicePtr, Memory, Sealed};
use crate::context::Context;
use crate::driver::Driver;
use crate::error::Error;
use crate::resource::{Body, Place, Region, Resource};
use crate::stream::Owner;
use crate::sys;

/// Pinned memory of the host, never write-combined. Handles are cloned freely; it is freed when the last is dropped and no work uses it.
///
/// To allocate and to free it is the driver's: it may wait for other work of the device meanwhile, so it is made early and kept.
///
/// A device may write it at any time. So a slice of it is given only to whoever has the last handle, when no work uses it ([`HostMemory::bytes_mut`]);
/// otherwise its bytes are copied out and in, and its words are atomics.
#[derive(Clone)]
pub struct HostMemory {
    resource: Arc<Resource>,
    host: ptr::NonNull<u8>,
}

// SAFETY: the pointer is to memory that the resource keeps, and is followed only as the methods say.
unsafe impl Send for HostMemory {}
// SAFETY: shared handles reach the bytes by atomics only.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// `len` bytes, zero, for the devices of all contexts.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Empty`], or what the driver says otherwise.
    pub fn alloc(context: &Context, len: usize) -> Result<Self, Error> {
        if len == 0 {
            return Err(Error::Empty);
        }
        let _entered = context.enter()?;
        let driver = context.driver();
        let mut host = ptr::null_mut();
        // SAFETY: the pointer is to a pointer of ours; the context is current.
        let answer =
            unsafe { (driver.table().mem_host_alloc)(&raw mut host, len, sys::HOST_PORTABLE | sys::HOST_DEVICE_MAP) };
        driver.check(answer, "cuMemHostAlloc", format_args!("{len} bytes of pinned memory"))?;
        // SAFETY: the driver has given so many bytes, of which nobody knows.
        unsafe { ptr::write_bytes(host.cast::<u8>(), 0, len) };
        Self::mapped(context, host, len, Pinned::Allocated(host.expose_provenance()))
    }

    /// Memory that exists already, pinned and mapped from now on until it is dropped.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] beyond the limit of locked memory, [`Error::Empty`], or what the driver says otherwise; the memory is dropped then.
    pub fn register(context: &Context, memory: Box<[u8]>) -> Result<Self, Error> {
        let len = memory.len();
        if len == 0 {
            return Err(Error::Empty);
        }
        let _entered = context.enter()?;
        let driver = context.driver();
        // Taken apart: from here on the bytes are reached through the pointer only.
        let memory = Box::into_raw(memory);
        let host = memory.cast::<c_void>();
        // SAFETY: the bytes are of ours, and stay where they are until they are unregistered; the context is current.
        let answer =
            unsafe { (driver.table().mem_host_register)(host, len, sys::HOST_PORTABLE | sys::HOST_DEVICE_MAP) };
        if let Err(error) = driver.check(answer, "cuMemHostRegister", format_args!("{len} bytes")) {
            // SAFETY: taken apart above, and not registered.
            drop(unsafe { Box::from_raw(memory) });
            return Err(error);
        }
        let owner = Pinned::Registered {
            host: host.expose_provenance(),
            len,
        };
        Self::mapped(context, host, len, owner)
    }

    /// Memory that somebody else has, pinned and mapped from now on: a mapping of shared memory, for one. `owner` keeps it and is dropped when it is unpinned.
    ///
    /// # Safety
    /// `len` bytes from `host` on must be there until `owner` is dropped, and nobody may have a reference to them meanwhile but to atomics.
    ///
    /// # Errors
    /// As [`HostMemory::register`].
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
        // SAFETY: the caller's promise; the owner is kept until they are unregistered; the context is current.
        let answer =
            unsafe { (driver.table().mem_host_register)(host, len, sys::HOST_PORTABLE | sys::HOST_DEVICE_MAP) };
        driver.check(answer, "cuMemHostRegister", format_args!("{len} bytes"))?;
        let pinned = Pinned::Lent {
            host: host.expose_provenance(),
            owner,
        };
        Self::mapped(context, host, len, pinned)
    }

    fn mapped(context: &Context, host: *mut c_void, len: usize, mut owner: Pinned) -> Result<Self, Error> {
        let driver = context.driver();
        let mut address = 0;
        // SAFETY: the pointer is to an address of ours; the memory is pinned and mapped; the context is current.
        let answer = unsafe { (driver.table().mem_host_get_device_pointer)(&raw mut address, host, 0) };
        let checked = driver.check(answer, "cuMemHostGetDevicePointer", format_args!("{len} bytes"));
        let (Ok(()), Some(pointer)) = (&checked, ptr::NonNull::new(host.cast::<u8>())) else {
            // The first error is the one to tell.
            drop(owner.release(driver));
            return Err(checked.err().unwrap_or(Error::Empty));
        };
        let region = Region {
            address,
            len,
            place: Place::Host {
                at: host.expose_provenance(),
            },
        };
        Ok(Self {
            resource: Resource::new(context, region, owner),
            host: pointer,
        })
    }

    /// Where it begins, for the processor. What lies there may be written by devices at any time.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.host.as_ptr()
    }

    /// Where it begins, for kernels.
    #[must_use]
    pub fn device_ptr(&self) -> DevicePtr {
        self.all().device_ptr()
    }

    /// Frees it, or unpins what somebody else has, as soon as the work that uses it is done, which is waited for. Where there are other handles the last of them does, as when this one is dropped.
    ///
    /// # Errors
    /// [`Error::Lost`] when work has failed: then it is freed when that is known to be over; or what the driver says.
    pub fn free(self) -> Result<(), Error> {
        Arc::into_inner(self.resource).map_or(Ok(()), Resource::free)
    }

    /// Its bytes, when all work that uses it is done: waits for that.
    ///
    /// # Errors
    /// [`Error::Shared`] where there are other handles; [`Error::Lost`] when work has failed.
    pub fn bytes_mut(&mut self) -> Result<&mut [u8], Error> {
        let Some(resource) = Arc::get_mut(&mut self.resource) else {
            return Err(Error::Shared);
        };
        resource.settle()?;
        // SAFETY: so many bytes are there. This is the only handle, and it is borrowed as long as the slice lives, so nobody can begin
        // work with it; what had been begun is done.
        Ok(unsafe { slice::from_raw_parts_mut(self.host.as_ptr(), resource.region().len) })
    }

    /// Copies `bytes` to `offset`. The bytes are written one by one or in words, in no order that work of a device could rely on.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] where they do not lie in it.
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

    /// Copies the bytes from `offset` on to `bytes`. Of what a device writes meanwhile, any part may be seen.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] where they do not lie in it.
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

    /// The word of 32 bits at `offset`, a multiple of 4: to be exchanged with kernels and streams.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::Misaligned`].
    pub fn atomic_u32(&self, offset: usize) -> Result<&AtomicU32, Error> {
        self.check(offset, 4)?;
        let pointer = self.host.as_ptr().wrapping_add(offset).cast::<u32>();
        if !pointer.is_aligned() {
            return Err(Error::Misaligned { offset, word: 4 });
        }
        // SAFETY: the word lies in memory that this keeps, on its boundary; whoever has a shared handle reaches it by atomics only.
        Ok(unsafe { AtomicU32::from_ptr(pointer) })
    }

    /// The word of 64 bits at `offset`, a multiple of 8: to be exchanged with kernels and streams.
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

    /// The byte at `offset`, which lies in the memory.
    fn byte(&self, offset: usize) -> &AtomicU8 {
        // SAFETY: the callers have checked that it lies in memory that this keeps; whoever has a shared handle reaches it by atomics only.
        unsafe { AtomicU8::from_ptr(self.host.as_ptr().add(offset)) }
    }

    /// The word at `offset`, which lies in the memory on a boundary of 8.
    fn word(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: as above, and on its boundary.
        unsafe { AtomicU64::from_ptr(self.host.as_ptr().add(offset).cast()) }
    }
}

/// Whose the memory is. Addresses are exposed, so that this can go to other threads.
enum Pinned {
    Allocated(usize),
    /// A `Box<[u8]>` of ours.
    Registered {
        host: usize,
        len: usize,
    },
    /// Somebody else's. Where it cannot be unregistered its pages may still be written: then it is kept for ever.
    Lent {
        host: usize,
        owner: Owner,
    },
    Gone,
}

impl Body for Pinned {
    fn release(&mut self, driver: Driver) -> Result<(), Error> {
        match std::mem::replace(self, Self::Gone) {
            Self::Allocated(host) => {
                // SAFETY: the driver allocated it, and nobody has it any more.
                let answer = unsafe { (driver.table().mem_free_host)(ptr::with_exposed_provenance_mut(host)) };
                driver.check(answer, "cuMemFreeHost", format_args!("pinned memory"))
            }
            Self::Registered { host, len } => {
                unregister(driver, host)?;
                let bytes = ptr::slice_from_raw_parts_mut(ptr::with_exposed_provenance_mut::<u8>(host), len);
                // SAFETY: it was taken apart when it was registered. Where it is still registered, devices might write it: then this is not reached.
                drop(unsafe { Box::from_raw(bytes) });
                Ok(())
            }
            Self::Lent { host, owner } => unregister(driver, host).inspect_err(|_| std::mem::forget(owner)),
            Self::Gone => Ok(()),
        }
    }
}

fn unregister(driver: Driver, host: usize) -> Result<(), Error> {
    // SAFETY: it was registered once, and no work uses it any more.
    let answer = unsafe { (driver.table().mem_host_unregister)(ptr::with_exposed_provenance_mut(host)) };
    driver.check(answer, "cuMemHostUnregister", format_args!("pinned memory"))
}

impl Sealed for HostMemory {
    #[allow(private_interfaces)] // As the trait has it.
    fn resource(&self) -> &Arc<Resource> {
        &self.resource
    }
}

impl Memory for HostMemory {}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostMemory")
            .field("address", &self.host)
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}
