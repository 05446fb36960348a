//! Control pages: a page of each rank on the host, whose first word ends all waits of its kernels.
//!
//! Kernels may outlive their process: an MPS server executes those of a killed client on, and lets
//! no other client end before them. So a page is shared memory, which the ranks of a host map of
//! each other, and ranks that are left stop the kernels of one that is gone. They stop no others: a
//! rank whose kernels end knows by then that the communicator has failed.

use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use doorbell_cuda::{Context, HostMemory};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use nix::sys::stat::fstat;
use nix::unistd::ftruncate;

use super::descriptors;
use super::error::GpuError;
use crate::bootstrap::Exchange;
use crate::types::Rank;

/// Bytes of a page.
const CONTROL: NonZeroUsize = NonZeroUsize::new(4096).expect("a number");

/// A rank's own page.
pub(super) struct ControlPage {
    memory: HostMemory,
    file: OwnedFd,
}

/// Those of all ranks; `None` of this one, and of ranks whose page cannot be mapped.
#[derive(Debug)]
pub(super) struct ControlPages {
    own: HostMemory,
    others: Vec<Option<Mapping>>,
}

/// A page in the memory of this process.
#[derive(Debug)]
struct Mapping(NonNull<c_void>);

// SAFETY: it owns its mapping, whose bytes are accessed by atomics only.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl ControlPage {
    pub(super) fn new(context: &Context) -> Result<Self, GpuError> {
        let (file, mapping) = shared().map_err(|errno| GpuError::Refused {
            what: "a page of shared memory (memfd_create, mmap)",
            reason: errno.to_string(),
        })?;
        let start = mapping.0.cast();
        // SAFETY: the page is mapped until its owner is dropped, and accessed by atomics only.
        let memory = unsafe { HostMemory::register_raw(context, start, CONTROL.get(), Arc::new(mapping)) }?;
        Ok(Self { memory, file })
    }

    /// Maps the pages of all ranks. Collective.
    pub(super) fn exchange(self, exchange: &mut dyn Exchange, rank: Rank) -> Result<ControlPages, GpuError> {
        let files = descriptors::exchange_descriptors(exchange, rank, self.file.as_fd())?;
        let open = |file: Option<OwnedFd>| Mapping::of_peer(file?).ok();
        Ok(ControlPages {
            own: self.memory,
            others: files.into_iter().map(open).collect(),
        })
    }
}

impl ControlPages {
    pub(super) fn own(&self) -> &HostMemory {
        &self.own
    }

    /// Ends all waits of this rank's kernels, now and later.
    pub(super) fn stop(&self) -> Result<(), doorbell_cuda::Error> {
        self.own.atomic_u32(0)?.store(1, Ordering::Release);
        Ok(())
    }

    /// The same of ranks that are gone, as far as their pages are mapped here.
    pub(super) fn stop_gone(&self, ranks: &[Rank]) {
        let pages = ranks.iter().filter_map(|rank| self.others.get(rank.index())?.as_ref());
        pages.for_each(|page| page.word().store(1, Ordering::Release));
    }
}

/// A new page of zeros.
fn shared() -> nix::Result<(OwnedFd, Mapping)> {
    let file = memfd_create(c"doorbell-control", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
    ftruncate(&file, CONTROL.get() as i64)?;
    fcntl(
        &file,
        FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_SEAL),
    )?;
    let mapping = Mapping::new(&file)?;
    Ok((file, mapping))
}

impl Mapping {
    fn new(file: impl AsFd) -> nix::Result<Self> {
        let rights = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping where the kernel chooses.
        let start = unsafe { mmap(None, CONTROL, rights, MapFlags::MAP_SHARED, file, 0) }?;
        Ok(Self(start))
    }

    /// A file whose owner could shorten it is refused: an access beyond its end raises SIGBUS.
    fn of_peer(file: OwnedFd) -> nix::Result<Self> {
        let seals = SealFlag::from_bits_retain(fcntl(&file, FcntlArg::F_GET_SEALS)?);
        let is_long = fstat(&file)?.st_size >= CONTROL.get() as i64;
        match seals.contains(SealFlag::F_SEAL_SHRINK) && is_long {
            true => Self::new(&file),
            false => Err(Errno::EINVAL),
        }
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: the word begins the page, which this value keeps, and all access it by atomics.
        unsafe { AtomicU32::from_ptr(self.0.as_ptr().cast()) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and nothing borrows of it any more.
        let unmapped = unsafe { munmap(self.0, CONTROL.get()) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_one_for_its_owner_and_a_peer() {
        let (file, own) = shared().unwrap();
        let other = Mapping::of_peer(file).unwrap();
        other.word().store(1, Ordering::Release);
        assert_eq!(own.word().load(Ordering::Acquire), 1);
    }

    #[test]
    fn a_file_that_may_be_shortened_is_refused() {
        let file = || memfd_create(c"peer", MFdFlags::MFD_ALLOW_SEALING).unwrap();
        let seal = |file: &OwnedFd| fcntl(file, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK)).unwrap();
        let (long, short) = (file(), file());
        ftruncate(&long, CONTROL.get() as i64).unwrap();
        ftruncate(&short, 100).unwrap();
        seal(&short);
        assert!(Mapping::of_peer(short).is_err(), "too short");
        assert!(Mapping::of_peer(long.try_clone().unwrap()).is_err(), "not sealed");
        seal(&long);
        assert!(Mapping::of_peer(long).is_ok());
        assert!(Mapping::of_peer(std::fs::File::open("/dev/null").unwrap().into()).is_err());
    }
}
