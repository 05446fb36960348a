//! A rank's compiled program: checked steps, messages cut into pieces, and after which step the
//! target of a receive is free.
//!
//! Memory is granted before the step that receives. Scratch memory is reused by consecutive slices,
//! so that step may be of the previous slice.

use crate::executor::error::EngineError;
use crate::executor::layout::{Coalescing, MemoryContents, cut_into_pieces};
use crate::plan::{PlanMemory, Program, Shape, Span, Step};
use crate::types::Rank;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct StepRef {
    /// 0: the current slice; 1: the previous one.
    pub(super) slices_back: u32,
    pub(super) step: u32,
}

#[derive(Debug)]
pub(super) struct Instruction {
    pub(super) step: Step,
    /// First block relative to the span, and number of blocks.
    pub(super) pieces: Box<[(u32, u32)]>,
    /// The step after which its target is free; `None` if it is free at once.
    pub(super) free_after: Option<StepRef>,
}

#[derive(Debug, Default)]
pub(super) struct StrandProgram {
    pub(super) instructions: Box<[Instruction]>,
}

#[derive(Debug)]
pub(super) struct CompiledProgram {
    pub(super) strands: Box<[StrandProgram]>,
}

fn accesses(step: &Step) -> (Vec<Span>, Option<Span>) {
    match step {
        Step::Send { span, .. } => (vec![*span], None),
        Step::Recv { into, .. } => (Vec::new(), Some(*into)),
        Step::RecvReduce { with, into, .. } => (vec![*with], Some(*into)),
        Step::Reduce { sources, into } => (sources.to_vec(), Some(*into)),
        Step::Copy { from, into } => (vec![*from], Some(*into)),
    }
}

struct OverlapCheck {
    /// Offset of an input block in the output, in blocks, if they share memory.
    shift: Option<i64>,
}

impl OverlapCheck {
    fn between(&self, a: Span, b: Span) -> bool {
        let (Some((a_place, a)), Some((b_place, b))) = (self.resolve(a), self.resolve(b)) else {
            return false;
        };
        a_place == b_place && a.0 < b.1 && b.0 < a.1
    }

    /// The memory and blocks of a span; an input that shares memory is mapped to the output.
    fn resolve(&self, span: Span) -> Option<(PlanMemory, (i64, i64))> {
        if span.blocks == 0 {
            return None;
        }
        let first = i64::from(span.first);
        let (place, first) = match (span.place, self.shift) {
            (PlanMemory::Input, Some(shift)) => (PlanMemory::Output, first + shift),
            (place, _) => (place, first),
        };
        Some((place, (first, first + i64::from(span.blocks))))
    }
}

impl CompiledProgram {
    pub(super) fn new(
        shape: &Shape,
        rank: Rank,
        program: &Program,
        coalescing: Coalescing,
        in_place: bool,
        varied: bool,
    ) -> Result<Self, EngineError> {
        let shared = shape.shared(rank).filter(|_| in_place);
        let overlap = OverlapCheck {
            shift: shared.map(|shared| i64::from(shared.output) - i64::from(shared.input)),
        };
        let contents = MemoryContents::new(shape, rank, &program.scratch, &program.partial);
        let mut strands = Vec::new();
        for (index, steps) in program.strands.iter().enumerate() {
            let mut instructions = Vec::new();
            for (at, step) in steps.iter().enumerate() {
                let bad = |what| EngineError::Plan {
                    collective: shape.collective,
                    strand: index,
                    step: at,
                    what,
                };
                let data = check(shape, rank, step, &contents, varied).map_err(bad)?;
                instructions.push(Instruction {
                    step: step.clone(),
                    pieces: cut_into_pieces(data, coalescing),
                    free_after: last_access(steps, at, &overlap),
                });
            }
            strands.push(StrandProgram {
                instructions: instructions.into(),
            });
        }
        Ok(Self {
            strands: strands.into(),
        })
    }
}

/// Returns the data blocks that the step works on.
fn check<'c>(
    shape: &Shape,
    rank: Rank,
    step: &Step,
    contents: &'c MemoryContents,
    varied: bool,
) -> Result<&'c [u32], &'static str> {
    let peer = step.message().map(|(peer, ..)| peer);
    if peer.is_some_and(|peer| peer.0 >= shape.ranks() || peer == rank) {
        return Err("the other end is no other rank");
    }
    let of = |span| contents.of(span).ok_or("a span goes beyond its place");
    let (reads, writes) = accesses(step);
    if writes.is_some_and(|span| span.place == PlanMemory::Input && span.blocks > 0) {
        return Err("input is written");
    }
    let data = of(writes.unwrap_or_else(|| reads.first().copied().unwrap_or(Span::empty())))?;
    let class = |block: &u32| if varied { *block } else { shape.length_class(*block) };
    for span in reads {
        if !of(span)?.iter().map(class).eq(data.iter().map(class)) {
            return Err("its spans hold blocks of different lengths");
        }
    }
    let fits = match step {
        Step::Recv { into, .. } => into.place != PlanMemory::Input || into.blocks == 0,
        Step::Copy { from, into } => from.place.form() == into.place.form(),
        Step::RecvReduce { into, .. } | Step::Reduce { into, .. } => {
            matches!(into.place, PlanMemory::Output | PlanMemory::Partial)
        }
        Step::Send { .. } => true,
    };
    if !fits {
        return Err("what it writes is of another form, or in a place that is not for it");
    }
    if matches!(step, Step::Reduce { sources, .. } if sources.is_empty()) {
        return Err("nothing is reduced");
    }
    Ok(data)
}

/// The steps before `at`, the last one first, back to itself in the previous slice.
fn preceding_steps(len: usize, at: usize) -> impl Iterator<Item = StepRef> {
    let this = (0..at).rev().map(|step| StepRef {
        slices_back: 0,
        step: step as u32,
    });
    this.chain((at..len).rev().map(|step| StepRef {
        slices_back: 1,
        step: step as u32,
    }))
}

/// Whether the same blocks are other elements in the previous slice.
fn changes_per_slice(span: Span) -> bool {
    matches!(span.place, PlanMemory::Input | PlanMemory::Output)
}

/// The last step before `at` that accesses its target.
fn last_access(steps: &[Step], at: usize, overlap: &OverlapCheck) -> Option<StepRef> {
    let into = accesses(&steps[at]).1?;
    preceding_steps(steps.len(), at).find(|edge| {
        if edge.slices_back == 1 && changes_per_slice(into) {
            return false;
        }
        let (reads, writes) = accesses(&steps[edge.step as usize]);
        reads.into_iter().chain(writes).any(|span| overlap.between(span, into))
    })
}
