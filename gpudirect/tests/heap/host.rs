//! Requests by the host.

use std::thread;
use std::time::Duration;

use doorbell_gpudirect::heap::{HeapError, SignalOp, SymmetricHeap, ThreadExchange};
use doorbell_gpudirect::proxy::FailureCause;

use crate::world::{TIMEOUT, device, ranks};

fn pattern(rank: u32, round: u64, len: usize) -> Vec<u8> {
    (0..len)
        .map(|at| (u64::from(rank) * 31 + round * 7 + at as u64) as u8)
        .collect()
}

#[test]
fn a_ring_of_puts_with_signals() {
    for count in [1, 2, 3] {
        ranks(
            count,
            |heap| heap.bytes(1 << 20),
            |mut heap| {
                let (from, to) = (heap.alloc(70_000).unwrap(), heap.alloc(70_000).unwrap());
                let (arrived, read) = (heap.alloc_signal().unwrap(), heap.alloc_signal().unwrap());
                let (rank, ranks) = (heap.rank(), heap.ranks());
                let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
                for (round, len) in (1..).zip([1, 7, 8, 4096, 69_999, 3, 70_000]) {
                    heap.write_at(from, 0, &pattern(rank, round, len)).unwrap();
                    // The target may be overwritten once it has been read.
                    heap.wait_signal(read, round - 1, TIMEOUT).unwrap();
                    let (from, part) = (from.slice(0, len as u64).unwrap(), to.slice(0, len as u64).unwrap());
                    let update = if round % 2 == 0 {
                        SignalOp::Set(round)
                    } else {
                        SignalOp::Add(1)
                    };
                    heap.put_signal(from, part, next, arrived, update).unwrap();
                    heap.wait_signal(arrived, round, TIMEOUT).unwrap();
                    let mut found = vec![0; len];
                    heap.read_at(to, 0, &mut found).unwrap();
                    assert_eq!(
                        found,
                        pattern(before, round, len),
                        "rank {rank} of {ranks}, {len} bytes"
                    );
                    heap.signal(before, read, SignalOp::Add(1)).unwrap();
                    heap.quiet(TIMEOUT).unwrap();
                }
                heap.barrier(TIMEOUT).unwrap();
            },
        );
    }
}

#[test]
fn gets_and_barriers() {
    ranks(
        3,
        |heap| heap.bytes(1 << 20).depth(8).slots(4),
        |mut heap| {
            let mine = heap.alloc(1000).unwrap();
            let theirs: Vec<_> = (0..3).map(|_| heap.alloc(1000).unwrap()).collect();
            for round in 0..5 {
                heap.write_at(mine, 0, &pattern(heap.rank(), round, 1000)).unwrap();
                heap.barrier(TIMEOUT).unwrap();
                for (peer, range) in (0..).zip(&theirs) {
                    heap.get(*range, mine, peer).unwrap();
                }
                heap.quiet(TIMEOUT).unwrap();
                for (peer, range) in (0..).zip(&theirs) {
                    let mut found = vec![0; 1000];
                    heap.read_at(*range, 0, &mut found).unwrap();
                    assert_eq!(found, pattern(peer, round, 1000));
                }
                heap.barrier(TIMEOUT).unwrap();
            }
        },
    );
}

/// More puts than queues and rings hold, by several threads; all are counted.
#[test]
fn full_queues_and_many_threads() {
    const THREADS: u64 = 3;
    const EACH: u64 = 400;
    ranks(
        2,
        |heap| heap.bytes(1 << 20).depth(4).slots(2),
        |mut heap| {
            let counted = heap.alloc_signal().unwrap();
            let words: Vec<_> = (0..THREADS)
                .map(|_| (heap.alloc(8).unwrap(), heap.alloc(8).unwrap()))
                .collect();
            let peer = 1 - heap.rank();
            thread::scope(|scope| {
                for (from, to) in &words {
                    let heap = &heap;
                    scope.spawn(move || {
                        for _ in 0..EACH {
                            heap.put_signal(*from, *to, peer, counted, SignalOp::Add(1)).unwrap();
                        }
                    });
                }
            });
            heap.quiet(TIMEOUT).unwrap();
            assert_eq!(
                heap.wait_signal(counted, THREADS * EACH, TIMEOUT).unwrap(),
                THREADS * EACH
            );
            heap.barrier(TIMEOUT).unwrap();
            assert_eq!(heap.signal_value(counted), THREADS * EACH);
        },
    );
}

#[test]
fn invalid_requests_are_refused() {
    ranks(
        1,
        |heap| heap.bytes(64 << 10).signals(2),
        |mut heap| {
            let range = heap.alloc(100).unwrap();
            assert!(matches!(range.slice(50, 51), Err(HeapError::Range { .. })));
            assert!(matches!(range.slice(u64::MAX, 2), Err(HeapError::Range { .. })));
            assert!(matches!(
                heap.put(range, range, 1),
                Err(HeapError::Peer { peer: 1, ranks: 1 })
            ));
            let short = range.slice(0, 10).unwrap();
            assert!(matches!(
                heap.put(range, short, 0),
                Err(HeapError::Lengths { here: 100, there: 10 })
            ));
            assert!(matches!(heap.alloc(64 << 10), Err(HeapError::Full { .. })));
            assert!(matches!(
                heap.write_at(range, 99, &[0; 2]),
                Err(HeapError::Range { .. })
            ));
            heap.alloc_signal().unwrap();
            let last = heap.alloc_signal().unwrap();
            assert!(matches!(heap.alloc_signal(), Err(HeapError::NoSignal { all: 2 })));
            let late = heap.wait_signal(last, 1, Duration::from_millis(20)).unwrap_err();
            assert!(matches!(late, HeapError::Timeout { .. }), "{late}");
            heap.free(range).unwrap();
            assert!(matches!(heap.free(range), Err(HeapError::NotAllocated { .. })));
            // None of these errors affects later puts.
            let range = heap.alloc(100).unwrap();
            heap.put(range, range, 0).unwrap();
            heap.put(range.slice(0, 0).unwrap(), range.slice(0, 0).unwrap(), 0)
                .unwrap();
            heap.quiet(TIMEOUT).unwrap();
        },
    );
}

/// Every rank that sees a size mismatch reports it; others report that a peer failed.
#[test]
fn size_mismatch_fails_on_all_ranks() {
    let device = device();
    thread::scope(|scope| {
        for mut exchange in ThreadExchange::new(2, TIMEOUT) {
            let device = &device;
            scope.spawn(move || {
                let bytes = 1 << (20 + u64::from(doorbell_gpudirect::heap::Exchange::rank(&exchange)));
                let error = SymmetricHeap::builder(device)
                    .bytes(bytes)
                    .connect(&mut exchange)
                    .unwrap_err();
                assert!(matches!(error, HeapError::SizeMismatch { .. }), "{error}");
            });
        }
    });
}

#[test]
fn peer_exit_fails_requests() {
    ranks(
        2,
        |heap| heap.bytes(1 << 20),
        |mut heap| {
            let range = heap.alloc(4096).unwrap();
            heap.barrier(TIMEOUT).unwrap();
            if heap.rank() == 0 {
                return;
            }
            let failed = loop {
                let outcome = heap.put(range, range, 0).and_then(|()| heap.quiet(TIMEOUT));
                match outcome {
                    Ok(()) => thread::sleep(Duration::from_millis(1)),
                    Err(HeapError::Failed(failed)) => break failed,
                    Err(other) => panic!("{other}"),
                }
            };
            assert_eq!(failed.cause, FailureCause::Connection, "{failed}");
            // Later requests return the same error.
            assert!(heap.put(range, range, 1).is_err());
        },
    );
}
