//! Operations: the request, and the engine's state of each until its result is taken.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::error::Failed;
use super::layout::{Layout, Parts};
use super::program::CompiledProgram;
use super::strand::{ExpectedLengths, SliceActions};
use super::window::Puts;
use crate::failure::MESSAGES;
use crate::kernel::{Function, Scalar};
use crate::memory::{Lent, Segment};
use crate::plan::Collective;
use crate::protocol::LineProtocol;
use crate::types::Protocol;

/// A prepared plan: see [`Engine::prepare`](super::Engine::prepare).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PlanId(pub(super) usize);

/// A submitted operation, by which its result is taken.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Ticket {
    /// Of a point-to-point message: its peer and direction.
    pub(super) stream: Option<u32>,
    pub(super) number: u64,
}

impl Ticket {
    /// The first operation of an engine is 1. Point-to-point messages count from [`MESSAGES`] on,
    /// by peer and direction.
    #[must_use]
    pub fn number(self) -> u64 {
        if self.is_message() {
            MESSAGES | self.number
        } else {
            self.number
        }
    }

    pub(crate) const NO_OP: Self = Self::operation(0);

    pub(super) const fn operation(number: u64) -> Self {
        Self { stream: None, number }
    }

    #[inline]
    pub(crate) fn is_message(self) -> bool {
        self.stream.is_some()
    }
}

/// A rank's input or output.
#[derive(Clone, Debug, Default)]
pub enum Data {
    /// None: the collective needs none on this rank.
    #[default]
    None,
    /// Registered memory, from a byte offset on: zero-copy.
    Registered(Arc<Segment>, usize),
    /// Any memory: messages are copied.
    Plain(*mut u8),
}

// SAFETY: a pointer is followed by an engine only, whose `submit` has promises about its target,
// from any thread.
unsafe impl Send for Data {}
// SAFETY: as above.
unsafe impl Sync for Data {}

impl Data {
    /// The first byte; null if there is none.
    #[inline]
    pub(super) fn start(&self) -> *mut u8 {
        match self {
            Self::None => core::ptr::null_mut(),
            Self::Registered(segment, offset) => segment.start().wrapping_add(*offset),
            Self::Plain(start) => *start,
        }
    }

    pub(super) fn segment(&self) -> Option<(&Segment, usize)> {
        match self {
            Self::Registered(segment, offset) => Some((segment, *offset)),
            Self::None | Self::Plain(_) => None,
        }
    }
}

/// How an operation runs. The same on all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tuning {
    /// The protocol of messages.
    pub protocol: Protocol,
    /// Number of channels, at least 1.
    pub channels: u32,
    /// Approximate bytes per block of a slice.
    pub slice: usize,
}

/// An operation. All ranks submit the same operations in the same order.
#[derive(Clone)]
pub struct Operation {
    /// The plan.
    pub plan: PlanId,
    /// The data type, and the operator of collectives that reduce.
    pub function: Function,
    /// Elements of the whole of all-reduce, broadcast and reduce; else of each rank's part.
    pub count: u64,
    /// The parts of [`Collective::AllToAllV`], instead of `count`; or of a
    /// [`Collective::ReduceScatter`] by [`Algorithm::FullMesh`](crate::Algorithm::FullMesh).
    pub parts: Option<Parts>,
    /// The rank's input.
    pub input: Data,
    /// The rank's output. It may overlap the input; unless the plan runs in place and the two are
    /// laid out for it, the input is copied first.
    pub output: Data,
    /// The input's factor, for [`ReduceOp::PreMulSum`](crate::ReduceOp::PreMulSum).
    pub scale: Option<Scalar>,
    /// How it runs.
    pub tuning: Tuning,
    /// The timeout after which it fails.
    pub deadline: Option<Duration>,
}

debug_fields!(
    Operation,
    self,
    plan = self.plan,
    count = self.count,
    tuning = self.tuning
);

/// How messages travel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Transport {
    /// In slots of lines.
    Lines(LineProtocol),
    Simple {
        /// The length of messages from which on the receiver grants memory; others are eager.
        granted_from: usize,
        /// Maximum bytes of a fragment.
        fragment: usize,
    },
    /// By WRITEs into the peer's window, of a put exchange.
    Window,
}

impl Transport {
    /// Maximum bytes of a fragment of a message.
    pub(super) fn fragment(self) -> usize {
        match self {
            Self::Lines(lines) => lines.capacity(),
            Self::Simple { fragment, .. } => fragment,
            Self::Window => usize::MAX,
        }
    }

    pub(super) fn is_granted(self, len: usize) -> bool {
        match self {
            Self::Lines(_) | Self::Window => false,
            Self::Simple { granted_from, .. } => len >= granted_from,
        }
    }
}

#[derive(Debug)]
pub(super) struct CompiledOperation {
    pub(super) program: Arc<CompiledProgram>,
    pub(super) layout: Layout,
    /// By strand, if there is one slice.
    pub(super) only_slice: Option<Box<[SliceActions]>>,
    /// Whether there is a message for which the receiver grants memory.
    pub(super) has_granted: bool,
    /// By strand, the lengths exchanged with each peer, if parts have different lengths.
    pub(super) lengths: Option<Box<[Box<[ExpectedLengths]>]>>,
    /// Strand runners that have work, and 1 + the index of the last of them.
    pub(super) runners: u32,
    pub(super) active_runners: u32,
}

impl CompiledOperation {
    #[inline]
    pub(super) fn uses(&self, channels: u32, channel: u32, strand: u32) -> bool {
        channel < channels.min(self.layout.extent.slices)
            && self
                .program
                .strands
                .get(strand as usize)
                .is_some_and(|strand| !strand.instructions.is_empty())
    }
}

// fields: the operation as submitted, then its progress
pub(super) struct ActiveOperation {
    pub(super) collective: Collective,
    pub(super) ready: Arc<CompiledOperation>,
    pub(super) function: Function,
    pub(super) input: Data,
    pub(super) output: Data,
    /// Of plain input and output, what messages are sent from without a copy.
    pub(super) lent: [Option<Lent>; 2],
    /// Of a put exchange: what is written instead of the messages.
    pub(super) puts: Option<Arc<Puts>>,
    pub(super) transport: Transport,
    pub(super) channels: u32,
    /// When it was first in flight, to about a millisecond: the clock is not read per operation.
    pub(super) began: Option<Instant>,
    pub(super) deadline: Option<Duration>,
    pub(super) runners_left: u32,
    pub(super) result: Option<Result<(), Failed>>,
    pub(super) input_copied: bool,
    pub(super) taken: bool,
}

impl ActiveOperation {
    pub(super) fn with_data(&self, input: Data, output: Data) -> Self {
        Self {
            ready: Arc::clone(&self.ready),
            function: self.function.clone(),
            input,
            output,
            lent: [None, None],
            puts: None,
            began: None,
            runners_left: self.ready.runners,
            result: None,
            taken: false,
            ..*self
        }
    }

    #[inline]
    pub(super) fn uses(&self, channel: u32, strand: u32) -> bool {
        self.ready.uses(self.channels, channel, strand)
    }

    /// Whether it is in flight, or failed and not taken.
    pub(super) fn is_open(&self) -> bool {
        !self.taken && !matches!(self.result, Some(Ok(())))
    }

    #[inline]
    pub(super) fn complete_runner(&mut self) {
        self.runners_left -= 1;
        if self.runners_left == 0 {
            self.result = Some(Ok(()));
        }
    }
}
