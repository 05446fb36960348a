//! Iterates over a message: its pieces, in fragments that fit a slot or a grant.

use crate::executor::layout::{ElementRange, Layout};
use crate::executor::program::Instruction;
use crate::kernel::Function;
use crate::plan::Span;

#[derive(Clone, Copy, Default, Debug)]
pub(super) struct MessageCursor {
    pub(super) piece: u32,
    pub(super) at: u64,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Fragment {
    pub(super) piece: u32,
    /// Offset in the piece, in elements.
    pub(super) at: u64,
    pub(super) len: u64,
}

pub(super) fn next_fragment(
    layout: &Layout,
    most: u64,
    instruction: &Instruction,
    span: Span,
    slice: u32,
    cursor: &mut MessageCursor,
) -> Option<Fragment> {
    if span.blocks == 0 {
        return (cursor.piece == 0).then_some(Fragment {
            piece: 0,
            at: 0,
            len: 0,
        });
    }
    while let Some(&(first, blocks)) = instruction.pieces.get(cursor.piece as usize) {
        let run = layout.element_range(span.place, span.first + first, blocks, slice);
        if cursor.at < run.len {
            let len = most.min(run.len - cursor.at);
            return Some(Fragment {
                piece: cursor.piece,
                at: cursor.at,
                len,
            });
        }
        *cursor = MessageCursor {
            piece: cursor.piece + 1,
            at: 0,
        };
    }
    None
}

pub(super) fn advance(cursor: &mut MessageCursor, fragment: Fragment) {
    if fragment.len == 0 {
        cursor.piece += 1;
    } else {
        cursor.at += fragment.len;
    }
}

pub(super) fn byte_offset(
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
    let ElementRange { offset, .. } = layout.element_range(span.place, span.first + first, blocks, slice);
    (offset + fragment.at) as usize * function.bytes(span.place.form())
}
