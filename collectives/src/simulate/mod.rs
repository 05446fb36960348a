//! A simulator: runs any [`Schedule`] in virtual time over a modelled [`Fabric`].
//!
//! It does what the executor does: an operation is cut into slices, which the channels take in turns; each strand of each channel goes through the steps of the plan, once for each of its slices; a send is done when it is
//! posted, a receive when the message is there. A rank's strands share its one processor: each keeps it until it waits for a
//! message, and then whoever could go on first gets it.
//!
//! A message occupies, one after another, whatever lies on its way: the sender's adapter, its leaf's uplinks, those of the receiver's leaf, the receiver's adapter; it streams through them (cut-through), so that it takes
//! the latency and then the slowest of them. **Shared capacity is first come, first served, message by message**, not divided max-min fairly: an adapter sends what was posted first (one queue pair's messages it does in
//! order anyway); it needs no recomputation of all flows at each event, so that 16,384 ranks are possible; and as operations are cut into slices of a few hundred KiB, turns of a message come close to equal shares. What it does not
//! model: switches' buffers (a message waits at no cost to those behind it), routing (a leaf's uplinks are one pipe), and acknowledgements.
//!
//! On a link whose costs were measured so, grants and confirmations of messages are waited for, lines are packed at one end while they are unpacked at the other, and a byte costs what [`cost`](crate::cost) says of it.
//!
//! Times are whole picoseconds, so that runs are the same everywhere; what takes longer than 200 days takes 213. Blocks are taken to be equally long, whatever the remainder.

mod chart;
mod engine;
mod fabric;
mod links;
mod queue;
mod symmetry;
mod table;
#[cfg(test)]
mod tests;

use core::fmt;
use core::time::Duration;

use crate::plan::{Collective, Schedule, Shape};
use crate::types::{DataType, Protocol, Rank};

pub use chart::chart;
pub use fabric::{Fabric, Leaves, Straggler};
pub use table::{Row, quickest, table};

/// Up to how many ranks operations are run one after another: with more of them their skew matters less, and a run takes long.
const REPEATED_RANKS: u32 = 16;

/// An operation to be simulated.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Work {
    /// Bytes, as nccl-tests count them: the whole that is reduced or sent round; for gather, scatter, all-gather, reduce-scatter and all-to-all, what a rank has of the longer of its two buffers.
    pub bytes: u64,
    /// The elements' type: partial results may be longer.
    pub data: DataType,
    /// How messages go.
    pub protocol: Protocol,
    /// Replicas of the plan, on connections of their own.
    pub channels: u32,
    /// The most of a block that is in a slice.
    pub slice_bytes: u64,
}

impl Work {
    /// Into how many blocks of one length `bytes` is divided.
    fn blocks(shape: &Shape) -> u32 {
        match shape.collective {
            // What a rank has is one of as many parts as there are ranks.
            Collective::AllToAll | Collective::AllToAllV => shape.ranks() * shape.blocks,
            Collective::SendRecv => shape.blocks,
            _ => shape.data_blocks(),
        }
    }

    /// Bytes of a data block, all slices together.
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

    /// Into how many slices the operation is cut.
    #[must_use]
    pub fn slices(&self, shape: &Shape) -> u64 {
        self.slices_of(Self::blocks(shape))
    }

    /// Into how many slices it is cut where `bytes` is divided into so many blocks.
    pub(crate) fn slices_of(&self, blocks: u32) -> u64 {
        (self.bytes_of(blocks) / self.slice_bytes.max(1) as f64).ceil().max(1.0) as u64
    }

    /// Of how many bytes memory costs what it does while messages of so many are on their way: what a rank has of the operation, the mean of its input and its output; of lines, which go from cache to cache, the message's own.
    pub(crate) fn touched(&self, collective: Collective, ranks: u32, message: f64) -> f64 {
        use Collective as C;
        let of_two = match collective {
            C::AllReduce | C::Reduce | C::AllToAll | C::AllToAllV | C::SendRecv | C::Barrier => 2.0,
            C::Broadcast => 1.0,
            C::AllGather | C::ReduceScatter | C::Gather | C::Scatter => 1.0 + 1.0 / f64::from(ranks.max(1)),
        };
        match self.protocol {
            Protocol::Simple => self.bytes as f64 * of_two / 2.0,
            Protocol::Ll | Protocol::Ll128 => message,
        }
    }

    /// How many of the channels have something to do.
    #[must_use]
    pub fn busy_channels(&self, shape: &Shape) -> u32 {
        u64::from(self.channels.max(1)).min(self.slices(shape)) as u32
    }
}

/// Virtual time, in picoseconds since the operation began.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Time(pub u64);

impl Time {
    /// From ns; never negative.
    #[must_use]
    pub fn from_ns(ns: f64) -> Self {
        Self((ns * 1000.0).round() as u64)
    }

    /// In ns.
    #[must_use]
    pub fn ns(self) -> f64 {
        self.0 as f64 / 1000.0
    }

    /// In whole ns.
    #[must_use]
    pub fn duration(self) -> Duration {
        Duration::from_nanos(self.0 / 1000)
    }
}

/// How an operation went.
#[derive(Clone, PartialEq, Debug)]
pub struct Outcome {
    /// When the last rank had finished.
    pub time: Time,
    /// By rank.
    pub ranks: Vec<RankUse>,
    /// Whatever carried messages, and was not there for one rank's alone or was an adapter.
    pub links: Vec<LinkUse>,
    /// Messages in all.
    pub messages: u64,
    /// Steps in all.
    pub steps: u64,
}

/// What a rank did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RankUse {
    /// When it was done.
    pub finished: Time,
    /// For how long its processor worked; the rest it waited.
    pub busy: Time,
}

/// What a link carried.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LinkUse {
    /// Which.
    pub link: LinkName,
    /// Bytes of payload.
    pub bytes: f64,
    /// For how long it carried something.
    pub busy: Time,
}

/// A link of a fabric.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum LinkName {
    /// What a rank sends to others of its host.
    LocalOut(Rank),
    /// What a rank gets from others of its host.
    LocalIn(Rank),
    /// The memory that ranks of a host share.
    Memory {
        /// The host.
        host: u32,
    },
    /// What an adapter sends.
    AdapterOut {
        /// The host.
        host: u32,
        /// The adapter, from 0.
        adapter: u32,
    },
    /// What an adapter receives.
    AdapterIn {
        /// The host.
        host: u32,
        /// The adapter, from 0.
        adapter: u32,
    },
    /// From a leaf upwards.
    LeafUp(u32),
    /// Down to a leaf.
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

/// Why an operation cannot be simulated to its end.
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
    /// Nobody can go on, and somebody has not finished.
    #[error("after {} ns nobody can go on: {}", .at.ns(), show(.waiting))]
    Stuck {
        /// When the last step was done.
        at: Time,
        /// Some of those who wait, and if there is one a cycle of them.
        waiting: Vec<Wait>,
    },
    /// Messages were sent that nobody received.
    #[error("rank {to} never received a message of rank {from}: {count} are left over")]
    LeftOver {
        /// The sender of one.
        from: Rank,
        /// Its receiver.
        to: Rank,
        /// How many are left in all.
        count: u64,
    },
}

/// A rank that waits for a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wait {
    /// Who waits.
    pub rank: Rank,
    /// In which connection: channel × strands + strand.
    pub connection: u32,
    /// At which step of the strand, from 0.
    pub step: u64,
    /// For a message of whom.
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
/// Where all ranks provably do the same on a uniform fabric, one of them is run for all.
///
/// # Errors
/// [`SimulationError`]: the plan and the fabric do not fit together, or the plan is wrong.
pub fn run(schedule: &dyn Schedule, fabric: &Fabric, work: &Work) -> Result<Outcome, SimulationError> {
    fits(schedule, fabric)?;
    // What goes wrong is told of the ranks to which it happens.
    if fabric.is_uniform()
        && symmetry::all_do_the_same(schedule)
        && let Ok(outcome) = engine::run(schedule, fabric, work, engine::Who::OneForAll, 1)
    {
        return Ok(outcome);
    }
    engine::run(schedule, fabric, work, engine::Who::All, 1)
}

/// Runs `schedule` over `fabric`, every rank of it.
///
/// # Errors
/// As [`run`].
pub fn run_every_rank(schedule: &dyn Schedule, fabric: &Fabric, work: &Work) -> Result<Outcome, SimulationError> {
    fits(schedule, fabric)?;
    engine::run(schedule, fabric, work, engine::Who::All, 1)
}

/// How long an operation takes, ns, of many that are done one after another, as benchmarks and most programs do them: who is done with one begins the next, whether others are done or not. Where ranks or slices are too many for
/// that, it is [`predict_ns`].
///
/// # Errors
/// As [`run`].
pub fn repeated_ns(schedule: &dyn Schedule, fabric: &Fabric, work: &Work) -> Result<f64, SimulationError> {
    let shape = schedule.shape();
    if shape.ranks() > REPEATED_RANKS || work.slices(shape) > 4 * u64::from(work.busy_channels(shape)) {
        return predict_ns(schedule, fabric, work);
    }
    fits(schedule, fabric)?;
    let time = |operations| {
        let ran = engine::run(schedule, fabric, work, engine::Who::All, operations);
        ran.map(|outcome| outcome.time.ns())
    };
    Ok((time(5)? - time(2)?) / 3.0)
}

/// How long an operation takes, ns, by simulating the first of its slices: where every channel has more than twelve, what eight take longer than four is what each further four take.
///
/// # Errors
/// As [`run`].
pub fn predict_ns(schedule: &dyn Schedule, fabric: &Fabric, work: &Work) -> Result<f64, SimulationError> {
    let shape = schedule.shape();
    let (slices, channels) = (work.slices(shape), u64::from(work.busy_channels(shape)));
    let time = |work: &Work| run(schedule, fabric, work).map(|outcome| outcome.time.ns());
    if slices <= 12 * channels {
        return time(work);
    }
    // A length that gives so many slices of the length that they have.
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
