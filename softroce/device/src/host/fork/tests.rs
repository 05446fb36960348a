//! Forks while another thread creates and closes descriptors.

use std::mem::{MaybeUninit, size_of};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};

use crate::host::socket;

/// How many descriptors of this process are sockets of `name`. Safe in a forked child.
fn sockets_of(name: &[u8]) -> i32 {
    let is_one = |fd| {
        // SAFETY: all zeroes is a value of this type of integers.
        let mut address: libc::sockaddr_un = unsafe { MaybeUninit::zeroed().assume_init() };
        let mut len = size_of::<libc::sockaddr_un>() as libc::socklen_t;
        // SAFETY: `address` is written for its true length at most.
        let got = unsafe { libc::getsockname(fd, (&raw mut address).cast(), &raw mut len) };
        let path = address.sun_path.iter().skip(1).take(name.len());
        got == 0
            && i32::from(address.sun_family) == libc::AF_UNIX
            && path.map(|&byte| byte as u8).eq(name.iter().copied())
    };
    (0..1024).filter(|&fd| is_one(fd)).count() as i32
}

#[test]
fn a_fork_during_accept_or_close_keeps_no_descriptor() {
    const FORKS: usize = 2000;
    let name = format!("doorbell-fork-{}", std::process::id());
    let listener = socket::listen(&name).unwrap();
    let ended = AtomicBool::new(false);
    let kept: i32 = thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                let _client = socket::connect_to(&name).unwrap();
                let _accepted = socket::accept(listener.as_fd()).unwrap();
            }
        });
        let kept = (0..FORKS).map(|_| {
            // SAFETY: the child only makes system calls and compares memory of its own.
            match unsafe { fork() }.unwrap() {
                // SAFETY: it ends the child without running anything else of this program.
                ForkResult::Child => unsafe { libc::_exit(sockets_of(name.as_bytes())) },
                ForkResult::Parent { child } => match waitpid(child, None).unwrap() {
                    WaitStatus::Exited(_, kept) => kept,
                    other => panic!("{other:?}"),
                },
            }
        });
        let kept = kept.sum();
        ended.store(true, Ordering::Relaxed);
        kept
    });
    assert_eq!(kept, 0, "descriptors that {FORKS} forks kept");
}
