//! Short copies of GPUs' memory: by a block of the device that copies to, or from, instead of a copy engine ([`SmallCopies`]).
//!
//! An engine's copy of 8 bytes takes as long as one of 256 KiB, most of it calls. All copies that are begun together are done in one of the two ways, and the other way begins when those are over: there is no order between them.

use std::slice;
use std::sync::Arc;

use doorbell_cuda::{Context, Error, HostMemory, Memory as _, SmallCopies, SmallSource, Span};

use super::claim::{Claim, claim};
use super::copies::{End, Move};
use super::cuda::{Mark, Memory};

/// The most short copies that are begun together: they are done one after another.
const TOGETHER: usize = 16;

/// What does short copies for a device; `None` where it could not be made, or another process does so on that device.
pub(crate) type Short = (Context, Option<Block>);

/// Short copies, and the claim on the device for them.
#[derive(Debug)]
pub(crate) struct Block {
    pub(super) copies: SmallCopies,
    _claim: Arc<Claim>,
}

/// Makes what does short copies for the device of some memory, which takes tens of milliseconds: where nobody waits.
pub(crate) fn make_short(memory: &Memory) -> Short {
    let context = memory.context();
    let device = context.device();
    let Some(claim) = claim(device) else {
        tracing::debug!("short copies of {device} go by its copy engines: another process does them by blocks");
        return (context.clone(), None);
    };
    let made = SmallCopies::new(context).inspect_err(|error| {
        tracing::warn!("short copies of {device} go by its copy engines: {error}");
    });
    let block = made.ok().map(|copies| Block { copies, _claim: claim });
    (context.clone(), block)
}

/// Those of each device of which memory was registered.
#[derive(Debug, Default)]
pub(super) struct Shorts(Vec<Short>);

/// A copy as a device does it.
struct Found<'a> {
    place: usize,
    into: Span<'a>,
    from: SmallSource<'a>,
}

impl Shorts {
    /// Whether it is known how those of some memory's device are done.
    pub(super) fn has(&self, memory: &Memory) -> bool {
        self.0.iter().any(|(known, _)| known == memory.context())
    }

    /// Has those of a device done so from now on.
    pub(super) fn add(&mut self, short: Short) {
        // Two threads may have made one at once.
        if self.0.iter().all(|(known, _)| *known != short.0) {
            self.0.push(short);
        }
    }

    /// How a copy is done as a short one; `None` where it is none.
    fn find<'a>(&self, Move { into, from, len }: &'a Move, ring: Option<&'a HostMemory>) -> Option<Found<'a>> {
        let (one, other) = (memory(into), memory(from));
        let context = one.or(other)?.context();
        if one.into_iter().chain(other).any(|memory| memory.context() != context) {
            // Kernels of the one do not reach the other as its copies do.
            return None;
        }
        let place = self
            .0
            .iter()
            .position(|(known, block)| known == context && block.as_ref().is_some_and(is_free))?;
        let (to, source) = (span(into, *len, ring)?, span(from, *len, ring)?);
        if !SmallCopies::takes(to, source) {
            return None;
        }
        let from = match (from, ring) {
            (End::Ring(at), Some(ring)) if *len <= SmallCopies::MOST_INLINE => {
                // SAFETY: the span above lies in the ring, where what is to be copied was written, and nothing else is until it has been.
                SmallSource::Bytes(unsafe { slice::from_raw_parts(ring.as_ptr().add(*at), *len) })
            }
            _ => SmallSource::Memory(source),
        };
        Some(Found { place, into: to, from })
    }

    /// Whether all of some copies are short ones of one device, and not too many.
    pub(super) fn take(&self, moves: &[Move], ring: Option<&HostMemory>) -> bool {
        let mut places = moves
            .iter()
            .map(|wanted| self.find(wanted, ring).map(|found| found.place));
        let Some(Some(first)) = places.next() else {
            return false;
        };
        moves.len() <= TOGETHER && places.all(|place| place == Some(first))
    }

    /// Begins copies that it [takes](Self::take). The memory is to be kept until they are done.
    ///
    /// # Errors
    /// What the driver says.
    pub(super) fn copy(
        &mut self,
        moves: &[Move],
        ring: Option<&HostMemory>,
        marks: &mut Vec<Mark>,
    ) -> Result<(), Error> {
        for wanted in moves {
            let Some(Found { place, into, from }) = self.find(wanted, ring) else {
                continue;
            };
            let Some((_, Some(Block { copies, .. }))) = self.0.get_mut(place) else {
                continue;
            };
            let number = loop {
                // SAFETY: the caller keeps the memory, which kernels of its context reach: it is of that context, or imported for its device, or pinned.
                if let Some(number) = unsafe { copies.copy(into, from)? } {
                    break number;
                }
                copies.done()?;
            };
            marks.clear();
            marks.push(Mark::Short(place, number));
        }
        Ok(())
    }

    /// Takes those back that these marks are of, where their device has not begun them for long: which device's.
    pub(super) fn take_back(&mut self, marks: &[Mark]) -> Option<usize> {
        let place = marks.iter().find_map(|mark| match mark {
            Mark::Short(place, _) => Some(*place),
            Mark::Event(_) => None,
        })?;
        let (_, block) = self.0.get_mut(place)?;
        block.as_mut()?.copies.take_back().unwrap_or(false).then_some(place)
    }

    /// Whether a device's copies are done up to a number.
    ///
    /// # Errors
    /// What the driver says.
    pub(super) fn is_done(&mut self, place: usize, number: u64) -> Result<bool, Error> {
        match self.0.get_mut(place) {
            Some((_, Some(block))) => Ok(block.copies.done()? >= number),
            _ => Ok(true),
        }
    }
}

fn is_free(block: &Block) -> bool {
    block.copies.is_free().unwrap_or(false)
}

fn memory(end: &End) -> Option<&Memory> {
    match end {
        End::Device(memory, _) => Some(memory),
        End::Ring(_) | End::Host(..) => None,
    }
}

fn span<'a>(end: &'a End, len: usize, ring: Option<&'a HostMemory>) -> Option<Span<'a>> {
    match end {
        End::Device(memory, at) => memory.span(*at, len).ok(),
        End::Ring(at) => ring?.span(*at..at.saturating_add(len)).ok(),
        // Such copies are long.
        End::Host(..) => None,
    }
}
