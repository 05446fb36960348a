//! A wildcard that is bound has its devices open. A test program of its own, in which nothing else
//! opens them.

#[path = "api/common.rs"]
mod common;

use std::fs;
use std::net::Ipv4Addr;
use std::thread;
use std::time::{Duration, Instant};

use doorbell_softroce_rdmacm::*;
use doorbell_verbs_sys::rdmacm::*;

use common::*;

fn thread_count() -> usize {
    fs::read_dir("/proc/self/task").unwrap().count()
}

/// Whether a device's threads run: they have its name.
fn is_open() -> bool {
    let threads = fs::read_dir("/proc/self/task").unwrap();
    let mut names = threads.map(|thread| fs::read_to_string(thread.unwrap().path().join("comm")).unwrap_or_default());
    names.any(|name| name.starts_with("soft-"))
}

/// A program may announce its port before it listens there (qperf 0.4.11): opening devices then,
/// seconds on an oversubscribed machine, would let the peer's request be rejected.
#[test]
fn devices_are_open_before_the_port_is_known() {
    let id = Id::new(channel(), RDMA_PS_TCP);
    assert!(!is_open());
    let before = thread_count();
    let wildcard = sys((Ipv4Addr::UNSPECIFIED, 0).into());
    // SAFETY: the identifier and the address are live.
    ok(unsafe { rdma_bind_addr(id.0, at(&wildcard)) });
    assert!(thread_count() > before, "no device is open");
    // A thread names itself when it first runs.
    let since = Instant::now();
    while !is_open() {
        assert!(since.elapsed() < Duration::from_secs(30), "the threads are no device's");
        thread::yield_now();
    }
    id.destroy();
}
