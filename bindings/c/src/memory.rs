//! Registered memory.

use core::any::Any;
use core::ffi::c_void;
use core::mem::MaybeUninit;
use core::ptr::NonNull;
use std::sync::Arc;

use doorbell::collectives::CommBuffer;
use doorbell::{
    BufferAlias, Local, Memory, PeerAccessible, PeerRead, PeerReadWrite, PeerWrite, ProtectionDomain, Rights,
};

use crate::argument::{end, number, object, result, store};
use crate::device::doorbell_device;
use crate::status::{Failure, doorbell_status, run};

/// What peers that have the key of memory may do with it. The values are bits.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum doorbell_access {
    /// Nothing: it is for sending and receiving.
    DOORBELL_LOCAL = 0,
    /// Read it.
    DOORBELL_PEER_READ = 1,
    /// Write it.
    DOORBELL_PEER_WRITE = 2,
    /// Both.
    DOORBELL_PEER_READ_WRITE = 3,
}
use self::doorbell_access::*;

/// A key to memory, by which peers read and write it. It is the same bytes on every host: send it
/// as it is. Who has it may use it as long as the memory is registered.
#[repr(C)]
pub struct doorbell_key {
    /// Its bytes.
    pub bytes: [u8; 24],
}

/// Registered memory, for connections of its device, or for operations of its communicator. Ended
/// by doorbell_free().
pub struct doorbell_memory {
    pub(crate) region: Arc<Region>,
}

/// Memory and its registration, kept by the receives that are posted in it.
pub(crate) struct Region {
    start: NonNull<u8>,
    /// None: it is a communicator's, whose queue pairs no connection has.
    whole: Option<BufferAlias>,
    key: Option<[u8; 24]>,
    /// A `Buffer` or a `CommBuffer`: the registration.
    _buffer: Box<dyn Any + Send + Sync>,
}

// SAFETY: it lends no reference to the bytes; C and devices reach them by address.
unsafe impl Send for Region {}
// SAFETY: it lends no reference to the bytes; C and devices reach them by address.
unsafe impl Sync for Region {}

impl Region {
    /// # Safety
    /// As of `register_raw`, with C's promise as the protocol: nothing else uses bytes that a call
    /// or a posted receive uses.
    unsafe fn new(
        pd: &ProtectionDomain,
        start: NonNull<u8>,
        len: usize,
        access: u32,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self, Failure> {
        // SAFETY: the owner keeps the `len` bytes, and C uses none that a call or a posted receive
        // uses: as each of these requires.
        unsafe {
            match access {
                access if access == DOORBELL_LOCAL as u32 => Self::local(pd, start, len, owner),
                access if access == DOORBELL_PEER_READ as u32 => Self::of_peers(pd, start, len, PeerRead, owner),
                access if access == DOORBELL_PEER_WRITE as u32 => Self::of_peers(pd, start, len, PeerWrite, owner),
                access if access == DOORBELL_PEER_READ_WRITE as u32 => {
                    Self::of_peers(pd, start, len, PeerReadWrite, owner)
                }
                other => Err(Failure::invalid(format!("access {other} is no doorbell_access"))),
            }
        }
    }

    /// # Safety
    /// As of [`new`](Self::new).
    unsafe fn local(
        pd: &ProtectionDomain,
        start: NonNull<u8>,
        len: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self, Failure> {
        // SAFETY: the owner keeps the `len` bytes, and C uses none that a device uses.
        let buffer = unsafe { pd.register_raw(start.as_ptr(), len, Local, owner) }?;
        Ok(Self {
            start,
            // SAFETY: the buffer is kept beside it; what C promises of the bytes is in the header.
            whole: Some(unsafe { buffer.alias(..) }),
            key: None,
            _buffer: Box::new(buffer),
        })
    }

    /// # Safety
    /// As of [`new`](Self::new).
    unsafe fn of_peers<R: Rights + PeerAccessible>(
        pd: &ProtectionDomain,
        start: NonNull<u8>,
        len: usize,
        rights: R,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self, Failure> {
        // SAFETY: the owner keeps the `len` bytes, and C uses none that a device or a peer uses.
        let buffer = unsafe { pd.register_raw(start.as_ptr(), len, rights, owner) }?;
        Ok(Self {
            start,
            // SAFETY: the buffer is kept beside it; what C promises of the bytes is in the header.
            whole: Some(unsafe { buffer.alias(..) }),
            key: Some(buffer.remote().to_bytes()),
            _buffer: Box::new(buffer),
        })
    }

    pub(crate) fn of_communicator(mut buffer: CommBuffer<u8>) -> Self {
        Self {
            start: NonNull::from(&mut *buffer).cast(),
            whole: None,
            key: None,
            _buffer: Box::new(buffer),
        }
    }

    /// The `len` bytes at `offset`.
    pub(crate) fn part(&self, offset: usize, len: usize) -> Result<BufferAlias, Failure> {
        let whole = self.whole.as_ref().ok_or_else(|| {
            Failure::invalid("the memory is a communicator's: connections use that of doorbell_alloc()")
        })?;
        whole
            .slice(offset, len)
            .ok_or_else(|| Failure::invalid(format!("{len} bytes at offset {offset} are beyond the memory's end")))
    }

    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        self.start.as_ptr().wrapping_add(offset)
    }
}

/// Allocates and registers memory of this length, initially zero. Between processes of one host it
/// is the fastest for the userspace device.
///
/// DOORBELL_NO_MEMORY if there is none, or the limit of locked memory (ulimit -l) is reached.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_alloc(
    device: *const doorbell_device,
    length: usize,
    access: MaybeUninit<doorbell_access>,
    memory: *mut *mut doorbell_memory,
) -> doorbell_status {
    let make = || {
        // SAFETY: a handle or null, by contract.
        let device = unsafe { object(device, "device") }?;
        let mut owned = Memory::shared(length)?;
        let start = NonNull::from(&mut *owned).cast();
        // SAFETY: all bytes of the memory, which the region owns, and C's promise.
        let region = unsafe { Region::new(&device.pd, start, length, number(access), Arc::new(owned)) }?;
        Ok(doorbell_memory {
            region: Arc::new(region),
        })
    };
    // SAFETY: the caller's place for a handle, by contract.
    run(|| unsafe { store(memory, "memory", make) })
}

/// Registers the caller's memory, which has to exist until the handle is ended and all connections
/// that receives in it were posted on.
///
/// DOORBELL_NO_MEMORY if an adapter finds no memory there that can be written, or the limit of
/// locked memory (ulimit -l) is reached; the userspace device finds out when it uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_register(
    device: *const doorbell_device,
    address: *mut c_void,
    length: usize,
    access: MaybeUninit<doorbell_access>,
    memory: *mut *mut doorbell_memory,
) -> doorbell_status {
    let make = || {
        // SAFETY: a handle or null, by contract.
        let device = unsafe { object(device, "device") }?;
        let start = NonNull::new(address.cast()).ok_or_else(|| Failure::invalid("address is NULL"))?;
        // SAFETY: the caller's, as long as the handle and the receives in it, by contract.
        let region = unsafe { Region::new(&device.pd, start, length, number(access), Arc::new(())) }?;
        Ok(doorbell_memory {
            region: Arc::new(region),
        })
    };
    // SAFETY: the caller's place for a handle, by contract.
    run(|| unsafe { store(memory, "memory", make) })
}

/// The first byte of memory; NULL of NULL. The caller may use the bytes whenever no call, posted
/// receive or peer uses the same.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_address(memory: *const doorbell_memory) -> *mut c_void {
    // SAFETY: a handle or null, by contract.
    match unsafe { object(memory, "memory") } {
        Ok(memory) => memory.region.at(0).cast(),
        Err(_) => core::ptr::null_mut(),
    }
}

/// Stores the key of memory, for peers. DOORBELL_INVALID_ARGUMENT if it is DOORBELL_LOCAL or a
/// communicator's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_get_key(memory: *const doorbell_memory, key: *mut doorbell_key) -> doorbell_status {
    run(|| {
        // SAFETY: a handle or null, by contract.
        let memory = unsafe { object(memory, "memory") }?;
        // SAFETY: the caller's place, by contract.
        let key = unsafe { result(key, "key") }?;
        let lacking = || Failure::invalid("the memory has no key: register it with rights of peers");
        key.write(doorbell_key {
            bytes: memory.region.key.ok_or_else(lacking)?,
        });
        Ok(())
    })
}

/// Ends the handle of memory. It is deregistered, and freed if doorbell_alloc() or
/// doorbell_comm_alloc() has allocated it, when no receive is posted in it any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn doorbell_free(memory: *mut doorbell_memory) -> doorbell_status {
    run(|| {
        // SAFETY: a handle that ends here, by contract.
        drop(unsafe { end(memory) });
        Ok(())
    })
}
