//! Splits the steps of a plan into steps on single data blocks.

use super::{Block, BlockStep, NO_DATA, Work};
use crate::plan::{PlanMemory, Shape, Span, Step};
use crate::types::Rank;

/// The data blocks of a rank's places.
pub(super) struct Blocks {
    pub(super) input: Vec<u32>,
    pub(super) output: Vec<u32>,
    pub(super) scratch: Vec<u32>,
    pub(super) partial: Vec<u32>,
}

impl Blocks {
    pub(super) fn data(&self, (place, block): Block) -> Option<u32> {
        let list = match place {
            PlanMemory::Input => &self.input,
            PlanMemory::Output => &self.output,
            PlanMemory::Scratch => &self.scratch,
            PlanMemory::Partial => &self.partial,
        };
        list.get(block as usize).copied()
    }

    /// Splits a step into blocks; `None` if it names blocks that do not exist.
    pub(super) fn split(&self, step: &Step) -> Option<Vec<BlockStep>> {
        let blocks = |span: &Span| span.range().map(|block| (span.place, block)).collect::<Vec<_>>();
        let block_step = |sources: Vec<Block>, into: Option<Block>, work| {
            let first = sources.first().copied().or(into);
            Some(BlockStep {
                data: match first {
                    Some(block) => self.data(block)?,
                    None => NO_DATA,
                },
                work,
                sources,
                into,
                sends: None,
                takes: None,
            })
        };
        let mut split = Vec::new();
        match step {
            Step::Send { to, span } => {
                let spans = blocks(span);
                for block in spans
                    .iter()
                    .map(|block| vec![*block])
                    .chain(spans.is_empty().then(Vec::new))
                {
                    let mut one = block_step(block, None, Work::Move)?;
                    one.sends = Some((*to, 0));
                    split.push(one);
                }
            }
            Step::Recv { from, into } => {
                let spans = blocks(into);
                for block in spans
                    .iter()
                    .map(|block| Some(*block))
                    .chain(spans.is_empty().then_some(None))
                {
                    let mut one = block_step(Vec::new(), block, Work::Move)?;
                    one.takes = Some((*from, 0, into.place.form()));
                    split.push(one);
                }
            }
            Step::RecvReduce { from, form, with, into } => {
                let whole = into.place == PlanMemory::Output;
                for (with, into) in blocks(with).into_iter().zip(blocks(into)) {
                    let mut one = block_step(vec![with], Some(into), Work::Reduce { whole })?;
                    one.takes = Some((*from, 0, *form));
                    split.push(one);
                }
            }
            Step::Reduce { sources, into } => {
                let whole = into.place == PlanMemory::Output;
                let columns: Vec<Vec<Block>> = sources.iter().map(blocks).collect();
                for (index, into) in blocks(into).into_iter().enumerate() {
                    let row = columns
                        .iter()
                        .map(|column| column.get(index).copied())
                        .collect::<Option<Vec<_>>>()?;
                    split.push(block_step(row, Some(into), Work::Reduce { whole })?);
                }
            }
            Step::Copy { from, into } => {
                for (from, into) in blocks(from).into_iter().zip(blocks(into)) {
                    split.push(block_step(vec![from], Some(into), Work::Move)?);
                }
            }
        }
        Some(split)
    }

    /// Whether an in-place step copies a block onto itself.
    pub(super) fn is_self_copy(&self, shape: &Shape, rank: Rank, block_step: &BlockStep, in_place: bool) -> bool {
        let Some(shared) = shape.shared(rank).filter(|_| in_place) else {
            return false;
        };
        matches!(
            (block_step.work, block_step.sources.as_slice(), block_step.into, block_step.takes),
            (Work::Move, [(PlanMemory::Input, from)], Some((PlanMemory::Output, into)), None)
                if from.wrapping_sub(shared.input) == into.wrapping_sub(shared.output)
        )
    }
}
