//! Benchmarks: WRITEs between GPUs of two processes against the driver's own copies between the
//! same GPUs in the same run, READs, SENDs, and latency.

use std::net::IpAddr;
use std::time::Instant;

use anyhow::{Result, ensure};
use doorbell_cuda::{DeviceMemory, Driver, Memory as _, Stream};
use doorbell_verbs_sys::{IBV_WC_RECV, IBV_WC_SUCCESS};

use crate::Options;
use crate::end::{End, Op, Part};
use crate::remote::RemoteEnd;

/// Repeats of a median.
const REPEATS: usize = 5;
const WINDOW: usize = 16;

pub(crate) fn run(options: &Options, address: IpAddr) -> Result<()> {
    let mut sizes: Vec<usize> = (14..=30).map(|log| 1 << log).collect();
    sizes.retain(|&size| size <= options.largest);
    if options.quick {
        sizes.retain(|size| size.trailing_zeros().is_multiple_of(2));
    }
    let largest = sizes.last().copied().unwrap_or(1 << 20);
    let local = End::new(largest, options.gpus)?;
    let (mut remote, info) = RemoteEnd::spawn(address, largest, options.gpus)?;
    local.connect(&info)?;
    remote.connect(&local.info()?)?;
    let (first, last) = (1.min(local.regions.len() - 1), local.regions.len() - 1);
    println!(
        "bandwidth in GB/s, medians of {REPEATS}: {} here and {} in another process, {WINDOW} on their way; copy is the driver's own between these GPUs",
        local.regions[first].name, local.regions[last].name
    );
    println!(
        "{:>12} {:>8} {:>8} {:>7} {:>8} {:>12} {:>12}",
        "bytes", "write", "copy", "ratio", "read", "host->gpu", "gpu->host"
    );
    for &size in &sizes {
        let target = |region: usize| info.regions[region];
        let measure = |op, here, there| {
            let count = count(size, here == 0 || there == 0, options.quick);
            bandwidth(&local, op, (here, size), target(there), count)
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
            let took = latency(&local, &mut remote, (here, there), size, &info.regions, options.quick)?;
            println!(
                "{:>12} {} and {}: {took:.2}",
                size, local.regions[here].name, local.regions[there].name
            );
        }
    }
    Ok(())
}

/// About 2 GB between GPUs, less through the host; at most about 20,000 requests.
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

fn bandwidth(local: &End, op: Op, (region, len): (usize, usize), to: (u64, u32), count: usize) -> Result<f64> {
    let part = Part { region, at: 0, len };
    let mut all = Vec::new();
    for repeat in 0..=REPEATS {
        let since = Instant::now();
        let (mut posted, mut done) = (0, 0);
        while done < count {
            while posted < count && posted - done < WINDOW {
                local.post(op, &[part], to, false)?;
                posted += 1;
            }
            if let Some(wc) = local.poll() {
                ensure!(wc.status == IBV_WC_SUCCESS, "a completion with status {}", wc.status);
                done += 1;
            }
        }
        // The first one is a warm-up.
        if repeat > 0 {
            all.push((count * len) as f64 / since.elapsed().as_secs_f64() / 1e9);
        }
    }
    Ok(median(all))
}

/// The driver's own copies from one GPU to another, with as many outstanding.
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

/// Half round trip of WRITEs in microseconds.
fn latency(
    local: &End,
    remote: &mut RemoteEnd,
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
    let back = local.info()?.regions[here];
    remote.pong(Part { region: there, ..part }, back, rounds)?;
    remote.reply()?;
    for _ in 0..2 {
        local.receive(&[nothing])?;
    }
    let mut all = Vec::new();
    for _ in 0..rounds {
        let since = Instant::now();
        local.post(Op::WriteImm, &[part], regions[there], false)?;
        loop {
            let wc = local.wait()?;
            ensure!(wc.status == IBV_WC_SUCCESS, "a completion with status {}", wc.status);
            if wc.opcode & IBV_WC_RECV != 0 {
                break;
            }
        }
        all.push(since.elapsed().as_secs_f64() * 1e6 / 2.0);
        local.receive(&[nothing])?;
    }
    remote.reply()?;
    // A later ping then finds its receives posted.
    while local.poll().is_some() {}
    Ok(median(all))
}
