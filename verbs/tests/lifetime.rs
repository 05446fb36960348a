//! The order of destruction, and the fate of memory in flight. The stub asserts that nothing is
//! destroyed before its dependents, and reads a region's memory when it is deregistered.

use doorbell_verbs::{Buffer, CompletionQueue, IntoMemoryError, Local, Memory, MemoryError, PeerRead, PeerWrite};

use crate::rig::{PEER, TestBackend, TestCq, opened, over_all_kinds, poll_count, poll_each, rig_of};
use crate::stub::{Stub, Verb};

over_all_kinds! {
    entries_of_a_queue_pair_gone_are_free_again_though_the_queue_is_never_empty,
    completions_of_a_queue_pair_gone_are_not_its_successors,
    a_queue_pair_dropped_with_work_in_flight_gives_it_up_at_the_next_poll,
    a_completion_queue_dropped_first_leaves_the_memory_to_the_queue_pair,
    a_queue_pair_that_cannot_be_destroyed_keeps_its_memory_for_ever,
    a_completion_of_nothing_in_flight_is_ignored,
}

fn assert_all_gone(stub: &'static Stub) {
    for kind in ["mr", "qp", "cq", "pd", "context"] {
        assert_eq!(stub.live(kind), 0, "{kind}");
    }
}

#[test]
fn a_region_lives_as_long_as_its_last_buffer() {
    let stub = Stub::new();
    {
        let pd = stub.open().protection_domain().unwrap();
        let whole = pd.register(vec![7_u8; 100], Local).unwrap();
        drop(pd);
        let (first, second) = whole.split_at(30);
        drop(first);
        assert_eq!((stub.live("mr"), second.len(), second[0]), (1, 70, 7));
        let mut thirds: Vec<Buffer> = second.chunks(30).collect();
        assert_eq!(thirds.iter().map(Buffer::len).collect::<Vec<_>>(), [30, 30, 10]);
        drop(thirds.remove(1));
        assert_eq!((stub.live("mr"), stub.live("pd"), stub.live("context")), (1, 1, 1));
    }
    assert_all_gone(stub);
}

#[test]
fn memory_comes_back_whole_from_the_last_buffer() {
    let stub = Stub::new();
    let pd = stub.open().protection_domain().unwrap();
    let original = vec![3_u8; 64];
    let at = original.as_ptr();
    let (first, second) = pd.register(original, Local).unwrap().split_at(10);
    let Err(IntoMemoryError::Shared(second)) = second.into_memory() else {
        panic!("the first is still alive")
    };
    let whole = first.join(second).unwrap();
    assert_eq!(whole.len(), 64);
    let vec = whole.into_memory().unwrap().into_vec();
    assert_eq!((vec.as_ptr(), vec.len(), stub.live("mr")), (at, 64, 0));
}

#[test]
fn neighbours_only_are_joined() {
    let pd = Stub::new().open().protection_domain().unwrap();
    let mut thirds: Vec<Buffer> = pd.register(vec![0_u8; 30], Local).unwrap().chunks(10).collect();
    let (third, second, first) = (thirds.pop().unwrap(), thirds.pop().unwrap(), thirds.pop().unwrap());
    let (first, third) = first.join(third).unwrap_err();
    let (second, first) = second.join(first).unwrap_err();
    assert_eq!(first.join(second).unwrap().join(third).unwrap().len(), 30);
}

#[test]
fn memory_that_the_device_does_not_let_go_of_is_never_freed() {
    let stub = Stub::new();
    let pd = stub.open().protection_domain().unwrap();
    let buffer = pd.register(vec![0_u8; 64], Local).unwrap();
    stub.fail(Verb::DeregMr, libc::EBUSY);
    let error = buffer.into_memory().unwrap_err();
    assert!(
        matches!(error, IntoMemoryError::Refused(MemoryError::Deregister(_))),
        "{error}"
    );
    let buffer = pd.register(vec![0_u8; 64], Local).unwrap();
    stub.fail(Verb::DeregMr, libc::EBUSY);
    drop(buffer);
    drop(pd);
    assert_eq!(
        (stub.live("mr"), stub.live("pd"), stub.live("context")),
        (2, 1, 1),
        "leaked, with all it needs"
    );
}

#[test]
fn a_refused_registration_gives_advice() {
    let stub = Stub::new();
    let pd = stub.open().protection_domain().unwrap();
    stub.fail(Verb::RegMr, libc::ENOMEM);
    let error = pd.register(vec![0_u8; 64], Local).unwrap_err().to_string();
    assert!(
        error.contains("RLIMIT_MEMLOCK") && error.contains("64 bytes"),
        "{error}"
    );
    assert!(matches!(pd.register(Vec::new(), Local), Err(MemoryError::Empty)));
}

fn a_queue_pair_dropped_with_work_in_flight_gives_it_up_at_the_next_poll<B: TestBackend, Q: TestCq>() {
    let stub = Stub::new();
    let (mut qp, mut cq, mut buffers) = rig_of::<B, Q>(stub, 8, 4);
    qp.send(buffers.remove(0)).unwrap();
    qp.receive(buffers.remove(0)).unwrap();
    buffers.clear();
    assert_eq!(stub.live("mr"), 1);
    drop(qp);
    assert_eq!(stub.live("mr"), 1, "the poller may be taking completions");
    assert_eq!(poll_count(&mut cq), 0, "completions of a queue pair gone are dropped");
    assert_eq!(stub.live("mr"), 0);
    assert_eq!(stub.log(), ["destroy_qp", "dereg_mr"], "in this order");
    assert_eq!(cq.unreserved(), 16, "seen empty, all its entries are free again");
    drop(cq);
    assert_all_gone(stub);
}

fn a_completion_queue_dropped_first_leaves_the_memory_to_the_queue_pair<B: TestBackend, Q: TestCq>() {
    let stub = Stub::new();
    let (mut qp, cq, mut buffers) = rig_of::<B, Q>(stub, 8, 2);
    qp.send(buffers.remove(0)).unwrap();
    buffers.clear();
    drop(cq);
    assert_eq!((stub.live("cq"), stub.live("mr")), (1, 1));
    qp.send_inline(b"posting still works").unwrap();
    drop(qp);
    assert_all_gone(stub);
}

fn a_queue_pair_that_cannot_be_destroyed_keeps_its_memory_for_ever<B: TestBackend, Q: TestCq>() {
    let stub = Stub::new();
    let (mut qp, mut cq, mut buffers) = rig_of::<B, Q>(stub, 8, 2);
    qp.send(buffers.remove(0)).unwrap();
    buffers.clear();
    stub.fail(Verb::DestroyQp, libc::EBUSY);
    drop(qp);
    // Its flush completion still maps to a known ring: only that buffer is the caller's again.
    let back = poll_each(&mut cq, |mut done| done.take::<Local>())
        .into_iter()
        .flatten()
        .count();
    assert_eq!(back, 1);
    drop(cq);
    assert_eq!((stub.live("qp"), stub.live("cq"), stub.live("pd")), (1, 1, 1));
}

fn completions_of_a_queue_pair_gone_are_not_its_successors<B: TestBackend, Q: TestCq>() {
    let stub = Stub::new();
    stub.extend();
    let context = stub.open();
    let pd = context.protection_domain().unwrap();
    let mut cq = Q::make(&context, 64);
    let mut buffers: Vec<Buffer> = pd.register(vec![0_u8; 640], Local).unwrap().chunks(64).collect();
    let connect = |cq: &CompletionQueue<Q>| {
        let builder = pd.queue_pair(cq).max_send_wr(4).max_recv_wr(4);
        B::rc(builder).unwrap().connect(&PEER).unwrap()
    };
    for _ in 0..3 {
        let mut first = connect(&cq);
        first.send(buffers.remove(0)).unwrap();
        first.send(buffers.remove(0)).unwrap();
        drop(first);
        let mut second = connect(&cq);
        let third = buffers.remove(0);
        let expected = third.addr();
        second
            .post(|batch| {
                batch.send(third).signaled();
            })
            .unwrap();
        stub.complete_sends(second.qpn().get(), 1);
        let back = poll_each(&mut cq, |mut done| {
            (
                done.qpn(),
                done.sequence(),
                done.take::<Local>().map(|buffer| buffer.addr()),
            )
        });
        assert_eq!(back, [(second.qpn(), 0, Some(expected))]);
    }
    assert_eq!(poll_count(&mut cq), 0);
    assert_eq!(cq.unreserved(), 64);
}

/// A server with busy connections replaces others.
fn entries_of_a_queue_pair_gone_are_free_again_though_the_queue_is_never_empty<B: TestBackend, Q: TestCq>() {
    const BATCH: usize = 32;
    let stub = Stub::new();
    stub.extend();
    let context = stub.open();
    let pd = context.protection_domain().unwrap();
    let mut cq = Q::make(&context, 100);
    let connect = |cq: &CompletionQueue<Q>, depth| {
        let builder = pd.queue_pair(cq).max_send_wr(depth).max_recv_wr(0).max_inline_data(8);
        B::rc(builder).unwrap().connect(&PEER).unwrap()
    };
    let mut busy = connect(&cq, 2 * BATCH as u32);
    let mut keep_busy = |requests| {
        for _ in 0..requests {
            busy.post(|batch| {
                batch.send_inline(b"x").signaled();
            })
            .unwrap();
        }
        stub.complete_sends(busy.qpn().get(), requests);
    };
    keep_busy(2 * BATCH);
    let mut gone = connect(&cq, 4);
    let free = cq.unreserved();
    for done in 0..4 {
        gone.send_inline(b"x").unwrap();
        stub.complete_sends(gone.qpn().get(), done % 2);
    }
    drop(gone);
    for _ in 0..=cq.capacity() {
        // Those of the queue pair gone are not yielded.
        let yielded = poll_count(&mut cq);
        assert!(yielded >= BATCH - 4);
        keep_busy(yielded);
        if cq.unreserved() == free + 4 {
            return;
        }
    }
    panic!("{} entries are free", cq.unreserved());
}

fn a_completion_of_nothing_in_flight_is_ignored<B: TestBackend, Q: TestCq>() {
    let stub = Stub::new();
    let (mut qp, mut cq, mut buffers) = rig_of::<B, Q>(stub, 4, 2);
    let qpn = qp.qpn().get();
    qp.post(|batch| {
        batch.send(buffers.remove(0)).signaled();
    })
    .unwrap();
    let wr_id = stub.pending_sends(qpn)[0].wr_id;
    stub.complete_sends(qpn, 1);
    for wr_id in [wr_id, wr_id + 2, wr_id | 7 << 32, u64::MAX] {
        stub.forge(qpn, wr_id);
    }
    let back: Vec<_> = poll_each(&mut cq, |mut done| done.take::<Local>().is_some());
    assert_eq!(back, [true]);
    assert_eq!(qp.free_send_slots(), 4);
}

#[test]
fn memory_that_peers_write_is_copied_and_loaded_not_lent() {
    let pd = Stub::new().open().protection_domain().unwrap();
    let mut inbox = pd.register(Memory::zeroed(100), PeerWrite).unwrap();
    let data: Vec<u8> = (0..61).collect();
    inbox.write_at(3, &data);
    let mut back = vec![0; 61];
    inbox.read_at(3, &mut back);
    assert_eq!(back, data);
    assert_eq!(inbox.load_u8(63, core::sync::atomic::Ordering::Acquire), 60);
    inbox.store_u64(8, 0x0102_0304_0506_0708, core::sync::atomic::Ordering::Release);
    assert_eq!(
        inbox.load_u64(8, core::sync::atomic::Ordering::Relaxed),
        0x0102_0304_0506_0708
    );
    let mut table = pd.register(Memory::zeroed(16), PeerRead).unwrap();
    table.store_u32(8, 0x0102_0304, core::sync::atomic::Ordering::Release);
    assert_eq!(table[8..12], 0x0102_0304_u32.to_ne_bytes());
    inbox.fill(9);
    inbox.read_at(39, &mut back);
    assert!(back.iter().all(|&byte| byte == 9));
    let beyond = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| inbox.read_at(40, &mut back)));
    assert!(beyond.is_err());
}

#[test]
fn frozen_buffers_are_the_source_of_many_requests() {
    let (stub, context, pd) = opened();
    let mut cq = context.completion_queue(8).unwrap();
    let mut qp = pd
        .queue_pair(&cq)
        .max_send_wr(4)
        .max_recv_wr(4)
        .rc()
        .unwrap()
        .connect(&PEER)
        .unwrap();
    let mut buffer = pd.register(vec![0_u8; 8], PeerRead).unwrap();
    buffer.write_at(0, b"abcdefgh");
    let frozen = buffer.freeze();
    for _ in 0..3 {
        qp.send(frozen.clone()).unwrap();
    }
    qp.post(|batch| {
        batch.send(frozen.clone()).signaled();
    })
    .unwrap();
    stub.complete_sends(qp.qpn().get(), 4);
    let mut back = 0;
    for mut done in cq.poll().unwrap() {
        assert!(done.take::<Local>().is_none(), "of another kind");
        let frozen = done.take::<doorbell_verbs::Frozen>().unwrap();
        assert_eq!(&frozen[..], b"abcdefgh");
        back += 1;
    }
    assert_eq!(back, 4);
    assert!(matches!(frozen.into_memory(), Ok(memory) if &memory[..] == b"abcdefgh"));
}

#[test]
fn a_large_region_is_registered_in_chunks() {
    let stub = Stub::new();
    let pd = stub.open().protection_domain().unwrap();
    let chunks = pd.register_chunks(Memory::zeroed(10_000), 4096, Local).unwrap();
    assert_eq!((chunks.len(), stub.live("mr")), (3, 1));
    let addresses: Vec<_> = chunks.map(|buffer| buffer.addr()).collect();
    assert!(addresses[0].is_multiple_of(4096));
    assert_eq!((addresses[1] - addresses[0], addresses[2] - addresses[0]), (4096, 8192));
    assert_eq!(stub.live("mr"), 0);
}
