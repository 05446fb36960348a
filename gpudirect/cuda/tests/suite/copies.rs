//! Copies, and access to host memory.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use doorbell_cuda::{DeviceMemory, Driver, Error, HostMemory, Memory, Stream};

use super::{Outcome, Setting, Verdict, pattern};

pub(super) fn round_trip(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    for len in [1, 7, 4096, (1 << 20) + 13] {
        let bytes = pattern(len, len);
        let there = setting.device(&bytes)?;
        let elsewhere = DeviceMemory::alloc(&setting.context, len + 5)?;
        setting.stream.copy(elsewhere.span(5..)?, there.all())?;
        let host = HostMemory::alloc(&setting.context, len)?;
        let mut copy = HostMemory::alloc(&setting.context, len)?;
        setting.stream.copy(host.all(), elsewhere.span(5..)?)?;
        setting.stream.copy(copy.all(), host.all())?;
        assert!(copy.bytes_mut()? == bytes, "{len} bytes");
    }
    setting.finish()
}

pub(super) fn fills(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    let memory = DeviceMemory::alloc(&setting.context, 1000)?;
    setting.stream.fill(memory.all(), 7)?;
    setting.stream.fill(memory.span(10..=19)?, 9)?;
    setting.stream.fill(memory.span(500..500)?, 1)?;
    let bytes = setting.read(&memory)?;
    assert!(
        bytes
            .iter()
            .enumerate()
            .all(|(at, byte)| *byte == if (10..20).contains(&at) { 9 } else { 7 })
    );
    setting.finish()
}

pub(super) fn ranges_are_checked(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    let Setting { context, stream } = &setting;
    let memory = DeviceMemory::alloc(context, 100)?;
    let host = HostMemory::alloc(context, 100)?;
    assert!(
        memory.mapped_len() > memory.len(),
        "the device allocates by more than 100 bytes"
    );
    for bad in [memory.span(..101), memory.span(100..=100), memory.span(usize::MAX..)] {
        assert!(matches!(bad, Err(Error::OutOfBounds { len: 100, .. })), "{bad:?}");
    }
    #[expect(clippy::reversed_empty_ranges, reason = "that is what is refused")]
    let reversed = memory.span(50..10);
    assert!(matches!(reversed, Err(Error::OutOfBounds { .. })));
    let part = memory.span(40..60)?;
    assert!(matches!(part.span(..21), Err(Error::OutOfBounds { len: 20, .. })));
    assert_eq!(part.span(5..)?.device_ptr().0, memory.device_ptr().0 + 45);
    assert!(memory.span(100..)?.is_empty());

    let unequal = stream.copy(memory.all(), host.span(1..)?);
    assert!(
        matches!(unequal, Err(Error::Lengths { from: 99, into: 100 })),
        "{unequal:?}"
    );
    let overlapping = stream.copy(memory.span(..60)?, memory.span(40..)?);
    assert!(
        matches!(overlapping, Err(Error::Overlap { bytes: 60 })),
        "{overlapping:?}"
    );
    stream.copy(memory.span(..50)?, memory.span(50..)?)?;

    assert!(matches!(host.copy_in(90, &[0; 11]), Err(Error::OutOfBounds { .. })));
    assert!(matches!(
        host.copy_out(usize::MAX, &mut [0; 2]),
        Err(Error::OutOfBounds { .. })
    ));
    assert!(matches!(host.atomic_u64(96), Err(Error::OutOfBounds { .. })));
    assert!(matches!(host.atomic_u64(4), Err(Error::Misaligned { .. })));
    assert!(matches!(host.atomic_u32(6), Err(Error::Misaligned { .. })));
    assert!(matches!(
        stream.write_value64(memory.span(4..)?, 1),
        Err(Error::Misaligned { .. })
    ));
    assert!(matches!(
        stream.write_value32(memory.span(98..)?, 1),
        Err(Error::OutOfBounds { .. })
    ));

    assert!(matches!(DeviceMemory::alloc(context, 0), Err(Error::Empty)));
    assert!(matches!(HostMemory::alloc(context, 0), Err(Error::Empty)));
    assert!(matches!(
        DeviceMemory::alloc(context, usize::MAX),
        Err(Error::OutOfBounds { .. })
    ));
    let much = DeviceMemory::alloc(context, 1 << 45).unwrap_err();
    assert!(matches!(much, Error::OutOfMemory(_)), "{much}");
    setting.finish()
}

pub(super) fn peer_to_peer(driver: Driver) -> Outcome {
    let devices = driver.devices()?;
    let [one, two, ..] = devices[..] else {
        return Ok(Verdict::Skipped("one GPU".to_owned()));
    };
    if one.peer(two)?.is_none() {
        return Ok(Verdict::Skipped(format!("{one} does not reach {two}")));
    }
    let (here, there) = (Setting::new(driver)?, two.context()?);
    let bytes = pattern((4 << 20) + 3, 5);
    let from = here.device(&bytes)?;
    let pushed = DeviceMemory::options(&there).peers(&[one]).alloc(bytes.len())?;
    assert_eq!(pushed.device(), Some(two));
    here.stream.copy(pushed.all(), from.all())?;
    assert!(here.read(&pushed)? == bytes);

    // By a stream of the other device, from memory mapped for its own device alone.
    let stream = Stream::new(&there)?;
    let alone = DeviceMemory::alloc(&there, bytes.len())?;
    stream.copy(alone.all(), pushed.all())?;
    stream.synchronize()?;
    here.stream.fill(pushed.all(), 0)?;
    let back = DeviceMemory::options(&here.context).peers(&[two]).alloc(bytes.len())?;
    stream.copy_peer(back.all(), alone.all())?;
    stream.synchronize()?;
    assert!(here.read(&back)? == bytes);
    drop((pushed, alone, back));
    there.synchronize()?;
    here.finish()
}

pub(super) fn batches(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    let bytes = pattern(10_000, 3);
    let from = setting.device(&bytes)?;
    let into = DeviceMemory::alloc(&setting.context, bytes.len())?;
    let host = HostMemory::alloc(&setting.context, 1000)?;
    let mut copies = Vec::new();
    for at in (0..10_000).step_by(1000) {
        copies.push((into.span(9000 - at..10_000 - at)?, from.span(at..at + 1000)?));
    }
    copies.push((host.all(), from.span(2000..3000)?));
    copies.push((into.span(..0)?, from.span(..0)?));
    setting.stream.copy_batch(&copies)?;
    setting.stream.copy_batch(&copies[..1])?;
    setting.stream.copy_batch(&[])?;
    let got = setting.read(&into)?;
    for at in (0..10_000).step_by(1000) {
        assert!(got[9000 - at..10_000 - at] == bytes[at..at + 1000]);
    }
    assert!(setting.read(&host)? == bytes[2000..3000]);
    let bad = setting
        .stream
        .copy_batch(&[(into.span(..5)?, from.span(..5)?), (into.span(..5)?, from.span(..6)?)]);
    assert!(matches!(bad, Err(Error::Lengths { .. })), "{bad:?}");
    setting.finish()
}

pub(super) fn registered(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    let bytes = pattern(100_000, 8);
    let host = HostMemory::register(&setting.context, bytes.clone().into_boxed_slice())?;
    let there = DeviceMemory::alloc(&setting.context, bytes.len())?;
    setting.stream.copy(there.all(), host.all())?;
    assert!(setting.read(&there)? == bytes);

    let lent = Arc::new(pattern(8192, 9));
    let at = NonNull::from(lent.as_slice()).cast::<u8>();
    // SAFETY: the owner keeps this many bytes, which the copy below only reads.
    let raw = unsafe { HostMemory::register_raw(&setting.context, at, lent.len(), lent.clone())? };
    setting.stream.copy(there.span(..8192)?, raw.all())?;
    drop(raw);
    setting.stream.synchronize()?;
    assert_eq!(setting.context.reap(), 0);
    assert_eq!(
        Arc::strong_count(&lent),
        1,
        "the owner is let go of when the work is done"
    );
    assert!(setting.read(&there)?[..8192] == lent[..]);

    // SAFETY: as above; the first registration was released.
    let raw = unsafe { HostMemory::register_raw(&setting.context, at, lent.len(), lent.clone())? };
    let other = raw.clone();
    setting.stream.copy(there.span(8192..16384)?, raw.all())?;
    raw.free()?;
    assert_eq!(Arc::strong_count(&lent), 2, "there is another handle");
    other.free()?;
    assert_eq!(Arc::strong_count(&lent), 1, "the work that used it was waited for");
    assert!(setting.read(&there)?[8192..16384] == lent[..]);
    drop(host);
    setting.finish()
}

pub(super) fn bytes_and_words(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    let mut host = HostMemory::alloc(&setting.context, 300)?;
    assert!(host.bytes_mut()?.iter().all(|byte| *byte == 0));
    for offset in 0..17 {
        for len in [0, 1, 3, 8, 15, 16, 100] {
            let bytes = pattern(len, offset);
            host.copy_in(offset, &bytes)?;
            let mut back = vec![0xff; len];
            host.copy_out(offset, &mut back)?;
            assert_eq!(back, bytes, "{len} bytes at {offset}");
            assert!(host.bytes_mut()?[offset..offset + len] == bytes[..]);
        }
    }
    host.atomic_u32(8)?.store(0x0403_0201, Ordering::Relaxed);
    host.atomic_u64(16)?.store(u64::MAX, Ordering::Relaxed);
    let bytes = host.bytes_mut()?;
    assert_eq!(bytes[8..12], 0x0403_0201u32.to_ne_bytes());
    assert_eq!(bytes[16..24], [0xff; 8]);
    setting.finish()
}
