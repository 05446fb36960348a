//! Where the blocks of a plan lie: from a place, a block and a slice to elements.
//!
//! An operation is cut into *slices*, and the plan is run for each. Of all-reduce, broadcast and reduce a slice is a window of the whole, which the plan's blocks divide; of the others, a part of each block. Slices are of
//! one length but for the last, and a block lies at the same distance from its window's beginning in each; so scratch memory is laid out once for all slices.
//!
//! Both ends of a message cut it alike, into *pieces* of consecutive elements on both sides: this is a question of the data blocks alone, which are the same for both.

use crate::plan::{Collective, Place, Shape, Span};
use crate::types::Rank;

/// Elements that a boundary between blocks or slices is a multiple of, where there are many times as many.
const BOUNDARY_ALIGN: u64 = 64;

/// How the data blocks of a collective are numbered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// All ranks have the same data, in one window for each slice.
    Window,
    /// Each block belongs to a part, all of one length.
    Parts,
    /// The parts have lengths of their own.
    Varied,
}

/// Lengths and places of the parts of [`Collective::AllToAllV`], in elements; or of a [`Collective::ReduceScatter`] whose parts have lengths of their own, of which every rank sends all and receives one, the first.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Parts {
    /// Of the input: for each rank where what it is sent begins, and its length.
    pub send: Vec<(u64, u64)>,
    /// Of the output: for each rank where what it has sent begins, and its length.
    pub receive: Vec<(u64, u64)>,
    /// If there is one rank that all is sent to, or that sends all: then others neither send each other anything nor wait for one another. The same on all ranks.
    pub root: Option<Rank>,
}

/// What decides where everything lies, beside the plan.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Extent {
    /// Elements of the whole, or of each part.
    pub(crate) count: u64,
    /// Lengths of parts, if they differ.
    pub(crate) parts: Option<Parts>,
    /// Slices, at least one.
    pub(crate) slices: u32,
}

/// Where everything lies.
#[derive(Debug)]
pub(crate) struct Layout {
    kind: Kind,
    pub(crate) extent: Extent,
    /// Blocks of the whole, or of a part.
    blocks: u32,
    /// Elements of a window.
    window: u64,
    /// Where blocks begin, in a window or part, and where the last ends.
    starts: Vec<u64>,
    /// Where the blocks of scratch begin, and what they hold.
    scratch: Vec<(u64, u32)>,
    /// The same of partial results.
    partial: Vec<(u64, u32)>,
    /// Elements of scratch, and of partial results.
    pub(crate) scratch_len: u64,
    pub(crate) partial_len: u64,
}

/// Consecutive elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ElementRange {
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// Where part `index` of `parts` begins.
pub(crate) fn split(total: u64, parts: u32, index: u32) -> u64 {
    let granule = if total / u64::from(parts) >= 8 * BOUNDARY_ALIGN {
        BOUNDARY_ALIGN
    } else {
        1
    };
    let units = total.div_ceil(granule);
    let unit = u128::from(units) * u128::from(index) / u128::from(parts);
    (unit as u64 * granule).min(total)
}

/// The length of slices of which `slices` are `total`, the last perhaps shorter.
fn slice_len(total: u64, slices: u32) -> u64 {
    let len = total.div_ceil(u64::from(slices));
    if len >= 8 * BOUNDARY_ALIGN {
        len.next_multiple_of(BOUNDARY_ALIGN).min(total)
    } else {
        len
    }
}

impl Layout {
    pub(crate) fn new(shape: &Shape, extent: Extent, scratch: &[u32], partial: &[u32]) -> Self {
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
            starts: (0..=blocks).map(|block| split(window, blocks, block)).collect(),
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

    /// Lays blocks that are as long as these data blocks behind one another.
    fn lay_out(&self, data: &[u32]) -> (Vec<(u64, u32)>, u64) {
        let mut end = 0;
        let mut lay = |&data: &u32| {
            let start = end;
            end += self.longest(data);
            (start, data)
        };
        (data.iter().map(&mut lay).collect(), end)
    }

    /// The longest that a data block is in any slice.
    pub(crate) fn longest(&self, data: u32) -> u64 {
        let (start, end) = self.starts_of(data);
        let len = end - start;
        match self.kind {
            Kind::Window => len,
            Kind::Parts | Kind::Varied => slice_len(len, self.extent.slices),
        }
    }

    /// Whether all of the blocks of a span that are each other's neighbours are neighbours in memory, too.
    pub(crate) fn joins(&self) -> Coalescing {
        match self.kind {
            Kind::Window => Coalescing::Neighbours,
            Kind::Parts if self.extent.slices == 1 => Coalescing::All,
            Kind::Parts | Kind::Varied => Coalescing::None,
        }
    }

    /// The elements of `blocks` blocks of `place` from `first` on, which are one piece, in a slice.
    #[inline]
    pub(crate) fn run(&self, place: Place, first: u32, blocks: u32, slice: u32) -> ElementRange {
        match (self.kind, place) {
            (Kind::Window, Place::Input | Place::Output) => {
                let begin = u64::from(slice) * self.window;
                let run = self.in_window(first, blocks, begin);
                ElementRange {
                    offset: begin + run.offset,
                    len: run.len,
                }
            }
            (Kind::Window, Place::Scratch | Place::Partial) => {
                let (offset, data) = self.private(place)[first as usize];
                let len = self.in_window(data, blocks, u64::from(slice) * self.window).len;
                ElementRange { offset, len }
            }
            (Kind::Parts | Kind::Varied, Place::Input | Place::Output) => {
                let mut run = self.of_part(place, first, slice);
                if blocks > 1 {
                    let last = self.of_part(place, first + blocks - 1, slice);
                    run.len = last.offset + last.len - run.offset;
                }
                run
            }
            (Kind::Parts | Kind::Varied, Place::Scratch | Place::Partial) => {
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

    fn private(&self, place: Place) -> &[(u64, u32)] {
        if place == Place::Scratch {
            &self.scratch
        } else {
            &self.partial
        }
    }

    /// Blocks of the window that begins at `begin`, counted from there.
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

    /// Where a data block begins in its part, and ends.
    fn starts_of(&self, data: u32) -> (u64, u64) {
        let block = data % self.blocks;
        if let Some(parts) = &self.extent.parts {
            // Of reduce-scatter, which alone has memory for them: the parts of the input are those of the data.
            let len = parts.send.get((data / self.blocks) as usize).map_or(0, |(_, len)| *len);
            return (split(len, self.blocks, block), split(len, self.blocks, block + 1));
        }
        (self.starts[block as usize], self.starts[block as usize + 1])
    }

    /// A slice of a block.
    fn sliced(&self, (start, end): (u64, u64), slice: u32) -> ElementRange {
        let each = slice_len(end - start, self.extent.slices);
        let from = start.saturating_add(u64::from(slice) * each).min(end);
        ElementRange {
            offset: from,
            len: each.min(end - from),
        }
    }

    /// A slice of the block at `position` of the input or output.
    fn of_part(&self, place: Place, position: u32, slice: u32) -> ElementRange {
        let (part, block) = (position / self.blocks, position % self.blocks);
        let Some(parts) = &self.extent.parts else {
            let run = self.sliced(self.starts_of(block), slice);
            return ElementRange {
                offset: u64::from(part) * self.extent.count + run.offset,
                len: run.len,
            };
        };
        let parts = if place == Place::Input {
            &parts.send
        } else {
            &parts.receive
        };
        let (begin, len) = parts[part as usize];
        let bounds = (split(len, self.blocks, block), split(len, self.blocks, block + 1));
        let run = self.sliced(bounds, slice);
        ElementRange {
            offset: begin + run.offset,
            len: run.len,
        }
    }
}

/// Which neighbouring blocks of a span are one piece.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Coalescing {
    /// All.
    All,
    /// Those whose data blocks are neighbours.
    Neighbours,
    /// None.
    None,
}

/// What the blocks of a rank's places hold.
pub(crate) struct Contents {
    input: Vec<u32>,
    output: Vec<u32>,
    scratch: Vec<u32>,
    partial: Vec<u32>,
}

impl Contents {
    pub(crate) fn new(shape: &Shape, rank: Rank, scratch: &[u32], partial: &[u32]) -> Self {
        Self {
            input: shape.input(rank),
            output: shape.output(rank),
            scratch: scratch.to_vec(),
            partial: partial.to_vec(),
        }
    }

    /// The data blocks of a span; `None` if it goes beyond its place.
    pub(crate) fn of(&self, span: Span) -> Option<&[u32]> {
        let place = match span.place {
            Place::Input => &self.input,
            Place::Output => &self.output,
            Place::Scratch => &self.scratch,
            Place::Partial => &self.partial,
        };
        place.get(span.first as usize..(span.first as usize).checked_add(span.blocks as usize)?)
    }
}

/// Cuts a span of these data blocks into pieces: where each begins, counted in blocks from the span's beginning, and its length in blocks.
pub(crate) fn pieces(data: &[u32], coalescing: Coalescing) -> Box<[(u32, u32)]> {
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
