//! Dispatch: tokens to the ranks of their experts.

use core::fmt;
use core::ops::Range;

use super::combine::Combining;
use super::parallel::{ExpertParallel, Held};
use super::row::write_row;
use super::{Mode, MoeError, Payload, ReceivedRows, Routing, Shape};
use crate::communicator::PutRequest;
use crate::executor::Puts;
use crate::kernel::bf16;
use crate::types::Rank;

impl ExpertParallel<'_> {
    /// Sends each token to its experts, and receives those for the local experts: `tokens` are
    /// `[tokens, hidden]` elements, as many tokens as of the routing; any rank may have none.
    ///
    /// # Errors
    /// As [`dispatch_send`](Self::dispatch_send) and [`Dispatching::receive`].
    pub fn dispatch(&self, tokens: &[bf16], routing: &Routing) -> Result<Received<'_>, MoeError> {
        self.dispatch_send(tokens, routing)?.receive()
    }

    /// The sending half of a dispatch: copies and quantises the tokens, and returns when the device
    /// has been given what it takes now. [`Dispatching::receive`] waits for the rest; other work
    /// may be done before. In the high-throughput mode the counts are exchanged here.
    ///
    /// # Errors
    /// When tokens and routing do not fit; [`MoeError::Held`] when no area is free; with nothing
    /// begun. [`MoeError::Capacity`]: on all ranks. Otherwise the communicator has failed.
    pub fn dispatch_send(&self, tokens: &[bf16], routing: &Routing) -> Result<Dispatching<'_>, MoeError> {
        if routing.shape() != &self.options.shape {
            return Err(MoeError::OtherShape);
        }
        let expected = routing.tokens() * self.options.shape.hidden() as usize;
        if tokens.len() != expected {
            return Err(MoeError::Elements {
                given: tokens.len(),
                expected,
            });
        }
        self.check_free()?;
        let counts = match self.options.mode {
            Mode::LowLatency => None,
            Mode::HighThroughput => Some(Counts::exchange(self, routing)?),
        };
        let (held, mut puts) = self.begin_dispatch();
        self.stage(held.dispatch, tokens);
        for rank in (0..self.options.shape.ranks()).map(Rank) {
            let base = routing.base_for(rank);
            let first_rows = match &counts {
                None => self.first_slots(routing.pairs_for(rank)),
                Some(counts) => counts.first_rows(rank, self.comm.rank()),
            };
            self.add_rows(&mut puts, held.dispatch, routing, (rank, base, &first_rows));
            if self.options.mode == Mode::LowLatency && rank != self.comm.rank() {
                self.add_header(&mut puts, held.dispatch, routing, (rank, base));
            }
        }
        Ok(Dispatching {
            request: self.comm.put(puts, self.deadline())?,
            held,
            routing: routing.clone(),
            counts,
        })
    }

    /// By local expert of a rank: the first slot for this rank's pairs, of which it has so many.
    fn first_slots(&self, pairs: &[u32]) -> Vec<usize> {
        let area = self.comm.rank().index() * self.options.shape.max_pairs_for_rank();
        let next = |next: &mut usize, pairs: &u32| {
            let first = *next;
            *next += *pairs as usize;
            Some(first)
        };
        pairs.iter().scan(area, next).collect()
    }

    /// Adds the rows for a rank, whose pairs begin at `base` of the send order.
    fn add_rows(
        &self,
        puts: &mut Puts,
        dispatch: u64,
        routing: &Routing,
        (to, base, first_rows): (Rank, u32, &[usize]),
    ) {
        let (staging, window) = (self.in_staging(dispatch), self.in_window(dispatch));
        let bytes = self.areas.row;
        let mut order = routing.order()[base as usize..].iter();
        for (&count, &first) in routing.pairs_for(to).iter().zip(first_rows) {
            for (row, &pair) in (first..).zip(order.by_ref().take(count as usize)) {
                let token = routing.token_of(pair);
                // SAFETY: `stage` has written the row. The window's part for this dispatch is read
                // when it has arrived, by the value that is returned for it.
                unsafe { puts.add(to, staging + token * bytes, window + row * bytes, bytes) };
            }
        }
    }

    /// Adds the header for a rank: the counts by expert, and `base`.
    fn add_header(&self, puts: &mut Puts, dispatch: u64, routing: &Routing, (to, base): (Rank, u32)) {
        let from = self.in_staging(dispatch) + self.areas.staged_headers + to.index() * self.areas.header;
        for (index, word) in routing.pairs_for(to).iter().chain([&base]).enumerate() {
            // SAFETY: as of `stage`; a header has a word for each local expert and one more, and is
            // aligned to 64 bytes.
            unsafe { self.staging.start().add(from).cast::<u32>().add(index).write(*word) };
        }
        let own = self.comm.rank().index();
        let into = self.in_window(dispatch) + self.areas.headers + own * self.areas.header;
        // SAFETY: the header is written, and the window's part for it is as in `add_rows`.
        unsafe { puts.add(to, from, into, self.areas.header) };
    }

    /// Copies the tokens as rows to the staging memory of a dispatch.
    fn stage(&self, dispatch: u64, tokens: &[bf16]) {
        let hidden = self.options.shape.hidden() as usize;
        let mut at = self.in_staging(dispatch);
        for token in tokens.chunks_exact(hidden) {
            // SAFETY: the staging memory has a row for each token of the maximum; the dispatch that
            // used this part before has completed, as it was received or its area would not be
            // free.
            let row = unsafe { core::slice::from_raw_parts_mut(self.staging.start().add(at), self.areas.row) };
            write_row(self.options.payload, token, row);
            at += self.areas.row;
        }
    }
}

/// The counts of all ranks: what each sends to each expert.
#[derive(Debug)]
struct Counts {
    shape: Shape,
    /// By source, then expert.
    all: Vec<u32>,
}

impl Counts {
    fn exchange(of: &ExpertParallel<'_>, routing: &Routing) -> Result<Self, MoeError> {
        let (comm, shape) = (of.comm, of.options.shape);
        let mut all = vec![0; shape.experts() as usize * shape.ranks() as usize];
        let call = comm.all_gather_into(routing.pairs_per_expert(), &mut all);
        call.deadline(of.deadline()).wait()?;
        let counts = Self { shape, all };
        for source in (0..shape.ranks()).map(Rank) {
            let per_rank = (0..shape.ranks()).map(|rank| counts.of(source, Rank(rank)));
            if !per_rank.clone().all(|pairs| are_possible(&shape, pairs)) {
                return Err(impossible(of, MoeError::Impossible { source_rank: source }));
            }
        }
        let capacity = of.options.rows();
        for rank in (0..shape.ranks()).map(Rank) {
            let rows = counts.rows_of(rank);
            if rows > capacity as u64 {
                return Err(MoeError::Capacity { rank, rows, capacity });
            }
        }
        Ok(counts)
    }

    /// By local expert of a rank, the pairs of a source.
    fn of(&self, source: Rank, rank: Rank) -> &[u32] {
        let first = source.index() * self.shape.experts() as usize + self.shape.first_expert(rank) as usize;
        &self.all[first..first + self.shape.local_experts() as usize]
    }

    fn rows_of(&self, rank: Rank) -> u64 {
        let sources = (0..self.shape.ranks()).map(|source| self.of(Rank(source), rank));
        sources.flatten().map(|&count| u64::from(count)).sum()
    }

    /// By local expert of a rank, then source: what it receives.
    fn received_by(&self, rank: Rank) -> Vec<u32> {
        let (experts, ranks) = (self.shape.local_experts() as usize, self.shape.ranks());
        (0..experts)
            .flat_map(|expert| (0..ranks).map(move |source| self.of(Rank(source), rank)[expert]))
            .collect()
    }

    /// By local expert of a rank: the first row of a source.
    fn first_rows(&self, rank: Rank, source: Rank) -> Vec<usize> {
        let rows = ReceivedRows::new(&self.shape, Mode::HighThroughput, &self.received_by(rank));
        (0..self.shape.local_experts())
            .map(|expert| rows.range(expert, source).start)
            .collect()
    }

    /// The position in a source's send order of its first pair for a rank.
    fn base(&self, source: Rank, rank: Rank) -> u32 {
        (0..rank.0).flat_map(|before| self.of(source, Rank(before))).sum()
    }
}

/// Whether a rank can have these pairs for the experts of another.
fn are_possible(shape: &Shape, pairs: &[u32]) -> bool {
    let sum: u64 = pairs.iter().map(|&pairs| u64::from(pairs)).sum();
    pairs.iter().all(|&pairs| pairs <= shape.max_tokens()) && sum <= shape.max_pairs_for_rank() as u64
}

/// Checks what the other ranks have written in their arrival lines.
pub(super) fn check_lines(of: &ExpertParallel<'_>) -> Result<(), MoeError> {
    let mut others = (0..of.options.shape.ranks())
        .map(Rank)
        .filter(|rank| *rank != of.comm.rank());
    match others.find(|rank| !of.is_possible_line(*rank)) {
        Some(source_rank) => Err(impossible(of, MoeError::Line { source_rank })),
        None => Ok(()),
    }
}

/// Fails the communicator on all ranks, as this one cannot receive.
fn impossible(of: &ExpertParallel<'_>, error: MoeError) -> MoeError {
    of.comm.abort(&error.to_string());
    error
}

/// A dispatch in flight. Dropping it gives up what is received; its tokens are sent nevertheless.
#[must_use = "what is received is returned by `receive`"]
pub struct Dispatching<'e> {
    request: PutRequest<'e>,
    held: Held<'e>,
    routing: Routing,
    counts: Option<Counts>,
}

impl<'e> Dispatching<'e> {
    /// Whether all has arrived and been sent: then [`receive`](Self::receive) returns at once.
    /// Drives the communicator a little.
    ///
    /// # Errors
    /// When the communicator has failed.
    pub fn test(&mut self) -> Result<bool, MoeError> {
        Ok(self.request.test()?)
    }

    /// Waits for the tokens of all ranks.
    ///
    /// # Errors
    /// When the communicator has failed: within the deadline, on all ranks, with the culprit.
    /// [`MoeError::Impossible`] when a rank has sent counts that no routing has.
    pub fn receive(self) -> Result<Received<'e>, MoeError> {
        let Self {
            request,
            held,
            routing,
            counts,
        } = self;
        request.wait()?;
        let (of, own) = (held.of, held.of.comm.rank());
        check_lines(of)?;
        let shape = of.options.shape;
        let ranks = || (0..shape.ranks()).map(Rank);
        let (received, bases) = match &counts {
            Some(counts) => (
                counts.received_by(own),
                ranks().map(|source| counts.base(source, own)).collect(),
            ),
            None => read_headers(&held, &routing)?,
        };
        Ok(Received {
            rows: ReceivedRows::new(&shape, of.options.mode, &received),
            bases,
            held,
            routing,
        })
    }
}

impl fmt::Debug for Dispatching<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dispatching")
            .field("request", &self.request)
            .finish_non_exhaustive()
    }
}

/// The counts by local expert and source, and by source the position of its first pair for this
/// rank.
type Header = (Vec<u32>, Vec<u32>);

/// This rank's own header is of its routing, and not in the window: peers could write it.
fn read_headers(held: &Held<'_>, routing: &Routing) -> Result<Header, MoeError> {
    let (of, own) = (held.of, held.of.comm.rank());
    let words = of.options.shape.local_experts() as usize + 1;
    let ranks = (0..of.options.shape.ranks()).map(Rank);
    let headers = ranks.map(|source| {
        if source == own {
            return [routing.pairs_for(own), &[routing.base_for(own)]].concat();
        }
        let offset = of.in_window(held.dispatch) + of.areas.headers + source.index() * of.areas.header;
        let first = of.window_at(offset).cast::<u32>();
        // SAFETY: in the window and aligned; it has arrived. Each word is read once, as a peer that
        // breaks the protocol may write it now, and what is checked has to be what is used.
        (0..words)
            .map(|word| unsafe { first.add(word).read_volatile() })
            .collect()
    });
    check_headers(&of.options.shape, headers)
        .map_err(|source_rank| impossible(of, MoeError::Impossible { source_rank }))
}

/// # Errors
/// The source whose header is of no routing.
fn check_headers(shape: &Shape, headers: impl Iterator<Item = Vec<u32>>) -> Result<Header, Rank> {
    let (experts, ranks) = (shape.local_experts() as usize, shape.ranks() as usize);
    let (mut counts, mut bases) = (vec![0; experts * ranks], Vec::with_capacity(ranks));
    for (source, words) in headers.enumerate() {
        let (pairs, base) = (&words[..experts], words[experts]);
        let sum: u64 = pairs.iter().map(|&pairs| u64::from(pairs)).sum();
        if !are_possible(shape, pairs) || sum + u64::from(base) > shape.max_pairs() as u64 {
            return Err(Rank(source as u32));
        }
        for (expert, &count) in pairs.iter().enumerate() {
            counts[expert * ranks + source] = count;
        }
        bases.push(base);
    }
    Ok((counts, bases))
}

/// What the local experts have received, and the handle by which their outputs are combined.
pub struct Received<'e> {
    pub(super) held: Held<'e>,
    pub(super) routing: Routing,
    rows: ReceivedRows,
    /// By source: the position in its send order of its first pair for this rank.
    pub(super) bases: Vec<u32>,
}

impl<'e> Received<'e> {
    /// Where the rows are.
    #[must_use]
    pub fn rows(&self) -> &ReceivedRows {
        &self.rows
    }

    /// Bytes of a row: the elements, then the scales of FP8; see [`Payload::row_bytes`].
    #[must_use]
    pub fn row_bytes(&self) -> usize {
        self.held.of.areas.row
    }

    /// Rows of [`rows`](Self::rows), as they were carried.
    ///
    /// # Panics
    /// When there are no such rows.
    #[must_use]
    pub fn bytes(&self, rows: Range<usize>) -> &[u8] {
        let (of, len) = (self.held.of, self.checked(&rows));
        let at = of.in_window(self.held.dispatch) + rows.start * of.areas.row;
        // SAFETY: in the window, and not written before the dispatch is released.
        unsafe { core::slice::from_raw_parts(of.window_at(at), len * of.areas.row) }
    }

    /// Rows as elements, of [`Payload::Bf16`].
    ///
    /// # Panics
    /// When there are no such rows, or the payload is another.
    #[must_use]
    pub fn elements(&self, rows: Range<usize>) -> &[bf16] {
        assert_eq!(self.held.of.options.payload, Payload::Bf16, "elements of bf16");
        let bytes = self.bytes(rows);
        // SAFETY: rows are aligned to 16 bytes, and every bit pattern is a bf16.
        unsafe { core::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / size_of::<bf16>()) }
    }

    /// Rows as they were carried, and the places of their outputs, `hidden` elements each, from
    /// which combine sends. They have the contents of earlier operations.
    ///
    /// # Panics
    /// When there are no such rows.
    pub fn with_outputs(&mut self, rows: Range<usize>) -> (&[u8], &mut [bf16]) {
        let (of, len) = (self.held.of, self.checked(&rows));
        let at = of.in_expert_outputs(self.held.dispatch) + rows.start * of.areas.output;
        let elements = len * of.options.shape.hidden() as usize;
        // SAFETY: in the memory of the outputs, aligned; this value owns those of its dispatch.
        let outputs = unsafe { core::slice::from_raw_parts_mut(of.expert_outputs_at(at).cast(), elements) };
        (self.bytes(rows), outputs)
    }

    /// The rows of a local expert, by (source rank, token), copied behind each other. In the
    /// high-throughput mode they are so already.
    ///
    /// # Panics
    /// When there is no such expert.
    #[must_use]
    pub fn expert_rows(&self, expert: u32) -> Vec<u8> {
        self.rows
            .ranges(expert)
            .flat_map(|rows| self.bytes(rows))
            .copied()
            .collect()
    }

    fn checked(&self, rows: &Range<usize>) -> usize {
        let most = self.held.of.options.rows();
        assert!(rows.start <= rows.end && rows.end <= most, "rows {rows:?} of {most}");
        rows.len()
    }

    /// Returns the outputs of the local experts ([`with_outputs`](Self::with_outputs)) to the ranks
    /// of the tokens, and adds up those of this rank's tokens with their weights into `combined`:
    /// `[tokens, hidden]` elements.
    ///
    /// # Errors
    /// As [`combine_send`](Self::combine_send) and [`Combining::receive`].
    pub fn combine(self, combined: &mut [bf16]) -> Result<(), MoeError> {
        self.combine_send()?.receive(combined)
    }

    /// The sending half of a combine: see [`dispatch_send`](ExpertParallel::dispatch_send).
    ///
    /// # Errors
    /// When the communicator has failed.
    pub fn combine_send(self) -> Result<Combining<'e>, MoeError> {
        Combining::new(self)
    }
}

impl fmt::Debug for Received<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Received")
            .field("rows", &self.rows.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two experts of each of two ranks, top-2 of at most three tokens: six pairs for a rank.
    #[test]
    fn a_header_that_is_of_no_routing_names_its_source() {
        let shape = Shape::new(2, 4, 2, 8, 3).unwrap();
        let check = |second: [u32; 3]| check_headers(&shape, [[1, 2, 3], second].iter().map(|words| words.to_vec()));
        assert_eq!(check([3, 3, 0]), Ok((vec![1, 3, 2, 3], vec![3, 0])));
        for words in [[4, 0, 0], [3, 3, 1], [0, 0, 7], [u32::MAX, 1, 0], [1, 1, u32::MAX]] {
            assert_eq!(check(words), Err(Rank(1)), "{words:?}");
        }
    }
}
