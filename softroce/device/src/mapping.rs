//! Mappings of files that processes of a host share.
//!
//! ThreadSanitizer knows memory by its address, and so sees the two ends of a file in one process
//! only where they have one mapping: with `--cfg doorbell_tsan` all of a file's mappings are one.

use std::io;
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::ptr::NonNull;

use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

/// A mapping of a file, from its start.
#[derive(Debug)]
pub(crate) struct SharedMapping {
    start: NonNull<u8>,
    len: NonZeroUsize,
}

// SAFETY: it owns a mapping, which is of the whole process, and accesses none of it.
unsafe impl Send for SharedMapping {}
// SAFETY: as above.
unsafe impl Sync for SharedMapping {}

impl SharedMapping {
    pub(crate) fn new(file: impl AsFd, len: NonZeroUsize, rights: ProtFlags) -> io::Result<Self> {
        Self::with_flags(file, len, rights, MapFlags::empty())
    }

    pub(crate) fn with_flags(
        file: impl AsFd,
        len: NonZeroUsize,
        rights: ProtFlags,
        flags: MapFlags,
    ) -> io::Result<Self> {
        // SAFETY: a new mapping, wherever the kernel has space: nothing there is replaced, and
        // there are no references to its bytes yet.
        let start = unsafe { mmap(None, len, rights, MapFlags::MAP_SHARED | flags, &file, 0) }?;
        let start = start.cast();
        #[cfg(doorbell_tsan)]
        let start = only::first(file.as_fd(), Self { start, len })?;
        Ok(Self { start, len })
    }

    /// Page-aligned; of so many bytes as were requested, while `self` lives.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(crate) fn len(&self) -> NonZeroUsize {
        self.len
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        #[cfg(doorbell_tsan)]
        if !only::is_last(self.start) {
            return;
        }
        // SAFETY: mapped with this length, unmapped once; borrows of `self` have ended, with what
        // points into it. It cannot fail.
        let _ = unsafe { munmap(self.start.cast(), self.len.get()) };
    }
}

#[cfg(doorbell_tsan)]
mod only {
    //! The files with a mapping, and how many users each has.

    use std::io;
    use std::mem::ManuallyDrop;
    use std::os::fd::BorrowedFd;
    use std::ptr::NonNull;

    use nix::sys::stat::fstat;
    use parking_lot::Mutex;

    use super::SharedMapping;

    struct Mapped {
        /// Device, inode and length.
        file: (u64, u64, usize),
        start: usize,
        users: usize,
    }

    static ALL: Mutex<Vec<Mapped>> = Mutex::new(Vec::new());

    /// The file's mapping: `new`, or an earlier one.
    pub(super) fn first(file: BorrowedFd<'_>, new: SharedMapping) -> io::Result<NonNull<u8>> {
        let stat = fstat(file)?;
        let file = (stat.st_dev, stat.st_ino, new.len.get());
        let mut all = ALL.lock();
        if let Some(mapped) = all.iter_mut().find(|mapped| mapped.file == file) {
            mapped.users += 1;
            let start = std::ptr::with_exposed_provenance_mut(mapped.start);
            drop(all);
            return Ok(NonNull::new(start).unwrap());
        }
        let start = ManuallyDrop::new(new).start;
        all.push(Mapped {
            file,
            start: start.as_ptr().expose_provenance(),
            users: 1,
        });
        Ok(start)
    }

    /// Ends one use. A mapping without users is of no file.
    pub(super) fn is_last(start: NonNull<u8>) -> bool {
        let mut all = ALL.lock();
        let Some(index) = all.iter().position(|mapped| mapped.start == start.addr().get()) else {
            return true;
        };
        all[index].users -= 1;
        let is_last = all[index].users == 0;
        if is_last {
            all.swap_remove(index);
        }
        is_last
    }
}
