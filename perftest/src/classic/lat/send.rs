//! `ib_send_lat`: a message has arrived when its receive completes.

use std::time::Duration;

use doorbell_verbs::{Buffer, Local, Queue, Success};

use super::messages::{Messages, SOURCES, buffers, needs_completion};
use super::rally::Racket;
use crate::classic::settings::Settings;
use crate::classic::station::{Service, Station, refused, slots};
use crate::device::Gpu;
use crate::failure::Failure;
use crate::run::gpu::{Content, Pool};

/// Longest sleep on the completion channel, so that Ctrl-C and a lost peer are noticed.
pub(super) const SLEEP: Duration = Duration::from_millis(50);

/// One end.
#[derive(Debug)]
pub(super) struct Sends<T: Service> {
    station: Station<T>,
    /// Whether to sleep on the completion channel instead of polling.
    sleeps: bool,
    /// Free send queue slots of an idle queue pair.
    depth: u32,
    messages: Messages,
    /// The buffer of a received message, to be posted again.
    spare: Option<Buffer<Local>>,
    /// The buffers, where they lie in a GPU's memory.
    gpu: Option<OnGpu>,
    /// Messages that have arrived and are not consumed yet.
    arrived: u64,
}

/// Send and receive buffers in a GPU's memory.
#[derive(Debug)]
struct OnGpu {
    out: Pool,
    court: Pool,
}

impl OnGpu {
    fn new<T: Service>(gpu: &Gpu, station: &mut Station<T>, bytes: u64) -> Result<OnGpu, Failure> {
        let mut both = OnGpu {
            out: slots(gpu, &station.pd, bytes, SOURCES)?,
            court: slots(gpu, &station.pd, bytes.saturating_add(T::HEADER), SOURCES)?,
        };
        both.receive(station, SOURCES as usize)?;
        Ok(both)
    }

    /// Posts up to `count` receives.
    #[inline]
    fn receive<T: Service>(&mut self, station: &mut Station<T>, count: usize) -> Result<(), Failure> {
        let Station { lanes, shared, .. } = station;
        let buffers = std::iter::from_fn(|| self.court.take(Content::Nothing)).take(count);
        let posted = T::receive(&mut lanes[0].qp, shared.as_mut(), buffers);
        posted.map_err(|e| lanes[0].refused(&e))
    }
}

impl<T: Service> Sends<T> {
    /// # Errors
    /// [`Failure::Test`] when there is no memory for messages, or the device refuses it.
    pub(super) fn new(settings: &Settings, mut station: Station<T>) -> Result<Sends<T>, Failure> {
        let longest = settings.sizes.iter().max().copied().unwrap_or(1);
        if let Some(gpu) = station.gpu.clone() {
            return Ok(Sends {
                sleeps: settings.events,
                depth: station.lanes[0].qp.send_room(),
                messages: Messages::none(),
                spare: None,
                gpu: Some(OnGpu::new(&gpu, &mut station, longest)?),
                arrived: 0,
                station,
            });
        }
        let receives = buffers(settings, &station, longest.saturating_add(T::HEADER))?;
        let Station { lanes, shared, .. } = &mut station;
        let posted = T::receive(&mut lanes[0].qp, shared.as_mut(), receives.into_iter());
        posted.map_err(|e| lanes[0].refused(&e))?;
        Ok(Sends {
            sleeps: settings.events,
            depth: station.lanes[0].qp.send_room(),
            messages: Messages::new(settings, &station, longest)?,
            spare: None,
            gpu: None,
            arrived: 0,
            station,
        })
    }

    /// Posts one receive.
    #[inline]
    fn receive(station: &mut Station<T>, buffer: Buffer<Local>) -> Result<(), Failure> {
        let Station { lanes, shared, .. } = station;
        let posted = T::receive(&mut lanes[0].qp, shared.as_mut(), std::iter::once(buffer));
        posted.map_err(|e| lanes[0].refused(&e))
    }

    #[inline]
    fn poll(&mut self) -> Result<(), Failure> {
        let Station { cq, lanes, shared, .. } = &mut self.station;
        let lane = &mut lanes[0];
        let completions = if self.sleeps {
            cq.wait(SLEEP).map_err(refused)?
        } else {
            cq.poll().map_err(refused)?
        };
        for mut done in completions {
            let success = done.result().map_err(|failure| lane.failed(&failure))?;
            let buffer = done.take::<Local>();
            if done.queue() == Queue::Send {
                match &mut self.gpu {
                    Some(gpu) => done.take().into_iter().for_each(|buffer| gpu.out.give(buffer)),
                    None => self.messages.free.extend(buffer),
                }
                continue;
            }
            if let Some(gpu) = &mut self.gpu {
                done.take().into_iter().for_each(|buffer| gpu.court.give_filled(buffer));
                if let Some(failure) = gpu.court.failed() {
                    return Err(failure);
                }
            }
            let Success::Receive { len, .. } = success else {
                continue;
            };
            let (came, belong) = (u64::from(len).saturating_sub(T::HEADER), self.messages.bytes as u64);
            if came != belong {
                return Err(Failure::test(format!(
                    "{lane} sent {came} bytes where {belong} belong: do both ends have the same options (-s, -a)?"
                )));
            }
            self.arrived += 1;
            let Some(buffer) = buffer else { continue };
            if let Some(earlier) = self.spare.replace(buffer) {
                T::receive(&mut lane.qp, shared.as_mut(), std::iter::once(earlier)).map_err(|e| lane.refused(&e))?;
            }
        }
        Ok(())
    }
}

impl<T: Service> Racket for Sends<T> {
    fn resize(&mut self, bytes: usize) {
        self.messages.bytes = bytes;
    }

    #[inline]
    fn is_ready(&mut self) -> Result<bool, Failure> {
        let has_one = match &self.gpu {
            Some(gpu) => gpu.out.len() > 0,
            None => self.messages.has_one(),
        };
        if self.station.lanes[0].qp.send_room() > 0 && has_one {
            return Ok(true);
        }
        self.poll().map(|()| false)
    }

    #[inline]
    fn hit(&mut self, index: u64, last: bool) -> Result<(), Failure> {
        if let Some(gpu) = &mut self.gpu {
            let lane = &mut self.station.lanes[0];
            let Some(message) = gpu.out.take(Content::Any) else {
                return Ok(());
            };
            if let Some(failure) = gpu.out.failed() {
                return Err(failure);
            }
            let signal = last || needs_completion(index, gpu.out.len() + 1);
            let (qp, to) = (&mut lane.qp, &lane.to);
            let posted = qp.post(|batch| T::send(batch, to, message, signal));
            posted.map_err(|e| lane.refused(&e))?;
            return gpu.receive(&mut self.station, 1);
        }
        let signal = self.messages.signals(index, last);
        let end = self.messages.bytes;
        let lane = &mut self.station.lanes[0];
        let (qp, to) = (&mut lane.qp, &lane.to);
        let posted = if self.messages.are_inline() {
            let message = &self.messages.inline[..end];
            qp.post(|batch| T::send_inline(batch, to, message, signal))
        } else {
            let Some(message) = self.messages.free.pop() else {
                return Ok(());
            };
            qp.post(|batch| T::send(batch, to, message.part(..end), signal))
        };
        posted.map_err(|e| lane.refused(&e))?;
        // After the answer is posted: other receives are still available.
        match self.spare.take() {
            Some(buffer) => Self::receive(&mut self.station, buffer),
            None => Ok(()),
        }
    }

    #[inline]
    fn has_come(&mut self, _index: u64) -> Result<bool, Failure> {
        if self.arrived == 0 {
            self.poll()?;
        }
        let come = self.arrived > 0;
        self.arrived -= u64::from(come);
        Ok(come)
    }

    fn is_settled(&mut self) -> Result<bool, Failure> {
        if self.station.lanes[0].qp.send_room() < self.depth {
            self.poll()?;
        }
        Ok(self.station.lanes[0].qp.send_room() == self.depth)
    }
}
