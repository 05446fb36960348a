//! Streams, events, stream memory operations, and memory dropped while in use.

use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use doorbell_cuda::{
    Attribute, DeviceMemory, Driver, Error, Event, Follower, HostMemory, Memory, Stream, WaitCondition,
};

use super::{Outcome, Setting, Verdict, pattern};

pub(super) fn events(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    let bytes = pattern(1 << 16, 1);
    let memory = DeviceMemory::alloc(&setting.context, bytes.len())?;
    let other = Stream::with_priority(&setting.context, -1)?;
    let written = Event::new(&setting.context)?;
    assert!(written.is_done()?, "an event that was never recorded is done");

    let host = setting.host(&bytes)?;
    let mut back = HostMemory::alloc(&setting.context, bytes.len())?;
    setting.keep_busy(200)?;
    setting.stream.copy(memory.all(), host.all())?;
    setting.stream.record(&written)?;
    assert!(!written.is_done()?);
    assert!(!setting.stream.is_idle()?);
    other.wait(&written)?;
    other.copy(back.all(), memory.all())?;
    assert!(back.bytes_mut()? == bytes);
    assert!(written.is_done()?);
    written.synchronize()?;
    setting.finish()
}

pub(super) fn times(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    let (start, end) = (Event::timed(&setting.context)?, Event::timed(&setting.context)?);
    setting.stream.record(&start)?;
    setting.keep_busy(2)?;
    setting.stream.record(&end)?;
    end.synchronize()?;
    assert!(end.since(&start)? > Duration::ZERO);
    assert_eq!(start.since(&end)?, Duration::ZERO, "it came first");
    let untimed = Event::new(&setting.context)?;
    assert!(matches!(untimed.since(&start), Err(Error::Untimed)));
    setting.finish()
}

pub(super) fn words(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    let has_64 = setting.context.device().has(Attribute::CanUse64BitStreamMemOps);
    let host = HostMemory::alloc(&setting.context, 64)?;
    let (go, done, long) = (host.span(..4)?, host.span(4..8)?, host.span(8..16)?);
    setting.stream.wait_value32(go, WaitCondition::AtLeast(5))?;
    setting.stream.write_value32(done, 77)?;
    if has_64 {
        setting.stream.wait_value64(long, WaitCondition::Equal(1 << 40))?;
        setting.stream.write_value64(host.span(16..24)?, u64::MAX)?;
    }
    setting.stream.wait_value32(go, WaitCondition::AnyBit(4))?;
    thread::scope(|scope| {
        scope.spawn(|| {
            // Long enough that a stream that does not wait is usually detected.
            thread::sleep(Duration::from_millis(20));
            assert_eq!(
                host.atomic_u32(4).unwrap().load(Ordering::Acquire),
                0,
                "it has not waited"
            );
            host.atomic_u64(8).unwrap().store(1 << 40, Ordering::Release);
            host.atomic_u32(0).unwrap().store(6, Ordering::Release);
        });
        setting.stream.synchronize()
    })?;
    assert_eq!(host.atomic_u32(4)?.load(Ordering::Acquire), 77);
    if has_64 {
        assert_eq!(host.atomic_u64(16)?.load(Ordering::Acquire), u64::MAX);
    }

    let word = setting.device(&[0; 8])?;
    setting.stream.write_value32(word.span(4..)?, 0x0102_0304)?;
    assert_eq!(setting.read(&word)?[4..], 0x0102_0304u32.to_ne_bytes());
    setting.finish()
}

pub(super) fn dropped_in_flight(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    let bytes = pattern(1 << 20, 2);
    let mut back = HostMemory::alloc(&setting.context, bytes.len())?;
    // Everything is allocated first: allocating or freeing pinned memory may wait for the device.
    {
        let host = setting.host(&bytes)?;
        let one = DeviceMemory::alloc(&setting.context, bytes.len())?;
        let two = DeviceMemory::alloc(&setting.context, bytes.len())?;
        setting.keep_busy(200)?;
        setting.stream.copy(one.all(), host.all())?;
        setting.stream.copy(two.all(), one.all())?;
        setting.stream.copy(back.all(), two.all())?;
    }
    let waiting = setting.context.reap();
    assert!(
        waiting >= 3,
        "memory was freed while a copy was to come: only {waiting} things wait"
    );
    assert!(back.bytes_mut()? == bytes);
    setting.stream.synchronize()?;
    assert_eq!(setting.context.reap(), 0);

    // A stream used before many others is still tracked.
    let memory = setting.device(&bytes)?;
    let mut others = Vec::new();
    for _ in 0..12 {
        let target = DeviceMemory::alloc(&setting.context, bytes.len())?;
        others.push((Stream::new(&setting.context)?, target));
    }
    setting.stream.synchronize()?;
    setting.keep_busy(200)?;
    setting.stream.copy(back.all(), memory.all())?;
    for (other, target) in &others {
        other.copy(target.all(), memory.all())?;
        other.synchronize()?;
    }
    drop(memory);
    assert!(setting.context.reap() >= 1, "memory was freed while a copy was to come");
    assert!(back.bytes_mut()? == bytes);

    // Nor are dropped streams forgotten.
    let memory = setting.device(&bytes)?;
    setting.stream.synchronize()?;
    for _ in 0..20 {
        let stream = Stream::new(&setting.context)?;
        stream.copy(back.all(), memory.all())?;
    }
    drop(memory);
    setting.context.synchronize()?;
    assert_eq!(setting.context.reap(), 0);
    assert!(back.bytes_mut()? == bytes);
    setting.finish()
}

pub(super) fn slices_wait(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    let bytes = pattern(5000, 4);
    let memory = setting.device(&bytes)?;
    let mut host = HostMemory::alloc(&setting.context, bytes.len())?;
    setting.keep_busy(20)?;
    setting.stream.copy(host.all(), memory.all())?;
    let slice = host.bytes_mut()?;
    assert!(slice == bytes, "the slice was given before the copy was done");
    slice.fill(3);
    setting.stream.copy(memory.all(), host.all())?;
    assert!(setting.read(&memory)?.iter().all(|byte| *byte == 3));
    setting.finish()
}

pub(super) fn slices_are_of_the_last_handle(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    let mut host = HostMemory::alloc(&setting.context, 16)?;
    let other = host.clone();
    assert!(matches!(host.bytes_mut(), Err(Error::Shared)));
    drop(other);
    host.bytes_mut()?.fill(1);
    setting.finish().map(|_| Verdict::Passed)
}

pub(super) fn borrowed(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    let follower = Follower::new(&setting.context);
    let memory = DeviceMemory::alloc(&setting.context, 1 << 16)?;
    let mut host = HostMemory::alloc(&setting.context, 1 << 16)?;
    let end = Event::new(&setting.context)?;
    setting.keep_busy(200)?;
    // SAFETY: the setting keeps the stream.
    let stream = unsafe { Stream::borrow_raw(setting.stream.as_raw(), &follower)? };
    stream.fill(memory.all(), 7)?;
    stream.copy(host.all(), memory.all())?;
    stream.record_end(&end)?;
    // The kernel that keeps the stream busy.
    let others = setting.context.reap();
    drop((stream, memory));
    assert_eq!(
        setting.context.reap(),
        others + 1,
        "memory was freed while its work went on"
    );
    follower.synchronize()?;
    assert_eq!(setting.context.reap(), 0, "memory was kept when its work was done");
    assert!(host.bytes_mut()?.iter().all(|byte| *byte == 7));
    setting.finish()
}

pub(super) fn threads(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    let bytes = pattern(100_000, 11);
    let shared = setting.device(&bytes)?;
    setting.stream.synchronize()?;
    thread::scope(|scope| {
        let work = |seed: usize| -> Result<(), Error> {
            let own = Stream::new(&setting.context)?;
            let streams = [&own, &setting.stream];
            let mut back = HostMemory::alloc(&setting.context, bytes.len())?;
            for round in 0..30 {
                let stream = streams[(round + seed) % 2];
                let through = DeviceMemory::alloc(&setting.context, bytes.len())?;
                stream.copy(through.all(), shared.all())?;
                stream.copy(back.all(), through.all())?;
                drop(through);
                if round % 5 == seed {
                    assert!(back.bytes_mut()? == bytes);
                    back.bytes_mut()?.fill(0);
                }
            }
            Ok(())
        };
        let threads: Vec<_> = (0..4).map(|seed| scope.spawn(move || work(seed))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap())
    })?;
    setting.context.synchronize()?;
    setting.finish()
}
