//! Aliased ranges of a region, posted repeatedly by requests that own no buffer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use doorbell_verbs::{PeerWrite, Remote, Success, WriteAccess};

use crate::rig::{PEER, opened};
use crate::stub::Stub;

const TARGET: Remote<WriteAccess> = Remote::from_raw(0x1000, 7, 4096);

#[test]
fn one_range_is_posted_many_times_at_once_and_nothing_comes_back() {
    let (stub, context, pd) = opened();
    let mut cq = context.completion_queue(16).unwrap();
    let mut qp = pd
        .queue_pair(&cq)
        .max_send_wr(8)
        .max_recv_wr(8)
        .rc()
        .unwrap()
        .connect(&PEER)
        .unwrap();
    let buffer = pd.register(vec![7; 4096], PeerWrite).unwrap();
    // SAFETY: the buffer outlives the queue pair, and nothing writes it.
    let alias = unsafe { buffer.alias(1024..2048) };
    assert_eq!(alias.addr(), buffer.addr() + 1024);
    let tail = alias.slice(1000, 24).unwrap();
    assert!(alias.slice(1000, 25).is_none() && alias.slice(1025, 0).is_none());
    qp.post(|batch| {
        batch.write(alias, TARGET);
        batch.write(tail, TARGET);
        batch.write(alias, TARGET).signaled();
    })
    .unwrap();
    let posted = stub.pending_sends(qp.qpn().get());
    let lkey = posted[0].sges[0].2;
    let sges: Vec<_> = posted.iter().map(|posted| posted.sges[0]).collect();
    let whole = (buffer.addr() + 1024, 1024, lkey);
    assert_eq!(sges, [whole, (buffer.addr() + 2024, 24, lkey), whole]);
    stub.complete_sends(qp.qpn().get(), 3);
    let mut done = 0;
    for mut completion in cq.poll().unwrap() {
        assert_eq!((completion.result(), completion.sequence()), (Ok(Success::Write), 2));
        assert!(completion.take::<PeerWrite>().is_none());
        done += 1;
    }
    assert_eq!(done, 1, "one was signaled, and none has a buffer");
}

struct Owner(Arc<AtomicBool>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn several_domains_register_one_memory_and_the_last_lets_its_owner_go() {
    let stub = Stub::new();
    let context = stub.open();
    let domains = [
        context.protection_domain().unwrap(),
        context.protection_domain().unwrap(),
    ];
    let mut memory = vec![0_u8; 4096];
    let start = memory.as_mut_ptr();
    let gone = Arc::new(AtomicBool::new(false));
    let owner = Arc::new(Owner(Arc::clone(&gone)));
    let [first, second] = domains.each_ref().map(|domain| {
        // SAFETY: the memory outlives both regions, and nothing accesses it.
        unsafe { domain.register_raw(start, 4096, PeerWrite, Arc::clone(&owner) as _) }.unwrap()
    });
    drop(owner);
    assert_eq!(
        (first.addr(), second.addr()),
        (start.addr() as u64, start.addr() as u64)
    );
    assert_eq!(stub.live("mr"), 2);
    drop(first);
    assert!(!gone.load(Ordering::Relaxed));
    drop(second);
    assert!(gone.load(Ordering::Relaxed));
    assert_eq!(stub.live("mr"), 0);
    // SAFETY: nothing is registered.
    let none = unsafe { domains[0].register_raw(start, 0, PeerWrite, Arc::new(())) };
    assert!(none.is_err());
}
