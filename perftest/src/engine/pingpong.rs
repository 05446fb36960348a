//! One end of a ping-pong: it sends a message, and waits for the peer's.
//!
//! The receiver of a WRITE polls the last byte, which counts (modulo 256) and is written last. The
//! CPU cannot poll GPU memory: where messages lie there, at either end, a WRITE carries immediate
//! data, and its receive completion is polled as that of a SEND is.

use std::sync::atomic::Ordering;

use doorbell_verbs::{Buffer, Completion, Local, Opaque, PeerWrite, QueueKind, Success};

use super::gpu::{Content, GpuMessages, GpuPool};
use super::lat::Trips;
use super::message::Payloads;
use super::pattern::{Mismatch, Pattern};
use super::receiver::Receiver;
use super::requester::MessageOp;
use super::test_end::{TestEnd, TestQp, completions};
use super::transport::TestTransport;
use crate::failure::Failure;

/// Buffers per direction: the completion of a message may arrive after its answer.
pub(crate) const BUFFERS: u32 = 8;

/// What differs between the native tests and the classic ones.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PingPongParams {
    /// One message in so many is signaled, a power of two; and any that takes the last free buffer.
    pub(crate) signal_every: u64,
    /// Whether memory is not polled until what was sent has completed.
    pub(crate) complete_first: bool,
    /// Polls of memory at a time.
    pub(crate) polls: u32,
    /// Times that memory is polled before the completion queue is, a power of two.
    pub(crate) times: u32,
    /// Whether to sleep on the completion channel instead of polling.
    pub(crate) sleeps: bool,
    /// What is added to the error of a wrong length.
    pub(crate) advice: &'static str,
}

/// The buffers to send from that no request uses.
#[derive(Debug)]
pub(crate) enum SendBuffers {
    Host {
        free: Vec<Buffer<Local>>,
        /// Messages of up to this length are sent inline, from here.
        inline: Vec<u8>,
    },
    Gpu(Box<GpuPool>),
}

/// The memory that the peer writes to.
#[derive(Debug)]
pub(crate) enum Written {
    Nothing,
    Host(Buffer<PeerWrite>),
    Gpu(Box<GpuMessages>, Buffer<Opaque<PeerWrite>>),
}

#[derive(Debug)]
pub(crate) struct PingPongMemory<O> {
    pub(crate) op: O,
    pub(crate) out: SendBuffers,
    /// Receives, posted already; none where a written byte is polled.
    pub(crate) receiver: Option<Receiver>,
    pub(crate) written: Written,
    /// With `--verify`, the payloads sent and those to be received.
    pub(crate) payloads: Option<[Payloads; 2]>,
}

/// The last byte of a written message: never that of the previous one, and not 0 at first.
#[inline]
fn flag(index: u64) -> u8 {
    (index.wrapping_add(1) & 0xff) as u8
}

#[derive(Debug)]
pub(crate) struct PingPong<'a, T: TestTransport, O> {
    end: &'a mut TestEnd<T>,
    memory: &'a mut PingPongMemory<O>,
    params: PingPongParams,
    bytes: usize,
    /// Free send queue slots of an idle queue pair.
    depth: u32,
    /// Messages received and not yet consumed.
    arrived: u64,
    polled: u32,
    /// A copy of a verified message.
    scratch: Vec<u8>,
}

impl<'a, T: TestTransport, O: MessageOp<T>> PingPong<'a, T, O> {
    /// Messages of `bytes` on the first queue pair of `end`.
    pub(crate) fn new(
        end: &'a mut TestEnd<T>,
        memory: &'a mut PingPongMemory<O>,
        params: PingPongParams,
        bytes: usize,
    ) -> PingPong<'a, T, O> {
        PingPong {
            depth: end.qps[0].qp.free_send_slots(),
            scratch: vec![0; if memory.payloads.is_some() { bytes } else { 0 }],
            end,
            memory,
            params,
            bytes,
            arrived: 0,
            polled: 0,
        }
    }

    /// Sets the message size, which only grows: no earlier message was as long, so its last byte is
    /// still 0.
    pub(crate) fn resize(&mut self, bytes: usize) {
        self.bytes = bytes;
    }

    /// Whether all sends have completed: sent, or on a reliable transport acknowledged.
    pub(crate) fn is_drained(&mut self) -> Result<bool, Failure> {
        if self.end.qps[0].qp.free_send_slots() < self.depth {
            self.poll()?;
        }
        Ok(self.end.qps[0].qp.free_send_slots() == self.depth)
    }

    #[inline]
    fn poll_memory(&mut self, index: u64) -> Result<bool, Failure> {
        if self.params.complete_first && !self.is_drained()? {
            return Ok(false);
        }
        if let Written::Host(written) = &self.memory.written {
            for _ in 0..self.params.polls {
                if written.load_u8(self.bytes - 1, Ordering::Acquire) == flag(index) {
                    return Ok(true);
                }
            }
        }
        self.polled = self.polled.wrapping_add(1);
        if self.polled & (self.params.times - 1) == 0 {
            self.poll()?;
        }
        Ok(false)
    }

    #[inline]
    fn poll(&mut self) -> Result<(), Failure> {
        let TestEnd { cq, qps, .. } = &mut *self.end;
        let test_qp = &qps[0];
        for done in completions(cq, self.params.sleeps)? {
            let success = done.result().map_err(|failure| test_qp.failed(&failure))?;
            if done.queue() == QueueKind::Send {
                reclaim(&mut self.memory.out, done);
                continue;
            }
            let (Success::Receive { len, .. } | Success::ReceiveWrite { len, .. }) = success else {
                continue;
            };
            let (came, belong) = (u64::from(len).saturating_sub(T::HEADER), self.bytes as u64);
            if came != belong {
                let (peer, advice) = (&test_qp.peer, self.params.advice);
                return Err(Failure::test(format!(
                    "{peer} sent {came} bytes instead of {belong}{advice}"
                )));
            }
            if let Some(receiver) = &mut self.memory.receiver {
                receiver
                    .retire(done)
                    .map_err(|error| error.into_failure(&test_qp.peer))?;
            }
            self.arrived += 1;
        }
        Ok(())
    }

    /// What the peer has written: with `--verify` checks and inverts it; else makes it visible to
    /// the GPU whose memory it is in.
    #[inline]
    fn verify_arrived(&mut self, index: u64) -> Result<(), Failure> {
        match (&self.memory.payloads, &mut self.memory.written) {
            (_, Written::Nothing) | (None, Written::Host(_)) => Ok(()),
            (None, Written::Gpu(messages, _)) => messages.pull(0),
            (Some([_, received]), _) => {
                let (payload, next) = (received.of(index), received.of(index + 1));
                self.check_written(index, payload, next)
            }
        }
    }

    #[cold]
    fn check_written(&mut self, index: u64, payload: Pattern, next: Pattern) -> Result<(), Failure> {
        let PingPongMemory { receiver, written, .. } = &mut *self.memory;
        let message = &mut self.scratch;
        match written {
            Written::Nothing => {}
            Written::Host(written) => written.read_at(0, message),
            Written::Gpu(messages, _) => messages.read(0, message)?,
        }
        let bytes = message.len() as u64;
        // The last byte of a polled message is the flag, which stays.
        let polled = receiver.is_none();
        if let (Some(last), true) = (message.last_mut(), polled) {
            *last = payload.last_byte(bytes);
        }
        let wrong = payload.check(message);
        next.fill_inverse(message);
        if let (Some(last), true) = (message.last_mut(), polled) {
            *last = flag(index);
        }
        match written {
            Written::Nothing => {}
            Written::Host(written) => written.write_at(0, message),
            Written::Gpu(messages, _) => messages.write(0, message)?,
        }
        match wrong {
            Some(wrong) => {
                let mismatch = Mismatch::at(bytes, 0, index, wrong);
                Err(Failure::test(format!("{}: {mismatch}", self.end.qps[0].peer)))
            }
            None => Ok(()),
        }
    }
}

impl<T: TestTransport, O: MessageOp<T>> Trips for PingPong<'_, T, O> {
    #[inline]
    fn is_ready(&mut self) -> Result<bool, Failure> {
        let has_free = match &self.memory.out {
            SendBuffers::Host { free, inline } => self.bytes <= inline.len() || !free.is_empty(),
            SendBuffers::Gpu(pool) => pool.len() > 0,
        };
        if has_free && self.end.qps[0].qp.free_send_slots() > 0 {
            return Ok(true);
        }
        self.poll().map(|()| false)
    }

    #[inline]
    fn send(&mut self, index: u64, last: bool) -> Result<(), Failure> {
        let TestEnd { qps, shared, .. } = &mut *self.end;
        let PingPongMemory {
            op,
            out,
            receiver,
            payloads,
            ..
        } = &mut *self.memory;
        let bytes = self.bytes;
        let signal = last || index & (self.params.signal_every - 1) == self.params.signal_every - 1;
        let payload = payloads.map(|[sent, _]| sent.of(index));
        let fill = |message: &mut [u8], polled: bool| {
            if let Some(payload) = payload {
                payload.fill(message);
            }
            if polled {
                message[bytes - 1] = flag(index);
            }
        };
        let test_qp = &mut qps[0];
        let TestQp { qp, to, .. } = &mut *test_qp;
        let to = &*to;
        let posted = match out {
            SendBuffers::Host { inline, .. } if bytes <= inline.len() => {
                let message = &mut inline[..bytes];
                fill(message, receiver.is_none());
                let message = &*message;
                qp.post(|batch| op.inline(batch, to, message, signal))
            }
            SendBuffers::Host { free, .. } => {
                let Some(mut message) = free.pop() else {
                    return Ok(());
                };
                fill(&mut message[..bytes], receiver.is_none());
                let signal = signal || free.is_empty();
                qp.post(|batch| op.post(batch, to, message.part(..bytes), signal))
            }
            SendBuffers::Gpu(pool) => {
                let Some(message) = pool.take(payload.map_or(Content::Any, Content::Pattern)) else {
                    return Ok(());
                };
                if let Some(failure) = pool.take_error() {
                    return Err(failure);
                }
                let signal = signal || pool.len() == 0;
                qp.post(|batch| op.post(batch, to, message, signal))
            }
        };
        posted.map_err(|e| test_qp.refused(&e))?;
        // After the answer is posted: other receives are still available.
        match receiver {
            Some(receiver) => receiver.post(test_qp, shared.as_mut()),
            None => Ok(()),
        }
    }

    #[cold]
    fn lost(&self, index: u64) -> Failure {
        self.end.qps[0].lost(index)
    }

    #[inline]
    fn has_arrived(&mut self, index: u64) -> Result<bool, Failure> {
        let come = if self.memory.receiver.is_some() {
            if self.arrived == 0 {
                self.poll()?;
            }
            let come = self.arrived > 0;
            self.arrived -= u64::from(come);
            come
        } else {
            self.poll_memory(index)?
        };
        if come {
            self.verify_arrived(index)?;
        }
        Ok(come)
    }
}

#[inline]
fn reclaim(out: &mut SendBuffers, mut done: Completion<'_>) {
    match out {
        SendBuffers::Host { free, .. } => free.extend(done.take::<Local>()),
        SendBuffers::Gpu(pool) => done.take().into_iter().for_each(|buffer| pool.release(buffer)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_is_never_the_one_before() {
        assert_ne!(flag(0), 0);
        for index in 0..600 {
            assert_ne!(flag(index), flag(index + 1));
        }
    }
}
