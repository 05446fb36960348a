//! Memory of the host that GPUs' copies go to by themselves: pinned when it is worth it, piece by piece.
//!
//! Only what is pinned can be copied to without the processor, and to pin costs as much as to copy twice. So a piece of a region is pinned when as much has been copied to it by the processor as it has bytes: whoever
//! uses it once pays twice at most, and whoever uses it again has it at the bus's speed. It is given back when the region is deregistered, until which its owner has promised that it stays mapped. What cannot be pinned, as the
//! program has pinned it itself or there is a limit, goes by the processor as before.

use std::collections::HashMap;

use super::Memory;
use super::cuda::Pin;

/// Pieces begin at multiples of it: to pin one takes 1.6 ms, for which the engine stands still.
const PIECE: usize = 16 << 20;
/// Shorter copies go by the ring.
const SHORTEST: usize = 64 << 10;
/// What is pinned are whole pages.
const PAGE: usize = 4096;

/// Registered memory: its first byte's address, and how many there are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) start: usize,
    pub(crate) len: usize,
}

/// What is pinned, by the key of its region and the address of the piece.
#[derive(Debug, Default)]
pub(super) struct Pins {
    pieces: HashMap<u32, HashMap<usize, Piece>>,
}

#[derive(Debug)]
enum Piece {
    /// So many bytes were copied to it.
    Used(usize),
    Pinned(Pin),
    Refused,
}

/// The whole pages of a region in the piece at `piece`.
fn pages(piece: usize, bounds: Bounds) -> Option<(usize, usize)> {
    let first = bounds.start.checked_next_multiple_of(PAGE)?.max(piece);
    let end = bounds.start.checked_add(bounds.len)? / PAGE * PAGE;
    let end = end.min(piece.checked_add(PIECE)?);
    (first < end).then(|| (first, end - first))
}

impl Pins {
    /// Where in what pinned memory `len` bytes at `to` lie, in the region of a key; `None` where a copy to them goes by the ring.
    pub(super) fn find(
        &mut self,
        device: &Memory,
        key: u32,
        to: usize,
        len: usize,
        bounds: Bounds,
    ) -> Option<(Pin, usize)> {
        let place = to / PIECE * PIECE;
        if len < SHORTEST || to + len > place + PIECE {
            return None;
        }
        let piece = self
            .pieces
            .entry(key)
            .or_default()
            .entry(place)
            .or_insert(Piece::Used(0));
        if let Piece::Used(bytes) = piece {
            *bytes += len;
            let Some((first, size)) = pages(place, bounds) else {
                *piece = Piece::Refused;
                return None;
            };
            if *bytes < size {
                return None;
            }
            // SAFETY: registered memory stays mapped until it is deregistered, which waits until this is given back (`take`).
            *piece = match unsafe { Pin::new(device, first, size) } {
                Ok(pin) => Piece::Pinned(pin),
                Err(error) => {
                    tracing::debug!(
                        "{size} bytes of registered memory cannot be pinned, and copies to them go by the processor: {error}"
                    );
                    Piece::Refused
                }
            };
        }
        let Piece::Pinned(pin) = piece else { return None };
        let at = to.checked_sub(pin.start())?;
        (at + len <= pin.len()).then(|| (pin.clone(), at))
    }

    /// What was pinned of a region, to be given back.
    pub(super) fn take(&mut self, key: u32) -> Vec<Pin> {
        let pieces = self.pieces.remove(&key).unwrap_or_default().into_values();
        let pinned = pieces.filter_map(|piece| match piece {
            Piece::Pinned(pin) => Some(pin),
            Piece::Used(_) | Piece::Refused => None,
        });
        pinned.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_whole_pages_of_the_region() {
        let bounds = |start, len| Bounds { start, len };
        assert_eq!(pages(PIECE, bounds(0, 4 * PIECE)), Some((PIECE, PIECE)));
        assert_eq!(pages(0, bounds(1, 3 * PAGE)), Some((PAGE, 2 * PAGE)));
        assert_eq!(pages(PIECE, bounds(PIECE - 5, PAGE + 10)), Some((PIECE, PAGE)));
        assert_eq!(pages(0, bounds(1, PAGE)), None);
        assert_eq!(pages(PIECE, bounds(0, PIECE)), None);
        assert_eq!(pages(0, bounds(usize::MAX - 1, 1)), None);
    }
}
