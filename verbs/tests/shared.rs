//! Shared receive queues: buffers go in by one poster, and come out of any completion queue, in any order.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::thread;

use doorbell_verbs::{
    AsyncEvent, Buffer, CompletionQueue, Context, Local, ProtectionDomain, Queue, QueuePair, QueuePairError, Rc,
    Reason, SharedReceive, SharedReceiveError, SharedReceiveEvent, SharedReceiveQueue, Status, Success,
};
use doorbell_verbs_sys as sys;

use crate::allocation::{OfTheProvider, calls_in};
use crate::rig::PEER;
use crate::stub::{Stub, Verb};

type SharedQp = QueuePair<SharedReceive<Rc>>;

const DEPTH: u32 = 8;

struct Rig {
    // Before what they are made of, so that tests see that nothing depends on that.
    srq: SharedReceiveQueue,
    pd: ProtectionDomain,
    context: Context,
    stub: &'static Stub,
}

impl Rig {
    fn new() -> Self {
        let stub = Stub::new();
        let context = stub.open();
        let pd = context.protection_domain().unwrap();
        let srq = pd.shared_receive_queue(DEPTH).max_sge(2).create().unwrap();
        Self { srq, pd, context, stub }
    }

    fn cq(&self, entries: u32) -> CompletionQueue {
        self.context.completion_queue(entries).unwrap()
    }

    fn qp(&self, cq: &CompletionQueue, tag: u64) -> SharedQp {
        let builder = self.pd.queue_pair(cq).send_depth(2).recv_depth(999).tag(tag);
        builder.shared_receive(&self.srq).rc().unwrap().connect(&PEER).unwrap()
    }

    /// Buffers that hold their number.
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

/// The numbers of the buffers that have come back, with the queue pair's tag and the sequence.
fn drain(cq: &mut CompletionQueue) -> Vec<(u64, u64, u64)> {
    let done = cq.poll().unwrap();
    done.map(|done| {
        assert_eq!(
            (done.queue(), done.result()),
            (Queue::Receive, Ok(Success::Receive { len: 8, imm: None }))
        );
        let (tag, sequence) = (done.tag(), done.sequence());
        (number_of(&done.into_buffer::<Local>().unwrap()), tag, sequence)
    })
    .collect()
}

#[test]
fn receives_come_out_of_order_to_whoever_took_them() {
    let mut rig = Rig::new();
    let mut cq = rig.cq(100);
    let qps = [10, 11].map(|tag| rig.qp(&cq, tag));
    let qpn = [0, 1].map(|at: usize| qps[at].qpn().get());
    assert!(rig.stub.has_shared_receives(qpn[0]));
    for buffer in rig.buffers(4) {
        rig.srq.receive(buffer).unwrap();
    }
    assert_eq!((rig.srq.room(), rig.stub.shared_doorbells(qpn[0])), (4, 4));
    // The last, the first, then what was third and second.
    for (qp, place) in [(0, 3), (1, 0), (0, 1), (0, 0)] {
        rig.stub.complete_shared(qpn[qp], place, 8);
    }
    assert_eq!(rig.srq.room(), 4, "not before they are polled");
    assert_eq!(drain(&mut cq), [(3, 10, 0), (0, 11, 0), (2, 10, 1), (1, 10, 2)]);
    assert_eq!(rig.srq.room(), DEPTH);
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
        // There is room for it, though the rest is not yielded yet.
        rig.srq.receive(buffer).unwrap();
    }
    assert_eq!(rig.srq.room(), 0);
}

#[test]
fn what_does_not_fit_comes_back() {
    let mut rig = Rig::new();
    let cq = rig.cq(100);
    let qp = rig.qp(&cq, 1);
    let qpn = qp.qpn().get();
    let mut buffers = rig.buffers(40).into_iter();
    let mut next = || buffers.next().unwrap();
    // Too many of them: none is posted.
    let refused = rig
        .srq
        .post_receives(|batch| (0..=DEPTH).for_each(|_| batch.receive(next())))
        .unwrap_err();
    assert!(
        matches!(refused.reason, Reason::QueueFull { depth: DEPTH }),
        "{refused}"
    );
    assert_eq!((refused.index, refused.posted, refused.buffers.len()), (8, 0, 9));
    assert_eq!((rig.srq.room(), rig.stub.shared_doorbells(qpn)), (DEPTH, 0));
    // Too many buffers in the second.
    let refused = rig.srq.post_receives(|batch| {
        batch.receive(next());
        batch.receive_scatter([next(), next(), next()]);
        batch.receive(next());
    });
    let mut refused = refused.unwrap_err();
    assert!(
        matches!(refused.reason, Reason::TooManyBuffers { requested: 3, max: 2 }),
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
    assert_eq!((rig.srq.room(), rig.stub.shared_doorbells(qpn)), (DEPTH, 0));
    // The device refuses the third: the first two stay.
    rig.stub.refuse_shared(qpn, 2, libc::ENOMEM);
    let mut refused = rig
        .srq
        .post_receives(|batch| (0..4).for_each(|_| batch.receive(next())))
        .unwrap_err();
    assert!(
        matches!(
            refused.reason,
            Reason::Device {
                verb: "ibv_post_srq_recv",
                ..
            }
        ),
        "{refused}"
    );
    assert_eq!((refused.index, refused.posted, refused.buffers.len()), (2, 2, 2));
    assert_eq!(number_of(&refused.buffers[0].take::<Local>().unwrap()), 17);
    assert_eq!((rig.srq.room(), rig.stub.pending_shared(qpn).len()), (DEPTH - 2, 2));
    // One, of which the same is true; and one that is one too many.
    rig.stub.refuse_shared(qpn, 0, libc::EINVAL);
    assert_eq!(rig.srq.receive(next()).unwrap_err().buffers.len(), 1);
    (2..DEPTH).for_each(|_| rig.srq.receive(next()).unwrap());
    let refused = rig.srq.receive(next()).unwrap_err();
    assert!(
        matches!(refused.reason, Reason::QueueFull { depth: DEPTH }),
        "{refused}"
    );
    assert_eq!(
        (refused.buffers.len(), rig.srq.post_receives(|_| {}).is_ok()),
        (1, true)
    );
}

/// Each completion queue has an entry for every receive, once for all queue pairs that share both queues, until the last of them is gone and the queue polled empty.
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
        .send_depth(2)
        .shared_receive(&rig.srq)
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
    // The queue pair that was not made has left nothing but the note of its going.
    assert_eq!(drain(&mut other), []);
    assert_eq!(other.unreserved(), DEPTH + 1);
    let third = rig.pd.queue_pair(&one).recv_cq(&other).send_depth(0);
    let third = third
        .shared_receive(&rig.srq.handle())
        .rc()
        .unwrap()
        .connect(&PEER)
        .unwrap();
    assert_eq!(other.unreserved(), 1);
    // All receives to either of them: no overflow, on which the stub insists.
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
    assert_eq!(rig.srq.room(), DEPTH);
}

/// What a queue pair received before it was dropped still comes, with its number and tag.
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
            (qpn, 1, Some(Status::Flushed), 1)
        ]
    );
    assert_eq!(rig.srq.room(), DEPTH - 1);
    // The same twice is of no request in flight.
    let stale = rig.stub.pending_shared(other.get())[0].wr_id;
    rig.stub.complete_shared(other.get(), 0, 8);
    rig.stub.forge(other.get(), stale);
    rig.stub.forge(other.get(), stale & !0xffff_ffff | 0xffff);
    assert_eq!(drain(&mut cq), [(3, 2, 1)]);
    assert_eq!(rig.srq.room(), DEPTH);
}

/// Where a device takes unpolled completions away with their queue pair, the buffers stay where nothing touches them until the queue goes.
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
    assert_eq!((rig.srq.room(), rig.stub.live("mr")), (DEPTH - 3, 1));
    let Rig { srq, stub, .. } = rig;
    drop(srq);
    // The completion queue may have had some: its poller looks once more.
    assert_eq!(drain(&mut cq), []);
    assert_eq!((stub.live("mr"), stub.live("srq")), (0, 0));
    assert_eq!(stub.log().as_slice(), ["destroy_qp", "destroy_srq", "dereg_mr"]);
}

/// The queue lives as long as a queue pair on it, and memory posted to it is freed after it was destroyed.
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
    // It still receives.
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
    let error = other.pd.queue_pair(&cq).shared_receive(&rig.srq).rc().unwrap_err();
    assert!(matches!(error, QueuePairError::ForeignSharedReceiveQueue), "{error}");
}

#[test]
fn the_limit_is_armed_asked_for_and_told_of() {
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
            SharedReceiveError::Arm {
                limit: 9,
                depth: DEPTH,
                ..
            }
        ),
        "{error}"
    );
    let mut events = rig.context.events().unwrap();
    for (code, event) in [
        (sys::IBV_EVENT_SRQ_LIMIT_REACHED, SharedReceiveEvent::LimitReached),
        (sys::IBV_EVENT_SRQ_ERR, SharedReceiveEvent::Error),
    ] {
        rig.stub.raise_on_shared(qpn, code);
        let id = rig.srq.id();
        assert_eq!(
            events.try_next().unwrap(),
            Some(AsyncEvent::SharedReceiveQueue { id, event })
        );
    }
}

/// Queue pairs and completion queues come and go at random, receives complete at random; every buffer is somewhere, and comes back with what was in it.
#[test]
fn nothing_is_lost_or_doubled_in_a_long_life() {
    let mut rig = Rig::new();
    let mut state = 1_u64;
    let mut random = |below: usize| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let mut pool = rig.buffers(12);
    let mut cqs: Vec<CompletionQueue> = (0..3).map(|_| rig.cq(200)).collect();
    // Each with the completion queue that it is on.
    let mut qps: Vec<(usize, SharedQp)> = Vec::new();
    let mut received: HashMap<u64, u64> = HashMap::new();
    let mut tag = 0;
    for _ in 0..20_000 {
        match random(10) {
            0 if qps.len() < 6 => {
                let on = random(cqs.len());
                tag += 1;
                let qp = rig.qp(&cqs[on], tag);
                qps.push((on, qp));
            }
            1 if !qps.is_empty() => drop(qps.swap_remove(random(qps.len()))),
            // Another completion queue in place of one that nothing is on any more.
            2 if !qps.iter().any(|(on, _)| *on == 2) => {
                take_all(&mut cqs[2], &mut pool, &mut received);
                cqs[2] = rig.cq(200);
            }

            3..6 => {
                while let Some(buffer) = pool.pop() {
                    if let Err(mut refused) = rig.srq.receive(buffer) {
                        pool.extend(refused.buffers[0].take::<Local>());
                        break;
                    }
                }
            }
            6..8 if !qps.is_empty() => {
                let qpn = qps[random(qps.len())].1.qpn().get();
                let posted = rig.stub.pending_shared(qpn).len();
                if posted > 0 {
                    rig.stub.complete_shared(qpn, random(posted), 8);
                }
            }
            _ => {
                let at = random(cqs.len());
                take_all(&mut cqs[at], &mut pool, &mut received);
            }
        }
        assert_eq!(
            pool.len() + (DEPTH - rig.srq.room()) as usize,
            12,
            "a buffer is in the pool or in flight"
        );
        let mut numbers: Vec<_> = pool.iter().map(number_of).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), pool.len());
    }
    assert!(received.len() > 100, "{} queue pairs have received", received.len());
}

/// Takes all completions, whose sequence is that of their queue pair.
fn take_all(cq: &mut CompletionQueue, pool: &mut Vec<Buffer>, received: &mut HashMap<u64, u64>) {
    loop {
        let before = pool.len();
        for done in cq.poll().unwrap() {
            let next = received.entry(done.tag()).or_default();
            assert_eq!(done.sequence(), *next);
            *next += 1;
            pool.push(done.into_buffer().unwrap());
        }
        if pool.len() == before {
            return;
        }
    }
}

#[test]
fn neither_posting_nor_polling_allocates() {
    let mut rig = Rig::new();
    let mut cq = rig.cq(100);
    let qps = [1, 2].map(|tag| rig.qp(&cq, tag));
    let qpns = [0, 1].map(|at: usize| qps[at].qpn().get());
    let mut pool = rig.buffers(u64::from(DEPTH));
    let mut round = |number: usize| {
        rig.srq.receive(pool.pop().unwrap()).unwrap();
        rig.srq
            .post_receives(|batch| pool.drain(..).for_each(|buffer| batch.receive(buffer)))
            .unwrap();
        {
            let _provider = OfTheProvider::begin();
            for place in (0..DEPTH as usize).rev() {
                rig.stub.complete_shared(qpns[(place + number) % 2], place / 2, 8);
            }
        }
        for done in cq.poll().unwrap() {
            pool.extend(done.into_buffer::<Local>());
        }
        assert_eq!(pool.len(), DEPTH as usize);
    };
    // The first completion of a queue pair makes it known to the poller, and the first look for slots makes the completion queue known to the poster.
    round(0);
    round(1);
    for number in 2..50 {
        assert_eq!(
            calls_in(|| round(number)),
            0,
            "calls of the allocator in round {number}"
        );
    }
}

/// One thread posts, two poll completion queues of their own: every buffer goes round, in one place at a time.
#[test]
fn a_poster_and_two_pollers_lose_and_double_nothing() {
    const ROUNDS: u64 = 5_000;
    let mut rig = Rig::new();
    let cqs = [0, 1].map(|_| rig.cq(100));
    let qps: Vec<SharedQp> = cqs.iter().map(|cq| rig.qp(cq, 1)).collect();
    let qpns: Vec<u32> = qps.iter().map(|qp| qp.qpn().get()).collect();
    let (give_back, returned) = mpsc::channel::<Buffer>();
    for buffer in rig.buffers(u64::from(DEPTH)) {
        give_back.send(buffer).unwrap();
    }
    let stub = rig.stub;
    let pollers = cqs.map(|mut cq| {
        let give_back = give_back.clone();
        thread::spawn(move || {
            let mut seen = 0_u64;
            loop {
                for done in cq.poll().unwrap() {
                    // A message without a buffer ends it.
                    seen += 1;
                    assert!(done.is_ok());
                    let buffer = done.into_buffer::<Local>().unwrap();
                    if u64::from_ne_bytes((&*buffer).try_into().unwrap()) == u64::MAX {
                        return (seen, cq);
                    }
                    let _ = give_back.send(buffer);
                }
                thread::yield_now();
            }
        })
    });
    // Without sleeping in the channel, whose own lock ThreadSanitizer does not see.
    let next = || {
        loop {
            match returned.try_recv() {
                Ok(buffer) => return buffer,
                Err(_) => thread::yield_now(),
            }
        }
    };
    for number in 0..ROUNDS {
        let mut buffer = next();
        buffer.copy_from_slice(&number.to_ne_bytes());
        // As many buffers as slots, and a slot comes back before its buffer.
        rig.srq.receive(buffer).unwrap();
        stub.complete_shared(qpns[number as usize % 3 % 2], 0, 8);
    }
    for &qpn in &qpns {
        let mut buffer = next();
        buffer.copy_from_slice(&u64::MAX.to_ne_bytes());
        rig.srq.receive(buffer).unwrap();
        stub.complete_shared(qpn, 0, 8);
    }
    let seen: u64 = pollers.map(|poller| poller.join().unwrap().0).iter().sum();
    assert_eq!(seen, ROUNDS + 2);
    assert_eq!(rig.srq.room(), DEPTH);
}
