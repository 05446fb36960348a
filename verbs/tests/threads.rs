//! One thread posts, another polls: every buffer circulates exactly once at a time, and in order.

use std::sync::mpsc;
use std::thread;

use doorbell_verbs::{Buffer, Local};

use crate::rig::{TestBackend, TestCq, over_all_kinds, rig_of};
use crate::stub::Stub;

over_all_kinds! {
    a_poster_and_a_poller_on_two_threads_lose_and_double_nothing,
}

/// Miri is a thousand times slower.
const ROUNDS: u64 = if cfg!(miri) { 200 } else { 20_000 };

fn a_poster_and_a_poller_on_two_threads_lose_and_double_nothing<B: TestBackend, Q: TestCq>() {
    let stub = Stub::new();
    let (mut qp, mut cq, buffers) = rig_of::<B, Q>(stub, 32, 64);
    stub.complete_at_once();
    let (give_back, returned) = mpsc::channel::<Buffer>();
    for buffer in buffers {
        give_back.send(buffer).unwrap();
    }
    let poster = thread::spawn(move || {
        let mut number = 0_u64;
        while number < ROUNDS {
            let Ok(mut buffer) = returned.recv() else { break };
            buffer[..8].copy_from_slice(&number.to_ne_bytes());
            let mut waiting = Some(buffer);
            while let Some(buffer) = waiting.take() {
                let signaled = number.is_multiple_of(5);
                let posted = qp.post(|batch| {
                    let request = batch.send(buffer);
                    if signaled {
                        request.signaled()
                    } else {
                        request
                    };
                });
                if let Err(mut refused) = posted {
                    waiting = refused.buffers[0].take();
                    thread::yield_now();
                }
            }
            number += 1;
        }
        qp
    });
    let mut next = 0;
    // The last signaled one confirms all but the unsignaled tail.
    let last = ROUNDS - ROUNDS % 5 - 4;
    while next < last {
        cq.poll().unwrap().for_each(|mut done| {
            assert_eq!(done.sequence(), next);
            let buffer = done.take::<Local>().unwrap();
            let mut number = [0; 8];
            number.copy_from_slice(&buffer[..8]);
            assert_eq!(u64::from_ne_bytes(number), next, "the buffer of another request");
            next += 1;
            // The poster may have exited.
            let _ = give_back.send(buffer);
        });
        thread::yield_now();
    }
    let qp = poster.join().unwrap();
    assert_eq!(qp.next_send(), ROUNDS);
}
