//! The memory of a peer's process, by process_vm_readv(2) and process_vm_writev(2).
//!
//! A PID may be reused, and its process may run another program (execve(2)). So a process has a
//! *probe page*, which its children do not inherit, and every call begins with the probe there: it
//! finds the address space once, and ends at the first range that is not mapped in it.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::io;
use std::num::NonZeroUsize;
use std::ptr;

use libc::iovec;
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous};
use parking_lot::Mutex;

use crate::host::fork_generation;
use crate::memory::copy::WORD;

/// By what a process is recognized.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Probe {
    pub(super) addr: u64,
    pub(super) value: u64,
}

impl Probe {
    /// That of this process; its page stays mapped.
    pub(super) fn own() -> io::Result<Self> {
        static OWN: Mutex<Option<(u32, Probe)>> = Mutex::new(None);
        let (mut own, forks) = (OWN.lock(), fork_generation());
        if let Some((_, probe)) = own.filter(|(made, _)| *made == forks) {
            return Ok(probe);
        }
        let (len, rights) = (
            NonZeroUsize::new(WORD).unwrap(),
            ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
        );
        // SAFETY: a new mapping, wherever the kernel has space: nothing there is replaced.
        let page = unsafe { mmap_anonymous(None, len, rights, MapFlags::MAP_PRIVATE) }?;
        // SAFETY: all of the new mapping; the advice changes what children get.
        unsafe { madvise(page, WORD, MmapAdvise::MADV_DONTFORK) }?;
        let value = RandomState::new().hash_one(forks);
        // SAFETY: mapped, writable and page-aligned, without another user.
        unsafe { page.cast().write(value) };
        let addr = page.addr().get() as u64;
        let probe = Self { addr, value };
        *own = Some((forks, probe));
        Ok(probe)
    }
}

pub(super) fn range(start: *mut u8, len: usize) -> iovec {
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
            unsafe { process.copy(&mut [range(ptr::null_mut(), 0)], 0, to_peer) }
        };
        (permits(false) && permits(true)).then_some(process)
    }

    /// Copies between the local ranges, the first of which is replaced by one for the probe, and as
    /// many bytes from `addr` on. The last 8 bytes of a write become visible last. False unless all
    /// of it was copied.
    ///
    /// # Safety
    /// The local ranges are readable, or writable for a copy from the peer.
    pub(super) unsafe fn copy(self, local: &mut [iovec], addr: u64, to_peer: bool) -> bool {
        let mut probe = self.probe.value.to_ne_bytes();
        local[0] = range(probe.as_mut_ptr(), WORD);
        let len: usize = local[1..].iter().map(|range| range.iov_len).sum();
        // The kernel copies range by range, but the bytes of one in any order.
        let tail = if to_peer { len.min(WORD) } else { 0 };
        let head = len - tail;
        let remote = [
            remote(self.probe.addr, WORD),
            remote(addr, head),
            remote(addr.wrapping_add(head as u64), tail),
        ];
        let call = if to_peer {
            libc::process_vm_writev
        } else {
            libc::process_vm_readv
        };
        let counts = [local.len(), remote.len()].map(|count| count as libc::c_ulong);
        // SAFETY: the local ranges are readable, or writable, by contract, and the probe is both;
        // the kernel checks the remote ones. Of the peer's memory a write changes what the caller
        // wants, and stores the probe's value over itself.
        let copied = unsafe { call(self.pid, local.as_ptr(), counts[0], remote.as_ptr(), counts[1], 0) };
        usize::try_from(copied) == Ok(WORD + len) && u64::from_ne_bytes(probe) == self.probe.value
    }
}

#[cfg(all(test, not(doorbell_loom)))]
mod tests {
    use nix::sys::signal::{Signal, kill};
    use nix::sys::wait::waitpid;
    use nix::unistd::{ForkResult, Pid, fork, pause};

    use super::*;

    /// Copies to the process in two ranges and back in one. Whether both were complete.
    fn exchange(process: PeerProcess, bytes: &mut [u8], addr: u64) -> [bool; 2] {
        let none = range(ptr::null_mut(), 0);
        let (first, second) = bytes.split_at_mut(bytes.len() / 2);
        let [first, second] = [first, second].map(|part| range(part.as_mut_ptr(), part.len()));
        // SAFETY: both are readable.
        let written = unsafe { process.copy(&mut [none, first, second], addr, true) };
        bytes.fill(0);
        // SAFETY: writable for its length.
        let read = unsafe { process.copy(&mut [none, range(bytes.as_mut_ptr(), bytes.len())], addr, false) };
        [written, read]
    }

    #[test]
    fn a_copy_is_whole_or_reported() {
        let process = PeerProcess::attach(Pid::this().as_raw(), Probe::own().unwrap()).unwrap();
        for len in [1, 7, 8, 9, 10_000] {
            let (mut bytes, mut memory) = (vec![7; len], vec![0_u8; len + 1]);
            let addr = memory.as_mut_ptr().expose_provenance() as u64;
            assert_eq!(exchange(process, &mut bytes, addr), [true; 2]);
            assert_eq!((&bytes[..], memory[len]), (&memory[..len], 0));
            assert_eq!(bytes, vec![7; len]);
        }
        // Nothing is mapped there; the probe alone is copied.
        assert_eq!(exchange(process, &mut [7; 64], 64), [false; 2]);
    }

    /// A process of the same layout, such as a child that got the PID of its parent.
    #[test]
    fn another_process_is_not_accessed() {
        let probe = Probe::own().unwrap();
        let rights = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let len = NonZeroUsize::new(WORD).unwrap();
        // SAFETY: a new mapping, which is never unmapped.
        let shared = unsafe { mmap_anonymous(None, len, rights, MapFlags::MAP_SHARED) }.unwrap();
        // SAFETY: the child only calls pause(2), which is async-signal-safe.
        let child = match unsafe { fork() }.unwrap() {
            ForkResult::Parent { child } => child,
            ForkResult::Child => loop {
                pause();
            },
        };
        let [this, pid] = [Pid::this(), child].map(Pid::as_raw);
        let addr = shared.as_ptr().expose_provenance() as u64;
        let exchanged = exchange(PeerProcess { pid, probe }, &mut [7; WORD], addr);
        let value = !probe.value;
        let others = [
            (pid, probe),
            (i32::MAX, probe),
            (-1, probe),
            (this, Probe { value, ..probe }),
        ];
        let attached = others.map(|(pid, probe)| PeerProcess::attach(pid, probe));
        kill(child, Signal::SIGKILL).unwrap();
        waitpid(child, None).unwrap();
        assert_eq!((exchanged, attached), ([false; 2], [None; 4]));
        let process = PeerProcess::attach(this, probe).unwrap();
        let mut bytes = [0; WORD];
        // SAFETY: writable for its length.
        assert!(unsafe {
            process.copy(
                &mut [range(ptr::null_mut(), 0), range(bytes.as_mut_ptr(), WORD)],
                addr,
                false,
            )
        });
        assert_eq!(bytes, [0; WORD], "nothing was written");
    }
}
