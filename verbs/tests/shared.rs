//! Shared receive queues: one poster, completions in any queue, in any order.

mod stress;

use std::panic::{AssertUnwindSafe, catch_unwind};

use doorbell_verbs::{
    AsyncEvent, Buffer, CompletionQueue, CompletionStatus, Context, Local, ProtectionDomain, QueueKind, QueuePair,
    QueuePairError, RejectReason, ReliableConnection, SharedReceiveQueue, SharedReceiveQueueError,
    SharedReceiveQueueEvent, Success, WithSrq,
};
use doorbell_verbs_sys as sys;

use crate::rig::{PEER, opened};
use crate::stub::{Stub, Verb};

type SharedQp = QueuePair<WithSrq<ReliableConnection>>;

const DEPTH: u32 = 8;

struct Rig {
    // Declared first, so that tests show that nothing depends on the drop order.
    srq: SharedReceiveQueue,
    pd: ProtectionDomain,
    context: Context,
    stub: &'static Stub,
}

impl Rig {
    fn new() -> Self {
        let (stub, context, pd) = opened();
        let srq = pd.shared_receive_queue(DEPTH).max_sge(2).create().unwrap();
        Self { srq, pd, context, stub }
    }

    fn cq(&self, entries: u32) -> CompletionQueue {
        self.context.completion_queue(entries).unwrap()
    }

    fn qp(&self, cq: &CompletionQueue, tag: u64) -> SharedQp {
        let builder = self.pd.queue_pair(cq).max_send_wr(2).max_recv_wr(999).tag(tag);
        builder
            .shared_receive_queue(&self.srq)
            .rc()
            .unwrap()
            .connect(&PEER)
            .unwrap()
    }

    fn buffers(&self, count: u64) -> Vec<Buffer> {
        let bytes: Vec<u8> = (0..count).flat_map(u64::to_ne_bytes).collect();
        self.pd.register(bytes, Local).unwrap().chunks(8).collect()
    }
}

fn number_of(buffer: &Buffer) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(buffer);
    u64::from_ne_bytes(bytes)
}

/// The numbers of the buffers returned, with the queue pair's tag and the sequence.
fn drain(cq: &mut CompletionQueue) -> Vec<(u64, u64, u64)> {
    let done = cq.poll().unwrap();
    done.map(|done| {
        assert_eq!(
            (done.queue(), done.result()),
            (QueueKind::Receive, Ok(Success::Receive { len: 8, imm: None }))
        );
        let (tag, sequence) = (done.tag(), done.sequence());
        (number_of(&done.into_buffer::<Local>().unwrap()), tag, sequence)
    })
    .collect()
}

#[test]
fn receives_complete_out_of_order_to_the_queue_pair_that_consumed_them() {
    let mut rig = Rig::new();
    let mut cq = rig.cq(100);
    let qps = [10, 11].map(|tag| rig.qp(&cq, tag));
    let qpn = [0, 1].map(|at: usize| qps[at].qpn().get());
    assert!(rig.stub.has_shared_receives(qpn[0]));
    for buffer in rig.buffers(4) {
        rig.srq.receive(buffer).unwrap();
    }
    assert_eq!((rig.srq.free_slots(), rig.stub.shared_doorbells(qpn[0])), (4, 4));
    for (qp, place) in [(0, 3), (1, 0), (0, 1), (0, 0)] {
        rig.stub.complete_shared(qpn[qp], place, 8);
    }
    assert_eq!(rig.srq.free_slots(), 4, "not before they are polled");
    assert_eq!(drain(&mut cq), [(3, 10, 0), (0, 11, 0), (2, 10, 1), (1, 10, 2)]);
    assert_eq!(rig.srq.free_slots(), DEPTH);
}

#[test]
fn a_batch_is_one_doorbell_and_a_slot_is_free_as_soon_as_its_completion_is_yielded() {
    let mut rig = Rig::new();
    let mut cq = rig.cq(100);
    let qp = rig.qp(&cq, 1);
    let qpn = qp.qpn().get();
    let mut buffers = rig.buffers(10).into_iter();
    rig.srq
        .post_receives(|batch| {
            batch.receive_scatter([buffers.next().unwrap(), buffers.next().unwrap()]);
            for _ in 1..DEPTH {
                batch.receive(buffers.next().unwrap());
            }
        })
        .unwrap();
    let posted = rig.stub.pending_shared(qpn);
    assert_eq!((posted.len() as u32, rig.stub.shared_doorbells(qpn)), (DEPTH, 1));
    assert_eq!(posted[0].sges.len(), 2);
    assert!(
        posted.iter().all(|request| request.wr_id >> 63 == 1),
        "of no queue pair"
    );
    for _ in 0..DEPTH {
        rig.stub.complete_shared(qpn, 0, 8);
    }
    for done in cq.poll().unwrap() {
        let buffer = done.into_buffer::<Local>().unwrap();
        // Its slot is free, though the rest is not yielded yet.
        rig.srq.receive(buffer).unwrap();
    }
    assert_eq!(rig.srq.free_slots(), 0);
}

#[test]
fn what_does_not_fit_comes_back() {
    let mut rig = Rig::new();
    let cq = rig.cq(100);
    let qp = rig.qp(&cq, 1);
    let qpn = qp.qpn().get();
    let mut buffers = rig.buffers(40).into_iter();
    let mut next = || buffers.next().unwrap();
    let refused = rig
        .srq
        .post_receives(|batch| (0..=DEPTH).for_each(|_| batch.receive(next())))
        .unwrap_err();
    assert!(
        matches!(refused.reason, RejectReason::QueueFull { depth: DEPTH }),
        "{refused}"
    );
    assert_eq!((refused.index, refused.posted, refused.buffers.len()), (8, 0, 9));
    assert_eq!((rig.srq.free_slots(), rig.stub.shared_doorbells(qpn)), (DEPTH, 0));
    let refused = rig.srq.post_receives(|batch| {
        batch.receive(next());
        batch.receive_scatter([next(), next(), next()]);
        batch.receive(next());
    });
    let mut refused = refused.unwrap_err();
    assert!(
        matches!(refused.reason, RejectReason::TooManyBuffers { requested: 3, max: 2 }),
        "{refused}"
    );
    assert_eq!((refused.index, refused.buffers.len()), (1, 3));
    assert_eq!(number_of(&refused.buffers[2].take::<Local>().unwrap()), 13);
    // A panic while the batch is built posts nothing.
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        rig.srq.post_receives(|batch| {
            batch.receive(next());
            panic!("of the test");
        })
    }));
    assert!(panicked.is_err());
    assert_eq!((rig.srq.free_slots(), rig.stub.shared_doorbells(qpn)), (DEPTH, 0));
    // The device refuses the third: the first two stay.
    rig.stub.refuse_shared(qpn, 2, libc::ENOMEM);
    let mut refused = rig
        .srq
        .post_receives(|batch| (0..4).for_each(|_| batch.receive(next())))
        .unwrap_err();
    assert!(
        matches!(
            refused.reason,
            RejectReason::Device {
                verb: "ibv_post_srq_recv",
                ..
            }
        ),
        "{refused}"
    );
    assert_eq!((refused.index, refused.posted, refused.buffers.len()), (2, 2, 2));
    assert_eq!(number_of(&refused.buffers[0].take::<Local>().unwrap()), 17);
    assert_eq!(
        (rig.srq.free_slots(), rig.stub.pending_shared(qpn).len()),
        (DEPTH - 2, 2)
    );
    // A single request behaves alike; and one that is one too many.
    rig.stub.refuse_shared(qpn, 0, libc::EINVAL);
    assert_eq!(rig.srq.receive(next()).unwrap_err().buffers.len(), 1);
    (2..DEPTH).for_each(|_| rig.srq.receive(next()).unwrap());
    let refused = rig.srq.receive(next()).unwrap_err();
    assert!(
        matches!(refused.reason, RejectReason::QueueFull { depth: DEPTH }),
        "{refused}"
    );
    assert_eq!(
        (refused.buffers.len(), rig.srq.post_receives(|_| {}).is_ok()),
        (1, true)
    );
}

/// Each completion queue reserves an entry for every receive, once for all queue pairs that share
/// both queues, until the last of them is destroyed and the queue polled empty.
#[test]
fn entries_are_reserved_once_for_each_completion_queue() {
    let mut rig = Rig::new();
    let (mut one, mut other) = (rig.cq(DEPTH + 4), rig.cq(DEPTH + 1));
    let first = rig.qp(&one, 1);
    let second = rig.qp(&one, 2);
    assert_eq!(one.unreserved(), 0, "the depth and two sends each");
    let error = rig
        .pd
        .queue_pair(&other)
        .max_send_wr(2)
        .shared_receive_queue(&rig.srq)
        .rc()
        .unwrap_err();
    assert!(
        matches!(
            error,
            QueuePairError::CompletionQueueTooSmall {
                which: "receive",
                needed: DEPTH,
                free: 7,
                ..
            }
        ),
        "{error}"
    );
    // The queue pair that could not be created has left only its departure record.
    assert_eq!(drain(&mut other), []);
    assert_eq!(other.unreserved(), DEPTH + 1);
    let third = rig.pd.queue_pair(&one).recv_cq(&other).max_send_wr(0);
    let third = third
        .shared_receive_queue(&rig.srq.handle())
        .rc()
        .unwrap()
        .connect(&PEER)
        .unwrap();
    assert_eq!(other.unreserved(), 1);
    // All receives to either of them: no overflow, which the stub asserts.
    for (qp, cq) in [(&third, &mut other), (&second, &mut one)] {
        for buffer in rig.buffers(u64::from(DEPTH)) {
            rig.srq.receive(buffer).unwrap();
        }
        for _ in 0..DEPTH {
            rig.stub.complete_shared(qp.qpn().get(), 0, 8);
        }
        assert!(rig.srq.receive(rig.buffers(1).remove(0)).is_err());
        assert_eq!(drain(cq).len(), DEPTH as usize);
    }
    drop(third);
    assert_eq!(other.unreserved(), 1);
    assert_eq!(drain(&mut other), []);
    assert_eq!(other.unreserved(), DEPTH + 1);
    drop(first);
    assert_eq!(drain(&mut one), []);
    assert_eq!(one.unreserved(), 2);
    drop(second);
    assert_eq!(drain(&mut one), []);
    assert_eq!(one.unreserved(), DEPTH + 4);
    assert_eq!(rig.srq.free_slots(), DEPTH);
}

#[test]
fn completions_outlive_their_queue_pair() {
    let mut rig = Rig::new();
    let mut cq = rig.cq(100);
    let (gone, stays) = (rig.qp(&cq, 1), rig.qp(&cq, 2));
    let (qpn, other) = (gone.qpn(), stays.qpn());
    for buffer in rig.buffers(4) {
        rig.srq.receive(buffer).unwrap();
    }
    rig.stub.complete_shared(qpn.get(), 2, 8);
    rig.stub.complete_shared(other.get(), 0, 8);
    rig.stub.flush_shared(qpn.get(), 0);
    drop(gone);
    let seen: Vec<_> = cq
        .poll()
        .unwrap()
        .map(|done| {
            let status = done.result().err().map(|failure| failure.status);
            (
                done.qpn(),
                done.tag(),
                status,
                number_of(&done.into_buffer::<Local>().unwrap()),
            )
        })
        .collect();
    assert_eq!(
        seen,
        [
            (qpn, 1, None, 2),
            (other, 2, None, 0),
            (qpn, 1, Some(CompletionStatus::Flushed), 1)
        ]
    );
    assert_eq!(rig.srq.free_slots(), DEPTH - 1);
    // A second completion of the same receive is of no request in flight.
    let stale = rig.stub.pending_shared(other.get())[0].wr_id;
    rig.stub.complete_shared(other.get(), 0, 8);
    rig.stub.forge(other.get(), stale);
    rig.stub.forge(other.get(), stale & !0xffff_ffff | 0xffff);
    assert_eq!(drain(&mut cq), [(3, 2, 1)]);
    assert_eq!(rig.srq.free_slots(), DEPTH);
}

/// Where a device removes unpolled completions, buffers stay until the queue is destroyed.
#[test]
fn completions_that_the_device_takes_away_keep_their_buffers() {
    let mut rig = Rig::new();
    rig.stub.purge_completions();
    let mut cq = rig.cq(100);
    let qp = rig.qp(&cq, 1);
    for buffer in rig.buffers(3) {
        rig.srq.receive(buffer).unwrap();
    }
    rig.stub.complete_shared(qp.qpn().get(), 0, 8);
    drop(qp);
    assert_eq!(drain(&mut cq), []);
    assert_eq!((rig.srq.free_slots(), rig.stub.live("mr")), (DEPTH - 3, 1));
    let Rig { srq, stub, .. } = rig;
    drop(srq);
    // The completion queue may have had some: its poller polls once more.
    assert_eq!(drain(&mut cq), []);
    assert_eq!((stub.live("mr"), stub.live("srq")), (0, 0));
    assert_eq!(stub.log().as_slice(), ["destroy_qp", "destroy_srq", "dereg_mr"]);
}

#[test]
fn the_queue_goes_after_its_queue_pairs_and_before_its_memory() {
    let mut rig = Rig::new();
    let mut cq = rig.cq(100);
    let qp = rig.qp(&cq, 1);
    for buffer in rig.buffers(2) {
        rig.srq.receive(buffer).unwrap();
    }
    let Rig { srq, pd, context, stub } = rig;
    drop((srq, pd, context));
    assert_eq!((stub.live("srq"), stub.live("mr")), (1, 1));
    stub.complete_shared(qp.qpn().get(), 0, 8);
    assert_eq!(drain(&mut cq), [(0, 1, 0)]);
    drop(qp);
    drop(cq);
    assert_eq!(stub.log().as_slice(), ["destroy_qp", "destroy_srq", "dereg_mr"]);
    for kind in ["mr", "qp", "cq", "srq", "pd", "context"] {
        assert_eq!(stub.live(kind), 0, "{kind}");
    }
}

#[test]
fn what_the_device_does_not_let_go_of_is_leaked_with_its_memory() {
    let mut rig = Rig::new();
    let stub = rig.stub;
    rig.srq.receive(rig.buffers(1).remove(0)).unwrap();
    stub.fail(Verb::DestroySrq, libc::EBUSY);
    drop(rig);
    let live = ["srq", "mr", "pd", "context"].map(|kind| stub.live(kind));
    assert_eq!(live, [1; 4]);
}

#[test]
fn sizes_and_failures_say_what_to_do() {
    let rig = Rig::new();
    let create = |depth, max_sge| {
        rig.pd
            .shared_receive_queue(depth)
            .max_sge(max_sge)
            .create()
            .unwrap_err()
            .to_string()
    };
    let device = &rig.stub.name;
    assert_eq!(
        create(0, 1),
        format!("ibv_create_srq({device}): a depth of 0 is not between 1 and the device's 1024")
    );
    assert_eq!(
        create(1, 5),
        format!("ibv_create_srq({device}): max_sge 5 is not between 1 and the device's 4")
    );
    rig.stub.fail(Verb::CreateSrq, libc::ENOMEM);
    assert!(create(1, 1).contains("RLIMIT_MEMLOCK"));
    rig.stub.fail(Verb::CreateSrq, libc::EOPNOTSUPP);
    assert!(create(1, 1).contains("give each queue pair receives of its own"));
    let other = Rig::new();
    let cq = other.cq(300);
    let error = other
        .pd
        .queue_pair(&cq)
        .shared_receive_queue(&rig.srq)
        .rc()
        .unwrap_err();
    assert!(matches!(error, QueuePairError::ForeignSharedReceiveQueue), "{error}");
}

#[test]
fn the_limit_is_armed_queried_and_reported() {
    let rig = Rig::new();
    let cq = rig.cq(100);
    let qp = rig.qp(&cq, 1);
    let qpn = qp.qpn().get();
    rig.srq.arm_limit(3).unwrap();
    assert_eq!(rig.stub.limit(qpn), 3);
    let attr = rig.srq.query().unwrap();
    assert_eq!((attr.depth, attr.max_sge, attr.limit), (DEPTH, 2, 3));
    let error = rig.srq.arm_limit(DEPTH + 1).unwrap_err();
    assert!(
        matches!(
            error,
            SharedReceiveQueueError::Arm {
                limit: 9,
                depth: DEPTH,
                ..
            }
        ),
        "{error}"
    );
    let mut events = rig.context.events().unwrap();
    for (code, event) in [
        (sys::IBV_EVENT_SRQ_LIMIT_REACHED, SharedReceiveQueueEvent::LimitReached),
        (sys::IBV_EVENT_SRQ_ERR, SharedReceiveQueueEvent::Error),
    ] {
        rig.stub.raise_on_shared(qpn, code);
        let id = rig.srq.id();
        assert_eq!(
            events.try_next().unwrap(),
            Some(AsyncEvent::SharedReceiveQueue { id, event })
        );
    }
}
