//! The memory of dispatch and combine, and who may write it when.

use core::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{Mode, MoeError, Payload, Shape, SlotLayout};
use crate::communicator::Communicator;
use crate::executor::{Puts, Window};
use crate::memory::Segment;
use crate::types::Rank;

/// Settings of [`Communicator::expert_parallel`]: the same on all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MoeOptions {
    /// The dimensions.
    pub shape: Shape,
    /// How dispatch carries tokens.
    pub payload: Payload,
    /// How rows are exchanged.
    pub mode: Mode,
    /// Maximum rows that a rank receives in the high-throughput mode; `None` is the most that can
    /// be: all pairs of all ranks. A dispatch that would exceed it fails on all ranks, with nothing
    /// sent.
    pub capacity: Option<usize>,
}

impl MoeOptions {
    /// Dispatches whose results may be held at a time. The high-throughput mode has one area, as it
    /// is long and its ranks meet for the counts anyway.
    pub(super) const fn depth(&self) -> u64 {
        match self.mode {
            Mode::LowLatency => 2,
            Mode::HighThroughput => 1,
        }
    }

    /// The rows for which each rank has memory.
    #[must_use]
    pub fn rows(&self) -> usize {
        let most = self.shape.ranks() as usize * self.shape.max_pairs_for_rank();
        match (self.mode, self.capacity) {
            (Mode::HighThroughput, Some(capacity)) => capacity.min(most),
            _ => most,
        }
    }

    fn areas(&self) -> Areas {
        let (shape, rows) = (&self.shape, self.rows());
        let row = self.payload.row_bytes(shape.hidden());
        let output = Payload::Bf16.row_bytes(shape.hidden());
        let (outputs, headers, header, window) = match self.mode {
            Mode::LowLatency => {
                let layout = SlotLayout::new(*shape, self.payload);
                let header = layout.header_bytes();
                (layout.output(0), layout.header(Rank(0)), header, layout.bytes())
            }
            Mode::HighThroughput => {
                let outputs = (rows * row).next_multiple_of(64);
                let end = (outputs + shape.max_pairs() * output).next_multiple_of(64);
                (outputs, end, 0, end)
            }
        };
        let staged_headers = (shape.max_tokens() as usize * row).next_multiple_of(64);
        Areas {
            row,
            output,
            header,
            outputs,
            headers,
            window,
            staged_headers,
            staging: staged_headers + shape.ranks() as usize * header,
            expert_outputs: rows * output,
        }
    }

    /// The bytes of registered memory that each rank needs.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        let areas = self.areas();
        self.depth() * (areas.window + areas.staging + areas.expert_outputs) as u64
    }
}

/// Sizes and offsets in bytes, of one dispatch and its combine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Areas {
    /// A row of dispatch, of combine, and a header.
    pub(super) row: usize,
    pub(super) output: usize,
    pub(super) header: usize,
    /// In the window, which begins with the rows.
    pub(super) outputs: usize,
    pub(super) headers: usize,
    window: usize,
    /// In the staging memory, which begins with the tokens.
    pub(super) staged_headers: usize,
    staging: usize,
    expert_outputs: usize,
}

/// The dispatches so far.
#[derive(Default)]
struct Progress {
    /// Put exchanges, and dispatches.
    exchanges: u64,
    dispatches: u64,
    /// Dispatches whose results are held.
    held: Vec<u64>,
}

impl Progress {
    /// The last dispatch up to which no result is held: the credit of the peers.
    fn released(&self) -> u64 {
        self.held.iter().min().map_or(self.dispatches, |first| first - 1)
    }
}

/// One rank's memory and connections for dispatch and combine: see the [module](super).
///
/// All ranks make the same calls in the same order, as of the communicator.
pub struct ExpertParallel<'c> {
    pub(super) comm: &'c Communicator,
    pub(super) options: MoeOptions,
    pub(super) areas: Areas,
    deadline: Duration,
    window: Arc<Window>,
    /// Tokens and headers that are sent.
    pub(super) staging: Arc<Segment>,
    /// The outputs of the local experts.
    expert_outputs: Arc<Segment>,
    progress: Mutex<Progress>,
}

impl Communicator {
    /// Allocates and connects what dispatch and combine need. All ranks call it, with nothing in
    /// flight and the same options; it serves any number of operations.
    ///
    /// # Errors
    /// When the options are invalid or not the same on all ranks, there is no memory, or a rank is
    /// missing.
    pub fn expert_parallel(&self, options: MoeOptions) -> Result<ExpertParallel<'_>, MoeError> {
        let bytes = u128::from(options.memory_bytes());
        if bytes > isize::MAX as u128 {
            return Err(MoeError::Memory { bytes });
        }
        self.agree_on_experts(&options)?;
        let (areas, depth) = (options.areas(), options.depth() as usize);
        Ok(ExpertParallel {
            comm: self,
            options,
            areas,
            deadline: self.options().deadline,
            window: self.window(depth * areas.window)?,
            staging: self.segment(depth * areas.staging)?,
            expert_outputs: self.segment(depth * areas.expert_outputs)?,
            progress: Mutex::default(),
        })
    }

    /// Checks that the options are valid, and the same on all ranks. Collective.
    pub(crate) fn agree_on_experts(&self, options: &MoeOptions) -> Result<(), MoeError> {
        options.shape.supports(options.payload)?;
        if options.shape.ranks() != self.size() {
            return Err(MoeError::Ranks {
                given: options.shape.ranks(),
                ranks: self.size(),
            });
        }
        let own = format!("{options:?}");
        let given = self.exchange(own.as_bytes())?;
        match given.iter().position(|given| given != own.as_bytes()) {
            Some(other) => Err(MoeError::Disagree {
                rank: Rank(other as u32),
                own: self.rank(),
            }),
            None => Ok(()),
        }
    }
}

impl ExpertParallel<'_> {
    /// The options.
    #[must_use]
    pub fn options(&self) -> &MoeOptions {
        &self.options
    }

    /// Sets the timeout of later operations; the default is the communicator's. See
    /// [`Call::deadline`](crate::communicator::Call::deadline).
    pub fn set_deadline(&mut self, deadline: Duration) {
        self.deadline = deadline;
    }

    pub(super) fn deadline(&self) -> Duration {
        self.deadline
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether another dispatch has an area.
    pub(super) fn check_free(&self) -> Result<(), MoeError> {
        let progress = self.progress();
        let held = progress.dispatches - progress.released();
        match held < self.options.depth() {
            true => Ok(()),
            false => Err(MoeError::Held { held }),
        }
    }

    /// Begins a dispatch, for which an area is free. Its peers' areas are free when they have
    /// released the dispatch that used them before.
    pub(super) fn begin_dispatch(&self) -> (Held<'_>, Puts) {
        let mut progress = self.progress();
        progress.dispatches += 1;
        progress.exchanges += 1;
        let dispatch = progress.dispatches;
        progress.held.push(dispatch);
        let credits = (dispatch.saturating_sub(self.options.depth()), dispatch - 1);
        let released = progress.held.iter().min().map_or(credits.1, |first| first - 1);
        let puts = Puts::new(
            &self.window,
            (self.comm.rank(), &self.staging),
            progress.exchanges,
            (credits.0, released),
        );
        (Held { of: self, dispatch }, puts)
    }

    /// Begins the combine of a dispatch, whose areas are its own until it is released.
    pub(super) fn begin_combine(&self) -> Puts {
        let mut progress = self.progress();
        progress.exchanges += 1;
        Puts::new(
            &self.window,
            (self.comm.rank(), &self.expert_outputs),
            progress.exchanges,
            (0, progress.released()),
        )
    }

    /// Whether a rank can have written its arrival line. A rank is ahead by one exchange at most,
    /// as it receives from all before the next; and has released no more than it has begun.
    pub(super) fn is_possible_line(&self, rank: Rank) -> bool {
        let (exchange, credit) = self.window.line_of(rank);
        // Read afterwards, so that what the line answers is counted.
        let progress = self.progress();
        exchange <= progress.exchanges + 1 && credit <= progress.dispatches + 1
    }

    fn area(&self, dispatch: u64) -> usize {
        (dispatch % self.options.depth()) as usize
    }

    /// The offset in the window of a dispatch's area.
    pub(super) fn in_window(&self, dispatch: u64) -> usize {
        self.area(dispatch) * self.areas.window
    }

    pub(super) fn in_staging(&self, dispatch: u64) -> usize {
        self.area(dispatch) * self.areas.staging
    }

    pub(super) fn in_expert_outputs(&self, dispatch: u64) -> usize {
        self.area(dispatch) * self.areas.expert_outputs
    }

    pub(super) fn window_at(&self, offset: usize) -> *mut u8 {
        self.window.start().wrapping_add(offset)
    }

    pub(super) fn expert_outputs_at(&self, offset: usize) -> *mut u8 {
        self.expert_outputs.start().wrapping_add(offset)
    }
}

impl fmt::Debug for ExpertParallel<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExpertParallel")
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

/// The areas of a dispatch, of this rank's window and of its own memory. Dropping it releases them:
/// peers are given the credit by the next put exchange.
pub(super) struct Held<'e> {
    pub(super) of: &'e ExpertParallel<'e>,
    pub(super) dispatch: u64,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.of.progress().held.retain(|held| *held != self.dispatch);
    }
}

#[cfg(test)]
#[path = "hostile_tests.rs"]
mod hostile_tests;
