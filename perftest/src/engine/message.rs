//! Where messages lie: the buffers of each end, and the part of the peer's memory that messages
//! cycle through.

use doorbell_verbs::{Buffer, Completion, Frozen, Local, Opaque, Scratch, Success};

use super::gpu::{Content, GpuPool};
use super::pattern::{Mismatch, Pattern};
use crate::failure::Failure;

/// Message i is at slot i modulo `slots`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Cycle {
    /// Message size, without the header.
    pub(crate) bytes: u64,
    pub(crate) stride: u64,
    pub(crate) slots: u64,
}

impl Cycle {
    /// Slots of `bytes`, one behind the other.
    pub(crate) fn dense(bytes: u64, slots: u64) -> Cycle {
        Cycle {
            bytes,
            stride: bytes,
            slots,
        }
    }

    pub(crate) fn len(&self) -> u64 {
        self.slots * self.stride
    }
}

/// Goes through a cycle without a division.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cursor {
    cycle: Cycle,
    len: u64,
    at: u64,
}

impl Cursor {
    pub(crate) fn new(cycle: Cycle) -> Cursor {
        Cursor {
            cycle,
            len: cycle.len(),
            at: 0,
        }
    }

    /// The offset of the next message.
    #[inline]
    pub(crate) fn advance(&mut self) -> u64 {
        let at = self.at;
        self.at += self.cycle.stride;
        if self.at >= self.len {
            self.at = 0;
        }
        at
    }

    #[inline]
    pub(crate) fn bytes(&self) -> u64 {
        self.cycle.bytes
    }
}

/// The payloads of the verified messages on a queue pair.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Payloads {
    pub(crate) seed: u64,
    pub(crate) qp_index: usize,
    /// Payloads of two streams differ.
    pub(crate) stream: usize,
    /// Message i has the payload of message i modulo this.
    pub(crate) different: u64,
    /// Bytes before each message where it is received: the GRH of UD.
    pub(crate) header: usize,
}

impl Payloads {
    /// A payload of its own for each message.
    pub(crate) fn new(seed: u64, qp_index: usize) -> Payloads {
        Payloads {
            seed,
            qp_index,
            stream: qp_index,
            different: u64::MAX,
            header: 0,
        }
    }

    pub(crate) fn of(&self, message: u64) -> Pattern {
        Pattern::new(self.seed, self.stream, message % self.different)
    }
}

/// An error in the data of a test.
#[derive(Debug)]
pub(crate) enum DataError {
    Mismatch(Mismatch),
    /// An atomic that returned a wrong value.
    Value {
        /// Number of the atomic on its queue pair, from 0.
        iteration: u64,
        expected: u64,
        found: u64,
    },
    Length {
        expected: u64,
        found: u64,
    },
    /// The GPU could not fill or read a message.
    Gpu(Failure),
}

impl DataError {
    #[cold]
    pub(crate) fn into_failure(self, peer: &str) -> Failure {
        Failure::test(match self {
            DataError::Gpu(failure) => return failure,
            DataError::Mismatch(mismatch) => format!("{peer}: {mismatch}"),
            DataError::Value {
                iteration,
                expected,
                found,
            } => format!(
                "{peer}: wrong data: size 8 B, iteration {iteration}, offset 0: expected {expected}, found {found}"
            ),
            DataError::Length { expected, found } => format!("{peer} sent {found} bytes instead of {expected}"),
        })
    }
}

/// The buffers to send from that no request uses.
#[derive(Debug)]
pub(crate) enum Sources {
    /// Sent as they are.
    Frozen(Vec<Buffer<Frozen>>),
    /// Filled for each message.
    Verified(Vec<Buffer<Local>>, Payloads),
    Gpu(Box<GpuPool>, Option<Payloads>),
    /// None: messages are sent inline.
    Inline(Option<Payloads>),
}

impl Sources {
    /// Inlined, as it is part of the loop of every message; a GPU's is a call.
    #[inline(always)]
    pub(crate) fn reclaim(&mut self, mut done: Completion<'_>) -> Result<(), DataError> {
        match self {
            Sources::Frozen(free) => free.extend(done.take::<Frozen>()),
            Sources::Verified(free, _) => free.extend(done.take::<Local>()),
            Sources::Gpu(pool, _) => return reclaim_sent(pool, done),
            Sources::Inline(_) => {}
        }
        Ok(())
    }
}

#[inline(never)]
fn reclaim_sent(pool: &mut GpuPool, mut done: Completion<'_>) -> Result<(), DataError> {
    done.take().into_iter().for_each(|buffer| pool.release(buffer));
    gpu_result(pool)
}

/// The buffers to receive or read into that no request uses.
#[derive(Debug)]
pub(crate) enum Sinks {
    /// Not checked; several may be of the same memory.
    Scratch(Vec<Buffer<Scratch>>),
    /// Filled with the inverse of the payload before, so that a byte that never arrived is found.
    Verified(Vec<Buffer<Local>>, Payloads),
    Gpu(Box<GpuPool>, Option<Payloads>),
}

impl Sinks {
    pub(crate) fn len(&self) -> usize {
        match self {
            Sinks::Scratch(free) => free.len(),
            Sinks::Verified(free, _) => free.len(),
            Sinks::Gpu(pool, _) => pool.len(),
        }
    }

    /// Reclaims the buffer of a request, the number of which is that of its message, and checks its
    /// content. Inlined, as it is part of the loop of every message; a check is a call.
    #[inline(always)]
    pub(crate) fn reclaim(&mut self, mut done: Completion<'_>) -> Result<(), DataError> {
        match self {
            Sinks::Scratch(free) => {
                free.extend(done.take::<Scratch>());
                Ok(())
            }
            Sinks::Verified(..) | Sinks::Gpu(..) => self.reclaim_checked(done),
        }
    }

    #[inline(never)]
    fn reclaim_checked(&mut self, mut done: Completion<'_>) -> Result<(), DataError> {
        let message = number(&done);
        let (payloads, bytes, wrong) = match self {
            Sinks::Scratch(_) => return Ok(()),
            Sinks::Verified(free, payloads) => {
                let Some(buffer) = done.take::<Local>() else {
                    return Ok(());
                };
                let wrong = payloads.of(message).check(&buffer[payloads.header..]);
                let bytes = buffer.len() - payloads.header;
                free.push(buffer);
                (Some(*payloads), bytes, wrong)
            }
            Sinks::Gpu(pool, payloads) => {
                let Some(buffer) = done.take::<Opaque<Local>>() else {
                    return Ok(());
                };
                let wrong = pool.check(&buffer, payloads.map(|payloads| payloads.of(message)));
                let bytes = buffer.len();
                pool.release(buffer);
                gpu_result(pool)?;
                (*payloads, bytes, wrong.map_err(DataError::Gpu)?)
            }
        };
        match (payloads, wrong) {
            (Some(payloads), Some(wrong)) => Err(DataError::Mismatch(Mismatch::at(
                bytes as u64,
                payloads.qp_index,
                message,
                wrong,
            ))),
            _ => Ok(()),
        }
    }
}

/// The number of the message of a completion: that of its request, or where messages may be lost
/// the one in its immediate data, at most 2^31 from it.
fn number(done: &Completion<'_>) -> u64 {
    let request = done.sequence();
    match done.result() {
        Ok(Success::Receive { imm: Some(imm), .. }) => {
            let skipped = imm.wrapping_sub(request as u32) as i32;
            request.wrapping_add_signed(skipped.into())
        }
        _ => request,
    }
}

/// The buffer's content before message `message` is received or read into it.
#[inline]
pub(crate) fn content_before(payloads: Option<Payloads>, message: u64) -> Content {
    payloads.map_or(Content::Nothing, |payloads| Content::Inverse(payloads.of(message)))
}

#[inline]
fn gpu_result(pool: &mut GpuPool) -> Result<(), DataError> {
    pool.take_error().map_or(Ok(()), |failure| Err(DataError::Gpu(failure)))
}
