//! `ib_send_lat`: a message has arrived when its receive completes.

use doorbell_verbs::{Buffer, Local, QueueKind, Success};

use super::pingpong::PingPong;
use super::send_buffers::{BUFFERS, SendBuffers, buffers, needs_completion};
use crate::classic::settings::Settings;
use crate::classic::test_end::{TestEnd, slots};
use crate::device::Gpu;
use crate::engine::gpu::{Content, GpuPool};
use crate::engine::test_end::{self, completions};
use crate::engine::transport::TestTransport;
use crate::failure::Failure;

#[derive(Debug)]
pub(super) struct SendPingPong<T: TestTransport> {
    test_end: TestEnd<T>,
    sleeps: bool,
    /// Free send queue slots of an idle queue pair.
    depth: u32,
    messages: SendBuffers,
    /// The buffer of a received message, to be posted again.
    spare: Option<Buffer<Local>>,
    gpu: Option<GpuBuffers>,
    /// Messages that have arrived and are not consumed yet.
    arrived: u64,
}

#[derive(Debug)]
struct GpuBuffers {
    out: GpuPool,
    recv_buffer: GpuPool,
}

impl GpuBuffers {
    fn new<T: TestTransport>(gpu: &Gpu, test_end: &mut TestEnd<T>, bytes: u64) -> Result<GpuBuffers, Failure> {
        let mut both = GpuBuffers {
            out: slots(gpu, &test_end.pd, bytes, BUFFERS)?,
            recv_buffer: slots(gpu, &test_end.pd, bytes.saturating_add(T::HEADER), BUFFERS)?,
        };
        both.receive(test_end, BUFFERS as usize)?;
        Ok(both)
    }

    #[inline]
    fn receive<T: TestTransport>(&mut self, test_end: &mut TestEnd<T>, count: usize) -> Result<(), Failure> {
        let test_end::TestEnd { qps, shared, .. } = &mut test_end.end;
        let buffers = std::iter::from_fn(|| self.recv_buffer.take(Content::Nothing)).take(count);
        let posted = T::receive(&mut qps[0].qp, shared.as_mut(), buffers);
        posted.map_err(|e| qps[0].refused(&e))
    }
}

impl<T: TestTransport> SendPingPong<T> {
    pub(super) fn new(settings: &Settings, mut test_end: TestEnd<T>) -> Result<SendPingPong<T>, Failure> {
        let longest = settings.sizes.iter().max().copied().unwrap_or(1);
        if let Some(gpu) = test_end.gpu.clone() {
            return Ok(SendPingPong {
                sleeps: settings.events,
                depth: test_end.end.qps[0].qp.free_send_slots(),
                messages: SendBuffers::none(),
                spare: None,
                gpu: Some(GpuBuffers::new(&gpu, &mut test_end, longest)?),
                arrived: 0,
                test_end,
            });
        }
        let receives = buffers(settings, &test_end, longest.saturating_add(T::HEADER))?;
        let test_end::TestEnd { qps, shared, .. } = &mut test_end.end;
        let posted = T::receive(&mut qps[0].qp, shared.as_mut(), receives.into_iter());
        posted.map_err(|e| qps[0].refused(&e))?;
        Ok(SendPingPong {
            sleeps: settings.events,
            depth: test_end.end.qps[0].qp.free_send_slots(),
            messages: SendBuffers::new(settings, &test_end, longest)?,
            spare: None,
            gpu: None,
            arrived: 0,
            test_end,
        })
    }

    #[inline]
    fn receive(test_end: &mut TestEnd<T>, buffer: Buffer<Local>) -> Result<(), Failure> {
        let test_end::TestEnd { qps, shared, .. } = &mut test_end.end;
        let posted = T::receive(&mut qps[0].qp, shared.as_mut(), std::iter::once(buffer));
        posted.map_err(|e| qps[0].refused(&e))
    }

    #[inline]
    fn poll(&mut self) -> Result<(), Failure> {
        let test_end::TestEnd { cq, qps, shared } = &mut self.test_end.end;
        let test_qp = &mut qps[0];
        for mut done in completions(cq, self.sleeps)? {
            let success = done.result().map_err(|failure| test_qp.failed(&failure))?;
            let buffer = done.take::<Local>();
            if done.queue() == QueueKind::Send {
                match &mut self.gpu {
                    Some(gpu) => done.take().into_iter().for_each(|buffer| gpu.out.release(buffer)),
                    None => self.messages.free.extend(buffer),
                }
                continue;
            }
            if let Some(gpu) = &mut self.gpu {
                done.take()
                    .into_iter()
                    .for_each(|buffer| gpu.recv_buffer.release_received(buffer));
                if let Some(failure) = gpu.recv_buffer.take_error() {
                    return Err(failure);
                }
            }
            let Success::Receive { len, .. } = success else {
                continue;
            };
            let (came, belong) = (u64::from(len).saturating_sub(T::HEADER), self.messages.bytes as u64);
            if came != belong {
                return Err(Failure::test(format!(
                    "{} sent {came} bytes instead of {belong}: do both ends have the same options (-s, -a)?",
                    test_qp.peer
                )));
            }
            self.arrived += 1;
            let Some(buffer) = buffer else { continue };
            if let Some(earlier) = self.spare.replace(buffer) {
                T::receive(&mut test_qp.qp, shared.as_mut(), std::iter::once(earlier))
                    .map_err(|e| test_qp.refused(&e))?;
            }
        }
        Ok(())
    }
}

impl<T: TestTransport> PingPong for SendPingPong<T> {
    fn resize(&mut self, bytes: usize) {
        self.messages.bytes = bytes;
    }

    #[inline]
    fn is_ready(&mut self) -> Result<bool, Failure> {
        let has_free = match &self.gpu {
            Some(gpu) => gpu.out.len() > 0,
            None => self.messages.has_free(),
        };
        if self.test_end.end.qps[0].qp.free_send_slots() > 0 && has_free {
            return Ok(true);
        }
        self.poll().map(|()| false)
    }

    #[inline]
    fn send(&mut self, index: u64, last: bool) -> Result<(), Failure> {
        if let Some(gpu) = &mut self.gpu {
            let test_qp = &mut self.test_end.end.qps[0];
            let Some(message) = gpu.out.take(Content::Any) else {
                return Ok(());
            };
            if let Some(failure) = gpu.out.take_error() {
                return Err(failure);
            }
            let signal = last || needs_completion(index, gpu.out.len() + 1);
            let (qp, to) = (&mut test_qp.qp, &test_qp.to);
            let posted = qp.post(|batch| T::send(batch, to, message, signal));
            posted.map_err(|e| test_qp.refused(&e))?;
            return gpu.receive(&mut self.test_end, 1);
        }
        let signal = self.messages.signals(index, last);
        let end = self.messages.bytes;
        let test_qp = &mut self.test_end.end.qps[0];
        let (qp, to) = (&mut test_qp.qp, &test_qp.to);
        let posted = if self.messages.are_inline() {
            let message = &self.messages.inline[..end];
            qp.post(|batch| T::send_inline(batch, to, message, signal))
        } else {
            let Some(message) = self.messages.free.pop() else {
                return Ok(());
            };
            qp.post(|batch| T::send(batch, to, message.part(..end), signal))
        };
        posted.map_err(|e| test_qp.refused(&e))?;
        // After the answer is posted: other receives are still available.
        match self.spare.take() {
            Some(buffer) => Self::receive(&mut self.test_end, buffer),
            None => Ok(()),
        }
    }

    #[inline]
    fn has_arrived(&mut self, _index: u64) -> Result<bool, Failure> {
        if self.arrived == 0 {
            self.poll()?;
        }
        let come = self.arrived > 0;
        self.arrived -= u64::from(come);
        Ok(come)
    }

    fn is_drained(&mut self) -> Result<bool, Failure> {
        if self.test_end.end.qps[0].qp.free_send_slots() < self.depth {
            self.poll()?;
        }
        Ok(self.test_end.end.qps[0].qp.free_send_slots() == self.depth)
    }
}
