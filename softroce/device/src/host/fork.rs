//! Descriptors that a child of fork(2) must not keep, as they show that a process lives.
//!
//! A forked child that does not exec has copies of all of them, so a pthread_atfork(3) handler
//! replaces them with an eventfd: the numbers stay taken, and later use of the device in the child
//! finds no other's descriptor.
//!
//! A descriptor's creation or closing and the change of its mark are one *change*, and no change
//! overlaps a fork: a fork waits for changes in progress, a change for forks. Neither waits for
//! longer than [`PATIENCE`], as the forking thread may hold, in a later handler, a lock that the
//! changing one has, or may be that one in a signal handler; only then a child can keep a copy.
//!
//! No model: a bit for each descriptor and a count of forks, read in the child's only thread, and
//! two counts, each written before the other is read.

use std::io;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const WORD: usize = u64::BITS as usize;

/// Marked descriptors by number; higher ones need 65536 other open descriptors.
static MARKED: [AtomicU64; 1024] = [const { AtomicU64::new(0) }; 1024];

/// How many forks this process descends from, since it or an ancestor began to count.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Equal to an earlier value only without a fork in between.
pub(crate) fn fork_generation() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

/// Changes and forks in progress.
static CHANGES: AtomicU32 = AtomicU32::new(0);
static FORKING: AtomicU32 = AtomicU32::new(0);

/// A change takes microseconds, and the fork of a large process a second at most.
const PATIENCE: Duration = Duration::from_secs(1);

/// A change in progress.
struct Change;

impl Change {
    fn begin() -> Self {
        static HANDLERS: Once = Once::new();
        HANDLERS.call_once(|| {
            // SAFETY: functions of the right type that live as long as this object is loaded: glibc
            // drops the handlers with the object. It can only fail for want of memory; children
            // then keep the descriptors.
            let _ = unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
        });
        loop {
            let change = Self::counted();
            if FORKING.load(Ordering::SeqCst) == 0 {
                return change;
            }
            // Not counted while it waits, as the fork waits for the changes that are.
            drop(change);
            if !wait_for_none(&FORKING) {
                return Self::counted();
            }
        }
    }

    fn counted() -> Self {
        CHANGES.fetch_add(1, Ordering::SeqCst);
        Self
    }
}

impl Drop for Change {
    fn drop(&mut self) {
        CHANGES.fetch_sub(1, Ordering::Release);
    }
}

/// Whether the count became zero in time. Only system calls and atomics, as a fork handler waits.
fn wait_for_none(count: &AtomicU32) -> bool {
    if count.load(Ordering::SeqCst) == 0 {
        return true;
    }
    let since = Instant::now();
    while count.load(Ordering::SeqCst) != 0 {
        if since.elapsed() > PATIENCE {
            return false;
        }
        thread::sleep(Duration::from_micros(20));
    }
    true
}

extern "C" fn before() {
    FORKING.fetch_add(1, Ordering::SeqCst);
    wait_for_none(&CHANGES);
}

/// Also after a fork(2) that failed.
extern "C" fn in_parent() {
    FORKING.fetch_sub(1, Ordering::Release);
}

fn place(fd: RawFd) -> Option<(&'static AtomicU64, u64)> {
    let fd = usize::try_from(fd).ok()?;
    Some((MARKED.get(fd / WORD)?, 1 << (fd % WORD)))
}

/// Runs in the only thread of a forked child. The parent's threads may have been anywhere, so
/// nothing here locks or allocates: only system calls and atomics.
extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    // Those of threads that are not here.
    FORKING.store(0, Ordering::Relaxed);
    CHANGES.store(0, Ordering::Relaxed);
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
pub struct CloseOnFork<T: AsFd> {
    inner: ManuallyDrop<T>,
}

impl<T: AsFd> CloseOnFork<T> {
    pub(crate) fn create(create: impl FnOnce() -> io::Result<T>) -> io::Result<Self> {
        let _change = Change::begin();
        let inner = create()?;
        if let Some((word, bit)) = place(inner.as_fd().as_raw_fd()) {
            word.fetch_or(bit, Ordering::Relaxed);
        }
        let inner = ManuallyDrop::new(inner);
        Ok(Self { inner })
    }
}

impl<T: AsFd> Drop for CloseOnFork<T> {
    fn drop(&mut self) {
        let _change = Change::begin();
        // First, as the number may be another's once it is closed.
        if let Some((word, bit)) = place(self.inner.as_fd().as_raw_fd()) {
            word.fetch_and(!bit, Ordering::Relaxed);
        }
        // SAFETY: dropped only here, and not used afterwards.
        unsafe { ManuallyDrop::drop(&mut self.inner) }
    }
}

impl<T: AsFd> Deref for CloseOnFork<T> {
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

#[cfg(all(test, not(doorbell_loom)))]
mod tests;
