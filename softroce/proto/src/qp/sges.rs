//! Scatter/gather lists as one range of bytes: maps a part of a message to pieces of regions.

use core::ops::Range;

use crate::LKey;
use crate::memory::{AccessError, CopyError, Memory, PdId, Sge};
use crate::qp::packet::PayloadSource;

struct Piece {
    lkey: LKey,
    addr: u64,
    range: Range<usize>,
    /// Bytes of the SGE behind it.
    behind: usize,
}

/// The pieces of up to `len` bytes at `offset` of the message in `sges`.
fn pieces(sges: &[Sge], offset: u64, len: usize) -> impl Iterator<Item = Piece> {
    let mut skip = offset;
    let mut done = 0;
    sges.iter().filter_map(move |sge| {
        let inside = u64::from(sge.len).saturating_sub(skip);
        let start = skip;
        skip = skip.saturating_sub(u64::from(sge.len));
        let take = usize::try_from(inside).unwrap_or(usize::MAX).min(len - done);
        if take == 0 {
            return None;
        }
        let range = done..done + take;
        done += take;
        // Past the end of the address space: the memory refuses the saturated address.
        let addr = sge.addr.saturating_add(start);
        Some(Piece {
            lkey: sge.lkey,
            addr,
            range,
            behind: usize::try_from(inside).unwrap_or(usize::MAX) - take,
        })
    })
}

pub(crate) fn total(sges: &[Sge]) -> u64 {
    sges.iter().map(|sge| u64::from(sge.len)).sum()
}

/// Copies `dst.len()` bytes at `offset` of the message; the list is long enough.
pub(crate) fn gather<M: Memory>(
    memory: &mut M,
    pd: PdId,
    sges: &[Sge],
    offset: u64,
    dst: &mut [u8],
) -> Result<(), AccessError> {
    for piece in pieces(sges, offset, dst.len()) {
        memory.gather_ahead(pd, piece.lkey, piece.addr, &mut dst[piece.range], piece.behind)?;
    }
    Ok(())
}

pub(crate) fn add_refs<M: Memory>(
    memory: &mut M,
    pd: PdId,
    sges: &[Sge],
    offset: u64,
    len: usize,
) -> Result<(), AccessError> {
    for piece in pieces(sges, offset, len) {
        let sge = Sge {
            addr: piece.addr,
            // At most the length of its SGE.
            len: piece.range.len() as u32,
            lkey: piece.lkey,
        };
        memory.add_local_ref(pd, &sge)?;
    }
    Ok(())
}

/// Copies `src` to `offset` of the message; the list is long enough.
pub(crate) fn scatter<M: Memory>(
    memory: &mut M,
    pd: PdId,
    sges: &[Sge],
    offset: u64,
    src: PayloadSource<'_>,
) -> Result<(), CopyError> {
    for piece in pieces(sges, offset, src.len()) {
        match src.slice(piece.range) {
            PayloadSource::Bytes(bytes) => memory.scatter(pd, piece.lkey, piece.addr, bytes)?,
            PayloadSource::ByRef { offset, len } => {
                memory.scatter_by_ref(pd, piece.lkey, piece.addr, offset..offset + len)?;
            }
        }
    }
    Ok(())
}

pub(crate) fn check<M: Memory>(memory: &mut M, pd: PdId, sges: &[Sge], write: bool) -> Result<(), AccessError> {
    sges.iter().try_for_each(|sge| memory.check_local(pd, sge, write))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sge(addr: u64, len: u32) -> Sge {
        Sge {
            addr,
            len,
            lkey: LKey(addr as u32),
        }
    }

    fn list(sges: &[Sge], offset: u64, len: usize) -> Vec<(u64, Range<usize>)> {
        pieces(sges, offset, len)
            .map(|piece| (piece.addr, piece.range))
            .collect()
    }

    #[test]
    fn parts_of_a_list() {
        let sges = [sge(100, 10), sge(200, 0), sge(300, 5), sge(400, 20)];
        assert_eq!(list(&sges, 0, 10), [(100, 0..10)]);
        assert_eq!(list(&sges, 4, 13), [(104, 0..6), (300, 6..11), (400, 11..13)]);
        assert_eq!(list(&sges, 15, 20), [(400, 0..20)]);
        assert_eq!(list(&sges, 12, 2), [(302, 0..2)]);
        assert_eq!(list(&sges, 0, 0), []);
        assert_eq!(list(&sges, 34, 9), [(419, 0..1)]);
        assert_eq!(total(&sges), 35);
    }

    #[test]
    fn addresses_saturate_at_the_end_of_the_address_space() {
        assert_eq!(list(&[sge(u64::MAX - 3, 100)], 50, 8), [(u64::MAX, 0..8)]);
    }
}
