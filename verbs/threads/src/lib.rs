//! The threads that libraries start in programs of others (decision 076).
//!
//! The kernel gives a signal of a process to any thread that does not block it. A program that
//! blocks one in all of its threads, for signalfd(2) or sigwait(3), would die of it in a thread
//! that it does not know, and a handler that is to end a wait would run beside it.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::thread::{Builder, JoinHandle};

/// What a thread raises itself, by a fault or a system call. Blocked, they would end the process
/// without the program's handlers, or those of the soft device for faults in registered memory.
const OF_THE_THREAD: [libc::c_int; 6] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGILL,
    libc::SIGTRAP,
    libc::SIGSYS,
];

/// Starts a thread that gets no signal but those that it raises itself.
///
/// # Errors
/// When the thread cannot be created: see [`Builder::spawn`].
pub fn spawn<T: Send + 'static>(
    name: impl Into<String>,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    // A new thread has its creator's mask: no signal comes before it could block them.
    let _blocked = Blocked::on_this_thread();
    Builder::new().name(name.into()).spawn(work)
}

/// The calling thread's mask before, which is restored on drop.
struct Blocked(libc::sigset_t);

impl Blocked {
    fn on_this_thread() -> Self {
        let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: sigfillset(3) initialises the first set, which the calls after it modify and
        // read, and pthread_sigmask(3) the second; none can fail with these arguments.
        unsafe {
            libc::sigfillset(all.as_mut_ptr());
            for signal in OF_THE_THREAD {
                libc::sigdelset(all.as_mut_ptr(), signal);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), before.as_mut_ptr());
            Self(before.assume_init())
        }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: the set is initialised; nothing is written.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, ptr::null_mut()) };
    }
}
