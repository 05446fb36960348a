//! How fast: WRITEs from one process's GPU to another's beside the driver's own copies between the same GPUs in the same run, READs, SENDs, and the time of a short message.

use std::net::IpAddr;
use std::time::Instant;

use anyhow::{Result, ensure};
use doorbell_cuda::{DeviceMemory, Driver, Memory as _, Stream};
use doorbell_verbs_sys::{IBV_WC_RECV, IBV_WC_SUCCESS};

use crate::Options;
use crate::end::{End, Op, Part};
use crate::far::Far;

/// Repeats of which the median is told.
const REPEATS: usize = 5;
/// Requests on their way.
const WINDOW: usize = 16;

pub(crate) fn run(options: &Options, address: IpAddr) -> Result<()> {
    let mut sizes: Vec<usize> = (14..=30).map(|log| 1 << log).collect();
    sizes.retain(|&size| size <= options.largest);
    if options.quick {
        sizes.retain(|size| size.trailing_zeros().is_multiple_of(2));
    }
    let largest = sizes.last().copied().unwrap_or(1 << 20);
    let near = End::new(largest, options.gpus)?;
    let (mut far, card) = Far::spawn(address, largest, options.gpus)?;
    near.connect(&card)?;
    far.connect(&near.card()?)?;
    let (first, last) = (1.min(near.regions.len() - 1), near.regions.len() - 1);
    println!(
        "bandwidth in GB/s, medians of {REPEATS}: {} here and {} in another process, {WINDOW} on their way; copy is the driver's own between these GPUs",
        near.regions[first].name, near.regions[last].name
    );
    println!(
        "{:>12} {:>8} {:>8} {:>7} {:>8} {:>12} {:>12}",
        "bytes", "write", "copy", "ratio", "read", "host->gpu", "gpu->host"
    );
    for &size in &sizes {
        let target = |region: usize| card.regions[region];
        let measure = |op, here, there| {
            let count = count(size, here == 0 || there == 0, options.quick);
            bandwidth(&near, op, (here, size), target(there), count)
        };
        let write = measure(Op::Write, first, last)?;
        let copy = copies(first - 1, last - 1, size, options.quick)?;
        let read = measure(Op::Read, first, last)?;
        let up = measure(Op::Write, 0, last)?;
        let down = measure(Op::Write, first, 0)?;
        println!(
            "{size:>12} {write:>8.1} {copy:>8.1} {:>7.3} {read:>8.1} {up:>12.1} {down:>12.1}",
            write / copy
        );
    }
    println!("half round trip of WRITEs with immediate in microseconds, medians");
    for (here, there) in [(first, last), (0, last), (first, 0), (0, 0)] {
        for size in [8, 4096] {
            let took = latency(&near, &mut far, (here, there), size, &card.regions, options.quick)?;
            println!(
                "{:>12} {} and {}: {took:.2}",
                size, near.regions[here].name, near.regions[there].name
            );
        }
    }
    Ok(())
}

/// How many of a size are measured at once: some 2 GB between GPUs, less by the host; some 20 thousand at most.
fn count(size: usize, host: bool, quick: bool) -> usize {
    let bytes: usize = match (quick, host) {
        (true, _) => 16 << 20,
        (false, true) => 256 << 20,
        (false, false) => 2 << 30,
    };
    (bytes / size).clamp(if host { 1 } else { 4 }, if quick { 200 } else { 20_000 })
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

fn bandwidth(near: &End, op: Op, (region, len): (usize, usize), to: (u64, u32), count: usize) -> Result<f64> {
    let part = Part { region, at: 0, len };
    let mut all = Vec::new();
    for repeat in 0..=REPEATS {
        let since = Instant::now();
        let (mut posted, mut done) = (0, 0);
        while done < count {
            while posted < count && posted - done < WINDOW {
                near.post(op, &[part], to, false)?;
                posted += 1;
            }
            if let Some(wc) = near.poll() {
                ensure!(wc.status == IBV_WC_SUCCESS, "a completion with status {}", wc.status);
                done += 1;
            }
        }
        // The first warms up.
        if repeat > 0 {
            all.push((count * len) as f64 / since.elapsed().as_secs_f64() / 1e9);
        }
    }
    Ok(median(all))
}

/// The driver's own copies from one GPU to another, as many on their way.
fn copies(from: usize, into: usize, len: usize, quick: bool) -> Result<f64> {
    let driver = Driver::load()?;
    let (from, into) = (driver.device(from)?, driver.device(into)?);
    let (context, other) = (from.context()?, into.context()?);
    let source = DeviceMemory::alloc(&context, len)?;
    let target = DeviceMemory::options(&other).peers(&[from]).alloc(len)?;
    let stream = Stream::new(&context)?;
    let count = count(len, false, quick);
    let mut all = Vec::new();
    for repeat in 0..=REPEATS {
        let since = Instant::now();
        for _ in 0..count {
            stream.copy(target.all(), source.all())?;
        }
        stream.synchronize()?;
        if repeat > 0 {
            all.push((count * len) as f64 / since.elapsed().as_secs_f64() / 1e9);
        }
    }
    Ok(median(all))
}

/// Half of the time of a WRITE there and one back, in microseconds.
fn latency(
    near: &End,
    far: &mut Far,
    (here, there): (usize, usize),
    len: usize,
    regions: &[(u64, u32)],
    quick: bool,
) -> Result<f64> {
    let rounds = if quick { 50 } else { 2000 };
    let part = Part {
        region: here,
        at: 0,
        len,
    };
    let nothing = Part { len: 0, ..part };
    let back = near.card()?.regions[here];
    far.pong(Part { region: there, ..part }, back, rounds)?;
    far.answer()?;
    for _ in 0..2 {
        near.receive(&[nothing])?;
    }
    let mut all = Vec::new();
    for _ in 0..rounds {
        let since = Instant::now();
        near.post(Op::WriteImm, &[part], regions[there], false)?;
        loop {
            let wc = near.wait()?;
            ensure!(wc.status == IBV_WC_SUCCESS, "a completion with status {}", wc.status);
            if wc.opcode & IBV_WC_RECV != 0 {
                break;
            }
        }
        all.push(since.elapsed().as_secs_f64() * 1e6 / 2.0);
        near.receive(&[nothing])?;
    }
    far.answer()?;
    // The acknowledgement of the last, and the receives that are left, are of no more use: a later ping finds them posted.
    while near.poll().is_some() {}
    Ok(median(all))
}
