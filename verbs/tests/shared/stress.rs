//! Long runs over shared receive queues: random lifetimes, allocations, and several threads.

use std::collections::HashMap;
use std::sync::mpsc;
use std::thread;

use doorbell_verbs::{Buffer, CompletionQueue, Local};

use super::{DEPTH, Rig, SharedQp, number_of};
use crate::allocation::{ProviderScope, calls_in};

/// Random lifetimes and completions: every buffer is accounted for, with its content.
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
    // Each with the index of its completion queue.
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
            // Replaces a completion queue that has no queue pairs any more.
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
            pool.len() + (DEPTH - rig.srq.free_slots()) as usize,
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
            let _provider = ProviderScope::begin();
            for place in (0..DEPTH as usize).rev() {
                rig.stub.complete_shared(qpns[(place + number) % 2], place / 2, 8);
            }
        }
        for done in cq.poll().unwrap() {
            pool.extend(done.into_buffer::<Local>());
        }
        assert_eq!(pool.len(), DEPTH as usize);
    };
    // The first completion of a queue pair makes it known to the poller, and the first search for
    // slots makes the completion queue known to the poster.
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
                    // A message without a buffer ends the loop.
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
    for number in 0..ROUNDS {
        let mut buffer = returned.recv().unwrap();
        buffer.copy_from_slice(&number.to_ne_bytes());
        // There are as many buffers as slots, and a slot returns before its buffer.
        rig.srq.receive(buffer).unwrap();
        stub.complete_shared(qpns[number as usize % 3 % 2], 0, 8);
    }
    for &qpn in &qpns {
        let mut buffer = returned.recv().unwrap();
        buffer.copy_from_slice(&u64::MAX.to_ne_bytes());
        rig.srq.receive(buffer).unwrap();
        stub.complete_shared(qpn, 0, 8);
    }
    let seen: u64 = pollers.map(|poller| poller.join().unwrap().0).iter().sum();
    assert_eq!(seen, ROUNDS + 2);
    assert_eq!(rig.srq.free_slots(), DEPTH);
}
