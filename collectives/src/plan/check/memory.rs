//! A rank's memory in the checker: a cell per block, which holds a symbolic value.

use std::rc::Rc;

use super::Fault;
use crate::plan::{PlanMemory, Program, Shape, Shared, Span};
use crate::types::Rank;

pub(super) type RankSet = Rc<[u64]>;

#[derive(Clone)]
pub(super) struct Value {
    pub(super) data: u32,
    pub(super) part: Part,
}

#[derive(Clone)]
pub(super) enum Part {
    One(Rank),
    Some(RankSet),
    /// All: a complete result. Data that is not reduced is always complete.
    Whole,
}

pub(super) struct Accumulation {
    data: Option<u32>,
    set: Vec<u64>,
}

impl Accumulation {
    pub(super) fn new(ranks: u32) -> Self {
        Self {
            data: None,
            set: vec![0; (ranks as usize).div_ceil(64)],
        }
    }

    pub(super) fn add(&mut self, value: &Value) -> Result<(), Fault> {
        let data = *self.data.get_or_insert(value.data);
        if data != value.data {
            return Err(Fault::DifferentBlocks(data, value.data));
        }
        match &value.part {
            Part::Whole => return Err(Fault::Whole(data)),
            Part::One(rank) => {
                let (word, bit) = (rank.index() / 64, 1 << (rank.index() % 64));
                if self.set[word] & bit != 0 {
                    return Err(Fault::Twice {
                        contributor: *rank,
                        data,
                    });
                }
                self.set[word] |= bit;
            }
            Part::Some(others) => {
                for (word, (mine, &theirs)) in self.set.iter_mut().zip(others.iter()).enumerate() {
                    if *mine & theirs != 0 {
                        let contributor = Rank(word as u32 * 64 + (*mine & theirs).trailing_zeros());
                        return Err(Fault::Twice { contributor, data });
                    }
                    *mine |= theirs;
                }
            }
        }
        Ok(())
    }

    /// The value for `place`: complete for the output.
    pub(super) fn finish(self, place: PlanMemory, ranks: u32) -> Result<Value, Fault> {
        let data = self.data.ok_or(Fault::NoSources)?;
        let part = match place {
            PlanMemory::Partial => Part::Some(self.set.into()),
            PlanMemory::Output => match missing(&self.set, ranks) {
                Some(contributor) => return Err(Fault::Lacks { data, contributor }),
                None => Part::Whole,
            },
            PlanMemory::Input | PlanMemory::Scratch => {
                return Err(Fault::Place {
                    place,
                    what: "the result of a reduction",
                });
            }
        };
        Ok(Value { data, part })
    }
}

pub(super) fn missing(set: &[u64], ranks: u32) -> Option<Rank> {
    (0..ranks)
        .map(Rank)
        .find(|rank| set[rank.index() / 64] & 1 << (rank.index() % 64) == 0)
}

struct Cell {
    value: Option<Value>,
    length_of: u32,
    /// Messages that have not left it, and the receiver of the last one.
    pending: u32,
    pending_receiver: Rank,
    readers: [Option<u32>; 2],
    writer: Option<u32>,
    /// The last step that wrote it, and the index of the block in that step.
    stamp: (u64, u32),
}

pub(super) struct Memory {
    cells: Vec<Cell>,
    /// The first cell of each memory, and the end of the last one.
    bases: [usize; 5],
    shared: Option<Shared>,
    stamp: u64,
}

impl Memory {
    pub(super) fn new(shape: &Shape, rank: Rank, program: &Program, in_place: bool) -> Self {
        let (input, output) = (shape.input(rank), shape.output(rank));
        let mut bases = [0; 5];
        for (place, blocks) in [&input, &output, &program.scratch, &program.partial]
            .into_iter()
            .enumerate()
        {
            bases[place + 1] = bases[place] + blocks.len();
        }
        let part = if shape.collective.reduces() {
            Part::One(rank)
        } else {
            Part::Whole
        };
        let values = input.iter().map(|&data| {
            Some(Value {
                data,
                part: part.clone(),
            })
        });
        let likes = [&input, &output, &program.scratch, &program.partial]
            .into_iter()
            .flatten();
        let cells = values
            .chain(std::iter::repeat(None))
            .zip(likes)
            .map(|(value, &length_of)| Cell {
                value,
                length_of,
                pending: 0,
                pending_receiver: rank,
                readers: [None; 2],
                writer: None,
                stamp: (0, 0),
            })
            .collect();
        let shared = if in_place { shape.shared(rank) } else { None };
        Self {
            cells,
            bases,
            shared,
            stamp: 0,
        }
    }

    fn cell(&self, place: PlanMemory, block: u32) -> Result<usize, Fault> {
        let (base, end) = (self.bases[place as usize], self.bases[place as usize + 1]);
        if block as usize >= end - base {
            let blocks = (end - base) as u32;
            return Err(Fault::NoBlock { place, block, blocks });
        }
        match self.shared {
            Some(shared)
                if place == PlanMemory::Output && (shared.output..shared.output + shared.blocks).contains(&block) =>
            {
                Ok(self.bases[PlanMemory::Input as usize] + (block - shared.output + shared.input) as usize)
            }
            _ => Ok(base + block as usize),
        }
    }

    pub(super) fn cells(&self, span: Span) -> Result<Vec<usize>, Fault> {
        let end = span.first.checked_add(span.blocks).ok_or(Fault::NoBlock {
            place: span.place,
            block: u32::MAX,
            blocks: (self.bases[span.place as usize + 1] - self.bases[span.place as usize]) as u32,
        })?;
        (span.first..end).map(|block| self.cell(span.place, block)).collect()
    }

    pub(super) fn read(&mut self, strand: u32, span: Span, cells: &[usize]) -> Result<Vec<Value>, Fault> {
        let blocks = span.first..;
        blocks
            .zip(cells)
            .map(|(block, &at)| self.read_one(strand, span.place, block, at))
            .collect()
    }

    fn read_one(&mut self, strand: u32, place: PlanMemory, block: u32, at: usize) -> Result<Value, Fault> {
        let cell = &mut self.cells[at];
        if let Some(writer) = cell.writer.filter(|&writer| writer != strand) {
            return Err(Fault::Shared {
                strands: (writer, strand),
                block,
                place,
            });
        }
        match cell.readers {
            [None, _] => cell.readers[0] = Some(strand),
            [Some(first), None] if first != strand => cell.readers[1] = Some(strand),
            _ => {}
        }
        cell.value.clone().ok_or(Fault::Undefined { place, block })
    }

    pub(super) fn pending(&self, cells: &[usize]) -> Option<Rank> {
        cells
            .iter()
            .map(|&at| &self.cells[at])
            .find(|cell| cell.pending > 0)
            .map(|cell| cell.pending_receiver)
    }

    pub(super) fn add_pending(&mut self, cells: &[usize], to: Rank) {
        for &at in cells {
            self.cells[at].pending += 1;
            self.cells[at].pending_receiver = to;
        }
    }

    pub(super) fn release(&mut self, cells: &[usize]) {
        for &at in cells {
            self.cells[at].pending -= 1;
        }
    }

    pub(super) fn write(
        &mut self,
        shape: &Shape,
        strand: u32,
        into: Span,
        cells: &[usize],
        values: Vec<Value>,
    ) -> Result<(), Fault> {
        let place = into.place;
        if place == PlanMemory::Input && into.blocks > 0 {
            return Err(Fault::Place {
                place,
                what: "what the rank gets",
            });
        }
        for ((block, &at), value) in (into.first..).zip(cells).zip(values) {
            let cell = &mut self.cells[at];
            if let Some(writer) = cell.writer.filter(|&writer| writer != strand) {
                return Err(Fault::Shared {
                    strands: (writer, strand),
                    block,
                    place,
                });
            }
            if let Some(reader) = cell.readers.into_iter().flatten().find(|&reader| reader != strand) {
                return Err(Fault::Shared {
                    strands: (strand, reader),
                    block,
                    place,
                });
            }
            cell.writer = Some(strand);
            if place == PlanMemory::Output && !matches!(value.part, Part::Whole) {
                return Err(Fault::Place {
                    place,
                    what: "what lacks contributions",
                });
            }
            if shape.length_class(value.data) != shape.length_class(cell.length_of) {
                let (data, length_of) = (value.data, cell.length_of);
                return Err(Fault::Length {
                    data,
                    place,
                    block,
                    length_of,
                });
            }
            cell.value = Some(value);
        }
        Ok(())
    }

    pub(super) fn check_disjoint(&mut self, into: &[usize], sources: &[Vec<usize>]) -> Result<(), Fault> {
        self.stamp += 1;
        for (index, &at) in into.iter().enumerate() {
            self.cells[at].stamp = (self.stamp, index as u32);
        }
        for source in sources.iter().filter(|source| source.as_slice() != into) {
            if source.iter().any(|&at| self.cells[at].stamp.0 == self.stamp) {
                return Err(Fault::Overlap);
            }
        }
        Ok(())
    }

    pub(super) fn output(&self, shape: &Shape, rank: Rank) -> Result<(), Fault> {
        let place = PlanMemory::Output;
        for (block, expected) in (0..).zip(shape.output(rank)) {
            match &self.cells[self.cell(place, block)?].value {
                None => return Err(Fault::Undefined { place, block }),
                Some(value) if value.data != expected => {
                    let found = value.data;
                    return Err(Fault::Wrong { block, found, expected });
                }
                Some(Value { part: Part::Whole, .. }) => {}
                Some(_) => {
                    return Err(Fault::Place {
                        place,
                        what: "what lacks contributions",
                    });
                }
            }
        }
        Ok(())
    }
}
