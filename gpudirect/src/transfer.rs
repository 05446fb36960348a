//! Getting bytes to where an adapter, or a GPU, finds them: in parts, each of which is waited for by itself.

use core::ops::Range;
use std::collections::VecDeque;

use doorbell_cuda::{Error, Event, Span, Stream};

/// Parts are no shorter, but the last: below, the copies' own beginning and end cost more than their beginning sooner saves.
const SHORTEST: usize = 512 << 10;
/// Parts are no longer.
const LONGEST: usize = 1 << 20;
/// What is cut is cut into so many parts at least, so that copying and sending overlap.
const SLOTS: usize = 4;

/// Bytes on their way. Dropped, it goes on.
#[derive(Debug)]
#[must_use = "the bytes are there when it says so"]
pub struct Transfer {
    /// Where the part not yet taken begins.
    at: usize,
    /// The ends of the parts not yet taken, and when each is there; `None` is now.
    parts: VecDeque<(usize, Option<Event>)>,
}

impl Transfer {
    /// Nothing to do.
    pub(crate) fn done(offset: usize, len: usize) -> Self {
        Self {
            at: offset,
            parts: VecDeque::from([(offset + len, None)]),
        }
    }

    /// Nothing to do but what is in the stream.
    pub(crate) fn after(stream: &Stream, offset: usize, len: usize) -> Result<Self, Error> {
        let parts = VecDeque::from([(offset + len, Some(mark(stream)?))]);
        Ok(Self { at: offset, parts })
    }

    /// A copy, part by part.
    pub(crate) fn copy(stream: &Stream, offset: usize, into: Span<'_>, from: Span<'_>) -> Result<Self, Error> {
        let len = from.len();
        let part = (len / SLOTS).next_multiple_of(4096).clamp(SHORTEST, LONGEST);
        let mut parts = VecDeque::with_capacity(len.div_ceil(part));
        for start in (0..len).step_by(part) {
            let end = len.min(start + part);
            stream.copy(into.span(start..end)?, from.span(start..end)?)?;
            parts.push_back((offset + end, Some(mark(stream)?)));
        }
        Ok(Self { at: offset, parts })
    }

    /// The next part that is there, as a range of the memory; `None` when the next one is not yet, and when all have been taken ([`Transfer::is_taken`]).
    ///
    /// # Errors
    /// [`Lost`](Error::Lost) when work of the GPU has failed, or what its driver says otherwise.
    pub fn ready(&mut self) -> Result<Option<Range<usize>>, Error> {
        match self.parts.front() {
            Some((_, Some(event))) if !event.is_done()? => Ok(None),
            _ => Ok(self.take()),
        }
    }

    /// Waits for the next part; `None` when all have been taken.
    ///
    /// # Errors
    /// As [`Transfer::ready`].
    pub fn next_part(&mut self) -> Result<Option<Range<usize>>, Error> {
        if let Some((_, Some(event))) = self.parts.front() {
            event.synchronize()?;
        }
        Ok(self.take())
    }

    /// Whether all parts have been taken.
    #[must_use]
    pub fn is_taken(&self) -> bool {
        self.parts.is_empty()
    }

    /// Waits for all of it.
    ///
    /// # Errors
    /// As [`Transfer::ready`].
    pub fn wait(self) -> Result<(), Error> {
        // A stream goes in order: the last part is there when all are.
        match self.parts.back() {
            Some((_, Some(event))) => event.synchronize(),
            _ => Ok(()),
        }
    }

    fn take(&mut self) -> Option<Range<usize>> {
        let (end, _) = self.parts.pop_front()?;
        let start = std::mem::replace(&mut self.at, end);
        Some(start..end)
    }
}

/// An event behind all that is in the stream.
fn mark(stream: &Stream) -> Result<Event, Error> {
    let event = Event::new(stream.context())?;
    stream.record(&event)?;
    Ok(event)
}
