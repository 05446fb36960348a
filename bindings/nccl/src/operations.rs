//! What is enqueued: collectives, sends and receives.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use doorbell_collectives::communicator::Reduction;
use doorbell_collectives::executor::Direction;
use doorbell_collectives::gpu::{GpuCall, GpuMessage};
use doorbell_collectives::plan::Collective;
use doorbell_collectives::reference::Case;
use doorbell_collectives::{DataType, Rank, ReduceOp};
use doorbell_cuda::{Context, DevicePtr, Event, Foreign, Memory, Span, Stream};

use crate::abi::{Opaque, Status, data_type};
use crate::communicator::{Communicator, Ready};
use crate::failure::Failure;
use crate::reduction::Operator;
use crate::{group, handles};

/// An operation in a stream of the program.
pub(crate) struct Work {
    stream: Opaque,
    kind: Kind,
}

enum Kind {
    Collective(Call),
    Message {
        direction: Direction,
        peer: Rank,
        memory: Place,
    },
}

struct Call {
    collective: Collective,
    root: Rank,
    data: DataType,
    count: usize,
    operator: Operator,
    input: Place,
    output: Place,
}

/// GPU memory of the program: an address and bytes, of which there may be none.
#[derive(Clone, Copy)]
struct Place(DevicePtr, usize);

/// The arguments of a collective.
pub(crate) struct Arguments {
    pub(crate) collective: Collective,
    pub(crate) input: *const c_void,
    pub(crate) output: *mut c_void,
    pub(crate) count: usize,
    pub(crate) data: c_int,
    /// Of a reduction.
    pub(crate) operator: Option<c_int>,
    /// Of those that have one.
    pub(crate) root: Option<c_int>,
}

/// Validates a collective, and adds it to the thread's group.
pub(crate) fn collective(arguments: &Arguments, communicator: Opaque, stream: Opaque) -> Result<Status, Failure> {
    group::noted((|| {
        let communicator = handles::get(communicator)?;
        let call = call(arguments, &communicator)?;
        let kind = Kind::Collective(call);
        group::add(communicator, Work { stream, kind })
    })())
}

/// Validates a send or a receive, and adds it to the thread's group.
pub(crate) fn message(
    direction: Direction,
    buffer: *const c_void,
    (count, data): (usize, c_int),
    peer: c_int,
    communicator: Opaque,
    stream: Opaque,
) -> Result<Status, Failure> {
    group::noted((|| {
        let communicator = handles::get(communicator)?;
        let peer = rank(peer, communicator.ready()?.gpu.size(), "peer")?;
        let memory = place(buffer, bytes(count, 1, data_type(data)?)?, "the buffer")?;
        let kind = Kind::Message {
            direction,
            peer,
            memory,
        };
        group::add(communicator, Work { stream, kind })
    })())
}

fn call(arguments: &Arguments, communicator: &Communicator) -> Result<Call, Failure> {
    let &Arguments { collective, count, .. } = arguments;
    let gpu = &communicator.ready()?.gpu;
    let (own, ranks) = (gpu.rank(), gpu.size());
    let data = data_type(arguments.data)?;
    let operator = match arguments.operator {
        Some(operator) => communicator.operators.get(operator, data)?,
        None => Operator::Known(ReduceOp::Sum.into()),
    };
    let root = arguments.root.map_or(Ok(Rank(0)), |root| rank(root, ranks, "root"))?;
    let case = Case {
        collective,
        ranks,
        root,
        count: count as u64,
    };
    // The longest that there can be of it.
    bytes(count, ranks as usize, data)?;
    let bytes = |elements: u64| elements as usize * data.bytes();
    Ok(Call {
        collective,
        root,
        data,
        count,
        operator,
        input: place(arguments.input, bytes(case.input(own)), "sendbuff")?,
        output: place(arguments.output, bytes(case.output(own)), "recvbuff")?,
    })
}

/// The rank of this number, which `what` names.
pub(crate) fn rank(number: c_int, ranks: u32, what: &str) -> Result<Rank, Failure> {
    let rank = u32::try_from(number).ok().filter(|rank| *rank < ranks);
    rank.map(Rank)
        .ok_or_else(|| Failure::invalid_argument(format!("{what} {number} is no rank of {ranks} ranks")))
}

/// Bytes of `parts` times `count` elements.
fn bytes(count: usize, parts: usize, data: DataType) -> Result<usize, Failure> {
    let all = count.checked_mul(parts).and_then(|all| all.checked_mul(data.bytes()));
    let fits = |bytes: &usize| isize::try_from(*bytes).is_ok();
    all.filter(fits)
        .ok_or_else(|| Failure::invalid_argument(format!("{count} elements of {data} are more than there can be")))
}

fn place(buffer: *const c_void, bytes: usize, name: &str) -> Result<Place, Failure> {
    if buffer.is_null() && bytes > 0 {
        return Err(Failure::invalid_argument(format!("{name} is NULL")));
    }
    Ok(Place(DevicePtr(buffer.addr() as u64), bytes))
}

/// Reads a scalar in device memory, as the work before it in its stream leaves it. The operations
/// of a group come after this, as those of one communicator may wait for those of the next one.
pub(crate) fn read_scalar(communicator: &Communicator, work: &mut Work) -> Result<(), Failure> {
    if let Kind::Collective(call) = &mut work.kind
        && let Operator::ScaledBy(..) = call.operator
    {
        let ready = communicator.ready()?;
        let stream = ready.stream(work.stream)?;
        call.operator = Operator::Known(ready.reduction(call, &stream)?);
    }
    Ok(())
}

/// Enqueues one communicator's work: collectives in order, then all messages together.
pub(crate) fn enqueue<'a>(
    communicator: &Arc<Communicator>,
    work: impl Iterator<Item = &'a Work>,
) -> Result<(), Failure> {
    let ready = communicator.ready()?;
    // A group of several GPUs has another one's context current.
    ready.gpu.context().while_current(|| {
        let mut messages = Vec::new();
        for Work { stream, kind } in work {
            match kind {
                Kind::Collective(call) => ready.run(call, &ready.stream(*stream)?)?,
                Kind::Message {
                    direction,
                    peer,
                    memory,
                } => messages.push((*stream, *direction, *peer, *memory)),
            }
        }
        ready.exchange(&messages)
    })?
}

impl Ready {
    /// A stream of the program, for this call.
    fn stream(&self, raw: Opaque) -> Result<Stream, Failure> {
        // SAFETY: during the call the program keeps its stream, and begins and ends no capture of
        // it; the communicator records the end of what it enqueues.
        Ok(unsafe { Stream::borrow_raw(raw, &self.follower)? })
    }

    fn reduction(&self, call: &Call, stream: &Stream) -> Result<Reduction, Failure> {
        // SAFETY: NCCL's contract: the scalar is in its place until the operation is done.
        unsafe { call.operator.read(&self.scalar, stream) }
    }

    fn run(&self, call: &Call, stream: &Stream) -> Result<(), Failure> {
        let memories = [call.input, call.output].map(|place| place.memory(self.gpu.context()));
        let [input, output] = &memories;
        let call = GpuCall {
            collective: call.collective,
            root: call.root,
            data: call.data,
            count: call.count,
            reduction: self.reduction(call, stream)?,
            input: input.as_ref().map(Memory::all),
            output: output.as_ref().map(Memory::all),
        };
        Ok(self.gpu.enqueue(&call, stream)?)
    }

    /// Enqueues messages on the first one's stream, between the work of all of their streams before
    /// and after it. Empty ones are complete: both ends know that they are.
    fn exchange(&self, messages: &[(Opaque, Direction, Rank, Place)]) -> Result<(), Failure> {
        let context = self.gpu.context();
        let memories = messages.iter().map(|(.., place)| place.memory(context));
        let memories: Vec<Option<Foreign>> = memories.collect();
        let spans = messages.iter().zip(&memories);
        let group: Vec<GpuMessage<'_>> = spans
            .filter_map(|((_, direction, peer, _), memory)| {
                let memory: Span<'_> = memory.as_ref()?.all();
                Some(match direction {
                    Direction::Send => GpuMessage::send(memory, *peer),
                    Direction::Receive => GpuMessage::receive(memory, *peer),
                })
            })
            .collect();
        let Some((first, ..)) = messages.first() else {
            return Ok(());
        };
        if group.is_empty() {
            return Ok(());
        }
        let mut others: Vec<Opaque> = messages.iter().map(|(stream, ..)| *stream).collect();
        others.sort_unstable();
        others.dedup();
        others.retain(|other| other != first);
        let stream = self.stream(*first)?;
        let others = others.into_iter().map(|other| self.stream(other));
        let others = others.collect::<Result<Vec<_>, _>>()?;
        for other in &others {
            order(other, &stream, context)?;
        }
        self.gpu.group(&group, &stream)?;
        for other in &others {
            order(&stream, other, context)?;
        }
        Ok(())
    }
}

/// Makes later work of one stream wait for earlier work of another.
fn order(earlier: &Stream, later: &Stream, context: &Context) -> Result<(), Failure> {
    let event = Event::new(context)?;
    earlier.record(&event)?;
    Ok(later.wait(&event)?)
}

impl Place {
    fn memory(self, context: &Context) -> Option<Foreign> {
        // SAFETY: NCCL's contract: the program keeps the memory until the operation is done.
        unsafe { Foreign::name(context, self.0, self.1).ok() }
    }
}
