//! Measures the cost of copies and calls of this crate (medians), without judging them.

use std::error::Error;
use std::hint;
use std::sync::atomic::Ordering;
use std::time::Instant;

use doorbell_cuda::{
    CaptureMode, Context, DeviceMemory, Driver, Event, HostMemory, Launch, Memory, Module, Stream, WaitCondition,
};

use crate::suite::PTX;

const REPEATS: usize = 11;
type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

pub(crate) fn all(driver: Driver) -> Result {
    let context = driver.device(0)?.context()?;
    context.make_current()?;
    let stream = Stream::new(&context)?;
    bandwidth(driver, &context, &stream)?;
    calls(&context, &stream)?;
    words(&context, &stream)
}

/// Bandwidth in bytes/s of copies between each two places.
fn bandwidth(driver: Driver, context: &Context, stream: &Stream) -> Result {
    const MOST: usize = 256 << 20;
    let (one, two) = (DeviceMemory::alloc(context, MOST)?, DeviceMemory::alloc(context, MOST)?);
    let host = HostMemory::alloc(context, MOST)?;
    let mut peer = None;
    if let Some(other) = driver.devices()?.get(1)
        && other.peer(context.device())?.is_some()
    {
        let there = DeviceMemory::options(&other.context()?)
            .peers(&[context.device()])
            .alloc(MOST)?;
        peer = Some(there);
    }
    println!(
        "{:>10} {:>14} {:>14} {:>14} {:>14}  (GB/s)",
        "bytes", "to device", "to host", "on device", "to peer"
    );
    for shift in [3, 12, 16, 20, 24, 28] {
        let bytes = 1usize << shift;
        let mut line = format!("{bytes:>10}");
        for ends in [
            Some((one.all(), host.all())),
            Some((host.all(), one.all())),
            Some((two.all(), one.all())),
            peer.as_ref().map(|peer| (peer.all(), one.all())),
        ] {
            let rate = match ends {
                Some((into, from)) => {
                    let (into, from) = (into.span(..bytes)?, from.span(..bytes)?);
                    let seconds = timed(context, stream, 20, || Ok(stream.copy(into, from)?))?;
                    format!("{:.2}", bytes as f64 / seconds / 1e9)
                }
                None => "-".to_owned(),
            };
            line += &format!(" {rate:>14}");
        }
        println!("{line}");
    }
    Ok(())
}

fn calls(context: &Context, stream: &Stream) -> Result {
    let memory = DeviceMemory::alloc(context, 1 << 20)?;
    let (one, two) = (memory.span(..8)?, memory.span(4096..4104)?);
    let kernel = Module::from_ptx(context, PTX)?.kernel("add_one")?;
    let event = Event::new(context)?;
    let launch = || -> Result {
        // SAFETY: the memory has this many words.
        unsafe {
            kernel.launch(
                stream,
                Launch::linear(1, 32),
                &[&memory.device_ptr(), &32u32],
                &[memory.all()],
            )?
        };
        Ok(())
    };
    let copy = || Ok(stream.copy(two, one)?);
    let pairs: Vec<_> = (0..32)
        .map(|at| {
            Ok((
                memory.span(at * 64..at * 64 + 8)?,
                memory.span((1 << 19) + at * 64..(1 << 19) + at * 64 + 8)?,
            ))
        })
        .collect::<std::result::Result<_, doorbell_cuda::Error>>()?;
    let graph = stream.capture(CaptureMode::ThreadLocal, &[], || {
        (0..20).try_for_each(|_| {
            // SAFETY: as above.
            unsafe {
                kernel.launch(
                    stream,
                    Launch::linear(1, 32),
                    &[&memory.device_ptr(), &32u32],
                    &[memory.all()],
                )
            }
        })
    })?;
    let graph = graph.instantiate()?;

    println!(
        "{:<40} {:>10} {:>10}  (us: by the stream's clock, one after another; called and waited for)",
        "", "each", "alone"
    );
    let show = |what: &str, run: &dyn Fn() -> Result| -> Result {
        let each = timed(context, stream, 200, run)? * 1e6;
        let alone = median((0..200).map(|_| {
            let begun = Instant::now();
            run()?;
            stream.synchronize()?;
            Ok(begun.elapsed().as_secs_f64() * 1e6)
        }))?;
        println!("{what:<40} {each:>10.2} {alone:>10.2}");
        Ok(())
    };
    show("copy of 8 bytes", &copy)?;
    show("32 copies of 8 bytes, one by one", &|| {
        pairs.iter().try_for_each(|(into, from)| Ok(stream.copy(*into, *from)?))
    })?;
    show("32 copies of 8 bytes, in a batch", &|| Ok(stream.copy_batch(&pairs)?))?;
    show("kernel of one block", &launch)?;
    show("graph of 20 such kernels", &|| Ok(graph.launch(stream)?))?;
    show("event recorded", &|| Ok(stream.record(&event)?))?;
    show("word written", &|| Ok(stream.write_value32(one, 1)?))?;

    // CPU time alone: the stream waits for a word meanwhile, so that nothing starts.
    let gate = HostMemory::alloc(context, 64)?;
    for (what, run) in [
        ("copy of 8 bytes", &copy as &dyn Fn() -> Result),
        ("kernel of one block", &launch),
    ] {
        let taken = median((0..REPEATS).map(|_| {
            const CALLS: u32 = 200;
            gate.atomic_u32(0)?.store(0, Ordering::Release);
            stream.wait_value32(gate.all(), WaitCondition::Equal(1))?;
            let begun = Instant::now();
            for _ in 0..CALLS {
                run()?;
            }
            let taken = begun.elapsed().as_secs_f64() * 1e6 / f64::from(CALLS);
            gate.atomic_u32(0)?.store(1, Ordering::Release);
            stream.synchronize()?;
            Ok(taken)
        }))?;
        println!("{:<40} {taken:>10.2}", format!("{what}, the call alone"));
    }
    Ok(())
}

fn words(context: &Context, stream: &Stream) -> Result {
    const ROUNDS: u32 = 200;
    let host = HostMemory::alloc(context, 64)?;
    let (ping, pong) = (host.span(..4)?, host.span(4..8)?);
    let taken = median((0..REPEATS).map(|_| {
        let (request, reply) = (host.atomic_u32(0)?, host.atomic_u32(4)?);
        request.store(0, Ordering::Release);
        reply.store(0, Ordering::Release);
        for round in 1..=ROUNDS {
            stream.wait_value32(ping, WaitCondition::AtLeast(round))?;
            stream.write_value32(pong, round)?;
        }
        let begun = Instant::now();
        for round in 1..=ROUNDS {
            request.store(round, Ordering::Release);
            while reply.load(Ordering::Acquire) != round {
                hint::spin_loop();
            }
        }
        let taken = begun.elapsed().as_secs_f64() * 1e6 / f64::from(ROUNDS);
        stream.synchronize()?;
        Ok(taken)
    }))?;
    println!("{:<40} {taken:>10.2}", "word to a waiting stream and back");
    Ok(())
}

/// Seconds per run over `count` runs, by the stream's clock.
fn timed(context: &Context, stream: &Stream, count: u32, run: impl Fn() -> Result) -> Result<f64> {
    let (start, end) = (Event::timed(context)?, Event::timed(context)?);
    run()?;
    stream.synchronize()?;
    median((0..REPEATS).map(|_| {
        stream.record(&start)?;
        for _ in 0..count {
            run()?;
        }
        stream.record(&end)?;
        end.synchronize()?;
        Ok(end.since(&start)?.as_secs_f64() / f64::from(count))
    }))
}

fn median(values: impl Iterator<Item = Result<f64>>) -> Result<f64> {
    let mut values = values.collect::<Result<Vec<_>>>()?;
    values.sort_by(f64::total_cmp);
    Ok(values[values.len() / 2])
}
