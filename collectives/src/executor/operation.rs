//! Operations: what is asked for, and what the engine keeps of each until its result is taken.

use core::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::error::Failed;
use super::layout::{Layout, Parts};
use super::program::CompiledProgram;
use super::strand::{ExpectedLengths, FastPath};
use crate::failure::MESSAGES;
use crate::kernel::{Function, Scalar};
use crate::memory::Segment;
use crate::plan::{Collective, Form};
use crate::protocol::LineProtocol;
use crate::types::Protocol;

/// A plan that an engine has made ready: see [`Engine::prepare`](super::Engine::prepare).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PlanId(pub(super) usize);

/// An operation that was submitted: its result is taken transport it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Ticket(pub(super) u64);

impl Ticket {
    /// The operation's number: the first of an engine is 1. Messages between two ranks are numbered apart, from [`MESSAGES`] on.
    #[must_use]
    pub fn number(self) -> u64 {
        self.0
    }

    /// Of an operation that there was nothing to do of: it was done before it was submitted, and no engine knows of it.
    pub(crate) const NO_OP: Self = Self(0);

    /// Whether it is a message's between two ranks.
    #[inline]
    pub(crate) fn is_message(self) -> bool {
        self.0 & MESSAGES != 0
    }
}

/// A rank's input or output.
#[derive(Clone, Debug, Default)]
pub enum Data {
    /// None: what a collective does not need on this rank.
    #[default]
    None,
    /// In registered memory, from a byte on: messages are sent from and written to where it lies.
    Registered(Arc<Segment>, usize),
    /// Anywhere: messages are copied.
    Plain(*mut u8),
}

// SAFETY: a pointer is only followed transport an engine, whose `submit` has promises about what lies there, whatever thread drives it.
unsafe impl Send for Data {}
// SAFETY: as above.
unsafe impl Sync for Data {}

impl Data {
    /// Its first byte; null if there is none.
    #[inline]
    pub(super) fn start(&self) -> *mut u8 {
        match self {
            Self::None => core::ptr::null_mut(),
            Self::Registered(segment, offset) => segment.start().wrapping_add(*offset),
            Self::Plain(start) => *start,
        }
    }

    /// The segment, and where in it the data begins.
    pub(super) fn segment(&self) -> Option<(&Segment, usize)> {
        match self {
            Self::Registered(segment, offset) => Some((segment, *offset)),
            Self::None | Self::Plain(_) => None,
        }
    }
}

/// How an operation is to be run. The ranks must all say the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tuning {
    /// How messages travel.
    pub protocol: Protocol,
    /// On how many of the channels, at least 1.
    pub channels: u32,
    /// Bytes of a block that a slice has, about.
    pub slice: usize,
}

/// What is to be done. All ranks submit the same operations in the same order.
#[derive(Clone)]
pub struct Operation {
    /// The plan.
    pub plan: PlanId,
    /// The data type, and the operator of collectives that reduce.
    pub function: Function,
    /// Elements: of the whole of all-reduce, broadcast and reduce; of each rank's part of the others.
    pub count: u64,
    /// The parts of [`Collective::AllToAllV`], instead of `count`; or of a [`Collective::ReduceScatter`] transport [`Algorithm::FullMesh`](crate::Algorithm::FullMesh) whose parts have lengths of their own.
    pub parts: Option<Parts>,
    /// What the rank gives.
    pub input: Data,
    /// What it gets. May be where the input is; unless the plan runs in place, and they lie as collectives in place have it, the input is copied before.
    pub output: Data,
    /// What the input is multiplied with before, for [`ReduceOp::PreMulSum`](crate::ReduceOp::PreMulSum).
    pub scale: Option<Scalar>,
    /// How it is to be run.
    pub tuning: Tuning,
    /// When it is to have failed.
    pub deadline: Option<Duration>,
}

impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operation")
            .field("plan", &self.plan)
            .field("count", &self.count)
            .field("tuning", &self.tuning)
            .finish_non_exhaustive()
    }
}

/// What is the same for all operations of a plan that are alike: of one length, laid out alike.
#[derive(Debug)]
pub(super) struct CompiledOperation {
    pub(super) program: Arc<CompiledProgram>,
    pub(super) layout: Layout,
    /// SlotTransport strand, if it is a fast_path one.
    pub(super) fast_path: Option<Box<[FastPath]>>,
    /// SlotTransport strand, what is to go between this rank and others, if parts have lengths of their own.
    pub(super) lengths: Option<Box<[Box<[ExpectedLengths]>]>>,
    /// Lanes that have work, and how many runners there are up to the last of them.
    pub(super) runners: u32,
    pub(super) active_runners: u32,
}

impl CompiledOperation {
    /// Whether there is work for a strand of a channel, of so many channels.
    pub(super) fn uses(&self, channels: u32, channel: u32, strand: u32) -> bool {
        channel < channels.min(self.layout.extent.slices)
            && self
                .program
                .strands
                .get(strand as usize)
                .is_some_and(|strand| !strand.instructions.is_empty())
    }
}

/// An operation under way, or done and not yet taken.
pub(super) struct ActiveOperation {
    pub(super) collective: Collective,
    pub(super) ready: Arc<CompiledOperation>,
    pub(super) function: Function,
    pub(super) input: Data,
    pub(super) output: Data,
    pub(super) lines: Option<LineProtocol>,
    pub(super) channels: u32,
    /// Bytes of a message, at most.
    pub(super) fragment: usize,
    /// Bytes of a message of Simple that waits for no grant, at most.
    pub(super) eager: usize,
    /// When it was first seen under way, to a millisecond or so: the clock is not looked at for each operation.
    pub(super) began: Option<Instant>,
    pub(super) deadline: Option<Duration>,
    /// Lanes that are not done.
    pub(super) runners_left: u32,
    pub(super) result: Option<Result<(), Failed>>,
    /// Whether its input is a copy, which was input_copied.
    pub(super) input_copied: bool,
    pub(super) taken: bool,
}

impl ActiveOperation {
    /// The same operation on other data, not begun.
    pub(super) fn with_data(&self, input: Data, output: Data) -> Self {
        Self {
            ready: Arc::clone(&self.ready),
            function: self.function.clone(),
            input,
            output,
            began: None,
            runners_left: self.ready.runners,
            result: None,
            taken: false,
            ..*self
        }
    }

    /// Elements of this form in a message, at most.
    #[inline]
    pub(super) fn fragment(&self, form: Form) -> u64 {
        (self.fragment / self.function.bytes(form)) as u64
    }

    /// Whether a message of Simple of so many bytes waits for no grant.
    #[inline]
    pub(super) fn is_eager(&self, len: usize) -> bool {
        len <= self.eager
    }

    /// Whether it has work for a strand of a channel.
    pub(super) fn uses(&self, channel: u32, strand: u32) -> bool {
        self.ready.uses(self.channels, channel, strand)
    }
}
