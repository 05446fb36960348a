//! Division of a request into pieces that O_DIRECT accepts: each begins and ends at a multiple of
//! the file's alignment, and covers bytes of the request with what surrounds them in its blocks.

/// Bytes of the file that are read or written at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    /// Offset in the file: a multiple of the alignment.
    pub(super) start: u64,
    /// Length in the file: a multiple of the alignment, at most a block.
    pub(super) len: usize,
    /// Bytes at its beginning that are not of the request.
    pub(super) skip: usize,
    /// Bytes of the request, after `skip`.
    pub(super) take: usize,
    /// Where they are in the request.
    pub(super) at: usize,
}

impl Piece {
    /// Whether all its bytes are of the request.
    pub(super) fn is_whole(self) -> bool {
        self.take == self.len
    }

    /// The offset in the file of the request's bytes.
    pub(super) fn offset(self) -> u64 {
        self.start + self.skip as u64
    }
}

/// The pieces of the `len` bytes at `offset`, in order, of at most `block` bytes each.
///
/// `align` is a power of two, and `block` a multiple of it. With `edges`, a first or last block of
/// the file that the request covers in part is a piece of its own, so that all others are whole.
pub(super) fn pieces(offset: u64, len: usize, align: usize, block: usize, edges: bool) -> impl Iterator<Item = Piece> {
    debug_assert!(align.is_power_of_two() && block >= align && block.is_multiple_of(align));
    let end = offset + len as u64;
    let mask = align as u64 - 1;
    let mut at = offset;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let start = at & !mask;
        let is_head = start < at;
        let mut stop = start + block as u64;
        if edges && is_head {
            stop = start + align as u64;
        } else if edges && end < stop && end & mask != 0 && end & !mask > start {
            stop = end & !mask;
        }
        let until = stop.min(end);
        let piece = Piece {
            start,
            len: (until.next_multiple_of(align as u64) - start) as usize,
            skip: (at - start) as usize,
            take: (until - at) as usize,
            at: (at - offset) as usize,
        };
        at = until;
        Some(piece)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn pieces_cover_a_request_once_and_in_order(
            offset in 0u64..100_000,
            len in 0usize..100_000,
            shift in 0u32..=12,
            blocks in 1usize..5,
            edges: bool,
        ) {
            let align = 1usize << shift;
            let block = align * blocks;
            let mut next = 0;
            for piece in pieces(offset, len, align, block, edges) {
                prop_assert_eq!(piece.at, next);
                prop_assert_eq!(piece.start + piece.skip as u64, offset + piece.at as u64);
                prop_assert!(piece.start.is_multiple_of(align as u64) && piece.len.is_multiple_of(align));
                prop_assert!(piece.len <= block && piece.take > 0 && piece.skip + piece.take <= piece.len);
                prop_assert!(piece.len - piece.skip - piece.take < align && piece.skip < align);
                prop_assert!(!edges || piece.is_whole() || piece.len == align);
                next += piece.take;
            }
            prop_assert_eq!(next, len);
        }
    }
}
