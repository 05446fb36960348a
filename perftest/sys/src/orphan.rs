//! Child processes that are killed when their parent ends, even by SIGKILL.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::sys::signal::Signal;
use nix::unistd::Pid;

/// Kills this process when the thread that started it ends (PR_SET_PDEATHSIG, prctl(2)); kept
/// across execve(2) of an unprivileged program. `false` when `parent` is gone or the kernel
/// refused. May be called between fork and execve: it only makes two system calls.
pub(crate) fn set_parent_death_signal(parent: Pid) -> bool {
    // SAFETY: prctl with PR_SET_PDEATHSIG takes a signal number and touches no memory.
    let set = unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, Signal::SIGKILL as libc::c_ulong) };
    set == 0 && Pid::parent() == parent
}

/// The child of `command` is killed with SIGKILL when the thread that starts it ends: the caller
/// keeps that thread. Not inherited by the child's children, and reset when it executes a
/// privileged program (PR_SET_PDEATHSIG of prctl(2)). Starting fails with `ESRCH` when this process
/// is gone.
pub fn kill_with_parent(command: &mut Command) {
    let parent = Pid::this();
    let set = move || {
        if set_parent_death_signal(parent) {
            Ok(())
        } else {
            Err(io::Error::from_raw_os_error(libc::ESRCH))
        }
    };
    // SAFETY: only what signal-safety(7) lists may be called in the child: prctl and getppid,
    // without allocation or lock; an error of a raw number is that number alone.
    unsafe { command.pre_exec(set) };
}
