//! `process_vm_writev`: one copy into another process's memory, the ceiling of a same-host path.

use super::{Bandwidth, LimitError};
use crate::orphan::set_parent_death_signal;
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::sys::uio::RemoteIoVec;
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, fork};
use std::io::{self, IoSlice};
use std::time::{Duration, Instant};

/// A child process that sleeps until dropped, with this one's memory at the same addresses.
struct Sleeper {
    pid: Pid,
}

impl Sleeper {
    fn start() -> io::Result<Self> {
        let parent = Pid::this();
        // SAFETY: the child may only call what signal-safety(7) lists: sleep_until_killed calls
        // prctl, getppid, pause and _exit, and neither allocates nor locks nor returns.
        match unsafe { fork() }? {
            ForkResult::Parent { child } => Ok(Self { pid: child }),
            ForkResult::Child => sleep_until_killed(parent),
        }
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        // Not waited for yet, so the PID is still the child's; both only fail if it is gone.
        let _ = kill(self.pid, Signal::SIGKILL);
        let _ = waitpid(self.pid, None);
    }
}

fn sleep_until_killed(parent: Pid) -> ! {
    while set_parent_death_signal(parent) {
        // SAFETY: takes no argument and touches no memory.
        unsafe { libc::pause() };
    }
    // SAFETY: ends this process at once, without running the parent's exit handlers.
    unsafe { libc::_exit(0) };
}

/// Repeated process_vm_writev(2) of `block` bytes between the same two buffers.
///
/// # Errors
/// [`LimitError::Forbidden`] where writing to a child's memory is forbidden; or when fork(2) fails.
pub fn process_vm_writev(duration: Duration, block: usize) -> Result<Bandwidth, LimitError> {
    let source = vec![1u8; block];
    let target = vec![2u8; block];
    let child = Sleeper::start()?;
    let remote = RemoteIoVec {
        base: target.as_ptr() as usize,
        len: block,
    };
    let write = || match nix::sys::uio::process_vm_writev(child.pid, &[IoSlice::new(&source)], &[remote]) {
        Ok(bytes) => Ok(bytes as u64),
        Err(errno @ (Errno::EPERM | Errno::ENOSYS)) => Err(LimitError::Forbidden(errno.into())),
        Err(errno) => Err(LimitError::Io(errno.into())),
    };
    // The first one gives the child pages of its own.
    write()?;
    let (mut bytes, start) = (0, Instant::now());
    loop {
        bytes += write()?;
        let elapsed = start.elapsed();
        if elapsed >= duration {
            return Ok(Bandwidth::new(bytes, elapsed));
        }
    }
}
