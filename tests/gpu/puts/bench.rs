//! Benchmarks; all values are medians.

use std::time::{Duration, Instant};

use anyhow::Result;
use doorbell_cuda::CaptureMode;
use doorbell_gpudirect::heap::{SignalOp, SymmetricHeap};
use doorbell_gpudirect::proxy::IdlePolicy;
use doorbell_gpudirect::stream::StreamQueue;
use doorbell_verbs::{Context as Device, PeerWrite};

use crate::Options;
use crate::rank::{Gpu, HeapLocation, TIMEOUT};

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn micros(time: Duration, count: u64) -> f64 {
    time.as_secs_f64() * 1e6 / count as f64
}

/// Between ranks 0 and 1; the others only take part in barriers.
pub(crate) fn run(options: &Options, location: HeapLocation, gpu: &Gpu, heap: &mut SymmetricHeap) -> Result<()> {
    by_kernels(options, location, gpu, heap)?;
    rate(options, location, gpu, heap)?;
    in_streams(options, location, gpu, heap)
}

/// Half round trip of put_signal and wait_until between two kernels.
fn by_kernels(options: &Options, location: HeapLocation, gpu: &Gpu, heap: &mut SymmetricHeap) -> Result<()> {
    let queue = heap.kernel_queue(Some(&gpu.context), 256)?;
    let turn = heap.alloc_signal()?;
    let (repeats, most) = if options.quick { (3, 10u64) } else { (7, 1000) };
    let mut first = 0u64;
    for bytes in [0u64, 8, 64, 4096, 65_536, 1 << 20, 16 << 20] {
        if options.quick && bytes > 1 << 20 {
            break;
        }
        let rounds = if bytes > 65_536 { most / 10 } else { most };
        let (from, to) = (heap.alloc(bytes)?, heap.alloc(bytes)?);
        let mut times = Vec::new();
        // The first one is a warm-up.
        for _ in 0..=repeats {
            heap.barrier(TIMEOUT)?;
            let rank = heap.rank();
            if rank < 2 {
                let began = Instant::now();
                gpu.launch(
                    ("put_pingpong", 1, 1),
                    (heap, &queue),
                    &[
                        &(1 - rank),
                        &(1 - rank),
                        &to.offset(),
                        &from.offset(),
                        &bytes,
                        &first,
                        &rounds,
                        &turn.number(),
                    ],
                )?;
                gpu.results(&queue)?;
                times.push(began.elapsed());
            }
            first += rounds;
        }
        if heap.rank() == 0 {
            let half = micros(median(times.split_off(1)), 2 * rounds);
            println!(
                "heap in {location:?}: kernel to kernel, {bytes} bytes and a signal: {half:.2} us half a round trip"
            );
        }
        heap.free(from)?;
        heap.free(to)?;
    }
    Ok(())
}

/// Rate of 8-byte puts with signal by kernels on one queue; rank 0 alone.
fn rate(options: &Options, location: HeapLocation, gpu: &Gpu, heap: &mut SymmetricHeap) -> Result<()> {
    let queue = heap.kernel_queue(Some(&gpu.context), 1024)?;
    let counted = heap.alloc_signal()?;
    let (from, to) = (heap.alloc(1 << 16)?, heap.alloc(1 << 16)?);
    let (repeats, each) = if options.quick { (3, 10u64) } else { (7, 200) };
    for (bytes, what) in [(0u64, "signals (additions)"), (8, "puts of 8 bytes with a signal")] {
        for (blocks, threads) in [(1u32, 1u32), (8, 32)] {
            let mut rates = Vec::new();
            for _ in 0..=repeats {
                heap.barrier(TIMEOUT)?;
                if heap.rank() == 0 {
                    let before = queue.completed();
                    let began = Instant::now();
                    let at = (&*heap, &queue);
                    let arguments = (to.offset(), from.offset());
                    gpu.launch(
                        ("put_many", blocks, threads),
                        at,
                        &[&1u32, &arguments.0, &arguments.1, &bytes, &each, &counted.number()],
                    )?;
                    gpu.results(&queue)?;
                    let done = queue.completed() - before;
                    rates.push(Duration::from_secs_f64(began.elapsed().as_secs_f64() / done as f64));
                }
            }
            if heap.rank() == 0 {
                let one = median(rates.split_off(1));
                println!(
                    "heap in {location:?}: {what}, {blocks} x {threads} threads: {:.3} M/s",
                    1e-6 / one.as_secs_f64()
                );
            }
        }
    }
    heap.free(from)?;
    Ok(heap.free(to)?)
}

/// Half round trip of put_signal and wait_signal in two streams, without a kernel.
fn in_streams(options: &Options, location: HeapLocation, gpu: &Gpu, heap: &mut SymmetricHeap) -> Result<()> {
    let mut puts = heap.on_stream(&gpu.stream)?;
    let turn = heap.alloc_signal()?;
    let (repeats, rounds) = if options.quick { (3, 10u64) } else { (7, 400) };
    let mut round = 0;
    for bytes in [8u64, 65_536, 1 << 20] {
        let (from, to) = (heap.alloc(bytes)?, heap.alloc(bytes)?);
        let mut times = Vec::new();
        for _ in 0..=repeats {
            heap.barrier(TIMEOUT)?;
            let rank = heap.rank();
            let began = Instant::now();
            for _ in 0..rounds {
                round += 1;
                if rank == 1 {
                    puts.wait_signal(turn, round)?;
                }
                if rank < 2 {
                    puts.put_signal(from, to, 1 - rank, turn, SignalOp::Set(round))?;
                }
                if rank == 0 {
                    puts.wait_signal(turn, round)?;
                }
            }
            gpu.stream.synchronize()?;
            times.push(began.elapsed());
        }
        puts.quiet()?;
        gpu.stream.synchronize()?;
        if heap.rank() == 0 {
            let half = micros(median(times.split_off(1)), 2 * rounds);
            println!(
                "heap in {location:?}: stream to stream, {bytes} bytes and a signal: {half:.2} us half a round trip"
            );
        }
        heap.barrier(TIMEOUT)?;
        heap.free(from)?;
        heap.free(to)?;
    }
    Ok(())
}

/// Stream time of a post and its completion: one after another, by tickets and in a graph.
pub(crate) fn posts(options: &Options, gpu: &Gpu, device: &Device) -> Result<()> {
    let pd = device.protection_domain()?;
    let (cq, other) = (device.completion_queue(512)?, device.completion_queue(512)?);
    let one = pd.queue_pair(&cq).max_recv_wr(1).max_inline_data(8).signal_all().rc()?;
    let two = pd.queue_pair(&other).max_recv_wr(1).allow_remote_write().rc()?;
    let (to, from) = (two.endpoint(), one.endpoint());
    let (one, _two) = (one.connect(&to)?, two.connect(&from)?);
    let inbox = pd.register(vec![0; 64], PeerWrite)?;
    let remote = inbox.remote();
    let queue = StreamQueue::spawn(&gpu.context, one, cq, IdlePolicy::default())?;
    let (repeats, count) = if options.quick { (3, 10u64) } else { (7, 200) };
    let stream = &gpu.stream;

    let mut times = Vec::new();
    for _ in 0..=repeats {
        let began = Instant::now();
        for _ in 0..count {
            let posted = queue.post_after(stream, move |batch| {
                batch.write_inline(&[1; 8], remote);
            })?;
            posted.enqueue_wait(stream)?;
        }
        stream.synchronize()?;
        times.push(began.elapsed());
    }
    let each = micros(median(times.split_off(1)), count);
    println!("a stream posts 8 bytes and waits for the completion: {each:.2} us");

    let repeated = queue.repeated(move |batch| {
        batch.write_inline(&[1; 8], remote);
    })?;
    let graph = stream.capture(CaptureMode::Relaxed, &[], || {
        for _ in 0..10 {
            repeated.enqueue_post(stream).map_err(captured)?;
            repeated.enqueue_wait(stream).map_err(captured)?;
        }
        Ok(())
    })?;
    let graph = graph.instantiate()?;
    let mut times = Vec::new();
    for _ in 0..=repeats {
        let began = Instant::now();
        for _ in 0..count / 10 {
            graph.launch(stream)?;
        }
        stream.synchronize()?;
        times.push(began.elapsed());
    }
    let each = micros(median(times.split_off(1)), count);
    println!("the same, ten to a graph: {each:.2} us each");
    anyhow::ensure!(
        queue.failure().is_none() && repeated.failure().is_none(),
        "{:?}",
        queue.failure()
    );
    println!("PASS posts in a stream's order, and by graphs");
    Ok(())
}

/// The error type of a capture's closure.
fn captured(error: doorbell_gpudirect::stream::StreamError) -> doorbell_cuda::Error {
    match error {
        doorbell_gpudirect::stream::StreamError::Cuda(error) => error,
        _ => doorbell_cuda::Error::Capturing,
    }
}
