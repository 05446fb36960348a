//! `ib_write_lat`: the receiver polls the last byte of its buffer, which holds the message count
//! modulo 256 from 1 and is written last.

use std::sync::atomic::Ordering;

use doorbell_verbs::{Buffer, Connected, Remote, RemoteWrite, Write};

use super::messages::Messages;
use super::rally::Racket;
use crate::classic::settings::Settings;
use crate::classic::station::{Lane, Service, Station, Target, refused};
use crate::failure::Failure;

/// Memory polls per call.
const LOOKS: u32 = 16;
/// Calls between two polls of an idle completion queue: only a queue pair that fails completes
/// anything then.
const TURNS: u32 = 1 << 12;

/// One end.
#[derive(Debug)]
pub(super) struct Writes<T: Service> {
    station: Station<T>,
    /// Free send queue slots of an idle queue pair.
    depth: u32,
    messages: Messages,
    turns: u32,
    /// The peer's buffer.
    target: Remote<Write>,
}

impl<T: Service + Connected> Writes<T> {
    /// # Errors
    /// [`Failure::Test`] when there is no memory for messages.
    pub(super) fn new(settings: &Settings, station: Station<T>) -> Result<Writes<T>, Failure> {
        let longest = settings.sizes.iter().max().copied().unwrap_or(1);
        let lane = &station.lanes[0];
        Ok(Writes {
            depth: lane.qp.send_room(),
            messages: Messages::new(settings, &station, longest)?,
            turns: 0,
            target: lane.remote(&station.cycle(longest)),
            station,
        })
    }

    #[inline]
    fn poll(&mut self) -> Result<(), Failure> {
        let Station { cq, lanes, .. } = &mut self.station;
        for mut done in cq.poll().map_err(refused)? {
            done.result().map_err(|failure| lanes[0].failed(&failure))?;
            self.messages.free.extend(done.take());
        }
        Ok(())
    }
}

/// The buffer that the peer writes to.
#[inline]
fn court<T: Service>(lane: &Lane<T>) -> Option<&Buffer<RemoteWrite>> {
    match &lane.target {
        Target::Written(court) => Some(court),
        _ => None,
    }
}

/// The last byte of message `index`.
#[inline]
fn flag(index: u64) -> u8 {
    (index & 0xff) as u8
}

impl<T: Service + Connected> Racket for Writes<T> {
    fn resize(&mut self, bytes: usize) {
        // No earlier message was as long, so its last byte is still 0.
        self.messages.bytes = bytes;
    }

    #[inline]
    fn is_ready(&mut self) -> Result<bool, Failure> {
        if self.station.lanes[0].qp.send_room() > 0 && self.messages.has_one() {
            return Ok(true);
        }
        self.poll().map(|()| false)
    }

    #[inline]
    fn hit(&mut self, index: u64, _: bool) -> Result<(), Failure> {
        let (target, end) = (self.target, self.messages.bytes);
        let lane = &mut self.station.lanes[0];
        let posted = if self.messages.are_inline() {
            let message = &mut self.messages.inline[..end];
            message[end - 1] = flag(index);
            let message = &*message;
            lane.qp.post(|batch| {
                batch.write_inline(message, target).signalled();
            })
        } else {
            let Some(mut message) = self.messages.free.pop() else {
                return Ok(());
            };
            message[end - 1] = flag(index);
            lane.qp.post(|batch| {
                batch.write(message.part(..end), target).signalled();
            })
        };
        posted.map_err(|refused| lane.refused(&refused))
    }

    #[inline]
    fn has_come(&mut self, index: u64) -> Result<bool, Failure> {
        // As the C tools do: first poll for the completion of what was sent, then poll memory and
        // only memory.
        if self.station.lanes[0].qp.send_room() < self.depth {
            self.poll()?;
            if self.station.lanes[0].qp.send_room() < self.depth {
                return Ok(false);
            }
        }
        if let Some(court) = court(&self.station.lanes[0]) {
            for _ in 0..LOOKS {
                if court.load_u8(self.messages.bytes - 1, Ordering::Acquire) == flag(index) {
                    return Ok(true);
                }
            }
        }
        self.turns = self.turns.wrapping_add(1);
        if self.turns.is_multiple_of(TURNS) {
            self.poll()?;
        }
        Ok(false)
    }

    fn is_settled(&mut self) -> Result<bool, Failure> {
        self.poll()?;
        Ok(self.station.lanes[0].qp.send_room() == self.depth)
    }
}
