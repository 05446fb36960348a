//! Verifies that every byte arrives, and before its signal.

use anyhow::{Result, ensure};
use doorbell_cuda::{HostMemory, Memory as _};
use doorbell_gpudirect::heap::{SignalOp, SymmetricHeap};

use crate::Options;
use crate::rank::{Gpu, HeapLocation, TIMEOUT};

fn pattern(rank: u32, round: u64, len: u64) -> Vec<u8> {
    (0..len)
        .map(|at| (u64::from(rank) * 37 + round * 11 + at * 3 + (at >> 8)) as u8)
        .collect()
}

/// All checks, each started by all ranks together. Rank 0 reports.
pub(crate) fn run(options: &Options, location: HeapLocation, gpu: &Gpu, heap: &mut SymmetricHeap) -> Result<()> {
    let checks: [(&str, Check); 5] = [
        ("kernels put, with signals", by_kernels),
        ("kernels get", gets),
        ("kernels in turns, and many threads at once", in_turns),
        ("puts in a stream's order", in_streams),
        ("the host's puts and gets", by_the_host),
    ];
    for (name, check) in checks {
        heap.barrier(TIMEOUT)?;
        check(options, gpu, heap)
            .map_err(|error| error.context(format!("{name}, heap in {location:?}, rank {}", heap.rank())))?;
        heap.barrier(TIMEOUT)?;
        if heap.rank() == 0 {
            println!("PASS {name}, heap in {location:?}");
        }
    }
    Ok(())
}

type Check = fn(&Options, &Gpu, &mut SymmetricHeap) -> Result<()>;

/// The ring neighbours: the target of this rank's puts, and the rank that puts to it.
fn neighbours(heap: &SymmetricHeap) -> (u32, u32) {
    let (rank, ranks) = (heap.rank(), heap.ranks());
    ((rank + 1) % ranks, (rank + ranks - 1) % ranks)
}

fn sizes(options: &Options) -> &'static [u64] {
    if options.quick {
        &[1, 8, 1001, 65_536, 1 << 20]
    } else {
        &[1, 7, 8, 64, 1001, 4096, 65_537, 1 << 20, 16 << 20, (64 << 20) + 3]
    }
}

fn by_kernels(options: &Options, gpu: &Gpu, heap: &mut SymmetricHeap) -> Result<()> {
    let (next, _) = neighbours(heap);
    for slots in [2, 256] {
        let queue = heap.kernel_queue(Some(&gpu.context), slots)?;
        let arrived = heap.alloc_signal()?;
        let mut all = 0u64;
        for (round, &bytes) in (1u64..).zip(sizes(options)) {
            let blocks = if bytes < 4096 { 1u32 } else { 4 };
            all += u64::from(blocks);
            let (from, to) = (heap.alloc(bytes)?, heap.alloc(bytes)?);
            let at = (&*heap, &queue);
            let (from_at, to_at) = (from.offset(), to.offset());
            gpu.launch(
                ("put_fill", blocks, 256),
                at,
                &[&next, &to_at, &from_at, &bytes, &round, &arrived.number()],
            )?;
            gpu.launch(
                ("put_check", 2, 256),
                at,
                &[&to_at, &bytes, &round, &arrived.number(), &all],
            )?;
            ensure!(
                gpu.results(&queue)?.right == bytes,
                "{bytes} bytes were not all checked"
            );
            heap.barrier(TIMEOUT)?;
            heap.free(from)?;
            heap.free(to)?;
        }
    }
    Ok(())
}

fn gets(options: &Options, gpu: &Gpu, heap: &mut SymmetricHeap) -> Result<()> {
    let (next, _) = neighbours(heap);
    let queue = heap.kernel_queue(Some(&gpu.context), 16)?;
    for (round, &bytes) in (1u64..).zip(sizes(options)) {
        let (mine, theirs) = (heap.alloc(bytes)?, heap.alloc(bytes)?);
        gpu.write(heap, mine, &pattern(heap.rank(), round, bytes))?;
        heap.barrier(TIMEOUT)?;
        gpu.launch(
            ("put_get", 3, 32),
            (heap, &queue),
            &[&next, &theirs.offset(), &mine.offset(), &bytes],
        )?;
        gpu.results(&queue)?;
        ensure!(gpu.read(heap, theirs)? == pattern(next, round, bytes), "{bytes} bytes");
        heap.barrier(TIMEOUT)?;
        heap.free(mine)?;
        heap.free(theirs)?;
    }
    Ok(())
}

fn in_turns(options: &Options, gpu: &Gpu, heap: &mut SymmetricHeap) -> Result<()> {
    let queue = heap.kernel_queue(Some(&gpu.context), 8)?;
    let (turn, counted) = (heap.alloc_signal()?, heap.alloc_signal()?);
    let (from, to) = (heap.alloc(1 << 16)?, heap.alloc(1 << 16)?);
    let (rank, rounds) = (heap.rank(), if options.quick { 20u64 } else { 1000 });
    if rank < 2 {
        for (launch, bytes) in (0u64..).zip([0u64, 8, 4096]) {
            gpu.launch(
                ("put_pingpong", 1, 1),
                (heap, &queue),
                &[
                    &(1 - rank),
                    &(1 - rank),
                    &to.offset(),
                    &from.offset(),
                    &bytes,
                    &(launch * rounds),
                    &rounds,
                    &turn.number(),
                ],
            )?;
        }
        gpu.results(&queue)?;
    }
    let (next, _) = neighbours(heap);
    // A stand-in block has one thread regardless of the launch: puts are counted by requester.
    gpu.launch(
        ("put_many", 4, 64),
        (heap, &queue),
        &[&next, &to.offset(), &from.offset(), &16u64, &5u64, &counted.number()],
    )?;
    gpu.results(&queue)?;
    let before = if rank < 2 { 3 * rounds } else { 0 };
    let mine = queue.completed() - before;
    heap.wait_signal(counted, mine, TIMEOUT)?;
    heap.barrier(TIMEOUT)?;
    ensure!(
        heap.signal_value(counted) == mine,
        "{} puts of {mine}",
        heap.signal_value(counted)
    );
    heap.free(from)?;
    Ok(heap.free(to)?)
}

fn in_streams(options: &Options, gpu: &Gpu, heap: &mut SymmetricHeap) -> Result<()> {
    let (next, before) = neighbours(heap);
    let (rounds, len) = (if options.quick { 10u64 } else { 100 }, 10_000u64);
    let (from, to, back) = (heap.alloc(len)?, heap.alloc(len)?, heap.alloc(len)?);
    let arrived = heap.alloc_signal()?;
    let kept = HostMemory::alloc(&gpu.context, (2 * rounds * len) as usize)?;
    let mut puts = heap.on_stream(&gpu.stream)?;
    let span = |range| {
        heap.span(range)
            .ok_or_else(|| anyhow::anyhow!("the GPU does not reach the heap"))
    };
    let value = |rank: u32, round: u64| (round * 11 + u64::from(rank)) as u8;
    let mut at = 0;
    let mut keep = |range| -> Result<()> {
        gpu.stream.copy(kept.span(at..at + len as usize)?, span(range)?)?;
        at += len as usize;
        Ok(())
    };
    for round in 1..=rounds {
        gpu.stream.fill(span(from)?, value(heap.rank(), round))?;
        puts.put_signal(from, to, next, arrived, SignalOp::Set(round))?;
        puts.wait_signal(arrived, round)?;
        keep(to)?;
        puts.get(back, from, before)?;
        puts.quiet()?;
        keep(back)?;
        puts.barrier()?;
    }
    gpu.stream.synchronize()?;
    let mut found = vec![0; kept.len()];
    kept.copy_out(0, &mut found)?;
    for (index, bytes) in found.chunks(len as usize).enumerate() {
        let expected = value(before, index as u64 / 2 + 1);
        ensure!(bytes.iter().all(|byte| *byte == expected), "round {}", index / 2 + 1);
    }
    ensure!(puts.failure().is_none(), "{:?}", puts.failure());
    heap.barrier(TIMEOUT)?;
    for range in [from, to, back] {
        heap.free(range)?;
    }
    Ok(())
}

fn by_the_host(options: &Options, gpu: &Gpu, heap: &mut SymmetricHeap) -> Result<()> {
    let (next, before) = neighbours(heap);
    let arrived = heap.alloc_signal()?;
    for (round, &bytes) in (1u64..).zip(sizes(options)) {
        let (from, to) = (heap.alloc(bytes)?, heap.alloc(bytes)?);
        gpu.write(heap, from, &pattern(heap.rank(), round, bytes))?;
        heap.put_signal(from, to, next, arrived, SignalOp::Add(1))?;
        heap.wait_signal(arrived, round, TIMEOUT)?;
        ensure!(
            gpu.read(heap, to)? == pattern(before, round, bytes),
            "{bytes} bytes were put wrong"
        );
        heap.barrier(TIMEOUT)?;
        heap.get(to, from, next)?;
        heap.quiet(TIMEOUT)?;
        ensure!(
            gpu.read(heap, to)? == pattern(next, round, bytes),
            "{bytes} bytes were got wrong"
        );
        heap.barrier(TIMEOUT)?;
        heap.free(from)?;
        heap.free(to)?;
    }
    Ok(())
}
