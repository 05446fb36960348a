//! Descriptors that a child of fork(2) must not keep, as they show that a process lives.
//!
//! A forked child that does not exec has copies of all of them, so a pthread_atfork(3) handler
//! replaces them with an eventfd: the numbers stay taken, and later use of the device in the child
//! finds no other's descriptor. A child keeps a copy if a thread forks between a descriptor's
//! creation and its marking.
//!
//! No model: a bit for each descriptor and a count of forks, read in the child's only thread.

use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const WORD: usize = u64::BITS as usize;

/// Marked descriptors by number; higher ones need 65536 other open descriptors.
static MARKED: [AtomicU64; 1024] = [const { AtomicU64::new(0) }; 1024];

/// How many forks this process descends from, since it or an ancestor began to count.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Equal to an earlier value only without a fork in between.
pub(crate) fn fork_generation() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

#[derive(Debug)]
struct Mark(RawFd);

impl Mark {
    fn new(fd: BorrowedFd<'_>) -> Self {
        static HANDLER: Once = Once::new();
        HANDLER.call_once(|| {
            // SAFETY: `in_child` is a function of the right type that lives as long as this object
            // is loaded: glibc drops the handler with the object. It can only fail for want of
            // memory; children then keep the descriptors.
            let _ = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        });
        let fd = fd.as_raw_fd();
        if let Some((word, bit)) = place(fd) {
            word.fetch_or(bit, Ordering::Relaxed);
        }
        Self(fd)
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        if let Some((word, bit)) = place(self.0) {
            word.fetch_and(!bit, Ordering::Relaxed);
        }
    }
}

fn place(fd: RawFd) -> Option<(&'static AtomicU64, u64)> {
    let fd = usize::try_from(fd).ok()?;
    Some((MARKED.get(fd / WORD)?, 1 << (fd % WORD)))
}

/// Runs in the only thread of a forked child. The parent's threads may have been anywhere, so
/// nothing here locks or allocates: only system calls and atomics.
extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    // SAFETY: eventfd(2) has no preconditions.
    let dummy = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    for (index, word) in MARKED.iter().enumerate() {
        let mut bits = word.load(Ordering::Relaxed);
        while bits != 0 {
            let fd = (index * WORD) as RawFd + bits.trailing_zeros() as RawFd;
            bits &= bits - 1;
            // SAFETY: `fd` is ours, by its mark. Its owners here keep the number, now an eventfd's,
            // or closed without one: they get EBADF. dup3(2) and close(2) have no other
            // preconditions.
            unsafe {
                if dummy < 0 || libc::dup3(dummy, fd, libc::O_CLOEXEC) < 0 {
                    libc::close(fd);
                }
            }
        }
    }
    if dummy >= 0 {
        // SAFETY: it was opened here, and has no other user.
        unsafe { libc::close(dummy) };
    }
}

/// An owner of a descriptor that fork(2) children do not keep.
#[derive(Debug)]
pub struct CloseOnFork<T> {
    // First, as the mark must go before the number may be another's.
    _mark: Mark,
    inner: T,
}

impl<T: AsFd> From<T> for CloseOnFork<T> {
    fn from(inner: T) -> Self {
        let _mark = Mark::new(inner.as_fd());
        Self { _mark, inner }
    }
}

impl<T> Deref for CloseOnFork<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T: AsFd> AsFd for CloseOnFork<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}
