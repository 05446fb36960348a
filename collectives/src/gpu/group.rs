//! Groups of sends and receives, and all-to-all-v, which is one.

use doorbell_cuda::{Span, Stream};

use super::call::{Checked, GpuCall};
use super::communicator::GpuCommunicator;
use super::error::GpuError;
use crate::communicator::{StagedMessage, StagedOperation, displacements};
use crate::executor::{Direction, Parts};
use crate::plan::Collective;
use crate::types::{DataType, Rank};

/// A message of a [group](GpuCommunicator::group).
#[derive(Clone, Copy, Debug)]
pub struct GpuMessage<'a> {
    /// Whether this rank sends or receives it.
    pub direction: Direction,
    /// The other rank; or this one, for a message to itself.
    pub peer: Rank,
    /// Its source or target; its length is the message's, which may be 0.
    pub memory: Span<'a>,
}

impl<'a> GpuMessage<'a> {
    /// Sends `memory` to rank `to`.
    #[must_use]
    #[doc(alias = "ncclSend")]
    pub fn send(memory: Span<'a>, to: Rank) -> Self {
        Self {
            direction: Direction::Send,
            peer: to,
            memory,
        }
    }

    /// Receives `memory` from rank `from`.
    #[must_use]
    #[doc(alias = "ncclRecv")]
    pub fn receive(memory: Span<'a>, from: Rank) -> Self {
        Self {
            direction: Direction::Receive,
            peer: from,
            memory,
        }
    }
}

/// The validated messages of a group.
#[derive(Clone, Copy, Debug)]
pub(super) struct Group<'a> {
    /// What they are called in errors: send-receive or all-to-all-v.
    collective: Collective,
    rank: Rank,
    messages: &'a [GpuMessage<'a>],
}

impl<'a> Group<'a> {
    fn new(
        collective: Collective,
        messages: &'a [GpuMessage<'a>],
        (rank, ranks): (Rank, u32),
        allows_overlap: bool,
    ) -> Result<Self, GpuError> {
        let group = Self {
            collective,
            rank,
            messages,
        };
        if let Some(message) = messages.iter().find(|message| message.peer.0 >= ranks) {
            return Err(group.misuse(format!(
                "there is no rank {} of {ranks} ranks to exchange messages with",
                message.peer
            )));
        }
        let to_itself = |direction| group.of(direction, rank).map(Span::len);
        if !to_itself(Direction::Send).eq(to_itself(Direction::Receive)) {
            return Err(group.misuse("what a rank sends to itself is as much as it receives from itself".to_owned()));
        }
        if !allows_overlap && group.has_overlap() {
            return Err(group.misuse("memory for a received message overlaps another message's".to_owned()));
        }
        Ok(group)
    }

    /// What [`messages`] returns.
    pub(super) fn of_collective(collective: Collective, rank: Rank, messages: &'a [GpuMessage<'a>]) -> Self {
        Self {
            collective,
            rank,
            messages,
        }
    }

    pub(super) fn misuse(&self, what: String) -> GpuError {
        GpuError::Misuse {
            collective: self.collective,
            what,
        }
    }

    pub(super) fn collective(&self) -> Collective {
        self.collective
    }

    /// The memory of the messages in a direction.
    pub(super) fn all(self, direction: Direction) -> impl Iterator<Item = Span<'a>> {
        let messages = self.messages.iter();
        messages
            .filter(move |message| message.direction == direction)
            .map(|message| message.memory)
    }

    /// The memory of the messages to or from a rank, in order.
    pub(super) fn of(self, direction: Direction, peer: Rank) -> impl Iterator<Item = Span<'a>> {
        let messages = self.messages.iter();
        messages
            .filter(move |message| message.direction == direction && message.peer == peer)
            .map(|message| message.memory)
    }

    /// Source and target of each message to this rank itself, one after another.
    pub(super) fn copies(self) -> impl Iterator<Item = Span<'a>> {
        let into = self.of(Direction::Receive, self.rank);
        self.of(Direction::Send, self.rank)
            .zip(into)
            .flat_map(|(from, into)| [from, into])
    }

    fn has_overlap(self) -> bool {
        let mut ranges: Vec<_> = self
            .messages
            .iter()
            .filter(|message| !message.memory.is_empty())
            .map(|message| {
                let start = message.memory.device_ptr().0;
                let end = start + message.memory.len() as u64;
                (start, end, message.direction == Direction::Receive)
            })
            .collect();
        ranges.sort_unstable();
        // The ends, so far, of all and of what is received.
        let (mut all, mut received) = (0, 0);
        ranges.into_iter().any(|(start, end, is_received)| {
            let overlaps = start < received || is_received && start < all;
            all = all.max(end);
            if is_received {
                received = received.max(end);
            }
            overlaps
        })
    }
}

/// A collective that moves parts unchanged, as messages. What is in place is not copied.
///
/// # Errors
/// Misuse, for other collectives.
pub(super) fn messages<'a>(
    call: &GpuCall<'_>,
    (rank, ranks): (Rank, u32),
    checked: &Checked<'a>,
) -> Result<Vec<GpuMessage<'a>>, GpuError> {
    let part = call.count * call.data.bytes();
    let of = |span: Option<Span<'a>>, index: Rank| {
        let start = index.index() * part;
        span.map(|span| span.span(start..start + part)).transpose()
    };
    let mut messages = Vec::with_capacity(2 * ranks as usize);
    for peer in (0..ranks).map(Rank).filter(|peer| *peer != rank || !checked.in_place) {
        // Of input and output, the parts that go to this peer and come from it.
        let (sent, received) = match call.collective {
            Collective::AllToAll => (Some(peer), Some(peer)),
            Collective::AllGather => (Some(Rank(0)), Some(peer)),
            Collective::Gather => (
                (peer == call.root).then_some(Rank(0)),
                (rank == call.root).then_some(peer),
            ),
            Collective::Scatter => (
                (rank == call.root).then_some(peer),
                (peer == call.root).then_some(Rank(0)),
            ),
            Collective::SendRecv => {
                let is_next = |of: Rank, other: Rank| (of.0 + 1) % ranks == other.0;
                (
                    is_next(rank, peer).then_some(Rank(0)),
                    is_next(peer, rank).then_some(Rank(0)),
                )
            }
            collective => {
                return Err(GpuError::Misuse {
                    collective,
                    what: "it is no group of messages".to_owned(),
                });
            }
        };
        let send = sent
            .and_then(|index| of(checked.input, index).transpose())
            .transpose()?;
        let receive = received
            .and_then(|index| of(checked.output, index).transpose())
            .transpose()?;
        messages.extend(send.map(|memory| GpuMessage::send(memory, peer)));
        messages.extend(receive.map(|memory| GpuMessage::receive(memory, peer)));
    }
    Ok(messages)
}

impl GpuCommunicator {
    /// Performs sends and receives as a group: all progress together, in any order but that of the
    /// messages from one rank to another, which are received as they were sent, also across groups.
    /// Only the ranks that have messages call it. A message to the own rank is a copy.
    ///
    /// Both ends have the same length. If not, the communicator fails on all ranks, and the error
    /// names both ranks and lengths; what the group receives is undefined then. A send may be
    /// complete before its message is received, so a rank that has only sent may learn of it later.
    /// A message that is not received, or not sent, misses the deadline.
    ///
    /// # Errors
    /// As [`enqueue`](Self::enqueue): also misuse for more than 224 messages, where one to the own
    /// rank counts twice, and for memory that overlaps what is received.
    #[doc(alias("ncclGroupStart", "ncclGroupEnd", "ncclSend", "ncclRecv"))]
    pub fn group(&self, messages: &[GpuMessage<'_>], stream: &Stream) -> Result<(), GpuError> {
        self.check()?;
        let group = self.checked_group(Collective::SendRecv, messages)?;
        let staged = || StagedOperation::Messages(messages.iter().map(staged).collect());
        self.enqueue_group(group, staged, stream)
    }

    /// Each rank gets its part of every rank's `input`, of different lengths: `send[r]` elements go
    /// to rank r, and `receive[r]` come from it, consecutively. Never in place.
    ///
    /// Without peer access it matches [`Communicator::all_to_all_v`] of ranks without a GPU.
    ///
    /// # Errors
    /// As [`group`](Self::group).
    ///
    /// [`Communicator::all_to_all_v`]: crate::Communicator::all_to_all_v
    #[doc(alias = "MPI_Alltoallv")]
    pub fn all_to_all_v(
        &self,
        (input, send): (Span<'_>, &[usize]),
        (output, receive): (Span<'_>, &[usize]),
        data: DataType,
        stream: &Stream,
    ) -> Result<(), GpuError> {
        const COLLECTIVE: Collective = Collective::AllToAllV;
        let misuse = |what| GpuError::Misuse {
            collective: COLLECTIVE,
            what,
        };
        self.check()?;
        if send.len() != self.size() as usize || receive.len() != self.size() as usize {
            let what = format!("{} and {} counts for {} ranks", send.len(), receive.len(), self.size());
            return Err(misuse(what));
        }
        let mut messages = Vec::with_capacity(2 * send.len());
        for (direction, memory, counts) in [(Direction::Send, input, send), (Direction::Receive, output, receive)] {
            let mut start = 0usize;
            for (peer, count) in (0..).map(Rank).zip(counts) {
                let end = count
                    .checked_mul(data.bytes())
                    .and_then(|bytes| start.checked_add(bytes));
                let Some(end) = end.filter(|end| *end <= memory.len()) else {
                    let what = format!("the counts are of more than {} bytes of memory", memory.len());
                    return Err(misuse(what));
                };
                messages.push(GpuMessage {
                    direction,
                    peer,
                    memory: memory.span(start..end)?,
                });
                start = end;
            }
        }
        let group = self.checked_group(COLLECTIVE, &messages)?;
        let parts = || StagedOperation::Parts {
            data,
            parts: Parts {
                send: displacements(send).0,
                receive: displacements(receive).0,
                root: None,
            },
        };
        self.enqueue_group(group, parts, stream)
    }

    fn checked_group<'a>(&self, collective: Collective, messages: &'a [GpuMessage<'a>]) -> Result<Group<'a>, GpuError> {
        let of = (self.rank(), self.size());
        Group::new(collective, messages, of, self.allows_overlap())
    }
}

fn staged(message: &GpuMessage<'_>) -> StagedMessage {
    StagedMessage {
        direction: message.direction,
        peer: message.peer,
        bytes: message.memory.len(),
    }
}
