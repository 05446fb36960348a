//! Puts by kernels, on the stand-in for a GPU.

use std::thread;
use std::time::Duration;

use doorbell_cuda_standin::{ExecutionMode, Standin};
use doorbell_gpudirect::heap::SymmetricHeap;
use doorbell_gpudirect::proxy::{FailureCause, KernelQueue};

use crate::gpu::{Gpu, Results};
use crate::world::{TIMEOUT, gpu_ranks};

const FINE: Results = Results {
    failures: 0,
    wrong: 0,
    right: 0,
};

/// Blocks fill, put and signal; the peer's wait and compare. The queues are short enough to fill.
#[test]
fn blocks_put_and_peers_compare() {
    let standin = Standin::load(ExecutionMode::Prompt);
    for slots in [2, 64] {
        gpu_ranks(
            &standin,
            2,
            |heap| heap.bytes(1 << 20),
            |mut heap, gpu| {
                const BYTES: u64 = 50_001;
                let (from, to) = (heap.alloc(BYTES).unwrap(), heap.alloc(BYTES).unwrap());
                let arrived = heap.alloc_signal().unwrap();
                let queue = heap.kernel_queue(Some(&gpu.context), slots).unwrap();
                let peer = 1 - heap.rank();
                for (round, blocks) in (1u64..).zip([1u32, 3, 4]) {
                    let all: u64 = [1, 3, 4][..round as usize].iter().sum();
                    let at = (&heap, &queue);
                    gpu.launch(
                        ("put_fill", blocks, 32),
                        at,
                        &[&peer, &to.offset(), &from.offset(), &BYTES, &round, &arrived.number()],
                    );
                    gpu.launch(
                        ("put_check", 2, 32),
                        at,
                        &[&to.offset(), &BYTES, &round, &arrived.number(), &all],
                    );
                    assert_eq!(gpu.results(), Results { right: BYTES, ..FINE }, "{:?}", queue.failure());
                    heap.barrier(TIMEOUT).unwrap();
                }
            },
        );
    }
    standin.assert_nothing_left("puts by blocks");
}

#[test]
fn kernels_get() {
    let standin = Standin::load(ExecutionMode::Prompt);
    gpu_ranks(
        &standin,
        2,
        |heap| heap.bytes(1 << 20),
        |mut heap, gpu| {
            const BYTES: u64 = 10_000;
            let (mine, theirs) = (heap.alloc(BYTES).unwrap(), heap.alloc(BYTES).unwrap());
            let queue = heap.kernel_queue(Some(&gpu.context), 8).unwrap();
            let bytes: Vec<u8> = (0..BYTES).map(|at| (at * (3 + u64::from(heap.rank()))) as u8).collect();
            heap.write_at(mine, 0, &bytes).unwrap();
            heap.barrier(TIMEOUT).unwrap();
            let peer = 1 - heap.rank();
            gpu.launch(
                ("put_get", 3, 32),
                (&heap, &queue),
                &[&peer, &theirs.offset(), &mine.offset(), &BYTES],
            );
            assert_eq!(gpu.results(), FINE, "{:?}", queue.failure());
            let mut found = vec![0; BYTES as usize];
            heap.read_at(theirs, 0, &mut found).unwrap();
            assert!(
                found
                    .iter()
                    .zip(0..)
                    .all(|(byte, at): (_, u64)| *byte == (at * (3 + u64::from(peer))) as u8)
            );
            heap.barrier(TIMEOUT).unwrap();
        },
    );
}

#[test]
fn kernels_alternate_and_many_threads_share_a_queue() {
    let standin = Standin::load(ExecutionMode::Prompt);
    gpu_ranks(
        &standin,
        2,
        |heap| heap.bytes(1 << 20),
        |mut heap, gpu| {
            const ROUNDS: u64 = 50;
            const EACH: u64 = 40;
            let (from, to) = (heap.alloc(4096).unwrap(), heap.alloc(4096).unwrap());
            let (turn, counted) = (heap.alloc_signal().unwrap(), heap.alloc_signal().unwrap());
            let queue = heap.kernel_queue(Some(&gpu.context), 4).unwrap();
            let (rank, peer) = (heap.rank(), 1 - heap.rank());
            let at = (&heap, &queue);
            for (launch, bytes) in (0u64..).zip([0u64, 8, 1000]) {
                gpu.launch(
                    ("put_pingpong", 1, 1),
                    at,
                    &[
                        &peer,
                        &(1 - rank),
                        &to.offset(),
                        &from.offset(),
                        &bytes,
                        &(launch * ROUNDS),
                        &ROUNDS,
                        &turn.number(),
                    ],
                );
            }
            assert_eq!(gpu.results(), FINE, "{:?}", queue.failure());
            gpu.launch(
                ("put_many", 5, 1),
                at,
                &[&peer, &to.offset(), &from.offset(), &16u64, &EACH, &counted.number()],
            );
            assert_eq!(gpu.results(), FINE, "{:?}", queue.failure());
            heap.wait_signal(counted, 5 * EACH, TIMEOUT).unwrap();
            assert_eq!(queue.completed(), 3 * ROUNDS + 5 * EACH);
            heap.barrier(TIMEOUT).unwrap();
            assert_eq!(heap.signal_value(counted), 5 * EACH);
        },
    );
}

/// The kernel sees a failure, the host's error names descriptor and cause; later requests run.
#[test]
fn invalid_descriptors_of_kernels() {
    let standin = Standin::load(ExecutionMode::Prompt);
    // Operation, signal operation and peer; length.
    let cases = [
        (0u64, 8u64, FailureCause::Operation),
        (9, 8, FailureCause::Operation),
        (1 | 7 << 8, 8, FailureCause::Operation),
        (3, 0, FailureCause::Operation),
        (1 | 2 << 16, 8, FailureCause::Peer),
        (1 | u64::from(u32::MAX) << 16, 8, FailureCause::Peer),
        (1, (1 << 20) + 1, FailureCause::Local),
        (2, u64::MAX >> 8, FailureCause::Local),
    ];
    gpu_ranks(
        &standin,
        1,
        |heap| heap.bytes(1 << 20),
        |mut heap: SymmetricHeap, gpu: Gpu| {
            let range = heap.alloc(64).unwrap();
            let arrived = heap.alloc_signal().unwrap();
            for (number, (head, len, cause)) in (1..).zip(cases) {
                let queue = heap.kernel_queue(Some(&gpu.context), 4).unwrap();
                gpu.launch(("put_raw", 1, 1), (&heap, &queue), &[&head, &len, &0u64]);
                gpu.launch(
                    ("put_many", 1, 1),
                    (&heap, &queue),
                    &[&0u32, &range.offset(), &range.offset(), &8u64, &6u64, &arrived.number()],
                );
                assert_eq!(gpu.results().failures, 1, "it is reported in the end");
                let failed = queue.failure().unwrap();
                assert_eq!(failed.cause, cause, "{failed}");
                heap.wait_signal(arrived, 6 * number, TIMEOUT).unwrap();
                assert_eq!(queue.completed(), 7);
            }
            // An unexpected lap number: the queue stops, and a waiting kernel is released.
            let queue = heap.kernel_queue(Some(&gpu.context), 4).unwrap();
            gpu.launch(("put_raw", 1, 1), (&heap, &queue), &[&1u64, &8u64, &5u64]);
            gpu.launch(
                ("put_many", 2, 1),
                (&heap, &queue),
                &[&0u32, &range.offset(), &range.offset(), &8u64, &6u64, &arrived.number()],
            );
            assert_eq!(gpu.results().failures, 2);
            assert_eq!(queue.failure().unwrap().cause, FailureCause::Torn);
            // The heap's other queues continue.
            heap.put(range, range, 0).unwrap();
            heap.quiet(TIMEOUT).unwrap();
        },
    );
}

/// A kernel is released if its peer has exited, or on its host's request.
#[test]
fn waiting_kernels_are_released() {
    let standin = Standin::load(ExecutionMode::Prompt);
    gpu_ranks(
        &standin,
        2,
        |heap| heap.bytes(1 << 20),
        |mut heap, gpu| {
            let range = heap.alloc(4096).unwrap();
            let never = heap.alloc_signal().unwrap();
            let (queue, other) = (
                heap.kernel_queue(Some(&gpu.context), 4).unwrap(),
                heap.kernel_queue(Some(&gpu.context), 4).unwrap(),
            );
            heap.barrier(TIMEOUT).unwrap();
            let rank = heap.rank();
            let ping = |queue: &KernelQueue, to: u32| {
                gpu.launch(
                    ("put_pingpong", 1, 1),
                    (&heap, queue),
                    &[
                        &to,
                        &0u32,
                        &range.offset(),
                        &range.offset(),
                        &64u64,
                        &0u64,
                        &1u64,
                        &never.number(),
                    ],
                );
            };
            // Neither kernel starts the ping-pong.
            ping(&other, rank);
            assert!(!gpu.stream.is_idle().unwrap());
            other.stop();
            assert_eq!(gpu.results().failures, 1);
            assert_eq!(other.failure().unwrap().cause, FailureCause::Stopped);
            if rank == 0 {
                return;
            }
            while heap.put(range, range, 0).and_then(|()| heap.quiet(TIMEOUT)).is_ok() {
                thread::sleep(Duration::from_millis(1));
            }
            // The peer has exited, which the put and the next one detect.
            gpu.launch(
                ("put_many", 1, 1),
                (&heap, &queue),
                &[&0u32, &range.offset(), &range.offset(), &8u64, &1u64, &never.number()],
            );
            assert_eq!(gpu.results().failures, 1);
            assert_eq!(queue.failure().unwrap().cause, FailureCause::Connection);
            ping(&queue, rank);
            assert_eq!(gpu.results().failures, 1);
        },
    );
    standin.assert_nothing_left("kernels that were let go");
}
