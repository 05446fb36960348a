//! The executor: runs any plan on RC queue pairs and is independent of the algorithm.
//!
//! An [`Engine`] is one rank of a communicator. To each other rank it has a queue pair for each
//! *connection*: a strand of a plan on a channel. [`submit`](Engine::submit) queues an operation,
//! [`progress`](Engine::progress) drives all in flight until they would block, and
//! [`take`](Engine::take) returns the result of one. Operations run in order on each connection,
//! and overlap across connections.
//!
//! - `program` compiles a plan for this rank; `layout` maps blocks and slices to elements.
//! - `queue` holds operations in order, and `strand` runs their programs.
//! - `link` implements the [protocols](crate::Protocol).
//! - `program_cache` runs repeated short operations without compiling or queueing them.
//! - `p2p` are point-to-point messages; `window` are puts into peers' memory; `probe` is the link
//!   test.
//!
//! No allocation and no lock from step to step; memory for scratch and staging is registered when
//! it is first needed, and kept. Plain memory is registered per operation, where that pins nothing.

mod backoff;
mod connect;
mod error;
pub(crate) mod layout;
mod link;
mod operation;
mod p2p;
mod prepare;
mod probe;
mod program;
mod program_cache;
mod queue;
mod status;
mod strand;
mod window;

use core::iter;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Instant;

use doorbell_verbs::Context;

pub use backoff::Backoff;
use connect::Rail;
pub use error::{EngineError, Failed, Waiting};
pub use layout::Parts;
use link::Link;
use operation::ActiveOperation;
pub use operation::{Data, Operation, PlanId, Ticket, Tuning};
use p2p::PointToPoint;
pub use p2p::{Direction, Message};
use prepare::Prepared;
use probe::LinkProbe;
pub(crate) use program_cache::{CACHED_PROGRAMS, CachedProgram};
use queue::OperationQueue;
use strand::StrandRunner;
pub(crate) use window::{Puts, Window};

use crate::bootstrap::Exchange;
use crate::failure::Wait;
use crate::kernel::Function;
use crate::memory::Segment;
use crate::protocol::EAGER_BYTES;
use crate::types::{DataType, Rank, ReduceOp};

struct EngineFailure {
    why: Failed,
    waiting: Option<Waiting>,
    waits: Vec<Wait>,
}

/// Drives runners through the operations from number `first` on, until all would block. Returns
/// whether there was progress.
#[inline]
fn drive_runners(
    runners: &mut [StrandRunner],
    links: &mut [Vec<Option<Link>>],
    first: u64,
    operations: &mut [ActiveOperation],
) -> Result<bool, Failed> {
    let mut moved = false;
    for (runner, links) in runners.iter_mut().zip(links) {
        moved |= runner.drive(first, operations, links)?;
    }
    Ok(moved)
}

/// Steps between two deadline checks; an idle step counts more ([`IDLE_WEIGHT`]), as it is shorter.
const CLOCK_CHECK_INTERVAL: u32 = 1024;
const IDLE_WEIGHT: u32 = 16;

/// Configuration of an engine. The same on all ranks.
#[doc(alias = "ncclConfig_t")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// Channels: concurrent instances of a plan (default 4).
    pub channels: u32,
    /// Maximum strands of a plan (default 2).
    pub strands: u32,
    /// Maximum bytes of a message of Simple: longer ones are split (default 256 KiB).
    pub fragment: usize,
    /// Maximum bytes of an eager message of Simple: it is copied (default and maximum 16 KiB).
    pub eager: usize,
    /// Local ACK timeout of queue pairs: 4.096 µs · 2^n (default 16, 0.27 s), from 1 to 31. The
    /// connection fails after eight retransmissions. A busy host may not run a rank for half a
    /// second, so lower it only for networks that lose packets.
    pub timeout: u8,
}

impl Config {
    /// Maximum bytes of a granted message: whole pages, which are staged.
    fn fragment(&self) -> usize {
        self.fragment / 4096 * 4096
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            channels: 4,
            strands: 2,
            fragment: 256 << 10,
            eager: EAGER_BYTES,
            timeout: 16,
        }
    }
}

/// One rank of a communicator: its connections and the operations in flight.
///
/// Any connection error fails the engine and all its operations; queue pairs with requests in
/// flight are destroyed, so that nothing accesses the operations' memory any more. Dropping the
/// engine does the same; [`close`](Self::close) waits for the other ranks before.
// fields: one rank: resources, links, operations in flight, and the caches of programs.
pub struct Engine {
    // Dropped before the memory that they point into.
    links: Vec<Vec<Option<Link>>>,
    runners: Vec<StrandRunner>,
    operations: OperationQueue,
    plans: Vec<Prepared>,
    p2p: PointToPoint,
    /// Copies of inputs that are scaled, or that overlap the output.
    input_copies: Vec<Arc<Segment>>,
    /// Those that callers have, by address. What has been freed goes with the next allocation.
    segments: BTreeMap<usize, Weak<Segment>>,
    rails: Vec<Rail>,
    /// Whether all devices read memory where it is, without pinning it.
    lends: bool,
    active_runners: u32,
    rank: Rank,
    ranks: u32,
    config: Config,
    failed: Option<EngineFailure>,
    probe: Option<LinkProbe>,
    program_cache: program_cache::ProgramCache,
    steps_since_clock: u32,
    backoff: Backoff,
}

impl Engine {
    /// Connects rank `rank` of `ranks` with the others; connections are spread over these devices.
    /// All ranks call it at the same time with as many devices.
    ///
    /// # Errors
    /// When a device or the exchange fails, or a setting is out of range.
    pub fn new(
        devices: &[Context],
        rank: Rank,
        ranks: u32,
        config: Config,
        exchange: &mut dyn Exchange,
    ) -> Result<Self, EngineError> {
        if devices.is_empty() {
            return Err(EngineError::NoDevice);
        }
        if rank.0 >= ranks {
            return Err(EngineError::NoRank { rank, ranks });
        }
        let within = |what, given: u64, max: u64| match given {
            given if (1..=max).contains(&given) => Ok(()),
            given => Err(EngineError::Setting { what, given, max }),
        };
        within("channels", config.channels.into(), 64)?;
        within("strands", config.strands.into(), 8)?;
        within("fragment, in units of 4 KiB,", config.fragment as u64 / 4096, 1 << 18)?;
        within(
            "eager, in bytes and one more,",
            config.eager as u64 + 1,
            EAGER_BYTES as u64 + 1,
        )?;
        within("timeout", config.timeout.into(), 31)?;
        let connections = config.channels * config.strands;
        // One connection more, for point-to-point messages.
        let rails = connect::rails(devices, ranks, connections + 1)?;
        let links = connect::connect(&rails, (rank, ranks), connections + 1, config, exchange)?;
        let runner = |index| {
            let place = (index / config.strands, index % config.strands);
            let rail = index as usize % rails.len();
            StrandRunner::new(rank, place, (rail, &rails[rail].domain), 0..ranks as usize)
        };
        Ok(Self {
            links,
            runners: (0..connections).map(runner).collect(),
            operations: OperationQueue::new(),
            plans: Vec::new(),
            p2p: PointToPoint::new(
                ranks,
                connections as usize % rails.len(),
                config.fragment(),
                Function::new(DataType::U8, ReduceOp::Sum, ranks)?,
            ),
            input_copies: Vec::new(),
            segments: BTreeMap::new(),
            lends: rails.iter().all(|rail| {
                let device = rail.context.attr();
                device.is_userspace() && device.on_demand_paging
            }),
            rails,
            active_runners: 0,
            rank,
            ranks,
            config,
            failed: None,
            probe: None,
            program_cache: program_cache::ProgramCache::default(),
            steps_since_clock: 0,
            backoff: Backoff::for_ranks(ranks),
        })
    }

    /// The rank of this engine.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// The number of ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> Config {
        self.config
    }

    /// The devices.
    pub fn devices(&self) -> impl Iterator<Item = &Context> {
        self.rails.iter().map(|rail| &rail.context)
    }

    /// `len` bytes of shared memory, registered on all devices, for zero-copy messages.
    ///
    /// # Errors
    /// When there is no memory, or a device refuses it.
    pub fn allocate(&mut self, len: usize) -> Result<Arc<Segment>, EngineError> {
        let segment = Arc::new(Segment::new(self.rails.iter().map(|rail| &rail.domain), len)?);
        self.segments.retain(|_, segment| segment.strong_count() > 0);
        self.segments.insert(segment.start().addr(), Arc::downgrade(&segment));
        Ok(segment)
    }

    /// The memory from this byte on: of a segment that was allocated here, or plain.
    #[must_use]
    pub fn memory_at(&self, start: *mut u8) -> Data {
        if start.is_null() {
            return Data::None;
        }
        let before = self.segments.range(..=start.addr()).next_back();
        let segment = before.and_then(|(from, segment)| Some((start.addr() - from, segment.upgrade()?)));
        match segment.filter(|(offset, segment)| *offset < segment.len()) {
            Some((offset, segment)) => Data::Registered(segment, offset),
            None => Data::Plain(start),
        }
    }

    /// Drives operations in flight without waiting. Returns whether there was progress.
    pub fn progress(&mut self) -> bool {
        if self.failed.is_some() {
            return false;
        }
        match self.step() {
            Ok(moved) => moved,
            Err(failed) => {
                self.fail(failed);
                true
            }
        }
    }

    fn step(&mut self) -> Result<bool, Failed> {
        let moved = self.drive()? || self.poll()?;
        self.steps_since_clock += if moved { 1 } else { IDLE_WEIGHT };
        if self.steps_since_clock >= CLOCK_CHECK_INTERVAL {
            self.steps_since_clock = 0;
            self.check_deadlines()?;
        }
        Ok(moved)
    }

    fn drive(&mut self) -> Result<bool, Failed> {
        let runners = &mut self.runners[..self.active_runners as usize];
        let (first, operations) = self.operations.all_mut();
        let mut moved = drive_runners(runners, &mut self.links, first, operations)?;
        if self.p2p.is_busy()
            && let Some(links) = self.links.last_mut()
        {
            moved |= self.p2p.drive(self.rank, links)?;
        }
        Ok(moved)
    }

    fn poll(&mut self) -> Result<bool, Failed> {
        let mut any = false;
        for rail in &mut self.rails {
            let links = &mut self.links;
            let done = rail.cq.poll().map_err(|error| Failed::Device(error.to_string()))?;
            done.try_for_each(|done| -> Result<(), Failed> {
                any = true;
                let (connection, peer) = ((done.tag() >> 32) as usize, done.tag() as u32);
                done.check().map_err(|failure| Failed::Connection {
                    peer: Rank(peer),
                    failure,
                })?;
                if let Some(link) = links
                    .get_mut(connection)
                    .and_then(|links| links.get_mut(peer as usize)?.as_mut())
                {
                    link.completed = done.sequence() + 1;
                }
                Ok(())
            })?;
        }
        Ok(any)
    }

    /// The operations and messages in flight, or failed and not taken.
    fn open_operations(&mut self) -> impl Iterator<Item = &mut ActiveOperation> {
        let queues = iter::once(&mut self.operations).chain(self.p2p.queues_mut());
        queues.flat_map(OperationQueue::open)
    }

    fn check_deadlines(&mut self) -> Result<(), Failed> {
        let now = Instant::now();
        let late = self.open_operations().any(|op| {
            let began = *op.began.get_or_insert(now);
            op.deadline
                .is_some_and(|deadline| now.saturating_duration_since(began) >= deadline)
        });
        if !late {
            return Ok(());
        }
        match self.waiting() {
            Some(waiting) => Err(Failed::Deadline(waiting)),
            None => Err(Failed::Device(
                "the deadline has passed, with no rank to wait for".to_owned(),
            )),
        }
    }

    /// Queue pairs are destroyed, so that no device accesses the operations' memory any more.
    fn fail(&mut self, why: Failed) {
        let waiting = self.waiting();
        let waits = match why {
            Failed::Connection { peer, .. } | Failed::Refused { peer, .. } => self.waits_with_failed_links(peer),
            _ => self.report(),
        };
        // The connections for point-to-point messages are kept for the link test.
        let kept = match why {
            Failed::Connection { .. } | Failed::Refused { .. } if self.p2p.is_idle() => 1,
            _ => 0,
        };
        let gone = self.links.len().saturating_sub(kept);
        self.links[..gone].iter_mut().for_each(Vec::clear);
        self.operations.fail(&why);
        self.p2p.queues_mut().for_each(|queue| queue.fail(&why));
        self.failed = Some(EngineFailure { why, waiting, waits });
    }

    /// Breaks the connections to a rank (fault injection), for tests.
    ///
    /// # Errors
    /// When there is no such rank, or a device refuses.
    pub fn cut(&mut self, peer: Rank) -> Result<(), EngineError> {
        if peer.0 >= self.ranks {
            return Err(EngineError::NoRank {
                rank: peer,
                ranks: self.ranks,
            });
        }
        for link in self
            .links
            .iter_mut()
            .filter_map(|links| links.get_mut(peer.index())?.as_mut())
        {
            link.cut().map_err(|error| EngineError::QueuePair { peer, error })?;
        }
        Ok(())
    }

    /// Fails all operations in flight and all later ones with this reason.
    pub fn abort(&mut self, why: impl Into<String>) {
        if self.failed.is_none() {
            self.fail(Failed::Aborted(why.into()));
        }
    }

    /// The result of an operation, once; `None` while it is in flight, or if it was taken.
    pub fn take(&mut self, ticket: Ticket) -> Option<Result<(), Failed>> {
        let queue = match ticket.stream {
            Some(stream) => &mut self.p2p.streams.get_mut(stream as usize)?.as_mut()?.queue,
            None => &mut self.operations,
        };
        let result = queue.take(ticket.number)?;
        if self.operations.is_empty() {
            self.active_runners = 0;
        }
        Some(result)
    }

    /// Closes the engine collectively, so that no rank is left with an unacknowledged request. To
    /// be called when all results have been taken.
    ///
    /// # Errors
    /// When the exchange fails. The engine is gone all the same.
    pub fn close(self, exchange: &mut dyn Exchange) -> Result<(), EngineError> {
        exchange.barrier().map_err(EngineError::Exchange)
    }
}

debug_fields!(Engine, self, rank = self.rank, ranks = self.ranks, config = self.config);

#[cfg(test)]
mod tests;
