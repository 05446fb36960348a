//! Stream-ordered puts.

use doorbell_cuda::{CaptureMode, HostMemory, Memory as _, Stream, WaitCondition};
use doorbell_cuda_standin::{ExecutionMode, Standin};
use doorbell_gpudirect::heap::{HeapError, SignalOp};
use doorbell_gpudirect::proxy::FailureCause;

use crate::world::{TIMEOUT, gpu_ranks, ranks};

/// Puts follow the stream's writes, waits precede its reads, without blocking the host.
#[test]
fn put_wait_and_barrier() {
    let standin = Standin::load(ExecutionMode::Prompt);
    gpu_ranks(
        &standin,
        3,
        |heap| heap.bytes(1 << 20).depth(8),
        |mut heap, gpu| {
            const ROUNDS: u64 = 20;
            const LEN: u64 = 5000;
            let (from, to) = (heap.alloc(LEN).unwrap(), heap.alloc(LEN).unwrap());
            let back = heap.alloc(LEN).unwrap();
            let arrived = heap.alloc_signal().unwrap();
            let kept = HostMemory::alloc(&gpu.context, (2 * ROUNDS * LEN) as usize).unwrap();
            let (rank, ranks) = (heap.rank(), heap.ranks());
            let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
            let mut puts = heap.on_stream(&gpu.stream).unwrap();
            for round in 1..=ROUNDS {
                let value = |rank: u32| (round * 11 + u64::from(rank)) as u8;
                gpu.stream.fill(heap.span(from).unwrap(), value(rank)).unwrap();
                let update = if round % 2 == 0 {
                    SignalOp::Add(1)
                } else {
                    SignalOp::Set(round)
                };
                puts.put_signal(from, to, next, arrived, update).unwrap();
                puts.wait_signal(arrived, round).unwrap();
                let at = |of: u64| ((2 * (round - 1) + of) * LEN) as usize;
                let kept_at = |of| kept.span(at(of)..at(of) + LEN as usize).unwrap();
                gpu.stream.copy(kept_at(0), heap.span(to).unwrap()).unwrap();
                // The source on the previous rank is still unchanged.
                puts.get(back, from, before).unwrap();
                puts.quiet().unwrap();
                gpu.stream.copy(kept_at(1), heap.span(back).unwrap()).unwrap();
                // No rank refills before all have read.
                puts.barrier().unwrap();
            }
            gpu.stream.synchronize().unwrap();
            assert_eq!(puts.failure(), None);
            let mut found = vec![0; (2 * ROUNDS * LEN) as usize];
            kept.copy_out(0, &mut found).unwrap();
            for (index, bytes) in found.chunks(LEN as usize).enumerate() {
                let round = index as u64 / 2 + 1;
                let expected = (round * 11 + u64::from(before)) as u8;
                assert!(bytes.iter().all(|byte| *byte == expected), "round {round}, {index}");
            }
            heap.barrier(TIMEOUT).unwrap();
        },
    );
    standin.assert_nothing_left("puts in a stream's order");
}

#[test]
fn no_request_precedes_its_stream() {
    let standin = Standin::load(ExecutionMode::Prompt);
    gpu_ranks(
        &standin,
        1,
        |heap| heap.bytes(1 << 20),
        |mut heap, gpu| {
            let (first, second) = (heap.alloc_signal().unwrap(), heap.alloc_signal().unwrap());
            let gate = HostMemory::alloc(&gpu.context, 8).unwrap();
            let other = Stream::new(&gpu.context).unwrap();
            let mut puts = heap.on_stream(&gpu.stream).unwrap();
            let mut others = heap.on_stream(&other).unwrap();
            gpu.stream.wait_value64(gate.all(), WaitCondition::Equal(1)).unwrap();
            puts.signal(0, first, SignalOp::Set(1)).unwrap();
            // Another stream is independent.
            others.signal(0, second, SignalOp::Set(1)).unwrap();
            others.quiet().unwrap();
            other.synchronize().unwrap();
            assert_eq!((heap.signal_value(first), heap.signal_value(second)), (0, 1));
            gate.atomic_u64(0)
                .unwrap()
                .store(1, std::sync::atomic::Ordering::Release);
            heap.wait_signal(first, 1, TIMEOUT).unwrap();
            // Dropped with puts that still wait for their stream: they are executed, too.
            gate.atomic_u64(0)
                .unwrap()
                .store(0, std::sync::atomic::Ordering::Release);
            gpu.stream.synchronize().unwrap();
            gpu.stream.wait_value64(gate.all(), WaitCondition::Equal(1)).unwrap();
            puts.signal(0, first, SignalOp::Set(2)).unwrap();
            drop(puts);
            gate.atomic_u64(0)
                .unwrap()
                .store(1, std::sync::atomic::Ordering::Release);
            heap.wait_signal(first, 2, TIMEOUT).unwrap();
        },
    );
}

#[test]
fn failures_release_streams() {
    let standin = Standin::load(ExecutionMode::Prompt);
    gpu_ranks(
        &standin,
        2,
        |heap| heap.bytes(1 << 20),
        |mut heap, gpu| {
            let range = heap.alloc(4096).unwrap();
            let mut puts = heap.on_stream(&gpu.stream).unwrap();
            heap.barrier(TIMEOUT).unwrap();
            if heap.rank() == 0 {
                return;
            }
            loop {
                puts.put(range, range, 0).unwrap();
                puts.quiet().unwrap();
                gpu.stream.synchronize().unwrap();
                if let Some(failed) = puts.failure() {
                    assert_eq!(failed.cause, FailureCause::Connection, "{failed}");
                    break;
                }
            }
            assert!(matches!(puts.put(range, range, 0), Err(HeapError::Failed(_))));
            assert!(matches!(puts.quiet(), Err(HeapError::Failed(_))));
        },
    );
}

#[test]
fn capture_is_refused_and_failures_are_returned() {
    let standin = Standin::load(ExecutionMode::Prompt);
    gpu_ranks(
        &standin,
        1,
        |heap| heap.bytes(1 << 20),
        |mut heap, gpu| {
            let range = heap.alloc(8).unwrap();
            let mut puts = heap.on_stream(&gpu.stream).unwrap();
            let captured = gpu.stream.capture(CaptureMode::Relaxed, &[], || {
                assert!(gpu.stream.is_capturing()?);
                assert!(matches!(puts.put(range, range, 0), Err(HeapError::Capturing)));
                assert!(matches!(puts.quiet(), Err(HeapError::Capturing)));
                Ok(())
            });
            drop(captured.unwrap());
            assert!(!gpu.stream.is_capturing().unwrap());
            // A request that the driver refused is not released with a later one.
            standin.fail("cuStreamWriteValue64_v2", 1);
            assert!(matches!(puts.put(range, range, 0), Err(HeapError::Cuda(_))));
            assert!(matches!(puts.put(range, range, 0), Err(HeapError::Broken)));
        },
    );
    let driver = standin.driver().unwrap();
    ranks(
        1,
        |heap| heap.bytes(1 << 20),
        |mut heap| {
            let stream = Stream::new(&driver.device(0).unwrap().context().unwrap()).unwrap();
            assert!(matches!(heap.on_stream(&stream), Err(HeapError::NoGpu)));
        },
    );
}
