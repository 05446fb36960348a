//! The memory of a peer's process, by process_vm_readv(2) and process_vm_writev(2).
//!
//! A PID may be reused, and its process may run another program (execve(2)). So a process has a
//! *probe page*, which its children do not inherit, and every call begins with the probe there: it
//! finds the address space once, and ends at the first range that is not mapped in it.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::io;
use std::num::NonZeroUsize;
use std::ptr::{self, NonNull};

use libc::iovec;
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::capacity;
use crate::host::fork_generation;
use crate::memory::copy::WORD;

const PAGE: NonZeroUsize = NonZeroUsize::new(4096).unwrap();

/// By what a process is recognized.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Probe {
    pub(super) addr: u64,
    pub(super) value: u64,
}

/// The page with the probe of this process.
#[derive(Debug)]
pub(super) struct ProbePage {
    page: NonNull<u64>,
    value: u64,
    forks: u32,
}

// SAFETY: it owns a mapping, which is of the whole process, and of which nothing here is read.
unsafe impl Send for ProbePage {}
// SAFETY: as above.
unsafe impl Sync for ProbePage {}

impl ProbePage {
    pub(super) fn create() -> io::Result<Self> {
        let rights = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let forks = fork_generation();
        // SAFETY: a new mapping, wherever the kernel has space: nothing there is replaced.
        let page = unsafe { mmap_anonymous(None, PAGE, rights, MapFlags::MAP_PRIVATE) }?;
        let value = RandomState::new().hash_one(forks);
        let probe = Self {
            page: page.cast(),
            value,
            forks,
        };
        // SAFETY: all of the new mapping; the advice changes what children get.
        unsafe { madvise(page, PAGE.get(), MmapAdvise::MADV_DONTFORK) }?;
        // SAFETY: mapped, writable and page-aligned, without another user yet.
        unsafe { probe.page.write(value) };
        Ok(probe)
    }

    pub(super) fn probe(&self) -> Probe {
        Probe {
            addr: self.page.as_ptr().addr() as u64,
            value: self.value,
        }
    }
}

impl Drop for ProbePage {
    fn drop(&mut self) {
        // A child may have other memory at this address.
        if self.forks == fork_generation() {
            // SAFETY: mapped in `create` with this length, unmapped once, and never referred to.
            let _ = unsafe { munmap(self.page.cast(), PAGE.get()) };
        }
    }
}

/// Ranges of this process's memory, for one call. The first is for the probe.
pub(super) struct LocalRanges {
    ranges: [iovec; capacity::SGES as usize + 1],
    count: usize,
    len: usize,
}

impl LocalRanges {
    pub(super) fn new() -> Self {
        Self {
            ranges: [range(ptr::null_mut(), 0); _],
            count: 1,
            len: 0,
        }
    }

    /// False if there are too many.
    pub(super) fn push(&mut self, start: *mut u8, len: usize) -> bool {
        let Some(next) = self.ranges.get_mut(self.count) else {
            return false;
        };
        *next = range(start, len);
        self.count += 1;
        self.len += len;
        true
    }
}

fn range(start: *mut u8, len: usize) -> iovec {
    iovec {
        iov_base: start.cast(),
        iov_len: len,
    }
}

/// A range of the peer's: checked by the kernel, and no address here.
fn remote(addr: u64, len: usize) -> iovec {
    range(ptr::without_provenance_mut(addr as usize), len)
}

/// A process whose memory this one may access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PeerProcess {
    pid: i32,
    probe: Probe,
}

impl PeerProcess {
    /// `None` if the kernel does not permit access in both directions (ptrace(2), seccomp(2)), or
    /// the process does not have the probe.
    pub(super) fn attach(pid: i32, probe: Probe) -> Option<Self> {
        let process = Self { pid, probe };
        let permits = |to_peer| {
            // SAFETY: no range but the probe's.
            unsafe { process.copy(LocalRanges::new(), 0, to_peer) }
        };
        (permits(false) && permits(true)).then_some(process)
    }

    /// Copies between the local ranges and as many bytes from `addr` on. The last 8 bytes of a
    /// write become visible last. False unless all of it was copied.
    ///
    /// # Safety
    /// The local ranges are readable, or writable for a copy from the peer.
    pub(super) unsafe fn copy(self, mut local: LocalRanges, addr: u64, to_peer: bool) -> bool {
        let mut probe = self.probe.value.to_ne_bytes();
        local.ranges[0] = range(probe.as_mut_ptr(), probe.len());
        // The kernel copies range by range, but the bytes of one in any order.
        let tail = if to_peer { local.len.min(WORD) } else { 0 };
        let head = local.len - tail;
        let remote = [
            remote(self.probe.addr, probe.len()),
            remote(addr, head),
            remote(addr.wrapping_add(head as u64), tail),
        ];
        let (from, count) = (local.ranges.as_ptr(), local.count as libc::c_ulong);
        let (to, remotes) = (remote.as_ptr(), remote.len() as libc::c_ulong);
        let copied = if to_peer {
            // SAFETY: the local ranges are readable by contract, and the probe is; the kernel
            // checks the remote ones. Only the peer's memory is written: the probe's value over
            // itself, and what the caller wants there.
            unsafe { libc::process_vm_writev(self.pid, from, count, to, remotes, 0) }
        } else {
            // SAFETY: the local ranges are writable by contract, and the probe is; the kernel
            // checks the remote ones and writes nothing there.
            unsafe { libc::process_vm_readv(self.pid, from, count, to, remotes, 0) }
        };
        let complete = usize::try_from(copied) == Ok(probe.len() + local.len);
        complete && u64::from_ne_bytes(probe) == self.probe.value
    }
}

#[cfg(all(test, not(doorbell_loom)))]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use nix::sys::signal::{Signal, kill};
    use nix::sys::wait::waitpid;
    use nix::unistd::{ForkResult, Pid, fork};

    use super::*;

    fn this() -> i32 {
        Pid::this().as_raw()
    }

    fn write(process: PeerProcess, from: &mut [u8], addr: u64) -> bool {
        let mut local = LocalRanges::new();
        let (first, second) = from.split_at_mut(from.len() / 2);
        assert!(local.push(first.as_mut_ptr(), first.len()) && local.push(second.as_mut_ptr(), second.len()));
        // SAFETY: both are readable.
        unsafe { process.copy(local, addr, true) }
    }

    /// Pages that children of this process share, with a hole behind them.
    struct SharedPages(NonNull<u8>);

    impl SharedPages {
        /// Pages of any size, and as many bytes of the hole.
        const LEN: usize = 64 << 10;

        fn new() -> Self {
            let rights = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
            let len = NonZeroUsize::new(2 * Self::LEN).unwrap();
            // SAFETY: a new mapping, wherever the kernel has space.
            let start = unsafe { mmap_anonymous(None, len, rights, MapFlags::MAP_SHARED) }.unwrap();
            // SAFETY: its second half, to which there is no reference.
            unsafe { munmap(start.byte_add(Self::LEN), Self::LEN) }.unwrap();
            Self(start.cast())
        }

        fn addr(&self, offset: usize) -> u64 {
            (self.0.as_ptr().expose_provenance() + offset) as u64
        }

        fn first_word(&self) -> u64 {
            // SAFETY: mapped, page-aligned, and accessed only here and by the kernel.
            unsafe { AtomicU64::from_ptr(self.0.as_ptr().cast()) }.load(Ordering::Relaxed)
        }
    }

    impl Drop for SharedPages {
        fn drop(&mut self) {
            // SAFETY: mapped in `new`, without references to it.
            unsafe { munmap(self.0.cast(), Self::LEN) }.unwrap();
        }
    }

    #[test]
    fn a_copy_is_whole_or_reported() {
        let (page, memory) = (ProbePage::create().unwrap(), SharedPages::new());
        let process = PeerProcess::attach(this(), page.probe()).unwrap();
        let mut bytes: Vec<u8> = (0..SharedPages::LEN).map(|n| n as u8).collect();
        assert!(write(process, &mut bytes, memory.addr(0)));
        for len in [1, 7, 8, 9, SharedPages::LEN] {
            let (mut back, mut local) = (vec![0; len], LocalRanges::new());
            assert!(local.push(back.as_mut_ptr(), len));
            // SAFETY: writable for its length.
            assert!(unsafe { process.copy(local, memory.addr(0), false) });
            assert_eq!(back, bytes[..len]);
        }
        assert!(
            !write(process, &mut bytes[..64], memory.addr(SharedPages::LEN - 32)),
            "a hole"
        );
        let mut local = LocalRanges::new();
        let fits = (0..).take_while(|_| local.push(ptr::null_mut(), 0)).count();
        assert_eq!(fits, capacity::SGES as usize);
    }

    /// A process of the same layout, such as a child that got the PID of its parent.
    #[test]
    fn another_process_is_not_written() {
        let (page, memory) = (ProbePage::create().unwrap(), SharedPages::new());
        let probe = page.probe();
        // SAFETY: the child only calls pause(2), which is async-signal-safe.
        let child = match unsafe { fork() }.unwrap() {
            ForkResult::Parent { child } => child,
            ForkResult::Child => loop {
                nix::unistd::pause();
            },
        };
        let mut bytes = [7; 64];
        let other = PeerProcess {
            pid: child.as_raw(),
            probe,
        };
        let written = write(other, &mut bytes, memory.addr(0));
        let wrong = Probe {
            value: !probe.value,
            ..probe
        };
        let others = [(child.as_raw(), probe), (i32::MAX, probe), (-1, probe), (this(), wrong)];
        let attached = others.map(|(pid, probe)| PeerProcess::attach(pid, probe));
        kill(child, Signal::SIGKILL).unwrap();
        waitpid(child, None).unwrap();
        assert_eq!((written, memory.first_word(), attached), (false, 0, [None; 4]));
        let process = PeerProcess::attach(this(), probe).unwrap();
        assert!(write(process, &mut bytes, memory.addr(0)));
        assert_eq!(memory.first_word(), u64::from_ne_bytes([7; 8]));
    }
}
