//! Capture and graphs.

use std::panic::{AssertUnwindSafe, catch_unwind};

use doorbell_cuda::{CaptureMode, DeviceMemory, Driver, Error, Event, HostMemory, Memory, Stream};

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
