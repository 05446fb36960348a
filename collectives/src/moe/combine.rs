//! Combine: outputs of the experts back to the ranks of their tokens.

use core::fmt;

use super::dispatch::{Received, check_lines};
use super::parallel::Held;
use super::row::{Outputs, add_up};
use super::{MoeError, Routing};
use crate::communicator::PutRequest;
use crate::kernel::{Version, bf16};
use crate::types::Rank;

/// A combine in flight. Dropping it gives up what is received; the outputs are sent nevertheless.
#[must_use = "the sums are written by `receive`"]
pub struct Combining<'e> {
    request: PutRequest<'e>,
    held: Held<'e>,
    routing: Routing,
    /// The rows of this rank's own pairs for its own experts, whose outputs stay where they are.
    own_rows: Vec<u32>,
}

impl<'e> Combining<'e> {
    pub(super) fn new(received: Received<'e>) -> Result<Self, MoeError> {
        let of = received.held.of;
        let dispatch = received.held.dispatch;
        let (outputs, window) = (of.in_expert_outputs(dispatch), of.in_window(dispatch));
        let row = of.areas.output;
        let mut puts = of.begin_combine();
        let own = of.comm.rank();
        for (source, &base) in received.bases.iter().enumerate() {
            if source == own.index() {
                continue;
            }
            let mut position = base as usize;
            for expert in 0..of.options.shape.local_experts() {
                let rows = received.rows().range(expert, Rank(source as u32));
                let into = window + of.areas.outputs + position * row;
                // SAFETY: the outputs were written through `received`, which this has taken. The
                // window's part for outputs of this dispatch is read when they have arrived, by the
                // value that is made below.
                unsafe { puts.add(Rank(source as u32), outputs + rows.start * row, into, rows.len() * row) };
                position += rows.len();
            }
        }
        let experts = 0..of.options.shape.local_experts();
        let own_rows = experts.flat_map(|expert| received.rows().range(expert, own));
        Ok(Self {
            own_rows: own_rows.map(|row| row as u32).collect(),
            request: of.comm.put(puts, of.deadline())?,
            held: received.held,
            routing: received.routing,
        })
    }

    /// Whether all has arrived and been sent: then [`receive`](Self::receive) does not wait. Drives
    /// the communicator a little.
    ///
    /// # Errors
    /// When the communicator has failed.
    pub fn test(&mut self) -> Result<bool, MoeError> {
        Ok(self.request.test()?)
    }

    /// Waits for the outputs of all experts, and adds them up into `combined`: `[tokens, hidden]`
    /// elements. Tokens without an expert become zero.
    ///
    /// # Errors
    /// When `combined` is of another length, or the communicator has failed: within the deadline,
    /// on all ranks, with the culprit.
    pub fn receive(self, combined: &mut [bf16]) -> Result<(), MoeError> {
        let Self {
            request,
            held,
            routing,
            own_rows,
        } = self;
        let of = held.of;
        let hidden = of.options.shape.hidden() as usize;
        let expected = routing.tokens() * hidden;
        if combined.len() != expected {
            return Err(MoeError::Elements {
                given: combined.len(),
                expected,
            });
        }
        request.wait()?;
        check_lines(of)?;
        let at = of.in_window(held.dispatch) + of.areas.outputs;
        // SAFETY: in the window, initialised as all of a segment, and aligned; the outputs of all
        // pairs for other ranks have arrived, and ranks that keep the protocol do not write them
        // before the dispatch is released. Any bytes are values of the type.
        let arrived = unsafe { core::slice::from_raw_parts(of.window_at(at).cast(), routing.pairs() * hidden) };
        let at = of.in_expert_outputs(held.dispatch);
        // SAFETY: in that memory, initialised as all of a segment, and aligned; it is no part of
        // the window, whose key alone peers are given, and this rank writes outputs only through
        // the `Received` that combine has taken.
        let own = unsafe { core::slice::from_raw_parts(of.expert_outputs_at(at).cast(), of.options.rows() * hidden) };
        let outputs = Outputs {
            arrived,
            own,
            own_rows: &own_rows,
            own_base: routing.base_for(of.comm.rank()),
        };
        add_up(Version::best(), &routing, outputs, combined);
        Ok(())
    }
}

impl fmt::Debug for Combining<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Combining")
            .field("request", &self.request)
            .finish_non_exhaustive()
    }
}
