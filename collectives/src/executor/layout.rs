//! Memory layout: maps memory, block and slice of a plan to elements.
//!
//! An operation is cut into *slices*, and the plan runs for each. Of all-reduce, broadcast and
//! reduce a slice is a window of the whole, which the plan's blocks divide; of the others, a part
//! of each block. A block has the same offset in each slice, so scratch memory is laid out once.
//!
//! Both ends of a message cut it alike into *pieces* of elements that are consecutive on both
//! sides: this depends on the data blocks alone.

use crate::plan::{Collective, PlanMemory, Shape, Span};
use crate::types::Rank;

/// Alignment of block and slice boundaries, in elements, where there are many times as many.
const BOUNDARY_ALIGN: u64 = 64;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// All ranks have the same data, in one window per slice.
    Window,
    /// Each block belongs to a part, all of one length.
    Parts,
    Varied,
}

/// Displacements and lengths of the parts of [`Collective::AllToAllV`], in elements; or of a
/// [`Collective::ReduceScatter`] with parts of different lengths, of which every rank sends all and
/// receives the first.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Parts {
    /// Of the input, by destination rank: displacement and length.
    pub send: Vec<(u64, u64)>,
    /// Of the output, by source rank: displacement and length.
    pub receive: Vec<(u64, u64)>,
    /// The root, if all parts are sent to or by one rank: other pairs then neither exchange
    /// messages nor lengths. The same on all ranks.
    pub root: Option<Rank>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct OperationExtent {
    /// Elements of the whole, or of each part.
    pub(crate) count: u64,
    pub(crate) parts: Option<Parts>,
    /// Number of slices, at least one.
    pub(crate) slices: u32,
}

#[derive(Debug)]
pub(crate) struct Layout {
    kind: Kind,
    pub(crate) extent: OperationExtent,
    /// Blocks of the whole, or of a part.
    blocks: u32,
    window: u64,
    /// Where blocks begin in a window or part, and where the last one ends.
    starts: Vec<u64>,
    /// Offsets of the blocks of scratch, and their data blocks.
    scratch: Vec<(u64, u32)>,
    partial: Vec<(u64, u32)>,
    /// Elements of scratch, and of partial results.
    pub(crate) scratch_len: u64,
    pub(crate) partial_len: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ElementRange {
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

pub(crate) fn part_begin(total: u64, parts: u32, index: u32) -> u64 {
    let granule = if total / u64::from(parts) >= 8 * BOUNDARY_ALIGN {
        BOUNDARY_ALIGN
    } else {
        1
    };
    let units = total.div_ceil(granule);
    let unit = u128::from(units) * u128::from(index) / u128::from(parts);
    (unit as u64 * granule).min(total)
}

/// The length of slices if `slices` of them make up `total`; the last one may be shorter.
fn slice_len(total: u64, slices: u32) -> u64 {
    let len = total.div_ceil(u64::from(slices));
    if len >= 8 * BOUNDARY_ALIGN {
        len.next_multiple_of(BOUNDARY_ALIGN).min(total)
    } else {
        len
    }
}

impl Layout {
    pub(crate) fn new(shape: &Shape, extent: OperationExtent, scratch: &[u32], partial: &[u32]) -> Self {
        let kind = match shape.collective {
            Collective::AllReduce | Collective::Broadcast | Collective::Reduce | Collective::Barrier => Kind::Window,
            _ if extent.parts.is_some() => Kind::Varied,
            _ => Kind::Parts,
        };
        let blocks = shape.blocks.max(1);
        let window = match kind {
            Kind::Window => slice_len(extent.count, extent.slices),
            Kind::Parts | Kind::Varied => extent.count,
        };
        let mut layout = Self {
            kind,
            blocks,
            window,
            starts: (0..=blocks).map(|block| part_begin(window, blocks, block)).collect(),
            extent,
            scratch: Vec::new(),
            partial: Vec::new(),
            scratch_len: 0,
            partial_len: 0,
        };
        (layout.scratch, layout.scratch_len) = layout.lay_out(scratch);
        (layout.partial, layout.partial_len) = layout.lay_out(partial);
        layout
    }

    fn lay_out(&self, data: &[u32]) -> (Vec<(u64, u32)>, u64) {
        let mut end = 0;
        let mut lay = |&data: &u32| {
            let start = end;
            end += self.longest(data);
            (start, data)
        };
        (data.iter().map(&mut lay).collect(), end)
    }

    pub(crate) fn longest(&self, data: u32) -> u64 {
        let (start, end) = self.starts_of(data);
        let len = end - start;
        match self.kind {
            Kind::Window => len,
            Kind::Parts | Kind::Varied => slice_len(len, self.extent.slices),
        }
    }

    pub(crate) fn joins(&self) -> Coalescing {
        match self.kind {
            Kind::Window => Coalescing::Neighbours,
            Kind::Parts if self.extent.slices == 1 => Coalescing::All,
            Kind::Parts | Kind::Varied => Coalescing::None,
        }
    }

    /// The elements of a slice of these blocks, which form one piece.
    #[inline]
    pub(crate) fn element_range(&self, place: PlanMemory, first: u32, blocks: u32, slice: u32) -> ElementRange {
        match (self.kind, place) {
            (Kind::Window, PlanMemory::Input | PlanMemory::Output) => {
                let begin = u64::from(slice) * self.window;
                let run = self.in_window(first, blocks, begin);
                ElementRange {
                    offset: begin + run.offset,
                    len: run.len,
                }
            }
            (Kind::Window, PlanMemory::Scratch | PlanMemory::Partial) => {
                let (offset, data) = self.private(place)[first as usize];
                let len = self.in_window(data, blocks, u64::from(slice) * self.window).len;
                ElementRange { offset, len }
            }
            (Kind::Parts | Kind::Varied, PlanMemory::Input | PlanMemory::Output) => {
                let mut run = self.of_part(place, first, slice);
                if blocks > 1 {
                    let last = self.of_part(place, first + blocks - 1, slice);
                    run.len = last.offset + last.len - run.offset;
                }
                run
            }
            (Kind::Parts | Kind::Varied, PlanMemory::Scratch | PlanMemory::Partial) => {
                let all = self.private(place);
                let (offset, data) = all[first as usize];
                let mut len = self.sliced(self.starts_of(data), slice).len;
                if blocks > 1 {
                    let (last, data) = all[(first + blocks - 1) as usize];
                    len = last + self.sliced(self.starts_of(data), slice).len - offset;
                }
                ElementRange { offset, len }
            }
        }
    }

    fn private(&self, place: PlanMemory) -> &[(u64, u32)] {
        if place == PlanMemory::Scratch {
            &self.scratch
        } else {
            &self.partial
        }
    }

    /// Blocks of the window that begins at `begin`, relative to it.
    #[inline]
    fn in_window(&self, first: u32, blocks: u32, begin: u64) -> ElementRange {
        let window = self.window.min(self.extent.count.saturating_sub(begin));
        let from = self.starts[first as usize].min(window);
        let to = self.starts[(first + blocks) as usize].min(window);
        ElementRange {
            offset: from,
            len: to - from,
        }
    }

    fn starts_of(&self, data: u32) -> (u64, u64) {
        let block = data % self.blocks;
        if let Some(parts) = &self.extent.parts {
            // Of reduce-scatter, which alone has scratch memory for them: the parts of the input
            // are those of the data.
            let len = parts.send.get((data / self.blocks) as usize).map_or(0, |(_, len)| *len);
            return (
                part_begin(len, self.blocks, block),
                part_begin(len, self.blocks, block + 1),
            );
        }
        (self.starts[block as usize], self.starts[block as usize + 1])
    }

    fn sliced(&self, (start, end): (u64, u64), slice: u32) -> ElementRange {
        let each = slice_len(end - start, self.extent.slices);
        let from = start.saturating_add(u64::from(slice) * each).min(end);
        ElementRange {
            offset: from,
            len: each.min(end - from),
        }
    }

    fn of_part(&self, place: PlanMemory, position: u32, slice: u32) -> ElementRange {
        let (part, block) = (position / self.blocks, position % self.blocks);
        let Some(parts) = &self.extent.parts else {
            let run = self.sliced(self.starts_of(block), slice);
            return ElementRange {
                offset: u64::from(part) * self.extent.count + run.offset,
                len: run.len,
            };
        };
        let parts = if place == PlanMemory::Input {
            &parts.send
        } else {
            &parts.receive
        };
        let (begin, len) = parts[part as usize];
        let bounds = (
            part_begin(len, self.blocks, block),
            part_begin(len, self.blocks, block + 1),
        );
        let run = self.sliced(bounds, slice);
        ElementRange {
            offset: begin + run.offset,
            len: run.len,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Coalescing {
    All,
    /// Those whose data blocks are adjacent.
    Neighbours,
    None,
}

pub(crate) struct MemoryContents {
    input: Vec<u32>,
    output: Vec<u32>,
    scratch: Vec<u32>,
    partial: Vec<u32>,
}

impl MemoryContents {
    pub(crate) fn new(shape: &Shape, rank: Rank, scratch: &[u32], partial: &[u32]) -> Self {
        Self {
            input: shape.input(rank),
            output: shape.output(rank),
            scratch: scratch.to_vec(),
            partial: partial.to_vec(),
        }
    }

    /// The data blocks of a span; `None` if it is out of bounds.
    pub(crate) fn of(&self, span: Span) -> Option<&[u32]> {
        let place = match span.place {
            PlanMemory::Input => &self.input,
            PlanMemory::Output => &self.output,
            PlanMemory::Scratch => &self.scratch,
            PlanMemory::Partial => &self.partial,
        };
        place.get(span.first as usize..(span.first as usize).checked_add(span.blocks as usize)?)
    }
}

/// Cuts a span into pieces: first block, relative to the span, and number of blocks.
pub(crate) fn cut_into_pieces(data: &[u32], coalescing: Coalescing) -> Box<[(u32, u32)]> {
    let mut pieces: Vec<(u32, u32)> = Vec::new();
    for (at, block) in data.iter().enumerate() {
        let joined = match coalescing {
            Coalescing::All => at > 0,
            Coalescing::Neighbours => at > 0 && data[at - 1] + 1 == *block,
            Coalescing::None => false,
        };
        match pieces.last_mut() {
            Some((_, blocks)) if joined => *blocks += 1,
            _ => pieces.push((at as u32, 1)),
        }
    }
    pieces.into()
}

#[cfg(test)]
#[path = "layout_tests.rs"]
mod tests;
