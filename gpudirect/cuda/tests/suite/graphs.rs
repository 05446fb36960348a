//! Capture and graphs.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::{Duration, Instant};

use doorbell_cuda::{
    CaptureMode, DeviceMemory, Driver, Error, Event, Follower, GraphExec, HostMemory, Memory, Stream, StreamOrder,
    WaitCondition,
};

use super::{Outcome, Setting, add_one, pattern};

pub(super) fn replayed(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    let kernel = setting.kernel("add_one")?;
    let memory = setting.device(&[0; 4000])?;
    setting.stream.synchronize()?;
    for mode in [CaptureMode::ThreadLocal, CaptureMode::Relaxed] {
        let graph = setting.stream.capture(mode, &[], || {
            for _ in 0..3 {
                add_one(&setting.stream, &kernel, &memory, 1000)?;
            }
            Ok(())
        })?;
        assert_eq!(graph.node_count()?, 3);
        let exec = graph.instantiate()?;
        drop(graph);
        exec.upload(&setting.stream)?;
        for _ in 0..5 {
            exec.launch(&setting.stream)?;
        }
    }
    let got = setting.read(&memory)?;
    assert!(
        got.as_chunks::<4>()
            .0
            .iter()
            .all(|word| u32::from_ne_bytes(*word) == 30),
        "captured work was done, or not all of it"
    );
    setting.finish()
}

pub(super) fn forked(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    let kernel = setting.kernel("add_one")?;
    let other = Stream::new(&setting.context)?;
    let (left, right) = (setting.device(&[0; 400])?, setting.device(&[0; 400])?);
    setting.stream.synchronize()?;
    let (begun, done) = (Event::new(&setting.context)?, Event::new(&setting.context)?);
    let graph = setting.stream.capture(CaptureMode::ThreadLocal, &[&other], || {
        setting.stream.record(&begun)?;
        other.wait(&begun)?;
        add_one(&other, &kernel, &right, 100)?;
        other.record(&done)?;
        add_one(&setting.stream, &kernel, &left, 100)?;
        setting.stream.wait(&done)?;
        let both = &[
            (left.span(..8)?, right.span(..8)?),
            (left.span(8..16)?, right.span(8..16)?),
        ];
        setting.stream.copy_batch(both)?;
        add_one(&setting.stream, &kernel, &left, 4)
    })?;
    let stranger = Stream::new(&setting.context)?;
    assert!(
        matches!(stranger.wait(&begun), Err(Error::Captured)),
        "an event of a capture is no event outside"
    );
    let exec = graph.instantiate()?;
    exec.launch(&setting.stream)?;
    let word = |bytes: &[u8], at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let got = setting.read(&left)?;
    assert_eq!((word(&got, 0), word(&got, 12), word(&got, 16)), (2, 2, 1));

    // Both streams and both events are usable as before.
    add_one(&other, &kernel, &right, 100)?;
    other.record(&done)?;
    setting.stream.wait(&done)?;
    assert_eq!(word(&setting.read(&right)?, 396), 2);
    setting.finish()
}

pub(super) fn aborted(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    let memory = setting.device(&pattern(1000, 1))?;
    let fill = || setting.stream.fill(memory.all(), 9);
    let failed = setting.stream.capture(CaptureMode::ThreadLocal, &[], || {
        fill()?;
        setting.stream.fill(memory.span(..2000)?, 9)
    });
    assert!(matches!(failed, Err(Error::OutOfBounds { .. })), "{failed:?}");
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        setting.stream.capture(CaptureMode::Relaxed, &[], || {
            drop(fill());
            panic!("as a test has it");
        })
    }));
    assert!(panicked.is_err());
    // A captured stream cannot be synchronized: this invalidates the capture, and only that.
    let lost = setting.stream.capture(CaptureMode::ThreadLocal, &[], || {
        fill()?;
        setting.stream.synchronize()
    });
    assert!(lost.is_err());
    assert!(
        setting.read(&memory)? == pattern(1000, 1),
        "work of a capture that was given up was done"
    );
    let graph = setting.stream.capture(CaptureMode::ThreadLocal, &[], fill)?;
    graph.instantiate()?.launch(&setting.stream)?;
    assert!(setting.read(&memory)? == [9; 1000]);
    setting.finish()
}

pub(super) fn nested(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    let other = Stream::new(&setting.context)?;
    let memory = setting.device(&[0; 16])?;
    setting.stream.synchronize()?;
    setting.stream.capture(CaptureMode::Relaxed, &[&other], || {
        for (stream, others) in [(&setting.stream, &[][..]), (&other, &[]), (&other, &[&setting.stream])] {
            let inner = stream.capture(CaptureMode::Relaxed, others, || Ok(()));
            assert!(matches!(inner, Err(Error::Capturing)), "{inner:?}");
        }
        setting.stream.fill(memory.all(), 1)
    })?;
    other.synchronize()?;
    setting.finish()
}

pub(super) fn keeps_its_memory(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    let bytes = pattern(70_000, 6);
    let mut back = HostMemory::alloc(&setting.context, bytes.len())?;
    let exec = {
        let from = setting.host(&bytes)?;
        let through = DeviceMemory::alloc(&setting.context, bytes.len())?;
        // Dropped during the capture: checking its streams must not disturb the capture.
        let other = setting.device(&bytes)?;
        let graph = setting.stream.capture(CaptureMode::ThreadLocal, &[], || {
            setting.stream.copy(through.all(), from.all())?;
            drop(other);
            setting.context.reap();
            setting.stream.copy(back.all(), through.all())
        })?;
        graph.instantiate()?
    };
    assert!(
        matches!(back.bytes_mut(), Err(Error::Shared)),
        "the graph writes it whenever it is launched"
    );
    setting.keep_busy(50)?;
    for _ in 0..3 {
        exec.launch(&setting.stream)?;
    }
    drop(exec);
    let waiting = setting.context.reap();
    assert!(waiting >= 1, "a graph was freed while it was to run");
    setting.stream.synchronize()?;
    assert_eq!(setting.context.reap(), 0);
    assert!(back.bytes_mut()? == bytes);
    setting.finish()
}

/// A graph of the program, which this crate knows by its stream alone, keeps what it uses.
pub(super) fn captured_elsewhere(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    let follower = Follower::new(&setting.context);
    let mut host = HostMemory::alloc(&setting.context, 1000)?;
    let exec = {
        let through = DeviceMemory::alloc(&setting.context, host.len())?;
        let graph = setting.stream.capture(CaptureMode::ThreadLocal, &[], || {
            for value in [5, 6] {
                // SAFETY: the setting keeps the stream, and its capture goes on.
                let stream = unsafe { Stream::borrow_raw(setting.stream.as_raw(), &follower)? };
                assert!(stream.is_capturing()?);
                stream.fill(through.all(), value)?;
                stream.copy(host.all(), through.all())?;
            }
            Ok(())
        })?;
        graph.instantiate()?
    };
    assert!(follower.is_idle()? && matches!(host.bytes_mut(), Err(Error::Shared)));
    exec.launch(&setting.stream)?;
    setting.stream.synchronize()?;
    drop(exec);
    // The driver releases it in a thread of its own.
    let begun = Instant::now();
    let bytes = loop {
        setting.context.reap();
        if let Ok(bytes) = host.bytes_mut() {
            break bytes.to_vec();
        }
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "it is kept when the graph is gone"
        );
        thread::sleep(Duration::from_millis(1));
    };
    assert!(bytes == [6; 1000]);
    setting.finish()
}

/// Operations that append their number to a log, in streams and graphs that nothing else orders.
/// The first is late, so that the others would overtake it.
pub(super) fn ordered(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    let stream = || Stream::new(&setting.context);
    let (one, other, third, opener) = (stream()?, stream()?, stream()?, stream()?);
    let (log, before, gate) = (
        setting.device(&[0; 64])?,
        setting.device(&[0; 63])?,
        setting.device(&[0; 4])?,
    );
    setting.stream.synchronize()?;
    let operation = |order: &mut StreamOrder, stream: &Stream, number: u8| -> Result<(), Error> {
        let turn = order.begin(stream)?;
        stream.copy(before.all(), log.span(..63)?)?;
        stream.fill(log.span(..1)?, number)?;
        stream.copy(log.span(1..)?, before.all())?;
        order.end(turn, stream).map(drop)
    };
    let capture = |order: &mut StreamOrder, [first, second]: [u8; 2]| -> Result<GraphExec, Error> {
        let fork = Event::new(&setting.context)?;
        let graph = setting.stream.capture(CaptureMode::ThreadLocal, &[&other], || {
            setting.stream.record(&fork)?;
            other.wait(&fork)?;
            operation(order, &setting.stream, first)?;
            operation(order, &other, second)?;
            other.record(&fork)?;
            setting.stream.wait(&fork)
        })?;
        graph.instantiate()
    };
    let mut order = StreamOrder::new(&setting.context)?;
    one.wait_value32(gate.all(), WaitCondition::Equal(1))?;
    operation(&mut order, &one, 1)?;
    let (first, second) = (capture(&mut order, [2, 3])?, capture(&mut order, [4, 5])?);
    first.launch(&setting.stream)?;
    second.launch(&other)?;
    operation(&mut order, &third, 6)?;
    first.launch(&one)?;
    operation(&mut order, &other, 7)?;
    opener.write_value32(gate.all(), 1)?;
    setting.context.synchronize()?;
    let mut numbers = setting.read(&log)?;
    numbers.truncate(9);
    assert_eq!(numbers, [7, 3, 2, 6, 5, 4, 3, 2, 1], "the latest first");
    setting.finish()
}
