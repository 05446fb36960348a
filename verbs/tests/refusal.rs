//! Refusals: nothing is lost, nothing is posted twice, and the queue stays usable.

use doorbell_verbs::{Buffer, CompletionQueueError, Local, PostList, RejectReason, Remote, Success, WriteAccess};

use crate::rig::{TestBackend, opened, over_both_backends, rig};
use crate::stub::{Stub, Verb};

over_both_backends! {
    a_batch_that_does_not_fit_is_not_begun,
    a_request_that_does_not_fit_its_target_is_named,
    more_buffers_than_the_queue_pair_takes_come_back_all,
    a_refusal_of_the_signalled_request_leaves_no_queue_without_one,
    receives_are_refused_alike,
    a_panic_while_building_takes_everything_back,
    an_empty_batch_rings_no_doorbell,
    a_queue_that_cannot_be_polled_says_so,
    a_panic_after_a_signalled_request_leaves_no_queue_without_one,
    single_requests_are_refused_as_those_of_a_batch,
}

const REMOTE: Remote<WriteAccess> = Remote::from_raw(0x1000, 0x55, 64);

fn addresses(buffers: Vec<doorbell_verbs::Buffers>) -> Vec<Option<u64>> {
    buffers
        .into_iter()
        .map(|mut buffers| buffers.take::<Local>().map(|buffer| buffer.addr()))
        .collect()
}

fn a_batch_that_does_not_fit_is_not_begun<B: TestBackend>() {
    let stub = Stub::new();
    let (mut qp, _cq, buffers) = rig::<B>(stub, 4, 6);
    let expected: Vec<_> = buffers.iter().map(|buffer| Some(buffer.addr())).collect();
    let refused = qp
        .post(|batch| {
            for buffer in buffers {
                batch.send(buffer);
            }
        })
        .unwrap_err();
    assert_eq!((refused.index, refused.posted), (4, 0));
    assert!(matches!(refused.reason, RejectReason::QueueFull { depth: 4 }));
    assert_eq!(addresses(refused.buffers), expected);
    assert_eq!(stub.doorbells(qp.qpn().get()).0, 0);
    assert_eq!((qp.next_send(), qp.free_send_slots()), (0, 4));
}

fn a_request_that_does_not_fit_its_target_is_named<B: TestBackend>() {
    let stub = Stub::new();
    let (mut qp, _cq, mut buffers) = rig::<B>(stub, 8, 7);
    let (a, b, c) = (buffers.remove(0), buffers.remove(0), buffers.remove(0));
    let expected = [a.addr(), b.addr(), c.addr()].map(Some);
    let refused = qp
        .post(|batch| {
            batch.write(a, REMOTE);
            batch.write(b, REMOTE.slice(1, 63).unwrap());
            batch.write(c, REMOTE);
        })
        .unwrap_err();
    assert_eq!(refused.index, 1);
    assert!(
        matches!(refused.reason, RejectReason::RemoteTooShort { len: 64, remote: 63 }),
        "{refused}"
    );
    assert_eq!(addresses(refused.buffers), expected);

    let long = [0; 65];
    let refused = qp
        .post(|batch| {
            batch.send_inline(&long);
        })
        .unwrap_err();
    assert!(
        matches!(refused.reason, RejectReason::InlineTooLong { len: 65, max: 64 }),
        "{refused}"
    );

    let five: [Buffer; 4] = core::array::from_fn(|_| buffers.remove(0));
    qp.post(|batch| {
        batch.send_gather(five);
    })
    .unwrap();
    assert_eq!(stub.doorbells(qp.qpn().get()).0, 1);
}

fn more_buffers_than_the_queue_pair_takes_come_back_all<B: TestBackend>() {
    let stub = Stub::new();
    let (mut qp, _cq, mut buffers) = rig::<B>(stub, 8, 5);
    let five: [Buffer; 5] = core::array::from_fn(|_| buffers.remove(0));
    let mut refused = qp
        .post(|batch| {
            batch.send_gather(five);
        })
        .unwrap_err();
    assert!(
        matches!(refused.reason, RejectReason::TooManyBuffers { requested: 5, max: 4 }),
        "{refused}"
    );
    let back = core::iter::from_fn(|| refused.buffers[0].take::<Local>()).count();
    assert_eq!(back, 5);
}

#[test]
fn refused_requests_are_returned_and_the_rest_is_in_flight() {
    let stub = Stub::new();
    let (mut qp, mut cq, buffers) = rig::<PostList>(stub, 8, 5);
    let qpn = qp.qpn().get();
    let expected: Vec<_> = buffers.iter().map(Buffer::addr).collect();
    stub.refuse_send(qpn, 3, libc::ENOMEM);
    let refused = qp
        .post(|batch| {
            for buffer in buffers {
                batch.send(buffer);
            }
        })
        .unwrap_err();
    assert_eq!((refused.index, refused.posted), (3, 3));
    assert!(refused.to_string().contains("ibv_post_send"), "{refused}");
    assert_eq!(addresses(refused.buffers), [Some(expected[3]), Some(expected[4])]);
    assert_eq!((qp.next_send(), qp.free_send_slots()), (3, 5));

    qp.post(|batch| {
        batch.send_inline(b"x").signaled();
    })
    .unwrap();
    stub.complete_sends(qpn, 4);
    let back: Vec<_> = cq
        .poll()
        .unwrap()
        .map(|mut done| {
            (
                done.sequence(),
                done.result().unwrap(),
                done.take::<Local>().map(|buffer| buffer.addr()),
            )
        })
        .collect();
    let confirmed = |at: usize| (at as u64, Success::Confirmed, Some(expected[at]));
    assert_eq!(
        back,
        [confirmed(0), confirmed(1), confirmed(2), (3, Success::Send, None)]
    );
}

fn a_refusal_of_the_signalled_request_leaves_no_queue_without_one<B: TestBackend>() {
    let stub = Stub::new();
    let (mut qp, mut cq, _) = rig::<B>(stub, 4, 0);
    let qpn = qp.qpn().get();
    for _ in 0..8 {
        // Two fit before one must be signaled: refuse that one.
        stub.refuse_send(qpn, 1, libc::EINVAL);
        let refused = qp.post(|batch| {
            batch.send_inline(b"a");
            batch.send_inline(b"b");
        });
        assert_eq!(refused.unwrap_err().posted, if B::WHOLE { 0 } else { 1 });
        while qp.send_inline(b"c").is_ok() {}
        stub.complete_sends(qpn, usize::MAX);
        assert!(cq.poll().unwrap().count() > 0, "the queue stands still");
    }
}

fn receives_are_refused_alike<B: TestBackend>() {
    let stub = Stub::new();
    let (mut qp, _cq, mut buffers) = rig::<B>(stub, 2, 5);
    let qpn = qp.qpn().get();
    let (a, b) = (buffers.remove(0), buffers.remove(0));
    let second = b.addr();
    stub.refuse_receive(qpn, 1, libc::EINVAL);
    let refused = qp
        .post_receives(|batch| {
            batch.receive(a);
            batch.receive(b);
        })
        .unwrap_err();
    assert_eq!((refused.index, refused.posted), (1, 1));
    assert_eq!(addresses(refused.buffers), [Some(second)]);
    qp.receive(buffers.remove(0)).unwrap();
    let refused = qp.receive(buffers.remove(0)).unwrap_err();
    assert!(matches!(refused.reason, RejectReason::QueueFull { depth: 2 }));
    assert_eq!(stub.doorbells(qpn).1, 2, "the full queue is not even tried");
}

fn a_panic_while_building_takes_everything_back<B: TestBackend>() {
    let stub = Stub::new();
    let (mut qp, mut cq, mut buffers) = rig::<B>(stub, 4, 4);
    let qpn = qp.qpn().get();
    let (a, b) = (buffers.remove(0), buffers.remove(0));
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        qp.post(|batch| {
            batch.send(a);
            batch.send(b).signaled();
            panic!("in the closure");
        })
    }));
    assert!(panicked.is_err());
    assert_eq!((stub.doorbells(qpn).0, qp.next_send(), qp.free_send_slots()), (0, 0, 4));
    qp.post(|batch| {
        batch.send(buffers.remove(0)).signaled();
    })
    .unwrap();
    stub.complete_sends(qpn, 1);
    assert_eq!(cq.poll().unwrap().map(|done| done.sequence()).collect::<Vec<_>>(), [0]);
}

fn an_empty_batch_rings_no_doorbell<B: TestBackend>() {
    let stub = Stub::new();
    let (mut qp, _cq, _) = rig::<B>(stub, 4, 0);
    qp.post(|_| {}).unwrap();
    qp.post_receives(|_| {}).unwrap();
    assert_eq!(stub.doorbells(qp.qpn().get()), (0, 0));
}

#[test]
fn a_provider_that_does_not_say_which_request_it_refused_keeps_them_all() {
    let stub = Stub::new();
    let (mut qp, mut cq, mut buffers) = rig::<PostList>(stub, 4, 2);
    stub.fail(Verb::PostSend, libc::EIO);
    let (a, b) = (buffers.remove(0), buffers.remove(0));
    let refused = qp
        .post(|batch| {
            batch.send(a);
            batch.send(b).signaled();
        })
        .unwrap_err();
    assert_eq!((refused.posted, refused.buffers.len()), (2, 0), "it may be using them");
    stub.complete_sends(qp.qpn().get(), 2);
    assert_eq!(
        cq.poll().unwrap().filter_map(|mut done| done.take::<Local>()).count(),
        2
    );
}

fn a_queue_that_cannot_be_polled_says_so<B: TestBackend>() {
    let stub = Stub::new();
    let (_qp, mut cq, _) = rig::<B>(stub, 4, 0);
    stub.fail(Verb::PollCq, 0);
    let error = cq.poll().unwrap_err();
    assert!(
        matches!(error, CompletionQueueError::Poll { result: -1, .. }),
        "{error}"
    );
    assert_eq!(cq.poll().unwrap().count(), 0, "and may be tried again");
}

fn a_panic_after_a_signalled_request_leaves_no_queue_without_one<B: TestBackend>() {
    let stub = Stub::new();
    let (mut qp, mut cq, _) = rig::<B>(stub, 4, 0);
    let qpn = qp.qpn().get();
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        qp.post(|batch| {
            for _ in 0..4 {
                batch.send_inline(b"x").signaled();
            }
            panic!("in the closure");
        })
    }));
    assert!(panicked.is_err());
    while qp.send_inline(b"y").is_ok() {}
    stub.complete_sends(qpn, usize::MAX);
    assert!(cq.poll().unwrap().count() > 0, "the queue stands still");
}

/// Single requests take a faster path than batches, with the same guarantees.
fn single_requests_are_refused_as_those_of_a_batch<B: TestBackend>() {
    let stub = Stub::new();
    let (mut qp, mut cq, mut buffers) = rig::<B>(stub, 2, 3);
    let qpn = qp.qpn().get();
    let (a, b) = (buffers.remove(0), buffers.remove(0));
    let at = a.addr();

    let short = Remote::<WriteAccess>::from_raw(0x1000, 0x55, 63);
    let mut refused = qp.write(a, short).unwrap_err();
    assert!(matches!(
        refused.reason,
        RejectReason::RemoteTooShort { len: 64, remote: 63 }
    ));
    let a: Buffer = refused.buffers[0].take().unwrap();
    let refused = qp.write_inline(&[0; 65], REMOTE).unwrap_err();
    assert!(matches!(
        refused.reason,
        RejectReason::RemoteTooShort { .. } | RejectReason::InlineTooLong { .. }
    ));

    stub.refuse_send(qpn, 0, libc::ENOMEM);
    let refused = qp.write(a, REMOTE).unwrap_err();
    assert_eq!((refused.index, refused.posted, qp.next_send()), (0, 0, 0));
    assert_eq!(addresses(refused.buffers), [Some(at)]);

    // The earlier refusal of that request must not be used for this one in the same slot.
    stub.fail(Verb::PostSend, libc::EIO);
    let mut refused = qp.write(b, REMOTE).unwrap_err();
    if B::WHOLE {
        qp.write(refused.buffers[0].take::<Local>().unwrap(), REMOTE).unwrap();
    } else {
        assert_eq!((refused.posted, refused.buffers.len()), (1, 0), "it may be using it");
    }
    assert_eq!(qp.next_send(), 1);

    qp.send_inline(b"x").unwrap();
    let refused = qp.send_inline(b"y").unwrap_err();
    assert!(matches!(refused.reason, RejectReason::QueueFull { depth: 2 }));
    stub.complete_sends(qpn, 2);
    assert_eq!(
        cq.poll().unwrap().filter_map(|mut done| done.take::<Local>()).count(),
        1
    );

    qp.receive(buffers.remove(0)).unwrap();
    stub.refuse_receive(qpn, 0, libc::EINVAL);
    let spare = received(&mut cq, stub, qpn);
    let refused = qp.receive(spare).unwrap_err();
    assert_eq!((refused.posted, refused.buffers.len(), qp.next_receive()), (0, 1, 1));
}

fn received(cq: &mut doorbell_verbs::CompletionQueue, stub: &'static Stub, qpn: u32) -> Buffer {
    stub.complete_receive(qpn, doorbell_verbs_sys::IBV_WC_RECV, 64, None);
    let mut completions = cq.poll().unwrap();
    let mut done = completions.next().unwrap();
    done.take().unwrap()
}

/// The fast path for the very next request must not be taken for another ring's.
#[test]
fn completions_of_two_queue_pairs_in_turn_find_their_own_requests() {
    let (stub, context, pd) = opened();
    let mut cq = context.completion_queue(64).unwrap();
    let mut qps: Vec<_> = (0..2)
        .map(|tag| {
            let qp = pd.queue_pair(&cq).max_send_wr(16).max_recv_wr(1).tag(tag).rc().unwrap();
            qp.connect(&crate::rig::PEER).unwrap()
        })
        .collect();
    let mut buffers = pd.register(vec![0_u8; 64 * 12], Local).unwrap().chunks(64);
    let mut expected = Vec::new();
    for round in 0..3_u64 {
        for (tag, qp) in (0_u64..).zip(&mut qps) {
            let (first, second) = (buffers.next().unwrap(), buffers.next().unwrap());
            expected.extend([(tag, 2 * round, first.addr()), (tag, 2 * round + 1, second.addr())]);
            qp.post(|batch| {
                // In every other round each has its own completion.
                batch.send(first).signaled_if(round % 2 == 1);
            })
            .unwrap();
            qp.post(|batch| {
                batch.send(second).signaled();
            })
            .unwrap();
            stub.complete_sends(qp.qpn().get(), 2);
        }
    }
    let found: Vec<_> = cq
        .poll()
        .unwrap()
        .map(|mut done| (done.tag(), done.sequence(), done.take::<Local>().unwrap().addr()))
        .collect();
    assert_eq!(found, expected);
}
