//! Processes that are killed when the one that started them is gone, however it went: also by SIGKILL, after which nobody can clean up.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::sys::signal::Signal;
use nix::unistd::Pid;

/// Has the kernel kill this process with SIGKILL when the thread that started it ends (PR_SET_PDEATHSIG, prctl(2)); execve(2) keeps that, unless the program has privileges
/// of its own (set-user-ID, capabilities). `false` when `parent` was gone before that, or the kernel refused.
///
/// May be called between fork and execve: it only makes two system calls.
pub(crate) fn dies_with(parent: Pid) -> bool {
    // SAFETY: prctl with PR_SET_PDEATHSIG takes a signal number and touches no memory of the process.
    let set = unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, Signal::SIGKILL as libc::c_ulong) };
    set == 0 && Pid::parent() == parent
}

/// Has the process that `command` starts killed with SIGKILL when the thread that starts it ends, or this process does: who calls this keeps that thread until the other process has
/// ended. Processes that it starts in turn are not killed, nor is it once it has executed a program with privileges of its own (set-user-ID), as PR_SET_PDEATHSIG of prctl(2) has it.
///
/// To start it then fails with the error `ESRCH` when this process is gone already.
pub fn kill_with_parent(command: &mut Command) {
    let parent = Pid::this();
    let set = move || {
        if dies_with(parent) {
            Ok(())
        } else {
            Err(io::Error::from_raw_os_error(libc::ESRCH))
        }
    };
    // SAFETY: the closure runs in the child of a process that may have several threads, where only what signal-safety(7) lists may be called: it calls prctl and getppid, and neither
    // allocates nor locks; an error of a raw number is that number alone.
    unsafe { command.pre_exec(set) };
}
