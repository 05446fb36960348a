//! The receives of a queue pair or of a shared receive queue.

use doorbell_verbs::{Completion, SharedReceiveQueue, Success};

use super::message::{DataError, Sinks, content_before};
use super::test_end::TestQp;
use super::transport::TestTransport;
use crate::failure::Failure;

#[derive(Debug)]
pub(crate) struct Receiver {
    free: Sinks,
    /// Receives posted with one call.
    list: usize,
    /// The length that every message must have, with its header, where that is checked.
    bytes: Option<u64>,
    posted: u64,
}

impl Receiver {
    pub(crate) fn new(free: Sinks, list: u32, bytes: Option<u64>) -> Receiver {
        Receiver {
            free,
            list: list.max(1) as usize,
            bytes,
            posted: 0,
        }
    }

    /// Receives posted so far.
    pub(crate) fn posted(&self) -> u64 {
        self.posted
    }

    /// Takes a message: checks it, and keeps its buffer to be posted again.
    ///
    /// # Errors
    /// The first wrong byte of a verified message; a wrong length where that is checked.
    #[inline]
    pub(crate) fn retire(&mut self, done: Completion<'_>) -> Result<(), DataError> {
        if let Some(expected) = self.bytes
            && let Ok(Success::Receive { len, .. }) = done.result()
            && u64::from(len) != expected
        {
            return Err(DataError::Length {
                expected,
                found: len.into(),
            });
        }
        self.free.reclaim(done)
    }

    /// Posts the free buffers, as many as make whole lists.
    ///
    /// # Errors
    /// [`Failure::Test`] when they are refused, or the GPU could not prepare them.
    #[inline]
    pub(crate) fn post<T: TestTransport>(
        &mut self,
        test_qp: &mut TestQp<T>,
        shared: Option<&mut SharedReceiveQueue>,
    ) -> Result<(), Failure> {
        let free = self.free.len();
        if free < self.list {
            return Ok(());
        }
        let whole = free / self.list * self.list;
        let messages = self.posted..;
        self.posted += whole as u64;
        let qp = &mut test_qp.qp;
        let result = match &mut self.free {
            Sinks::Scratch(buffers) => T::receive(qp, shared, buffers.drain(free - whole..)),
            Sinks::Verified(buffers, payloads) => {
                let fill = |message| {
                    let mut buffer = buffers.pop()?;
                    payloads.of(message).fill_inverse(&mut buffer[payloads.header..]);
                    Some(buffer)
                };
                T::receive(qp, shared, messages.map_while(fill).take(whole))
            }
            Sinks::Gpu(pool, payloads) => {
                let fill = |message| pool.take(content_before(*payloads, message));
                T::receive(qp, shared, messages.map_while(fill).take(whole))
            }
        };
        result.map_err(|e| test_qp.refused(&e))?;
        match &mut self.free {
            Sinks::Gpu(pool, _) => pool.take_error().map_or(Ok(()), Err),
            _ => Ok(()),
        }
    }
}
