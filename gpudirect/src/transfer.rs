//! Transfers to or from a staging buffer, in parts that complete one by one (pipelining).

use core::ops::Range;
use std::collections::VecDeque;

use doorbell_cuda::{Error, Event, Span, Stream};

/// Minimum length of a part but the last: below, a copy's overhead exceeds the gain.
const MIN_PART: usize = 512 << 10;
const MAX_PART: usize = 1 << 20;
/// Minimum parts of a split transfer, so that copying and sending overlap.
const MIN_PARTS: usize = 4;

/// A transfer in progress. It continues if dropped.
#[derive(Debug)]
#[must_use = "the bytes are there when it says so"]
pub struct Transfer {
    at: usize,
    /// The ends of the remaining parts with the event of each; `None` if it is complete already.
    parts: VecDeque<(usize, Option<Event>)>,
}

impl Transfer {
    pub(crate) fn done(offset: usize, len: usize) -> Self {
        Self {
            at: offset,
            parts: VecDeque::from([(offset + len, None)]),
        }
    }

    pub(crate) fn after(stream: &Stream, offset: usize, len: usize) -> Result<Self, Error> {
        let parts = VecDeque::from([(offset + len, Some(record_event(stream)?))]);
        Ok(Self { at: offset, parts })
    }

    pub(crate) fn copy(stream: &Stream, offset: usize, into: Span<'_>, from: Span<'_>) -> Result<Self, Error> {
        let len = from.len();
        let part = (len / MIN_PARTS).next_multiple_of(4096).clamp(MIN_PART, MAX_PART);
        let mut parts = VecDeque::with_capacity(len.div_ceil(part));
        for start in (0..len).step_by(part) {
            let end = len.min(start + part);
            stream.copy(into.span(start..end)?, from.span(start..end)?)?;
            parts.push_back((offset + end, Some(record_event(stream)?)));
        }
        Ok(Self { at: offset, parts })
    }

    /// The next part, as a range of the memory, if it is complete; `None` if it is not, and after
    /// the last ([`Transfer::is_taken`]).
    ///
    /// # Errors
    /// [`Lost`](Error::Lost) if GPU work has failed, or another driver error.
    pub fn ready(&mut self) -> Result<Option<Range<usize>>, Error> {
        match self.parts.front() {
            Some((_, Some(event))) if !event.is_done()? => Ok(None),
            _ => Ok(self.take()),
        }
    }

    /// Waits for the next part; `None` after the last.
    pub fn next_part(&mut self) -> Result<Option<Range<usize>>, Error> {
        if let Some((_, Some(event))) = self.parts.front() {
            event.synchronize()?;
        }
        Ok(self.take())
    }

    /// Whether all parts have been returned.
    #[must_use]
    pub fn is_taken(&self) -> bool {
        self.parts.is_empty()
    }

    /// Waits for all of it.
    pub fn wait(self) -> Result<(), Error> {
        // Stream order: the last part completes last.
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

fn record_event(stream: &Stream) -> Result<Event, Error> {
    let event = Event::new(stream.context())?;
    stream.record(&event)?;
    Ok(event)
}
