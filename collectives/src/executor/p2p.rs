//! Point-to-point messages between two ranks, beside the plans.
//!
//! A message is an operation that only its two ends begin: the program of each has one instruction,
//! to send or to receive. The messages to a rank, and those from it, are a *stream*: a queue of
//! operations that are run in order by a strand runner, on the connection for messages. Streams do
//! not wait for each other.
//!
//! All messages are granted, even empty ones: each grant carries the number of bytes that the
//! receiver still expects, so two ends with different lengths detect it before anything is written.

use core::slice;
use std::time::Duration;

use super::Engine;
use super::error::{EngineError, Failed};
use super::link::Link;
use super::operation::{Data, Operation, PlanId, Ticket, Transport, Tuning};
use super::prepare::Prepared;
use super::queue::OperationQueue;
use super::strand::StrandRunner;
use crate::kernel::Function;
use crate::types::{Protocol, Rank};

/// The direction of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// Sent to the peer.
    Send,
    /// Received from the peer.
    Receive,
}

/// One end of a point-to-point message.
#[derive(Clone, Debug)]
pub struct Message {
    /// The other rank; or this one, for a message to itself.
    pub peer: Rank,
    /// The direction.
    pub direction: Direction,
    /// The source or target.
    pub data: Data,
    /// Its length; the other end has the same.
    pub bytes: usize,
    /// The timeout after which it fails.
    pub deadline: Option<Duration>,
}

/// The messages to a rank, or from it.
pub(super) struct Stream {
    pub(super) runner: StrandRunner,
    pub(super) queue: OperationQueue,
    /// Of messages, and of empty ones.
    plans: [Prepared; 2],
}

pub(super) struct PointToPoint {
    /// The index of the device.
    rail: usize,
    transport: Transport,
    /// Bytes, which are copied.
    function: Function,
    /// By peer and direction, from the first message on.
    pub(super) streams: Vec<Option<Box<Stream>>>,
    /// Indices of streams with messages in flight.
    busy: Vec<usize>,
}

impl PointToPoint {
    pub(super) fn new(ranks: u32, rail: usize, fragment: usize, function: Function) -> Self {
        Self {
            rail,
            transport: Transport::Simple {
                granted_from: 0,
                fragment,
            },
            function,
            streams: (0..2 * ranks).map(|_| None).collect(),
            busy: Vec::new(),
        }
    }

    #[inline]
    pub(super) fn is_busy(&self) -> bool {
        !self.busy.is_empty()
    }

    /// Streams with messages in flight; of a failed engine, those that had some.
    pub(super) fn busy(&self) -> impl Iterator<Item = &Stream> {
        self.busy.iter().filter_map(|index| self.streams[*index].as_deref())
    }

    pub(super) fn is_idle(&self) -> bool {
        self.busy().all(|stream| stream.queue.is_idle())
    }

    pub(super) fn queues(&self) -> impl Iterator<Item = &OperationQueue> {
        self.streams.iter().flatten().map(|stream| &stream.queue)
    }

    pub(super) fn queues_mut(&mut self) -> impl Iterator<Item = &mut OperationQueue> {
        self.streams.iter_mut().flatten().map(|stream| &mut stream.queue)
    }

    pub(super) fn drive(&mut self, rank: Rank, links: &mut [Option<Link>]) -> Result<bool, Failed> {
        let mut moved = false;
        for &index in &self.busy {
            if index / 2 == rank.index() {
                moved |= copy_own(rank, &mut self.streams[index & !1..][..2], links)?;
            } else if let Some(stream) = &mut self.streams[index] {
                let (first, messages) = stream.queue.all_mut();
                moved |= stream.runner.drive(first, messages, links).map_err(of_message)?;
            }
        }
        if moved {
            let streams = &self.streams;
            let in_flight = |stream: &Stream| stream.queue.is_last_in_flight();
            self.busy
                .retain(|index| streams[*index].as_deref().is_some_and(in_flight));
        }
        Ok(moved)
    }
}

/// Messages of this rank to itself: the program of a receive copies, once there are both ends.
fn copy_own(rank: Rank, streams: &mut [Option<Box<Stream>>], links: &mut [Option<Link>]) -> Result<bool, Failed> {
    let [Some(sends), Some(receives)] = streams else {
        return Ok(false);
    };
    let first = receives.queue.first_in_flight();
    let mut number = first;
    while let (Some(send), Some(receive)) = (sends.queue.get_mut(number), receives.queue.get_mut(number)) {
        let [bytes, expected] = [&*send, &*receive].map(|end| end.ready.layout.extent.count);
        if bytes != expected {
            return Err(Failed::Length {
                peer: rank,
                message: number,
                bytes,
                expected,
            });
        }
        receive.input = send.input.clone();
        receives.runner.drive(number, slice::from_mut(receive), links)?;
        send.complete_runner();
        number += 1;
    }
    Ok(number > first)
}

fn of_message(failed: Failed) -> Failed {
    match failed {
        Failed::Parts {
            operation,
            to,
            bytes,
            expected,
            ..
        } => Failed::Length {
            peer: to,
            message: operation,
            bytes,
            expected,
        },
        failed => failed,
    }
}

impl Engine {
    /// Submits a message, to be driven by [`progress`](Self::progress). Only its two ranks do; both
    /// submit messages of one direction in the same order.
    ///
    /// # Errors
    /// When the engine has failed, there is no such rank, or no memory is given; then it was not
    /// submitted.
    ///
    /// # Safety
    /// The data is valid for the message's length until the result is taken or the engine is
    /// dropped. Until then no other code writes it, or reads what is received; other operations in
    /// flight have other outputs.
    pub unsafe fn submit_message(&mut self, message: Message) -> Result<Ticket, EngineError> {
        if let Some(broken) = &self.failed {
            return Err(broken.why.clone().into());
        }
        let (rank, ranks, p2p) = (self.rank, self.ranks, &mut self.p2p);
        let Message {
            peer,
            direction,
            data,
            bytes,
            deadline,
        } = message;
        if peer.0 >= ranks {
            return Err(EngineError::NoRank { rank: peer, ranks });
        }
        let index = 2 * peer.index() + direction as usize;
        let domain = &self.rails[p2p.rail].domain;
        let stream = p2p.streams[index].get_or_insert_with(|| {
            Box::new(Stream {
                runner: StrandRunner::new(rank, (0, 0), (p2p.rail, domain), peer.index()..peer.index() + 1),
                queue: OperationQueue::new(),
                plans: [1, 0].map(|blocks| Prepared::message((rank, ranks), (peer, direction), blocks)),
            })
        });
        let (input, output) = match direction {
            Direction::Send => (data, Data::None),
            Direction::Receive => (Data::None, data),
        };
        let operation = Operation {
            plan: PlanId(0),
            function: p2p.function.clone(),
            count: bytes as u64,
            parts: None,
            input,
            output,
            scale: None,
            tuning: Tuning {
                protocol: Protocol::Simple,
                channels: 1,
                slice: usize::MAX,
            },
            deadline,
        };
        let plan = &mut stream.plans[usize::from(bytes == 0)];
        let lenders = if self.lends { &self.rails[..] } else { &[] };
        let (op, _) = plan.activate(operation, p2p.transport, (rank, 1), lenders)?;
        if !stream.queue.is_last_in_flight() {
            p2p.busy.push(index);
        }
        Ok(Ticket {
            stream: Some(index as u32),
            number: stream.queue.push(op),
        })
    }
}
