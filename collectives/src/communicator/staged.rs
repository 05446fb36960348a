//! Operations on segments, for GPU collectives staged through host memory.

use std::sync::Arc;

use super::call::{OperationSpec, Reduction};
use super::data::BufferRef;
use super::{CollectiveError, Communicator};
use crate::executor::{Direction, Parts};
use crate::memory::Segment;
use crate::plan::Collective;
use crate::reference::Case;
use crate::types::{DataType, Rank};

/// An operation on segments.
pub(crate) enum StagedOperation {
    /// Any but [`Collective::AllToAllV`].
    Collective {
        collective: Collective,
        root: Rank,
        reduction: Reduction,
        data: DataType,
        count: u64,
    },
    /// All-to-all-v.
    Parts {
        data: DataType,
        parts: Parts,
    },
    Messages(Vec<StagedMessage>),
}

/// A point-to-point message.
pub(crate) struct StagedMessage {
    pub(crate) direction: Direction,
    pub(crate) peer: Rank,
    pub(crate) bytes: usize,
}

impl StagedOperation {
    /// The collective, the type, and the elements of a rank's input and output.
    fn extent(&self, rank: Rank, ranks: u32) -> (Collective, DataType, u64, u64) {
        match self {
            Self::Collective {
                collective,
                root,
                data,
                count,
                ..
            } => {
                let case = Case {
                    collective: *collective,
                    ranks,
                    root: *root,
                    count: *count,
                };
                (*collective, *data, case.input(rank), case.output(rank))
            }
            Self::Parts { data, parts } => {
                let end = |parts: &[(u64, u64)]| parts.last().map_or(0, |(start, len)| start.saturating_add(*len));
                (Collective::AllToAllV, *data, end(&parts.send), end(&parts.receive))
            }
            Self::Messages(messages) => {
                let bytes = |direction| {
                    let messages = messages.iter().filter(|message| message.direction == direction);
                    messages.map(|message| message.bytes as u64).sum()
                };
                let (sent, received) = (bytes(Direction::Send), bytes(Direction::Receive));
                (Collective::SendRecv, DataType::U8, sent, received)
            }
        }
    }
}

impl Communicator {
    pub(crate) fn failure_error(&self) -> CollectiveError {
        self.shared.why()
    }

    /// The members whose process has ended without leaving.
    pub(crate) fn dead(&self) -> Vec<Rank> {
        self.shared.control.dead()
    }

    /// Runs an operation on segments of this communicator, from their beginnings.
    ///
    /// # Errors
    /// As of any operation; [`CollectiveError::Misuse`] where a segment is too short.
    pub(crate) fn run_staged(
        &self,
        operation: StagedOperation,
        input: Option<&Arc<Segment>>,
        output: Option<&Arc<Segment>>,
    ) -> Result<(), CollectiveError> {
        let (collective, data, given, got) = operation.extent(self.rank, self.ranks);
        let fits = |segment: Option<&Arc<Segment>>, elements: u64| {
            let bytes = elements.saturating_mul(data.bytes() as u64);
            segment.map_or(0, |segment| segment.len() as u64) >= bytes
        };
        if !fits(input, given) || !fits(output, got) {
            return collective.misuse("memory of the host is shorter than the operation");
        }
        let buffer =
            |segment: Option<&Arc<Segment>>| segment.map_or(BufferRef::NONE, |segment| BufferRef::segment(segment));
        let (input, output) = (buffer(input), buffer(output));
        let spec = match operation {
            StagedOperation::Messages(messages) => return self.run_messages(&messages, input, output),
            StagedOperation::Parts { data, parts } => OperationSpec {
                parts: Some(parts),
                ..self.spec_of(collective, (data, 0), input, output)
            },
            StagedOperation::Collective {
                root,
                reduction,
                data,
                count,
                ..
            } => {
                let spec = self.with_root(self.spec_of(collective, (data, count), input, output), root)?;
                match collective.reduces() {
                    true => Self::with_reduction(spec, reduction)?,
                    false => spec,
                }
            }
        };
        self.shared.run(spec, &self.settings(), || ())
    }

    /// Begins all messages before it waits for the first. What is sent, and what is received, is
    /// consecutive.
    fn run_messages(
        &self,
        messages: &[StagedMessage],
        input: BufferRef,
        output: BufferRef,
    ) -> Result<(), CollectiveError> {
        let (mut sent, mut received) = (0, 0);
        let mut tickets = Vec::with_capacity(messages.len());
        let mut result = Ok(());
        for message in messages {
            let (memory, end) = match message.direction {
                Direction::Send => (input, &mut sent),
                Direction::Receive => (output, &mut received),
            };
            let memory = memory.offset_by(*end, DataType::U8);
            *end += message.bytes;
            let (from, into) = match message.direction {
                Direction::Send => (memory, BufferRef::NONE),
                Direction::Receive => (BufferRef::NONE, memory),
            };
            let spec = OperationSpec {
                message: Some((message.peer, message.direction)),
                ..self.spec_of(Collective::SendRecv, (DataType::U8, message.bytes as u64), from, into)
            };
            match self.shared.begin(spec, &self.settings()) {
                Ok(ticket) => tickets.push(ticket),
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        for ticket in tickets {
            let one = self.shared.wait(ticket);
            result = result.and(one);
        }
        result
    }
}
