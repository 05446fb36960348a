//! Going through a message: its pieces, one after another, in fragments that a slot or a grant takes.

use crate::executor::code::Instruction;
use crate::executor::layout::Run;
use crate::executor::operation::Running;
use crate::plan::{Form, Span};

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

/// The next part of a message that `walk` has come to, at most as many elements as a fragment has; `None` when it is through.
pub(super) fn next(
    op: &Running,
    instruction: &Instruction,
    span: Span,
    slice: u32,
    form: Form,
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
        let run = op.layout.run(span.place, span.first + first, blocks, slice);
        if walk.at < run.len {
            let len = op.fragment(form).min(run.len - walk.at);
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
pub(super) fn bytes_at(op: &Running, instruction: &Instruction, span: Span, slice: u32, fragment: Fragment) -> usize {
    let Some(&(first, blocks)) = instruction.pieces.get(fragment.piece as usize) else {
        return 0;
    };
    let Run { offset, .. } = op.layout.run(span.place, span.first + first, blocks, slice);
    (offset + fragment.at) as usize * op.function.bytes(span.place.form())
}
