//! Reads and writes in flight: on an io_uring, or carried out one by one where there is none.
#![expect(unsafe_code, reason = "the kernel accesses memory by address")]

use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;
use std::time::Duration;

use io_uring::{IoUring, opcode, squeue, types};

use super::sys;

/// A read or write of memory that stays until it is done.
#[derive(Debug, Clone, Copy)]
pub(super) struct Operation {
    pub(super) fd: RawFd,
    pub(super) write: bool,
    pub(super) memory: *mut u8,
    pub(super) len: usize,
    pub(super) offset: u64,
    /// Whether the memory is within what [`Queue::register`] was given.
    pub(super) staged: bool,
    pub(super) tag: usize,
}

/// The end of an operation.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) tag: usize,
    pub(super) result: io::Result<usize>,
}

pub(super) enum Queue {
    Ring(Box<Ring>),
    /// Operations are carried out as they are started.
    Calls(VecDeque<Done>),
}

pub(super) struct Ring {
    ring: IoUring,
    /// Pushed, submitted or not, and not yet returned by `next`.
    in_flight: usize,
    registered: bool,
}

impl Queue {
    pub(super) fn calls() -> Self {
        Self::Calls(VecDeque::new())
    }

    /// An io_uring for `depth` operations.
    ///
    /// # Errors
    /// In words why there is none.
    pub(super) fn ring(depth: usize) -> Result<Self, String> {
        let entries = u32::try_from(depth).map_err(|e| e.to_string())?;
        // Completions need no interrupt of this thread, which polls for them (Linux 5.19).
        let ring = IoUring::builder()
            .setup_coop_taskrun()
            .build(entries)
            .or_else(|_| IoUring::new(entries))
            .map_err(|error| refusal(&error))?;
        // Before, a full completion queue lost completions (Linux 5.5).
        if !ring.params().is_feature_nodrop() {
            return Err("the kernel's io_uring is too old: Linux 5.6 is needed".to_owned());
        }
        Ok(Self::Ring(Box::new(Ring {
            ring,
            in_flight: 0,
            registered: false,
        })))
    }

    /// How many operations may be in flight.
    pub(super) fn is_concurrent(&self) -> bool {
        matches!(self, Self::Ring(_))
    }

    /// Registers memory, so that the kernel need not pin its pages for each operation.
    ///
    /// # Errors
    /// The system's error, as `ENOMEM` beyond RLIMIT_MEMLOCK; operations work without.
    ///
    /// # Safety
    /// The memory outlives the queue.
    pub(super) unsafe fn register(&mut self, memory: *mut u8, len: usize) -> io::Result<()> {
        let Self::Ring(ring) = self else { return Ok(()) };
        let vector = libc::iovec {
            iov_base: memory.cast(),
            iov_len: len,
        };
        // SAFETY: the caller's promise.
        unsafe { ring.ring.submitter().register_buffers(&[vector])? };
        ring.registered = true;
        Ok(())
    }

    /// Starts an operation; [`Queue::wait`] submits it.
    ///
    /// # Safety
    /// Until it is done nothing else accesses its memory, which stays (for a write: nothing writes
    /// it), and its descriptor stays open.
    pub(super) unsafe fn start(&mut self, operation: Operation) -> io::Result<()> {
        match self {
            Self::Ring(ring) => ring.push(&operation),
            Self::Calls(done) => {
                let Operation {
                    fd,
                    write,
                    memory,
                    len,
                    offset,
                    tag,
                    ..
                } = operation;
                // SAFETY: the caller's promise.
                let result = unsafe { sys::transfer(fd, write, memory, len, offset) };
                done.push_back(Done { tag, result });
                Ok(())
            }
        }
    }

    /// Submits what was started, and waits for an operation in flight.
    pub(super) fn wait(&mut self) -> io::Result<()> {
        match self {
            Self::Ring(ring) => ring.enter(1),
            Self::Calls(_) => Ok(()),
        }
    }

    /// An operation that is done.
    pub(super) fn next(&mut self) -> Option<Done> {
        match self {
            Self::Ring(ring) => ring.next(),
            Self::Calls(done) => done.pop_front(),
        }
    }

    /// Returns when no operation is in flight; their results are lost.
    pub(super) fn drain(&mut self) {
        let Self::Ring(ring) = self else {
            *self = Self::calls();
            return;
        };
        let mut entered = ring.enter(0);
        // What was never submitted is not in the kernel's hands.
        while ring.in_flight > ring.ring.submission().len() {
            if ring.next().is_none() {
                entered = ring.enter(1);
                if entered.is_err() {
                    // Completions arrive without a call of this thread's, too.
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
        if let Err(error) = entered
            && !ring.ring.submission().is_empty()
        {
            tracing::warn!("io_uring is not used any more: {error}");
            *self = Self::calls();
        }
    }
}

impl Ring {
    fn push(&mut self, operation: &Operation) -> io::Result<()> {
        let Operation { fd, memory, offset, .. } = *operation;
        let fd = types::Fd(fd);
        let len = u32::try_from(operation.len).map_err(io::Error::other)?;
        let entry: squeue::Entry = match (operation.write, operation.staged && self.registered) {
            (false, true) => opcode::ReadFixed::new(fd, memory, len, 0).offset(offset).build(),
            (true, true) => opcode::WriteFixed::new(fd, memory, len, 0).offset(offset).build(),
            (false, false) => opcode::Read::new(fd, memory, len).offset(offset).build(),
            (true, false) => opcode::Write::new(fd, memory, len).offset(offset).build(),
        };
        let entry = entry.user_data(operation.tag as u64);
        // SAFETY: the caller of `start` promises that memory and descriptor stay until it is done.
        if unsafe { self.ring.submission().push(&entry) }.is_err() {
            self.enter(0)?;
            // SAFETY: as above.
            unsafe { self.ring.submission().push(&entry) }.map_err(io::Error::other)?;
        }
        self.in_flight += 1;
        Ok(())
    }

    fn enter(&mut self, want: usize) -> io::Result<()> {
        let want = if self.ring.completion().is_empty() { want } else { 0 };
        if want == 0 && self.ring.submission().is_empty() {
            return Ok(());
        }
        loop {
            match self.ring.submit_and_wait(want) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                outcome => return outcome.map(drop),
            }
        }
    }

    fn next(&mut self) -> Option<Done> {
        let entry = self.ring.completion().next()?;
        self.in_flight -= 1;
        Some(Done {
            tag: entry.user_data() as usize,
            result: usize::try_from(entry.result()).map_err(|_| io::Error::from_raw_os_error(-entry.result())),
        })
    }
}

/// Why io_uring_setup(2) failed, in words.
fn refusal(error: &io::Error) -> String {
    let reason = match error.raw_os_error() {
        Some(libc::EPERM) if disabled() => "forbidden by the system (kernel.io_uring_disabled of /proc/sys)".to_owned(),
        Some(libc::EPERM | libc::EACCES) => "forbidden by a seccomp filter or a security module".to_owned(),
        Some(libc::ENOSYS) => "the kernel has none, or a seccomp filter hides it".to_owned(),
        Some(libc::ENOMEM) => "no memory, or beyond the limit of locked memory (ulimit -l)".to_owned(),
        _ => return error.to_string(),
    };
    format!("{reason}: {error}")
}

fn disabled() -> bool {
    std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").is_ok_and(|value| value.trim() != "0")
}
