//! Memory regions (MR): memory is freed only after the device has released it.

use core::ffi::c_uint;
use core::mem::ManuallyDrop;
use std::any::Any;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use doorbell_verbs_sys::{self as sys, inline};

use super::buffer::{Buffer, Chunks};
use super::rights::{MemoryKind, Rights};
use super::storage::Memory;
use crate::error::{MemoryError, check, register_advice};
use crate::pd::PdInner;
use crate::raw::Lender;
use crate::types::RKey;

/// The longest message, hence the longest buffer: 2^31 bytes (IBTA vol 1, 9.7.7).
pub(super) const MAX_BUFFER: usize = 1 << 31;

/// A registered region. Every range of it holds a reference; the last one deregisters, then frees.
pub(crate) struct Region {
    mr: *mut sys::ibv_mr,
    lkey: u32,
    rkey: u32,
    /// The address of its first byte for the device; for host memory, the host's own.
    start: u64,
    len: usize,
    access: c_uint,
    backing: ManuallyDrop<Backing>,
    pd: ManuallyDrop<Arc<PdInner>>,
}

/// A region as its device knows it (ibv_reg_mr(3); IBTA vol 1, 10.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
#[doc(alias = "ibv_mr")]
pub struct RegionAttr {
    /// The address of its first byte in requests: the host's, or the `iova` it was registered at.
    pub addr: u64,
    /// Its length in bytes.
    pub len: u64,
    /// The local key (lkey), used in this side's scatter-gather lists.
    pub lkey: u32,
    /// The remote key (rkey), used by peers.
    pub rkey: RKey,
    /// The rights and options it was registered with (`ibv_access_flags`).
    pub access: u32,
}

/// The rights among a region's access flags; the rest are options.
const RIGHTS: c_uint = sys::IBV_ACCESS_LOCAL_WRITE
    | sys::IBV_ACCESS_REMOTE_READ
    | sys::IBV_ACCESS_REMOTE_WRITE
    | sys::IBV_ACCESS_REMOTE_ATOMIC
    | sys::IBV_ACCESS_MW_BIND;

pub(super) enum Backing {
    Owned(Memory),
    KeepAlive(Arc<dyn Any + Send + Sync>),
    /// The kernel, or a promise of the caller.
    External,
    /// The lender, which has registered the region and deregisters it.
    #[expect(dead_code, reason = "it is kept, not used")]
    Lent(Arc<dyn Send + Sync>),
}

impl Backing {
    /// The file of shared memory that is registered whole: a software device lets peers map it.
    fn memfd(&self, start: *mut u8, len: usize) -> Option<BorrowedFd<'_>> {
        let memory = match self {
            Self::Owned(memory) => memory,
            Self::KeepAlive(owner) => owner.downcast_ref()?,
            Self::External | Self::Lent(_) => return None,
        };
        let is_whole = (memory.start(), memory.size()) == (start, len);
        memory.memfd().filter(|_| is_whole)
    }
}

// SAFETY: only verbs get `mr`, from any thread; memory is reached through unique ranges only.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

pub(super) fn register<R: Rights>(pd: &Arc<PdInner>, memory: Memory, flags: c_uint) -> Result<Buffer<R>, MemoryError> {
    let len = memory.size();
    check_buffer(len)?;
    let region = Region::of_host(pd, memory, R::ACCESS | flags)?;
    let start = region.start;
    Ok(Buffer::new(region, start, len))
}

pub(super) fn register_chunks<R: Rights>(
    pd: &Arc<PdInner>,
    memory: Memory,
    chunk: usize,
    flags: c_uint,
) -> Result<Chunks<R>, MemoryError> {
    check_buffer(chunk)?;
    let len = memory.size();
    let region = Region::of_host(pd, memory, R::ACCESS | flags)?;
    let start = region.start;
    Ok(Chunks::new(region, start, len, chunk))
}

/// # Safety
/// As of [`Region::adopt`], but the lender may deregister it; `access` are the rights of `K`.
pub(crate) unsafe fn adopt_region<K: MemoryKind>(
    pd: &Arc<PdInner>,
    mr: *mut sys::ibv_mr,
    (start, len): (u64, usize),
    access: c_uint,
    lender: Lender,
) -> Result<Buffer<K>, MemoryError> {
    check_buffer(len)?;
    let backing = lender.map_or(Backing::External, Backing::Lent);
    // SAFETY: by contract.
    let region = unsafe { Region::adopt(pd, mr, start, len, access, backing) };
    Ok(Buffer::new(region, start, len))
}

pub(super) fn check_buffer(len: usize) -> Result<(), MemoryError> {
    match len {
        0 => Err(MemoryError::Empty),
        1..=MAX_BUFFER => Ok(()),
        _ => Err(MemoryError::TooLong { len, max: MAX_BUFFER }),
    }
}

impl Region {
    fn of_host(pd: &Arc<PdInner>, memory: Memory, access: c_uint) -> Result<Arc<Self>, MemoryError> {
        let (start, len) = (memory.start(), memory.size());
        // SAFETY: the memory is `len` owned bytes, which the region keeps until it is deregistered.
        unsafe { Self::register(pd, start, len, access, Backing::Owned(memory)) }
    }

    /// # Safety
    /// Mapped until the region is gone, which `backing` may ensure. Until then only the device and
    /// buffers of the region make accesses that `access` allows.
    pub(super) unsafe fn register(
        pd: &Arc<PdInner>,
        start: *mut u8,
        len: usize,
        access: c_uint,
        backing: Backing,
    ) -> Result<Arc<Self>, MemoryError> {
        if len == 0 {
            return Err(MemoryError::Empty);
        }
        // The device, and this crate through buffers, reach it by address from here on.
        let addr = start.expose_provenance() as u64;
        let api = pd.context.api;
        let file = backing.memfd(start, len).map(|file| file.as_raw_fd());
        if let Some((fd, register)) = file.zip(api.reg_dmabuf_mr) {
            // SAFETY: the domain is live; the file is open, and mapped there as long as the region
            // is.
            let mr = unsafe { register(pd.raw, 0, len, addr, fd, access.cast_signed()) };
            // A device that cannot share memory refuses what is no dma-buf.
            if !mr.is_null() {
                // SAFETY: just made in this domain; mapped as long as the region is, by contract.
                return Ok(unsafe { Self::adopt(pd, mr, addr, len, access, backing) });
            }
        }
        // SAFETY: the domain is live; the memory is mapped as long as the region is, by contract.
        let mr = unsafe {
            match api.reg_mr_iova2 {
                // As the ibv_reg_mr macro: the library drops flags that its kernel does not know.
                Some(register) => register(pd.raw, start.cast(), len, addr, access),
                None => {
                    let access = access & (sys::IBV_ACCESS_OPTIONAL_FIRST - 1);
                    (api.reg_mr)(pd.raw, start.cast(), len, access.cast_signed())
                }
            }
        };
        if mr.is_null() {
            let error = io::Error::last_os_error();
            return Err(MemoryError::Register {
                device: pd.context.name.clone(),
                len,
                advice: register_advice(&error),
                error,
            });
        }
        // SAFETY: just made in this domain.
        Ok(unsafe { Self::adopt(pd, mr, addr, len, access, backing) })
    }

    /// # Safety
    /// `mr` is of `pd`, `len` bytes that the device addresses from `start`, and no other owner
    /// deregisters it; the bytes stay until then, which `backing` may ensure.
    pub(super) unsafe fn adopt(
        pd: &Arc<PdInner>,
        mr: *mut sys::ibv_mr,
        start: u64,
        len: usize,
        access: c_uint,
        backing: Backing,
    ) -> Arc<Self> {
        // SAFETY: live by contract.
        let (lkey, rkey) = unsafe { ((*mr).lkey, (*mr).rkey) };
        Arc::new(Self {
            mr,
            lkey,
            rkey,
            start,
            len,
            access,
            backing: ManuallyDrop::new(backing),
            pd: ManuallyDrop::new(Arc::clone(pd)),
        })
    }

    pub(super) fn raw(&self) -> *mut sys::ibv_mr {
        self.mr
    }

    pub(super) fn pd(&self) -> &Arc<PdInner> {
        &self.pd
    }

    pub(super) fn start(&self) -> u64 {
        self.start
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn access(&self) -> c_uint {
        self.access
    }

    pub(super) fn lkey(&self) -> u32 {
        self.lkey
    }

    pub(super) fn rkey(&self) -> u32 {
        self.rkey
    }

    pub(super) fn owns_memory(&self) -> bool {
        matches!(*self.backing, Backing::Owned(_))
    }

    pub(super) fn into_memory(self) -> Result<Memory, MemoryError> {
        let mut this = ManuallyDrop::new(self);
        this.deregister().map_err(MemoryError::Deregister)?;
        // SAFETY: both taken once, as Drop does not run; the device has released the memory.
        let backing = unsafe {
            ManuallyDrop::drop(&mut this.pd);
            ManuallyDrop::take(&mut this.backing)
        };
        match backing {
            Backing::Owned(memory) => Ok(memory),
            Backing::KeepAlive(_) | Backing::External | Backing::Lent(_) => Ok(Memory::zeroed(0)),
        }
    }

    /// Changes the remote rights (ibv_rereg_mr(3)). The keys may change too.
    ///
    /// # Errors
    /// The device's error, and whether the region is still registered as before.
    pub(super) fn change_rights(&mut self, rights: c_uint) -> Result<(), (MemoryError, bool)> {
        let access = self.access & !RIGHTS | rights;
        let failed = |error| MemoryError::Reregister {
            device: self.pd.context.name.clone(),
            error,
        };
        let Some(rereg) = self.pd.context.api.rereg_mr else {
            return Err((failed(io::ErrorKind::Unsupported.into()), true));
        };
        let flags = sys::IBV_REREG_MR_CHANGE_ACCESS.cast_signed();
        // SAFETY: the region is live and borrowed exclusively; domain and translation stay.
        let result = unsafe {
            rereg(
                self.mr,
                flags,
                core::ptr::null_mut(),
                core::ptr::null_mut(),
                0,
                access.cast_signed(),
            )
        };
        if result != 0 {
            let error = io::Error::last_os_error();
            let half_way = matches!(
                result,
                sys::IBV_REREG_MR_ERR_CMD | sys::IBV_REREG_MR_ERR_CMD_AND_DO_FORK_NEW
            );
            // A device without this call fails in the command too, and has changed nothing.
            let kept = !half_way || error.kind() == io::ErrorKind::Unsupported;
            return Err((failed(error), kept));
        }
        self.access = access;
        // SAFETY: live.
        (self.lkey, self.rkey) = unsafe { ((*self.mr).lkey, (*self.mr).rkey) };
        Ok(())
    }

    pub(super) fn prefetch(&self, mut sge: sys::ibv_sge, writable: bool) -> Result<(), MemoryError> {
        let advice = if writable {
            sys::IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE
        } else {
            sys::IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH
        };
        // SAFETY: domain and region are live, and the element lies in the region.
        let result = unsafe { inline::advise_mr(self.pd.raw, advice, 0, &mut sge, 1) };
        check(result).map_err(|error| MemoryError::Prefetch {
            device: self.pd.context.name.clone(),
            error,
        })
    }

    pub(super) fn attr(&self) -> RegionAttr {
        RegionAttr {
            addr: self.start,
            len: self.len as u64,
            lkey: self.lkey,
            rkey: RKey(self.rkey),
            access: self.access,
        }
    }

    fn deregister(&self) -> Result<(), io::Error> {
        if let Backing::Lent(_) = *self.backing {
            return Ok(());
        }
        // SAFETY: of this Api, deregistered once: `dissolve` and Drop exclude each other.
        check(unsafe { (self.pd.context.api.dereg_mr)(self.mr) })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        match self.deregister() {
            // SAFETY: dropped once, here; the device has released it; the domain goes after.
            Ok(()) => unsafe {
                ManuallyDrop::drop(&mut self.backing);
                ManuallyDrop::drop(&mut self.pd);
            },
            Err(error) => tracing::error!(
                device = %self.pd.context.name,
                len = self.len,
                %error,
                "ibv_dereg_mr failed; the memory is leaked, because the device may still touch it"
            ),
        }
    }
}
