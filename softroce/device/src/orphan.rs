//! Child processes that are killed when their parent ends, even by SIGKILL.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::sys::signal::Signal;
use nix::unistd::Pid;

/// Has the kernel kill this process with SIGKILL when the thread that started it ends
/// (PR_SET_PDEATHSIG, prctl(2)); kept across execve(2), unless the program is privileged
/// (set-user-ID, capabilities). `false` when `parent` was gone before that, or the kernel refused.
///
/// May be called between fork and execve: it only makes two system calls.
pub(crate) fn set_parent_death_signal(parent: Pid) -> bool {
    // SAFETY: prctl with PR_SET_PDEATHSIG takes a signal number and touches no memory of the
    // process.
    let set = unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, Signal::SIGKILL as libc::c_ulong) };
    set == 0 && Pid::parent() == parent
}

/// The child of `command` is killed with SIGKILL when the thread that starts it, or this process,
/// ends: the caller keeps that thread until the child has ended. Not inherited by the child's
/// children, and reset when it executes a privileged (set-user-ID) program: PR_SET_PDEATHSIG of
/// prctl(2).
///
/// Starting it fails with `ESRCH` when this process is gone already.
pub fn kill_with_parent(command: &mut Command) {
    let parent = Pid::this();
    let set = move || {
        if set_parent_death_signal(parent) {
            Ok(())
        } else {
            Err(io::Error::from_raw_os_error(libc::ESRCH))
        }
    };
    // SAFETY: the closure runs in the child of a process that may have several threads, where only
    // what signal-safety(7) lists may be called: it calls prctl and getppid, and neither allocates
    // nor locks; an error of a raw number is that number alone.
    unsafe { command.pre_exec(set) };
}
