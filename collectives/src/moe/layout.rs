//! Where rows are: contiguous in the high-throughput mode, in fixed slots in the low-latency mode.

use core::ops::Range;

use super::{Mode, Payload, Shape};
use crate::types::Rank;

/// The rows that a rank has received: how many of each expert from each source, and where.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReceivedRows {
    ranks: u32,
    /// By local expert, then source.
    counts: Box<[u32]>,
    first: Box<[u32]>,
}

impl ReceivedRows {
    /// The rows in this mode, of `counts` by local expert, then source rank.
    ///
    /// # Panics
    /// When there are not as many counts, or more rows than a rank can receive.
    #[must_use]
    pub fn new(shape: &Shape, mode: Mode, counts: &[u32]) -> Self {
        let (experts, ranks) = (shape.local_experts() as usize, shape.ranks() as usize);
        assert_eq!(counts.len(), experts * ranks, "a count for each expert and source");
        let mut first = vec![0; counts.len()];
        match mode {
            Mode::HighThroughput => {
                let mut next = 0_u32;
                for (first, count) in first.iter_mut().zip(counts) {
                    *first = next;
                    next = next.checked_add(*count).expect("fewer rows than MAX_PAIRS");
                }
            }
            Mode::LowLatency => {
                for source in 0..ranks {
                    let area = source * shape.max_pairs_for_rank();
                    let mut next = 0;
                    for expert in 0..experts {
                        let at = expert * ranks + source;
                        first[at] = (area + next) as u32;
                        next += counts[at] as usize;
                    }
                    assert!(next <= shape.max_pairs_for_rank(), "the pairs of a source have slots");
                }
            }
        }
        Self {
            ranks: shape.ranks(),
            counts: counts.into(),
            first: first.into(),
        }
    }

    /// The rows of a local expert from a source, in order of its tokens.
    ///
    /// # Panics
    /// When there is no such expert or rank.
    #[must_use]
    pub fn range(&self, expert: u32, source: Rank) -> Range<usize> {
        assert!(source.0 < self.ranks, "rank {source} of {}", self.ranks);
        let at = expert as usize * self.ranks as usize + source.index();
        let first = self.first[at] as usize;
        first..first + self.counts[at] as usize
    }

    /// The rows of a local expert, by source: in the high-throughput mode they are contiguous.
    pub fn ranges(&self, expert: u32) -> impl Iterator<Item = Range<usize>> {
        (0..self.ranks).map(move |source| self.range(expert, Rank(source)))
    }

    /// The number of rows of a local expert.
    #[must_use]
    pub fn of_expert(&self, expert: u32) -> usize {
        self.ranges(expert).map(|rows| rows.len()).sum()
    }

    /// The number of rows from a source.
    #[must_use]
    pub fn from(&self, source: Rank) -> usize {
        let experts = (self.counts.len() / self.ranks as usize) as u32;
        (0..experts).map(|expert| self.range(expert, source).len()).sum()
    }

    /// The number of rows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.counts.iter().map(|&count| count as usize).sum()
    }

    /// Whether no token has chosen an expert of this rank.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The window of a rank in the low-latency mode: memory that its peers write, of fixed places.
///
/// Offsets are in bytes from its start. It has, each aligned to 64 bytes:
///
/// 1. by source, an area of [`slots_per_source`](Self::slots_per_source) slots of a row each, for
///    dispatch;
/// 2. [`Shape::max_pairs`] rows of bf16 for combine: the outputs of the own pairs, in send order;
/// 3. by source, the header of its last dispatch ([`header_bytes`](Self::header_bytes)): the counts
///    of the local experts as `u32`, then, as `u32`, the position in the source's send order of its
///    first pair for this rank, to which combine writes.
///
/// What announces arrivals, and numbers them, is the implementation's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlotLayout {
    shape: Shape,
    payload: Payload,
}

const ALIGNMENT: usize = 64;

impl SlotLayout {
    /// The window of these dimensions.
    #[must_use]
    pub const fn new(shape: Shape, payload: Payload) -> Self {
        Self { shape, payload }
    }

    /// The slots for each source rank: as many as pairs that it can have for this rank.
    #[must_use]
    pub const fn slots_per_source(&self) -> usize {
        self.shape.max_pairs_for_rank()
    }

    /// The bytes of a slot.
    #[must_use]
    pub const fn slot_bytes(&self) -> usize {
        self.payload.row_bytes(self.shape.hidden())
    }

    /// The offset of a row of [`ReceivedRows`], counted over the areas of all sources.
    #[must_use]
    pub const fn slot(&self, row: usize) -> usize {
        row * self.slot_bytes()
    }

    /// The offset of the first slot for a source.
    #[must_use]
    pub const fn area(&self, source: Rank) -> usize {
        self.slot(source.index() * self.slots_per_source())
    }

    /// The offset of the output of the pair at a position of the send order.
    #[must_use]
    pub const fn output(&self, position: usize) -> usize {
        let slots = self.slot(self.shape.ranks() as usize * self.slots_per_source());
        slots.next_multiple_of(ALIGNMENT) + position * Payload::Bf16.row_bytes(self.shape.hidden())
    }

    /// The offset of the header from a source.
    #[must_use]
    pub const fn header(&self, source: Rank) -> usize {
        self.output(self.shape.max_pairs()).next_multiple_of(ALIGNMENT) + source.index() * self.header_bytes()
    }

    /// The bytes of a header.
    #[must_use]
    pub const fn header_bytes(&self) -> usize {
        ((self.shape.local_experts() as usize + 1) * size_of::<u32>()).next_multiple_of(ALIGNMENT)
    }

    /// The bytes of the window.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.header(Rank(self.shape.ranks()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_contiguous_by_expert_and_source_or_in_the_slots_of_their_source() {
        // Two ranks of two experts, top-2 of at most three tokens: six slots for each source.
        let shape = Shape::new(2, 4, 2, 8, 3).unwrap();
        let counts = [1, 2, 3, 0];
        let contiguous = ReceivedRows::new(&shape, Mode::HighThroughput, &counts);
        let ranges = |rows: &ReceivedRows| [0, 1].map(|expert| rows.ranges(expert).collect::<Vec<_>>());
        assert_eq!(ranges(&contiguous), [[0..1, 1..3], [3..6, 6..6]]);
        let slots = ReceivedRows::new(&shape, Mode::LowLatency, &counts);
        assert_eq!(ranges(&slots), [[0..1, 6..8], [1..4, 8..8]]);
        assert_eq!((slots.of_expert(0), slots.from(Rank(0)), slots.len()), (3, 4, 6));
    }

    #[test]
    fn the_parts_of_a_window_do_not_overlap() {
        let shape = Shape::new(4, 8, 3, 136, 5).unwrap();
        let layout = SlotLayout::new(shape, Payload::Bf16);
        assert_eq!(layout.slots_per_source(), 5 * 2);
        let ends = [
            layout.area(Rank(3)) + layout.slots_per_source() * layout.slot_bytes(),
            layout.output(shape.max_pairs()),
            layout.header(Rank(3)) + layout.header_bytes(),
        ];
        let starts = [layout.output(0), layout.header(Rank(0)), layout.bytes()];
        for (end, next) in ends.into_iter().zip(starts) {
            assert!(
                end <= next && next < end + 64 && next.is_multiple_of(64),
                "{end} {next}"
            );
        }
    }
}
