//! The requester's part of each operation on one queue pair: staging a work request, and reclaiming
//! its buffer on completion.

use std::sync::atomic::Ordering;

use doorbell_verbs::{
    AtomicAccess, AtomicWord, Batch, Buffer, Completion, Connected, PeerWrite, ReadAccess, Reliable, Remote, Source,
    WriteAccess,
};

use super::gpu::Content;
use super::message::{Cursor, Cycle, DataError, Sinks, Sources, content_before};
use super::transport::TestTransport;
use crate::cli::AtomicOperation;

/// A message to be staged.
pub(crate) struct Message<'d, T: TestTransport> {
    pub(crate) to: &'d T::Destination,
    pub(crate) index: u64,
    /// Its payload, where messages are sent inline.
    pub(crate) inline: Option<&'d [u8]>,
    pub(crate) signal: bool,
}

pub(crate) trait Requester<T: TestTransport> {
    /// Messages that may have been posted in all by now, by the peer's credits.
    #[inline]
    fn allowance(&self) -> u64 {
        u64::MAX
    }

    /// Writes the payload of message `index`, where inline messages differ.
    fn payload(&self, _index: u64, _into: &mut [u8]) {}

    /// Adds a message to a post list. A buffer is always free, as at most a window of messages is
    /// in flight.
    fn stage<'d>(&mut self, batch: &mut Batch<'_, 'd, T>, message: Message<'d, T>);

    /// Ends a list with the requests that [`PostParams`](super::bw::PostParams) leaves room for;
    /// `posted` is the number of messages posted with it, little-endian.
    fn end_list<'d>(&mut self, _batch: &mut Batch<'_, 'd, T>, _posted: &'d [u8; 8], _signal: bool) {}

    /// Reclaims the buffer of a completed request and checks its content.
    ///
    /// # Errors
    /// The first wrong byte of a verified message; an error of the GPU.
    fn retire(&mut self, done: Completion<'_>) -> Result<(), DataError>;

    /// The messages that the peer has confirmed, where those count and not the completed ones.
    fn confirmed(&self) -> Option<u64> {
        None
    }
}

/// The operation that carries a message: WRITE or SEND.
pub(crate) trait MessageOp<T: TestTransport> {
    fn post<'d>(&mut self, batch: &mut Batch<'_, 'd, T>, to: &'d T::Destination, message: impl Source, signal: bool);

    fn inline<'d>(&mut self, batch: &mut Batch<'_, 'd, T>, to: &'d T::Destination, bytes: &'d [u8], signal: bool);

    fn end_list<'d>(&mut self, _batch: &mut Batch<'_, 'd, T>, _posted: &'d [u8; 8], _signal: bool) {}
}

#[derive(Debug)]
pub(crate) struct WriteOp {
    target: Remote<WriteAccess>,
    cursor: Cursor,
    /// The peer's word for the number of messages, written after each list.
    notice: Option<Remote<WriteAccess>>,
}

impl WriteOp {
    pub(crate) fn new(target: Remote<WriteAccess>, cycle: Cycle, notice: Option<Remote<WriteAccess>>) -> WriteOp {
        WriteOp {
            target,
            cursor: Cursor::new(cycle),
            notice,
        }
    }

    #[inline]
    fn next(&mut self) -> Option<Remote<WriteAccess>> {
        self.target.slice(self.cursor.advance(), self.cursor.bytes())
    }
}

impl<T: TestTransport + Connected> MessageOp<T> for WriteOp {
    #[inline]
    fn post<'d>(&mut self, batch: &mut Batch<'_, 'd, T>, _: &'d T::Destination, message: impl Source, signal: bool) {
        if let Some(target) = self.next() {
            batch.write(message, target).signaled_if(signal);
        }
    }

    #[inline]
    fn inline<'d>(&mut self, batch: &mut Batch<'_, 'd, T>, _: &'d T::Destination, bytes: &'d [u8], signal: bool) {
        if let Some(target) = self.next() {
            batch.write_inline(bytes, target).signaled_if(signal);
        }
    }

    #[inline]
    fn end_list<'d>(&mut self, batch: &mut Batch<'_, 'd, T>, posted: &'d [u8; 8], signal: bool) {
        if let Some(notice) = self.notice {
            batch.write_inline(posted, notice).signaled_if(signal);
        }
    }
}

/// A WRITE with its number as immediate data, which completes a receive of the peer.
#[derive(Debug)]
pub(crate) struct WriteImmOp {
    target: Remote<WriteAccess>,
    next: u32,
}

impl WriteImmOp {
    pub(crate) fn new(target: Remote<WriteAccess>) -> WriteImmOp {
        WriteImmOp { target, next: 0 }
    }

    #[inline]
    fn imm(&mut self) -> u32 {
        let imm = self.next;
        self.next = self.next.wrapping_add(1);
        imm
    }
}

impl<T: TestTransport + Connected> MessageOp<T> for WriteImmOp {
    #[inline]
    fn post<'d>(&mut self, batch: &mut Batch<'_, 'd, T>, _: &'d T::Destination, message: impl Source, signal: bool) {
        let imm = self.imm();
        batch.write(message, self.target).imm(imm).signaled_if(signal);
    }

    #[inline]
    fn inline<'d>(&mut self, batch: &mut Batch<'_, 'd, T>, _: &'d T::Destination, bytes: &'d [u8], signal: bool) {
        let imm = self.imm();
        batch.write_inline(bytes, self.target).imm(imm).signaled_if(signal);
    }
}

#[derive(Debug)]
pub(crate) struct SendOp {
    /// The number of the next message, where they carry it as immediate data.
    next: Option<u32>,
}

impl SendOp {
    pub(crate) fn new(is_numbered: bool) -> SendOp {
        SendOp {
            next: is_numbered.then_some(0),
        }
    }

    #[inline]
    fn imm(&mut self) -> Option<u32> {
        let imm = self.next?;
        self.next = Some(imm.wrapping_add(1));
        Some(imm)
    }
}

impl<T: TestTransport> MessageOp<T> for SendOp {
    #[inline]
    fn post<'d>(&mut self, batch: &mut Batch<'_, 'd, T>, to: &'d T::Destination, message: impl Source, signal: bool) {
        T::send(batch, to, message, self.imm(), signal);
    }

    #[inline]
    fn inline<'d>(&mut self, batch: &mut Batch<'_, 'd, T>, to: &'d T::Destination, bytes: &'d [u8], signal: bool) {
        T::send_inline(batch, to, bytes, self.imm(), signal);
    }
}

/// Flow control by the peer: it writes to a word of this end how many messages it is done with, and
/// this end sends at most as many more as the peer has slots.
#[derive(Debug)]
pub(crate) struct Credits {
    pub(crate) word: Buffer<PeerWrite>,
    pub(crate) slots: u64,
    /// Whether a message is done when the peer says so, not when it completes.
    pub(crate) confirm: bool,
}

impl Credits {
    #[inline]
    fn count(&self) -> u64 {
        u64::from_le(self.word.load_u64(0, Ordering::Acquire))
    }
}

/// Sends messages by WRITE or SEND.
#[derive(Debug)]
pub(crate) struct MessageRequester<O> {
    pub(crate) op: O,
    pub(crate) sources: Sources,
    pub(crate) credits: Option<Credits>,
}

impl<T: TestTransport, O: MessageOp<T>> Requester<T> for MessageRequester<O> {
    #[inline]
    fn allowance(&self) -> u64 {
        match &self.credits {
            Some(credits) => credits.count().saturating_add(credits.slots),
            None => u64::MAX,
        }
    }

    fn payload(&self, index: u64, into: &mut [u8]) {
        if let Sources::Inline(Some(payloads)) = &self.sources {
            payloads.of(index).fill(into);
        }
    }

    #[inline]
    fn stage<'d>(&mut self, batch: &mut Batch<'_, 'd, T>, message: Message<'d, T>) {
        let Message {
            to,
            index,
            inline,
            signal,
        } = message;
        if let Some(bytes) = inline {
            self.op.inline(batch, to, bytes, signal);
            return;
        }
        match &mut self.sources {
            Sources::Frozen(free) => {
                if let Some(buffer) = free.pop() {
                    self.op.post(batch, to, buffer, signal);
                }
            }
            Sources::Verified(free, payloads) => {
                if let Some(mut buffer) = free.pop() {
                    payloads.of(index).fill(&mut buffer);
                    self.op.post(batch, to, buffer, signal);
                }
            }
            Sources::Gpu(pool, payloads) => {
                let content = payloads.map_or(Content::Any, |payloads| Content::Pattern(payloads.of(index)));
                if let Some(buffer) = pool.take(content) {
                    self.op.post(batch, to, buffer, signal);
                }
            }
            Sources::Inline(_) => {}
        }
    }

    #[inline]
    fn end_list<'d>(&mut self, batch: &mut Batch<'_, 'd, T>, posted: &'d [u8; 8], signal: bool) {
        self.op.end_list(batch, posted, signal);
    }

    #[inline]
    fn retire(&mut self, done: Completion<'_>) -> Result<(), DataError> {
        self.sources.reclaim(done)
    }

    #[inline]
    fn confirmed(&self) -> Option<u64> {
        self.credits
            .as_ref()
            .filter(|credits| credits.confirm)
            .map(Credits::count)
    }
}

#[derive(Debug)]
pub(crate) struct ReadRequester {
    source: Remote<ReadAccess>,
    cursor: Cursor,
    free: Sinks,
}

impl ReadRequester {
    pub(crate) fn new(source: Remote<ReadAccess>, cycle: Cycle, free: Sinks) -> ReadRequester {
        ReadRequester {
            source,
            cursor: Cursor::new(cycle),
            free,
        }
    }
}

impl<T: TestTransport + Reliable> Requester<T> for ReadRequester {
    #[inline]
    fn stage<'d>(&mut self, batch: &mut Batch<'_, 'd, T>, message: Message<'d, T>) {
        let Message { index, signal, .. } = message;
        let Some(source) = self.source.slice(self.cursor.advance(), self.cursor.bytes()) else {
            return;
        };
        match &mut self.free {
            Sinks::Scratch(free) => {
                if let Some(buffer) = free.pop() {
                    batch.read(buffer, source).signaled_if(signal);
                }
            }
            Sinks::Verified(free, payloads) => {
                if let Some(mut buffer) = free.pop() {
                    payloads.of(index).fill_inverse(&mut buffer);
                    batch.read(buffer, source).signaled_if(signal);
                }
            }
            Sinks::Gpu(pool, payloads) => {
                if let Some(buffer) = pool.take(content_before(*payloads, index)) {
                    batch.read(buffer, source).signaled_if(signal);
                }
            }
        }
    }

    #[inline]
    fn retire(&mut self, done: Completion<'_>) -> Result<(), DataError> {
        self.free.reclaim(done)
    }
}

/// Fetch-and-add of one, or compare-and-swap of message i's number by the next.
#[derive(Debug)]
pub(crate) struct AtomicRequester {
    target: Remote<AtomicAccess>,
    cursor: Cursor,
    operation: AtomicOperation,
    free: Vec<AtomicWord>,
    /// Whether the values that they return are checked to be 0, 1, 2, …: atomics on one queue pair
    /// are executed in order, so they are on one word.
    verify: bool,
}

impl AtomicRequester {
    /// Requests for the words at the beginning of the slots of `cycle`; none if the target is not
    /// aligned.
    pub(crate) fn new(
        target: Remote<AtomicAccess>,
        cycle: Cycle,
        operation: AtomicOperation,
        free: Vec<AtomicWord>,
        verify: bool,
    ) -> Option<AtomicRequester> {
        target.word(0)?;
        Some(AtomicRequester {
            target,
            cursor: Cursor::new(cycle),
            operation,
            free,
            verify,
        })
    }
}

impl<T: TestTransport + Reliable> Requester<T> for AtomicRequester {
    #[inline]
    fn stage<'d>(&mut self, batch: &mut Batch<'_, 'd, T>, message: Message<'d, T>) {
        let Message { index, signal, .. } = message;
        let (Some(target), Some(mut word)) = (self.target.word(self.cursor.advance()), self.free.pop()) else {
            return;
        };
        if self.verify {
            word.set(u64::MAX);
        }
        match self.operation {
            AtomicOperation::FetchAdd => {
                batch.fetch_add(word, target, 1).signaled_if(signal);
            }
            AtomicOperation::CompareSwap => {
                batch.compare_swap(word, target, index, index + 1).signaled_if(signal);
            }
        }
    }

    #[inline]
    fn retire(&mut self, mut done: Completion<'_>) -> Result<(), DataError> {
        let iteration = done.sequence();
        let Some(word) = done.take_word() else { return Ok(()) };
        let found = word.get();
        self.free.push(word);
        if self.verify && found != iteration {
            return Err(DataError::Value {
                iteration,
                expected: iteration,
                found,
            });
        }
        Ok(())
    }
}
