//! Going through a message: its pieces, one after another, in fragments that a slot or a grant takes.

use crate::executor::code::Instruction;
use crate::executor::layout::{Layout, Run};
use crate::kernel::Function;
use crate::plan::Span;

/// How far a step has come in its message.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Walk {
    pub(super) piece: u32,
    /// Elements of the piece.
    pub(super) at: u64,
}

/// A part of a message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fragment {
    pub(super) piece: u32,
    /// Elements from the piece's beginning.
    pub(super) at: u64,
    /// Elements.
    pub(super) len: u64,
}

/// The next part of a message that `walk` has come to, at most so many elements; `None` when it is through.
pub(super) fn next(
    layout: &Layout,
    most: u64,
    instruction: &Instruction,
    span: Span,
    slice: u32,
    walk: &mut Walk,
) -> Option<Fragment> {
    if span.blocks == 0 {
        return (walk.piece == 0).then_some(Fragment {
            piece: 0,
            at: 0,
            len: 0,
        });
    }
    while let Some(&(first, blocks)) = instruction.pieces.get(walk.piece as usize) {
        let run = layout.run(span.place, span.first + first, blocks, slice);
        if walk.at < run.len {
            let len = most.min(run.len - walk.at);
            return Some(Fragment {
                piece: walk.piece,
                at: walk.at,
                len,
            });
        }
        *walk = Walk {
            piece: walk.piece + 1,
            at: 0,
        };
    }
    None
}

/// Goes on behind a fragment.
pub(super) fn pass(walk: &mut Walk, fragment: Fragment) {
    if fragment.len == 0 {
        walk.piece += 1;
    } else {
        walk.at += fragment.len;
    }
}

/// Where the elements of a fragment lie that belongs to this span: bytes from the beginning of its place.
pub(super) fn bytes_at(
    layout: &Layout,
    function: &Function,
    instruction: &Instruction,
    span: Span,
    slice: u32,
    fragment: Fragment,
) -> usize {
    let Some(&(first, blocks)) = instruction.pieces.get(fragment.piece as usize) else {
        return 0;
    };
    let Run { offset, .. } = layout.run(span.place, span.first + first, blocks, slice);
    (offset + fragment.at) as usize * function.bytes(span.place.form())
}
