//! Memory of the host that GPUs' copies go to by themselves: pinned when it is worth it, piece by piece.
//!
//! Only what is pinned can be copied to without the processor, and to pin costs as much as to copy twice. So a piece of a region is pinned when as much has been copied to it by the processor as it has bytes: whoever
//! uses it once pays twice at most, and whoever uses it again has it at the bus's speed. It is given back when the region is deregistered, until which its owner has promised that it stays mapped. What cannot be pinned, as the
//! program has pinned it itself or there is a limit, goes by the processor as before.
//!
//! A thread of its own pins, one piece at a time: that takes milliseconds, and a driver may wait meanwhile for work of the device which itself waits for a message.

use std::collections::HashMap;
use std::mem;
use std::thread::{self, JoinHandle};

use super::Memory;
use super::cuda::Pin;

/// Pieces begin at multiples of it. To pin one takes 1.6 ms.
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
    /// The one that is being pinned.
    asked: Option<(u32, usize)>,
}

#[derive(Debug)]
enum Piece {
    /// So many bytes were copied to it.
    Used(usize),
    /// It is being pinned.
    Asked(JoinHandle<Option<Pin>>),
    Pinned(Pin),
    Refused,
}

/// What is pinned of a region that goes, or will be.
#[derive(Debug)]
pub(crate) struct Taken(Vec<Piece>);

impl Taken {
    /// Unpins it all, after the copies that use it. What is being pinned is waited for.
    pub(crate) fn release(self) {
        for piece in self.0 {
            match piece {
                Piece::Asked(thread) => thread.join().ok().flatten().into_iter().for_each(Pin::release),
                Piece::Pinned(pin) => pin.release(),
                Piece::Used(_) | Piece::Refused => {}
            }
        }
    }
}

/// Has a range of registered memory pinned by a thread.
fn pin(device: &Memory, first: usize, size: usize) -> Piece {
    let device = device.clone();
    let work = move || {
        // SAFETY: registered memory stays mapped until it is deregistered, which waits until this is given back (`Taken::release`).
        let pinned = unsafe { Pin::new(&device, first, size) };
        let failed = |error: &_| {
            tracing::debug!(
                "{size} bytes of registered memory cannot be pinned, and copies to them go by the processor: {error}"
            );
        };
        pinned.inspect_err(failed).ok()
    };
    let name = "doorbell-pin".to_owned();
    thread::Builder::new()
        .name(name)
        .spawn(work)
        .map_or(Piece::Refused, Piece::Asked)
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
        self.look();
        let pieces = self.pieces.entry(key).or_default();
        let piece = pieces.entry(place).or_insert(Piece::Used(0));
        match piece {
            Piece::Used(bytes) => {
                *bytes += len;
                match pages(place, bounds) {
                    None => *piece = Piece::Refused,
                    Some((first, size)) if *bytes >= size && self.asked.is_none() => {
                        *piece = pin(device, first, size);
                        self.asked = Some((key, place));
                    }
                    Some(_) => {}
                }
                None
            }
            Piece::Pinned(pin) => {
                let at = to.checked_sub(pin.start())?;
                (at + len <= pin.len()).then(|| (pin.clone(), at))
            }
            Piece::Asked(_) | Piece::Refused => None,
        }
    }

    /// Looks whether what is being pinned is so by now.
    fn look(&mut self) {
        let Some((key, place)) = self.asked else { return };
        let piece = self.pieces.get_mut(&key).and_then(|pieces| pieces.get_mut(&place));
        let Some(piece @ Piece::Asked(_)) = piece else { return };
        match mem::replace(piece, Piece::Refused) {
            Piece::Asked(thread) if thread.is_finished() => {
                self.asked = None;
                if let Ok(Some(pin)) = thread.join() {
                    *piece = Piece::Pinned(pin);
                }
            }
            other => *piece = other,
        }
    }

    /// What is pinned of a region, or will be, to be given back.
    pub(super) fn take(&mut self, key: u32) -> Taken {
        self.asked.take_if(|(of, _)| *of == key);
        Taken(self.pieces.remove(&key).unwrap_or_default().into_values().collect())
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
