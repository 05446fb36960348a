//! Pinned host memory as a direct destination of GPU copies, pinned piece by piece where it pays.
//!
//! Pinning costs as much as two copies by the CPU, so a piece of a region is pinned once the CPU
//! has copied as many bytes to it (decision 039), and unpinned when the region is deregistered.
//! What cannot be pinned (limits, or memory that the program has pinned itself) is copied by the
//! CPU. A thread pins one piece at a time, as the driver may wait for work that waits for a
//! message.

use std::collections::HashMap;
use std::mem;
use std::thread::JoinHandle;

use super::Memory;
use super::cuda::Pin;

/// Size and alignment of pieces. Pinning one takes 1.6 ms.
const PIECE: usize = 16 << 20;
/// Shorter copies go through the ring.
const MIN_COPY: usize = 64 << 10;
const PAGE: usize = 4096;

/// Registered memory: the address of the first byte, and the length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) start: usize,
    pub(crate) len: usize,
}

#[derive(Debug, Default)]
pub(super) struct Pins {
    pieces: HashMap<u32, HashMap<usize, Piece>>,
    pinning: Option<(u32, usize)>,
}

#[derive(Debug)]
enum Piece {
    /// So many bytes were copied to it by the CPU.
    Used(usize),
    Pinning(JoinHandle<Option<Pin>>),
    Pinned(Pin),
    Refused,
}

#[derive(Debug)]
pub(crate) struct ReleasedPins(Vec<Piece>);

impl ReleasedPins {
    /// Unpins it all, after the copies that use it. Waits for a piece that is being pinned.
    pub(crate) fn release(self) {
        for piece in self.0 {
            match piece {
                Piece::Pinning(thread) => thread.join().ok().flatten().into_iter().for_each(Pin::release),
                Piece::Pinned(pin) => pin.release(),
                Piece::Used(_) | Piece::Refused => {}
            }
        }
    }
}

fn pin(device: &Memory, first: usize, size: usize) -> Piece {
    let device = device.clone();
    let work = move || {
        // SAFETY: registered memory stays mapped until it is deregistered, which waits until this
        // is released (`ReleasedPins::release`).
        let pinned = unsafe { Pin::new(&device, first, size) };
        let failed = |error: &_| {
            tracing::debug!(
                "{size} bytes of registered memory cannot be pinned, and are copied to by the CPU: {error}"
            );
        };
        pinned.inspect_err(failed).ok()
    };
    doorbell_threads::spawn("doorbell-pin", work).map_or(Piece::Refused, Piece::Pinning)
}

/// The whole pages of a region in the piece at `piece`.
fn pages(piece: usize, bounds: Bounds) -> Option<(usize, usize)> {
    let first = bounds.start.checked_next_multiple_of(PAGE)?.max(piece);
    let end = bounds.start.checked_add(bounds.len)? / PAGE * PAGE;
    let end = end.min(piece.checked_add(PIECE)?);
    (first < end).then(|| (first, end - first))
}

impl Pins {
    /// The pin of `len` bytes at `to`, in the region of a key, and their offset in it; `None` where
    /// a copy to them goes through the ring.
    pub(super) fn find(
        &mut self,
        device: &Memory,
        key: u32,
        to: usize,
        len: usize,
        bounds: Bounds,
    ) -> Option<(Pin, usize)> {
        let start = to / PIECE * PIECE;
        if len < MIN_COPY || to + len > start + PIECE {
            return None;
        }
        self.poll_pinning();
        let pieces = self.pieces.entry(key).or_default();
        let piece = pieces.entry(start).or_insert(Piece::Used(0));
        match piece {
            Piece::Used(bytes) => {
                *bytes += len;
                match pages(start, bounds) {
                    None => *piece = Piece::Refused,
                    Some((first, size)) if *bytes >= size && self.pinning.is_none() => {
                        *piece = pin(device, first, size);
                        self.pinning = Some((key, start));
                    }
                    Some(_) => {}
                }
                None
            }
            Piece::Pinned(pin) => {
                let at = to.checked_sub(pin.start())?;
                (at + len <= pin.len()).then(|| (pin.clone(), at))
            }
            Piece::Pinning(_) | Piece::Refused => None,
        }
    }

    fn poll_pinning(&mut self) {
        let Some((key, start)) = self.pinning else { return };
        let piece = self.pieces.get_mut(&key).and_then(|pieces| pieces.get_mut(&start));
        let Some(piece @ Piece::Pinning(_)) = piece else { return };
        match mem::replace(piece, Piece::Refused) {
            Piece::Pinning(thread) if thread.is_finished() => {
                self.pinning = None;
                if let Ok(Some(pin)) = thread.join() {
                    *piece = Piece::Pinned(pin);
                }
            }
            other => *piece = other,
        }
    }

    pub(super) fn remove_region(&mut self, key: u32) -> ReleasedPins {
        self.pinning.take_if(|(of, _)| *of == key);
        ReleasedPins(self.pieces.remove(&key).unwrap_or_default().into_values().collect())
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
