//! Simulator: runs any [`Schedule`] in virtual time over a modelled [`Fabric`].
//!
//! It models the executor: an operation is cut into slices, distributed over the channels
//! round-robin; each strand of each channel executes the plan for each of its slices; a send
//! completes when posted, a receive when the message has arrived. A rank's strands share its one
//! processor: each keeps it until it waits for a message.
//!
//! A message occupies all links on its path in turn and is forwarded cut-through, so it takes the
//! latency plus the time of the slowest link. **Shared capacity is first come, first served, per
//! message** (decision 058). Not modelled: switch buffers (a waiting message does not block those
//! behind it), routing (a leaf's uplinks are one pipe), and acknowledgement packets.
//!
//! On links with measured costs, grants and acknowledgements are waited for, lines are packed while
//! others are unpacked, and the cost per byte is that of [`cost`](crate::cost).
//!
//! Times are integer picoseconds, so that runs are reproducible; durations saturate at 213 days.
//! Blocks have equal lengths, ignoring remainders.

mod chart;
mod engine;
mod fabric;
mod figure;
mod links;
mod queue;
mod symmetry;
mod table;
#[cfg(test)]
mod tests;

use core::fmt;

use crate::plan::{Collective, Schedule, Shape};
use crate::types::{DataType, Protocol, Rank};

pub use chart::chart;
pub use fabric::{Fabric, Leaves, Straggler};
pub use figure::{Axis, Line, Panel, figure};
pub use table::{Row, fastest, table};

/// Maximum ranks for consecutive operations: with more their skew matters less.
const REPEATED_RANKS: u32 = 16;

/// An operation to be simulated.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Work {
    /// Bytes, as nccl-tests counts them: all that is reduced or broadcast; for gather, scatter,
    /// all-gather, reduce-scatter and all-to-all, the longer of a rank's two buffers.
    pub bytes: u64,
    /// The data type: partial results may be longer.
    pub data: DataType,
    /// The protocol.
    pub protocol: Protocol,
    /// Instances of the plan, on connections of their own.
    pub channels: u32,
    /// Maximum bytes of a block per slice.
    pub slice_bytes: u64,
}

impl Work {
    fn blocks(shape: &Shape) -> u32 {
        match shape.collective {
            Collective::AllToAll | Collective::AllToAllV => shape.ranks() * shape.blocks,
            Collective::SendRecv => shape.blocks,
            _ => shape.data_blocks(),
        }
    }

    /// Bytes of a data block, over all slices.
    #[must_use]
    pub fn block_bytes(&self, shape: &Shape) -> f64 {
        self.bytes_of(Self::blocks(shape))
    }

    fn bytes_of(&self, blocks: u32) -> f64 {
        if blocks == 0 {
            0.0
        } else {
            self.bytes as f64 / f64::from(blocks)
        }
    }

    /// The number of slices.
    #[must_use]
    pub fn slices(&self, shape: &Shape) -> u64 {
        self.slices_of(Self::blocks(shape))
    }

    pub(crate) fn slices_of(&self, blocks: u32) -> u64 {
        (self.bytes_of(blocks) / self.slice_bytes.max(1) as f64).ceil().max(1.0) as u64
    }

    /// The working set that determines memory cost: the mean of input and output; for LL and LL128,
    /// which transfer between caches, the message length.
    pub(crate) fn touched(&self, collective: Collective, ranks: u32, message: f64) -> f64 {
        use Collective as C;
        let of_two = match collective {
            C::AllReduce | C::Reduce | C::AllToAll | C::AllToAllV | C::SendRecv | C::Barrier => 2.0,
            // The root reads its input once, and writes it to another rank and to its own output.
            C::Broadcast => 3.0,
            C::AllGather | C::ReduceScatter | C::Gather | C::Scatter => 1.0 + 1.0 / f64::from(ranks.max(1)),
        };
        match self.protocol {
            Protocol::Simple => self.bytes as f64 * of_two / 2.0,
            Protocol::Ll | Protocol::Ll128 => message,
        }
    }

    /// The number of channels that have work.
    #[must_use]
    pub fn busy_channels(&self, shape: &Shape) -> u32 {
        u64::from(self.channels.max(1)).min(self.slices(shape)) as u32
    }
}

/// Virtual time, in picoseconds since the operation began.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Time(pub u64);

impl Time {
    /// From ns; saturates at 0.
    #[must_use]
    pub fn from_ns(ns: f64) -> Self {
        Self((ns * 1000.0).round() as u64)
    }

    /// In ns.
    #[must_use]
    pub fn ns(self) -> f64 {
        self.0 as f64 / 1000.0
    }
}

/// The result of a simulation.
#[derive(Clone, PartialEq, Debug)]
pub struct Outcome {
    /// When the last rank finished.
    pub time: Time,
    /// By rank.
    pub ranks: Vec<RankUse>,
    /// All shared links, and all adapters.
    pub links: Vec<LinkUse>,
    /// Total messages.
    pub messages: u64,
    /// Total steps.
    pub steps: u64,
}

/// Utilisation of a rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RankUse {
    /// When it finished.
    pub finished: Time,
    /// Busy time of its processor.
    pub busy: Time,
}

/// Utilisation of a link.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LinkUse {
    /// The link.
    pub link: LinkName,
    /// Bytes of payload.
    pub bytes: f64,
    /// Busy time.
    pub busy: Time,
}

/// A link of a fabric.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum LinkName {
    /// A rank's messages to others of its host.
    LocalOut(Rank),
    /// A rank's messages from others of its host.
    LocalIn(Rank),
    /// The shared memory of a host.
    Memory {
        /// The host.
        host: u32,
    },
    /// The sending side of an adapter.
    AdapterOut {
        /// The host.
        host: u32,
        /// The adapter, from 0.
        adapter: u32,
    },
    /// The receiving side of an adapter.
    AdapterIn {
        /// The host.
        host: u32,
        /// The adapter, from 0.
        adapter: u32,
    },
    /// Uplinks of a leaf.
    LeafUp(u32),
    /// Downlinks of a leaf.
    LeafDown(u32),
}

impl fmt::Display for LinkName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LocalOut(rank) => write!(f, "rank {rank} out"),
            Self::LocalIn(rank) => write!(f, "rank {rank} in"),
            Self::Memory { host } => write!(f, "host {host} memory"),
            Self::AdapterOut { host, adapter } => write!(f, "host {host} adapter {adapter} out"),
            Self::AdapterIn { host, adapter } => write!(f, "host {host} adapter {adapter} in"),
            Self::LeafUp(leaf) => write!(f, "leaf {leaf} up"),
            Self::LeafDown(leaf) => write!(f, "leaf {leaf} down"),
        }
    }
}

/// Why a simulation failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SimulationError {
    /// The plan is for another number of ranks.
    #[error("the plan is for {plan} ranks and the fabric has {fabric}")]
    Ranks {
        /// The plan's.
        plan: u32,
        /// The fabric's.
        fabric: u32,
    },
    /// Deadlock: no thread can continue, and some have not finished.
    #[error("after {} ns no thread can continue: {}", .at.ns(), show(.waiting))]
    Stuck {
        /// Time of the last step.
        at: Time,
        /// Some of the waits: a cycle, if there is one.
        waiting: Vec<Wait>,
    },
    /// Messages that were never received.
    #[error("rank {to} never received a message of rank {from}: {count} are left over")]
    LeftOver {
        /// The sender of one.
        from: Rank,
        /// Its receiver.
        to: Rank,
        /// Their number.
        count: u64,
    },
}

/// A rank that waits for a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wait {
    /// The waiting rank.
    pub rank: Rank,
    /// The connection: channel × strands + strand.
    pub connection: u32,
    /// The step of the strand, from 0.
    pub step: u64,
    /// The sender of the awaited message.
    pub from: Rank,
}

fn show(waiting: &[Wait]) -> String {
    let one = |wait: &Wait| {
        format!(
            "rank {} waits for rank {} at step {} of connection {}",
            wait.rank, wait.from, wait.step, wait.connection
        )
    };
    waiting.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// Runs `schedule` over `fabric`.
///
/// If the schedule is symmetric and the fabric uniform, one rank is simulated for all.
///
/// # Errors
/// [`SimulationError`]: the plan does not match the fabric, or it is wrong.
pub fn run(schedule: &dyn Schedule, fabric: &Fabric, work: &Work) -> Result<Outcome, SimulationError> {
    run_part(schedule, fabric, work, work)
}

/// As [`run`], of work that is a part of an operation: memory costs as much as in that.
fn run_part(
    schedule: &dyn Schedule,
    fabric: &Fabric,
    work: &Work,
    operation: &Work,
) -> Result<Outcome, SimulationError> {
    fits(schedule, fabric)?;
    let run = |scope| engine::run(schedule, fabric, (work, operation), scope, 1);
    if fabric.is_uniform()
        && symmetry::all_ranks_symmetric(schedule)
        && let Ok(outcome) = run(engine::Scope::Representative)
    {
        return Ok(outcome);
    }
    run(engine::Scope::All)
}

/// Runs `schedule` over `fabric`, simulating every rank.
///
/// # Errors
/// As [`run`].
pub fn run_every_rank(schedule: &dyn Schedule, fabric: &Fabric, work: &Work) -> Result<Outcome, SimulationError> {
    fits(schedule, fabric)?;
    engine::run(schedule, fabric, (work, work), engine::Scope::All, 1)
}

/// Time per operation of many consecutive ones, ns: a rank begins the next one without waiting for
/// others. With too many ranks or slices it is [`predict_ns`].
///
/// # Errors
/// As [`run`].
pub fn repeated_ns(schedule: &dyn Schedule, fabric: &Fabric, work: &Work) -> Result<f64, SimulationError> {
    let shape = schedule.shape();
    if shape.ranks() > REPEATED_RANKS || work.slices(shape) > 4 * u64::from(work.busy_channels(shape)) {
        return predict_ns(schedule, fabric, work);
    }
    fits(schedule, fabric)?;
    let time = |times| {
        let ran = engine::run(schedule, fabric, (work, work), engine::Scope::All, times);
        ran.map(|outcome| outcome.time.ns())
    };
    Ok((time(5)? - time(2)?) / 3.0)
}

/// Duration of an operation, ns, by simulating its first slices: if every channel has more than
/// twelve, the difference between eight and four is extrapolated.
///
/// # Errors
/// As [`run`].
pub fn predict_ns(schedule: &dyn Schedule, fabric: &Fabric, work: &Work) -> Result<f64, SimulationError> {
    let shape = schedule.shape();
    let (slices, channels) = (work.slices(shape), u64::from(work.busy_channels(shape)));
    let time = |part: &Work| run_part(schedule, fabric, part, work).map(|outcome| outcome.time.ns());
    if slices <= 12 * channels {
        return time(work);
    }
    let of = |some: u64| {
        let bytes = (work.bytes as f64 * some as f64 / slices as f64).round() as u64;
        let block = Work { bytes, ..*work }.block_bytes(shape);
        Work {
            bytes,
            slice_bytes: (block / some as f64).ceil() as u64,
            ..*work
        }
    };
    let (four, eight) = (time(&of(4 * channels))?, time(&of(8 * channels))?);
    Ok(eight + (eight - four) * (slices - 8 * channels) as f64 / (4 * channels) as f64)
}

fn fits(schedule: &dyn Schedule, fabric: &Fabric) -> Result<(), SimulationError> {
    let (plan, fabric) = (schedule.shape().ranks(), fabric.ranks());
    if plan == fabric {
        Ok(())
    } else {
        Err(SimulationError::Ranks { plan, fabric })
    }
}
