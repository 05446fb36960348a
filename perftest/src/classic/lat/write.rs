//! `ib_write_lat`: the receiver polls the last byte of its buffer, which holds the message count
//! modulo 256 from 1 and is written last.

use std::sync::atomic::Ordering;

use doorbell_verbs::{Buffer, Connected, PeerWrite, Remote, WriteAccess};

use super::pingpong::PingPong;
use super::send_buffers::SendBuffers;
use crate::classic::settings::Settings;
use crate::classic::test_end::{Link, Target, TestEnd};
use crate::engine::test_end;
use crate::engine::transport::TestTransport;
use crate::failure::{Failure, refused};

/// Memory polls per call.
const POLLS_PER_CALL: u32 = 16;
/// Calls between two polls of an idle completion queue: only a queue pair that fails completes
/// anything then.
const CALLS_PER_CQ_POLL: u32 = 1 << 12;

#[derive(Debug)]
pub(super) struct WritePingPong<T: TestTransport> {
    test_end: TestEnd<T>,
    /// Free send queue slots of an idle queue pair.
    depth: u32,
    messages: SendBuffers,
    calls: u32,
    target: Remote<WriteAccess>,
}

impl<T: TestTransport + Connected> WritePingPong<T> {
    pub(super) fn new(settings: &Settings, test_end: TestEnd<T>) -> Result<WritePingPong<T>, Failure> {
        let longest = settings.sizes.iter().max().copied().unwrap_or(1);
        Ok(WritePingPong {
            depth: test_end.end.qps[0].qp.free_send_slots(),
            messages: SendBuffers::new(settings, &test_end, longest)?,
            calls: 0,
            target: test_end.links[0].remote(&test_end.cycle(longest)),
            test_end,
        })
    }

    #[inline]
    fn poll(&mut self) -> Result<(), Failure> {
        let test_end::TestEnd { cq, qps, .. } = &mut self.test_end.end;
        for mut done in cq.poll().map_err(refused)? {
            done.result().map_err(|failure| qps[0].failed(&failure))?;
            self.messages.free.extend(done.take());
        }
        Ok(())
    }
}

#[inline]
fn recv_buffer(link: &Link) -> Option<&Buffer<PeerWrite>> {
    match &link.target {
        Target::Write(recv_buffer) => Some(recv_buffer),
        _ => None,
    }
}

/// The last byte of message `index`.
#[inline]
fn flag(index: u64) -> u8 {
    (index & 0xff) as u8
}

impl<T: TestTransport + Connected> PingPong for WritePingPong<T> {
    fn resize(&mut self, bytes: usize) {
        // No earlier message was as long, so its last byte is still 0.
        self.messages.bytes = bytes;
    }

    #[inline]
    fn is_ready(&mut self) -> Result<bool, Failure> {
        if self.test_end.end.qps[0].qp.free_send_slots() > 0 && self.messages.has_free() {
            return Ok(true);
        }
        self.poll().map(|()| false)
    }

    #[inline]
    fn send(&mut self, index: u64, _: bool) -> Result<(), Failure> {
        let (target, end) = (self.target, self.messages.bytes);
        let test_qp = &mut self.test_end.end.qps[0];
        let posted = if self.messages.are_inline() {
            let message = &mut self.messages.inline[..end];
            message[end - 1] = flag(index);
            let message = &*message;
            test_qp.qp.post(|batch| {
                batch.write_inline(message, target).signaled();
            })
        } else {
            let Some(mut message) = self.messages.free.pop() else {
                return Ok(());
            };
            message[end - 1] = flag(index);
            test_qp.qp.post(|batch| {
                batch.write(message.part(..end), target).signaled();
            })
        };
        posted.map_err(|refused| test_qp.refused(&refused))
    }

    #[inline]
    fn has_arrived(&mut self, index: u64) -> Result<bool, Failure> {
        // As the C tools do: first poll for the completion of what was sent, then poll memory and
        // only memory.
        if self.test_end.end.qps[0].qp.free_send_slots() < self.depth {
            self.poll()?;
            if self.test_end.end.qps[0].qp.free_send_slots() < self.depth {
                return Ok(false);
            }
        }
        if let Some(recv_buffer) = recv_buffer(&self.test_end.links[0]) {
            for _ in 0..POLLS_PER_CALL {
                if recv_buffer.load_u8(self.messages.bytes - 1, Ordering::Acquire) == flag(index) {
                    return Ok(true);
                }
            }
        }
        self.calls = self.calls.wrapping_add(1);
        if self.calls.is_multiple_of(CALLS_PER_CQ_POLL) {
            self.poll()?;
        }
        Ok(false)
    }

    fn is_drained(&mut self) -> Result<bool, Failure> {
        self.poll()?;
        Ok(self.test_end.end.qps[0].qp.free_send_slots() == self.depth)
    }
}
