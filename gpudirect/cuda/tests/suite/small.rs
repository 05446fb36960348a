//! Short copies by a resident block.

use std::error::Error;

use doorbell_cuda::{Driver, Error as CudaError, Memory, SmallCopies, SmallSource, Span};

use super::{Outcome, Setting, pattern};

fn submit(copies: &mut SmallCopies, into: Span<'_>, from: SmallSource<'_>) -> Result<u64, Box<dyn Error>> {
    loop {
        // SAFETY: the callers keep the memory, which is of the device's own context or pinned,
        // until the command is done, and have no slice of it.
        if let Some(number) = unsafe { copies.copy(into, from)? } {
            return Ok(number);
        }
        copies.done()?;
    }
}

fn finish(copies: &mut SmallCopies, number: u64) -> Result<(), Box<dyn Error>> {
    while copies.done()? < number {
        std::thread::yield_now();
    }
    Ok(())
}

/// The block exits, and nothing of it is kept.
fn end(setting: Setting, copies: SmallCopies) -> Outcome {
    drop(copies);
    setting.context.synchronize()?;
    setting.finish()
}

/// Every length of a few words at every offset, and the maximum: no adjacent byte changes.
pub(crate) fn every_length(driver: Driver) -> Outcome {
    const LEN: usize = 2 * SmallCopies::MAX_BYTES;
    let setting = Setting::new(driver)?;
    let mut copies = SmallCopies::new(&setting.context)?;
    let source = setting.device(&pattern(LEN, 1))?;
    let pinned = setting.host(&pattern(LEN, 1))?;
    setting.stream.synchronize()?;
    let mut lengths: Vec<_> = (1..=20)
        .flat_map(|len| (0..8).map(move |at| (at, (3 * at) % 8, len)))
        .collect();
    lengths.extend([
        (8, 16, SmallCopies::MAX_BYTES),
        (0, 8, 2048),
        (4, 12, SmallCopies::MAX_UNALIGNED),
        (1, 2, SmallCopies::MAX_UNALIGNED),
    ]);
    for (into, from, len) in lengths {
        let target = setting.device(&pattern(LEN, 2))?;
        let back = setting.host(&pattern(LEN, 2))?;
        setting.stream.synchronize()?;
        // To device memory from itself, from pinned memory, and inline; to pinned memory.
        let sent = pattern(LEN, 1)[from..from + len].to_vec();
        let mut expected = pattern(LEN, 2);
        let mut places = vec![(into, SmallSource::Memory(source.span(from..from + len)?))];
        if len <= SmallCopies::MAX_UNALIGNED {
            places.push((into + 1024, SmallSource::Memory(pinned.span(from..from + len)?)));
        }
        if len <= SmallCopies::MAX_INLINE {
            places.push((into + 2048, SmallSource::Bytes(&sent)));
        }
        for (at, source) in places {
            expected[at..at + len].copy_from_slice(&sent);
            submit(&mut copies, target.span(at..at + len)?, source)?;
        }
        let source = SmallSource::Memory(source.span(from..from + len)?);
        let last = submit(&mut copies, back.span(into..into + len)?, source)?;
        finish(&mut copies, last)?;
        assert_eq!(setting.read(&target)?, expected, "{len} bytes from {from} to {into}");
        let mut expected = pattern(LEN, 2);
        expected[into..into + len].copy_from_slice(&sent);
        assert_eq!(
            setting.read(&back)?,
            expected,
            "{len} bytes from {from} to {into} of the host"
        );
    }
    end(setting, copies)
}

/// The ring wraps more often than there are lap numbers; each command sees earlier writes.
pub(crate) fn many(driver: Driver) -> Outcome {
    const LAPS: usize = 256 * 64;
    let setting = Setting::new(driver)?;
    let mut copies = SmallCopies::new(&setting.context)?;
    let memory = setting.device(&[0; 24])?;
    setting.stream.synchronize()?;
    for count in 0..LAPS as u64 {
        // Copies the word on, behind its arrival.
        submit(&mut copies, memory.span(..8)?, SmallSource::Bytes(&count.to_le_bytes()))?;
        let copied = submit(&mut copies, memory.span(8..16)?, SmallSource::Memory(memory.span(..8)?))?;
        if count % 61 == 0 {
            finish(&mut copies, copied)?;
            let mut words = setting.host(&[0; 16])?;
            setting.stream.copy(words.all(), memory.span(..16)?)?;
            setting.stream.synchronize()?;
            let expected = [count.to_le_bytes(), count.to_le_bytes()].concat();
            assert_eq!(words.bytes_mut()?.to_vec(), expected);
        }
    }
    let last = submit(
        &mut copies,
        memory.span(16..)?,
        SmallSource::Memory(memory.span(8..16)?),
    )?;
    assert_eq!(last, 2 * LAPS as u64 + 1);
    finish(&mut copies, last)?;
    assert_eq!(copies.done()?, last);
    let all = setting.read(&memory)?;
    assert_eq!(all, [(LAPS as u64 - 1).to_le_bytes(); 3].concat());
    end(setting, copies)
}

/// A cancelled command never executes, whenever the block starts; later commands do.
pub(crate) fn cancelled(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    let memory = setting.device(&pattern(16, 1))?;
    setting.stream.synchronize()?;
    let mut copies = SmallCopies::new(&setting.context)?;
    let mut before = pattern(16, 1)[..8].to_vec();
    for round in 0..50_u64 {
        let word = round.to_le_bytes();
        submit(&mut copies, memory.span(..8)?, SmallSource::Bytes(&pattern(8, 7)))?;
        let number = submit(&mut copies, memory.span(..8)?, SmallSource::Bytes(&word))?;
        let came = copies.wait(number)?;
        setting.context.synchronize()?;
        if came {
            before = word.to_vec();
        }
        assert_eq!(copies.done()?, number);
        assert_eq!(setting.read(&memory)?[..8], before, "round {round}");
    }
    end(setting, copies)
}

/// Unsupported and surplus copies are refused; dropped outstanding ones leave nothing behind.
pub(crate) fn refused_and_dropped(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    let memory = setting.device(&pattern(8 * SmallCopies::MAX_BYTES, 1))?;
    setting.stream.synchronize()?;
    let mut copies = SmallCopies::new(&setting.context)?;
    let most = SmallCopies::MAX_BYTES;
    let wrong = [
        (memory.span(..8)?, SmallSource::Memory(memory.span(8..24)?)),
        (
            memory.span(..most + 8)?,
            SmallSource::Memory(memory.span(most + 8..2 * most + 16)?),
        ),
        (
            memory.span(1..most)?,
            SmallSource::Memory(memory.span(most + 1..2 * most)?),
        ),
        (memory.span(..4)?, SmallSource::Bytes(&[0; 8])),
        (memory.span(..24)?, SmallSource::Bytes(&[0; 24])),
    ];
    for (into, from) in wrong {
        // SAFETY: nothing is copied.
        let refused = unsafe { copies.copy(into, from) };
        assert!(matches!(refused, Err(CudaError::Lengths { .. })), "{refused:?}");
    }
    for _ in 0..20 {
        let last = submit(&mut copies, memory.span(..8)?, SmallSource::Memory(memory.span(8..16)?))?;
        finish(&mut copies, last)?;
    }
    submit(
        &mut copies,
        memory.span(..8)?,
        SmallSource::Memory(memory.span(16..24)?),
    )?;
    drop(copies);
    setting.context.synchronize()?;
    assert_eq!(setting.read(&memory)?[..8], pattern(24, 1)[16..]);
    setting.finish()
}
