//! What only extended completion queues have: open polls, fields read by calls, timestamps.

use std::cell::Cell;
use std::thread;
use std::time::Duration;

use doorbell_verbs::{
    BestCompletionQueue, Buffer, CompletionQueue, CompletionQueueError, CompletionStatus, ExtendedCq, Local, QueuePair,
    Success,
};
use doorbell_verbs_sys as sys;

use crate::rig::{PEER, poll_count, poll_each, rig_of};
use crate::stub::extended_cq::{CLOCK_KHZ, ticks_of, wallclock_of};
use crate::stub::{Stub, Verb};

fn rig(stub: &'static Stub, depth: u32, n: usize) -> (QueuePair, CompletionQueue<ExtendedCq>, Vec<Buffer>) {
    rig_of(stub, depth, n)
}

fn receive_all(stub: &'static Stub, qp: &mut QueuePair, buffers: &mut Vec<Buffer>) {
    let n = buffers.len();
    for buffer in buffers.drain(..) {
        qp.receive(buffer).unwrap();
    }
    for len in 0..n as u32 {
        stub.complete_receive(qp.qpn().get(), sys::IBV_WC_RECV, len, Some(len));
    }
}

#[test]
fn a_poll_is_started_and_ended_once_and_reads_only_the_fields_used() {
    let stub = Stub::new();
    let (mut qp, mut cq, mut buffers) = rig(stub, 8, 5);
    assert_eq!(poll_count(&mut cq), 0);
    assert_eq!(stub.polls(), (0, 0, 0), "nothing to end where nothing was started");
    receive_all(stub, &mut qp, &mut buffers);
    cq.poll().unwrap().for_each(|done| {
        done.check().unwrap();
        buffers.extend(done.into_buffer());
    });
    assert_eq!((buffers.len(), stub.polls(), stub.reads()), (5, (1, 5, 1), 0));
    receive_all(stub, &mut qp, &mut buffers);
    let lengths = poll_each(&mut cq, |done| match done.result().unwrap() {
        Success::Receive { len, imm } => (len, imm),
        other => panic!("{other:?}"),
    });
    assert_eq!(lengths, [0, 1, 2, 3, 4].map(|len| (len, Some(len))));
    assert_eq!(
        (stub.polls(), stub.reads()),
        ((2, 10, 2), 5 * 4),
        "opcode, length, flags, immediate"
    );
}

#[test]
fn a_poll_takes_no_more_than_a_batch() {
    let stub = Stub::new();
    let (mut qp, mut cq, mut buffers) = rig(stub, 64, 40);
    receive_all(stub, &mut qp, &mut buffers);
    assert_eq!(
        (poll_count(&mut cq), poll_count(&mut cq), poll_count(&mut cq)),
        (32, 8, 0)
    );
    assert_eq!(stub.polls(), (2, 31 + 8, 2));
}

#[test]
fn an_abandoned_poll_is_resumed_with_the_rest() {
    let stub = Stub::new();
    let (mut qp, mut cq, mut buffers) = rig(stub, 8, 4);
    let qpn = qp.qpn().get();
    qp.post(|batch| {
        for buffer in buffers.drain(..3) {
            batch.send(buffer);
        }
        batch.send(buffers.remove(0)).signaled();
    })
    .unwrap();
    stub.complete_sends(qpn, 3);
    // The one that confirms the others has failed: its status must not be lost meanwhile.
    stub.fail_send(qpn, sys::IBV_WC_REM_ACCESS_ERR);
    let seen = Cell::new(0);
    let outcome = cq.poll().unwrap().try_for_each(|done| {
        seen.set(seen.get() + 1);
        if seen.get() == 2 { Err(done.sequence()) } else { Ok(()) }
    });
    assert_eq!(outcome, Err(1));
    assert_eq!(stub.polls(), (1, 0, 1), "ended, though the completion is not done with");
    {
        let mut completions = cq.poll().unwrap();
        let done = completions.next_completion().unwrap();
        assert_eq!((done.sequence(), done.result()), (2, Ok(Success::Confirmed)));
    }
    // A poll without reads changes nothing.
    drop(cq.poll().unwrap());
    let last = poll_each(&mut cq, |done| {
        let failure = done.result().unwrap_err();
        (failure.sequence, failure.status, failure.vendor_error)
    });
    assert_eq!(last, [(3, CompletionStatus::RemoteAccess, 0x99)]);
    assert_eq!(stub.polls(), (1, 0, 1));
    assert_eq!((qp.free_send_slots(), poll_count(&mut cq)), (8, 0));
}

#[test]
fn a_held_completion_keeps_all_its_fields() {
    let stub = Stub::new();
    stub.extend();
    let context = stub.open();
    let pd = context.protection_domain().unwrap();
    let queue = context.extended_completion_queue(64).timestamps().wallclock();
    let mut cq = queue.create().unwrap();
    let builder = pd.queue_pair(&cq).max_send_wr(8).max_recv_wr(8);
    let mut qp = builder.rc().unwrap().connect(&PEER).unwrap();
    let buffer = pd.register(vec![0_u8; 64], Local).unwrap();
    qp.receive(buffer).unwrap();
    stub.complete_receive(qp.qpn().get(), sys::IBV_WC_RECV_RDMA_WITH_IMM, 61, Some(7));
    let wr_id = 1 << 32;
    drop(cq.poll().unwrap());
    let reported = poll_each(&mut cq, |done| {
        (done.result(), done.timestamp_ticks(), done.wallclock_ns())
    });
    assert_eq!(
        reported,
        [(
            Ok(Success::ReceiveWrite { len: 61, imm: 7 }),
            Some(ticks_of(wr_id)),
            Some(wallclock_of(wr_id))
        )]
    );
    assert_eq!(stub.polls().0, 1);
}

#[test]
fn a_forgotten_poll_is_ended_by_the_next_and_loses_nothing() {
    let stub = Stub::new();
    let (mut qp, mut cq, mut buffers) = rig(stub, 8, 6);
    receive_all(stub, &mut qp, &mut buffers);
    let mut completions = cq.poll().unwrap();
    buffers.extend(completions.next_completion().unwrap().take::<Local>());
    core::mem::forget(completions);
    assert_eq!(stub.polls(), (1, 0, 0));
    assert_eq!(poll_count(&mut cq), 5);
    assert_eq!(stub.polls(), (2, 5, 2));
    qp.receive(buffers.remove(0)).unwrap();
    stub.complete_receive(qp.qpn().get(), sys::IBV_WC_RECV, 1, None);
    core::mem::forget(cq.poll().unwrap());
    assert_eq!(poll_count(&mut cq), 1);
    // In the middle of the requests that a completion confirms.
    qp.post(|batch| {
        batch.send_inline(b"a");
        batch.send_inline(b"b").signaled();
    })
    .unwrap();
    stub.complete_sends(qp.qpn().get(), 2);
    core::mem::forget(cq.poll().unwrap());
    drop(cq);
    let (started, _, ended) = stub.polls();
    assert_eq!(started, ended, "before the queue goes");
}

#[test]
fn a_queue_pair_dropped_by_the_thread_that_polls_is_destroyed_afterwards() {
    let stub = Stub::new();
    let (mut qp, mut cq, mut buffers) = rig(stub, 8, 4);
    buffers.truncate(2);
    receive_all(stub, &mut qp, &mut buffers);
    let mut pair = Some(qp);
    let received = Cell::new(0);
    cq.poll().unwrap().for_each(|done| {
        done.check().unwrap();
        received.set(received.get() + 1);
        // The stub fails if this destroys it now: a real provider would wait for its own lock.
        drop(pair.take());
    });
    assert_eq!((received.get(), stub.live("qp")), (2, 1));
    assert_eq!(poll_count(&mut cq), 0);
    assert_eq!((stub.live("qp"), stub.live("mr")), (0, 0));
    assert_eq!(cq.unreserved(), 16);
}

#[test]
fn a_queue_pair_dropped_while_its_queue_is_polled_goes_with_the_queue_at_the_latest() {
    let stub = Stub::new();
    let (mut qp, mut cq, mut buffers) = rig(stub, 8, 2);
    receive_all(stub, &mut qp, &mut buffers);
    let mut completions = cq.poll().unwrap();
    drop(completions.next_completion());
    drop(qp);
    drop(completions);
    assert_eq!(stub.live("qp"), 1);
    drop(cq);
    for kind in ["qp", "mr", "cq", "pd", "context"] {
        assert_eq!(stub.live(kind), 0, "{kind}");
    }
}

#[test]
fn a_panic_ends_the_poll_and_keeps_the_rest() {
    let stub = Stub::new();
    let (mut qp, mut cq, mut buffers) = rig(stub, 8, 5);
    receive_all(stub, &mut qp, &mut buffers);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        cq.poll()
            .unwrap()
            .for_each(|done| assert!(done.sequence() < 2, "on purpose"));
    }));
    assert!(panicked.is_err());
    let (started, _, ended) = stub.polls();
    assert_eq!((started, ended), (1, 1));
    assert_eq!(poll_each(&mut cq, |done| done.sequence()), [3, 4]);
}

#[test]
fn a_poll_that_fails_says_so() {
    let stub = Stub::new();
    let (mut qp, mut cq, mut buffers) = rig(stub, 8, 3);
    stub.fail(Verb::PollCq, libc::EIO);
    let error = cq.poll().map(|_| ()).unwrap_err();
    assert!(
        matches!(
            error,
            CompletionQueueError::Poll {
                verb: "ibv_start_poll",
                ..
            }
        ),
        "{error}"
    );
    receive_all(stub, &mut qp, &mut buffers);
    stub.fail(Verb::NextPoll, libc::EIO);
    assert_eq!(poll_count(&mut cq), 1, "what was found before the failure is given");
    assert_eq!(poll_count(&mut cq), 2);
    let error = cq.poll().map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("ibv_next_poll") && error.contains("overrun"), "{error}");
    assert_eq!(poll_count(&mut cq), 0, "and may be tried again");
}

#[test]
fn a_device_without_extended_queues_says_what_to_use() {
    let stub = Stub::new();
    let context = stub.open();
    let error = context.extended_completion_queue(8).create().unwrap_err().to_string();
    assert!(
        error.contains("ibv_create_cq_ex") && error.contains("Context::completion_queue"),
        "{error}"
    );
    let best = context.best_completion_queue(8).unwrap();
    assert!(matches!(best, BestCompletionQueue::Classic(_)), "{best:?}");
    let stub = Stub::new();
    stub.extend();
    let context = stub.open();
    let best = context.best_completion_queue(8).unwrap();
    assert!(matches!(best, BestCompletionQueue::Extended(_)), "{best:?}");
    drop(best);
    stub.fail(Verb::CreateCq, libc::ENOMEM);
    let error = context.best_completion_queue(8).unwrap_err().to_string();
    assert!(error.contains("RLIMIT_MEMLOCK"), "{error}");
    let error = context.extended_completion_queue(100_000).create().unwrap_err();
    assert!(matches!(error, CompletionQueueError::TooLarge { .. }), "{error}");
}

#[test]
fn timestamps_are_reported_where_requested() {
    let stub = Stub::new();
    let (mut qp, mut cq, mut buffers) = rig(stub, 8, 1);
    receive_all(stub, &mut qp, &mut buffers);
    let reported = poll_each(&mut cq, |done| (done.timestamp_ticks(), done.wallclock_ns()));
    assert_eq!(reported, [(None, None)]);
}

#[test]
fn ticks_are_made_times_by_the_devices_clock() {
    let stub = Stub::new();
    assert_eq!(stub.open().attr().clock, None);
    let error = stub.open().clock_ticks().unwrap_err().to_string();
    assert!(error.contains("ibv_query_rt_values_ex"), "{error}");
    stub.extend();
    let context = stub.open();
    let clock = context.attr().clock.unwrap();
    assert_eq!(clock.khz(), CLOCK_KHZ);
    let since = clock.between(context.clock_ticks().unwrap(), ticks_of(0));
    assert_eq!(since, Duration::from_micros(4));
}

#[test]
fn a_sleeper_on_an_extended_queue_is_woken_and_finds_what_came_before_it_slept() {
    let stub = Stub::new();
    stub.extend();
    let context = stub.open();
    let pd = context.protection_domain().unwrap();
    let channel = context.completion_channel().unwrap();
    let mut cq = context.extended_completion_queue(32).on(&channel).create().unwrap();
    let builder = pd.queue_pair(&cq).max_send_wr(8).max_recv_wr(8).signal_all();
    let mut qp = builder.rc().unwrap().connect(&PEER).unwrap();
    let qpn = qp.qpn().get();
    let mut buffer = pd.register(vec![0_u8; 64], Local).unwrap();
    for round in 0..100 {
        qp.send(buffer).unwrap();
        buffer = thread::scope(|scope| {
            match round % 3 {
                0 => stub.complete_sends(qpn, 1),
                // It raises no event: nothing would end this sleep.
                1 => stub.complete_before_arming(qpn),
                _ => drop(scope.spawn(|| stub.complete_sends(qpn, 1))),
            }
            let mut completions = cq.wait(None).unwrap();
            completions.next_completion().unwrap().into_buffer().unwrap()
        });
    }
    assert!(cq.wait(Duration::from_millis(10)).unwrap().next_completion().is_none());
    let (started, _, ended) = stub.polls();
    assert_eq!((started, ended), (100, 100));
    let foreign = Stub::new().open().completion_channel().unwrap();
    let error = context.extended_completion_queue(8).on(&foreign).create().unwrap_err();
    assert!(matches!(error, CompletionQueueError::ForeignChannel { .. }), "{error}");
}

#[test]
fn an_extended_queue_is_resized_and_moderated_as_a_classic_one() {
    let stub = Stub::new();
    let (mut qp, mut cq, mut buffers) = rig(stub, 8, 3);
    receive_all(stub, &mut qp, &mut buffers);
    assert!(matches!(
        cq.resize(10),
        Err(CompletionQueueError::Reserved { reserved: 16, .. })
    ));
    cq.resize(100).unwrap();
    assert_eq!((cq.capacity(), cq.unreserved()), (112, 96));
    cq.moderate(16, 100).unwrap();
    assert_eq!(stub.moderation(), Some((16, 100)));
    assert_eq!(poll_count(&mut cq), 3);
}

#[test]
fn a_queue_is_described() {
    let stub = Stub::new();
    let (_qp, cq, _) = rig(stub, 8, 0);
    let text = cq.describe().to_string();
    let lines: Vec<_> = text.lines().skip(1).collect();
    assert_eq!(
        lines,
        ["  kind: extended", "  cqe: 16, of which reserved: 16", "  channel: no"]
    );
    let description = Stub::new().open().completion_queue(8).unwrap().describe();
    assert_eq!(
        (description.kind, description.reserved, description.capacity),
        ("classic", 0, 8)
    );
}
