//! Windows: memory of each rank that the others write, of one layout, and puts into them.
//!
//! A *put exchange* is an operation as any other: the plan of an all-to-all whose messages, instead
//! of being granted memory, are WRITEs from registered memory into the peer's window
//! ([`Transport::Window`](super::operation::Transport)), and a last one into its *arrival line*. So
//! nothing is exchanged before the data, and waits, deadlines and failures are those of all-to-all.
//!
//! A peer may not write what this rank still reads. Exchanges that need it wait for a *credit* of
//! each peer: a number that only grows, and that each put carries along. It is written by itself
//! where the peer would otherwise wait for it.
//!
//! No model is possible: the other side is a device. The words of a line are loaded once with
//! Acquire and order what was written before them.

use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use doorbell_verbs::{BufferAlias, Remote, WriteAccess};

use super::error::EngineError;
use super::{Data, Engine};
use crate::memory::Segment;
use crate::plan::Collective;
use crate::types::Rank;

/// Bytes of an arrival line: the number of the last put exchange, and the credit.
const LINE: usize = 64;
/// Both words.
pub(super) const NOTIFICATION: usize = 16;
const CREDIT: usize = 8;

/// A rank's window, and where those of the other ranks are.
pub(crate) struct Window {
    memory: Arc<Segment>,
    len: usize,
    ranks: usize,
    /// By rank: the whole of its window.
    remote: Box<[Remote<WriteAccess>]>,
    /// By rank: the last credit that was sent to it.
    credited: Box<[AtomicU64]>,
}

impl Window {
    /// Bytes of memory for a window of `len` bytes: the arrival lines of the ranks are behind it,
    /// and the blocks of the plan, whose contents no rank uses.
    pub(crate) fn memory_bytes(len: usize, ranks: usize) -> Option<usize> {
        let lines = ranks.checked_mul(LINE)?.checked_add(2 * ranks)?;
        len.checked_next_multiple_of(LINE)?.checked_add(lines)
    }

    /// The window in `memory`, of `memory_bytes`. `addresses` are what the ranks' `address`
    /// returns.
    ///
    /// # Errors
    /// The rank whose window is of another length, or no window.
    pub(crate) fn new(memory: Arc<Segment>, len: usize, addresses: &[Vec<u8>]) -> Result<Self, Rank> {
        let remote = |(rank, bytes): (usize, &Vec<u8>)| {
            let remote = <[u8; 24]>::try_from(&bytes[..])
                .ok()
                .and_then(|bytes| Remote::<WriteAccess>::from_bytes(&bytes).ok());
            remote
                .filter(|remote| remote.len() == memory.len() as u64)
                .ok_or(Rank(rank as u32))
        };
        let remote: Box<[_]> = addresses.iter().enumerate().map(remote).collect::<Result<_, Rank>>()?;
        Ok(Self {
            len,
            ranks: remote.len(),
            credited: remote.iter().map(|_| AtomicU64::new(0)).collect(),
            remote,
            memory,
        })
    }

    /// What the other ranks need to write to a window in this memory.
    pub(crate) fn address(memory: &Segment) -> Vec<u8> {
        let (start, len) = (memory.start().addr() as u64, memory.len() as u64);
        Remote::<WriteAccess>::from_raw(start, memory.rkey(0), len)
            .to_bytes()
            .to_vec()
    }

    /// Its first byte. Accesses race with peers except by the protocol of its user.
    pub(crate) fn start(&self) -> *mut u8 {
        self.memory.start()
    }

    fn line(&self, rank: Rank) -> usize {
        self.len.next_multiple_of(LINE) + rank.index() * LINE
    }

    fn word(&self, offset: usize) -> u64 {
        // SAFETY: in a line, which is in the memory and aligned; devices write whole words.
        unsafe { (*self.start().add(offset).cast::<AtomicU64>()).load(Ordering::Acquire) }
    }

    /// The number of a rank's last put exchange, and its credit, as it has written them.
    pub(crate) fn line_of(&self, rank: Rank) -> (u64, u64) {
        let line = self.line(rank);
        (self.word(line), self.word(line + CREDIT))
    }

    /// Blocks of the plan: input or output.
    fn blocks(&self, output: bool) -> Data {
        let start = self.line(Rank(self.ranks as u32));
        Data::Registered(Arc::clone(&self.memory), start + usize::from(output) * self.ranks)
    }

    pub(super) fn remote(&self, rank: Rank, offset: usize, len: usize) -> Remote<WriteAccess> {
        let whole = self.remote[rank.index()];
        Remote::from_raw(whole.addr().wrapping_add(offset as u64), whole.rkey().0, len as u64)
    }
}

/// One WRITE of a put.
#[derive(Clone, Copy, Debug)]
struct Piece {
    from: usize,
    into: usize,
    len: usize,
}

/// Longer pieces are posted as several WRITEs.
const MAX_PIECE: usize = 64 << 20;

/// One rank's part of a put exchange: what it writes into the windows of the others.
pub(crate) struct Puts {
    window: Arc<Window>,
    rank: Rank,
    /// What the pieces are in.
    source: Arc<Segment>,
    /// The number of the exchange on its window, from 1.
    number: u64,
    /// The credit that a peer must have given before it is written to.
    needs: u64,
    /// The credit that is given to the peers.
    gives: u64,
    pieces: Vec<Piece>,
    by_peer: Vec<Range<usize>>,
}

impl Puts {
    /// The exchange `number` of a window, which writes nothing yet: peers must have given the
    /// credit `needs` before, and are given `gives`.
    pub(crate) fn new(
        window: &Arc<Window>,
        (rank, source): (Rank, &Arc<Segment>),
        number: u64,
        (needs, gives): (u64, u64),
    ) -> Self {
        Self {
            rank,
            source: Arc::clone(source),
            number,
            needs,
            gives,
            pieces: Vec::new(),
            by_peer: vec![0..0; window.ranks],
            window: Arc::clone(window),
        }
    }

    /// Adds bytes of the source for a rank's window; those for one rank one after another. For this
    /// rank itself they are copied, at once.
    ///
    /// # Safety
    /// For this rank itself: nothing writes these bytes of the source, or accesses those of the
    /// window, while this copies. Source and window are different memory.
    ///
    /// # Panics
    /// When they are beyond the source or the window.
    pub(crate) unsafe fn add(&mut self, to: Rank, from: usize, into: usize, len: usize) {
        assert!(
            from.checked_add(len).is_some_and(|end| end <= self.source.len()),
            "in the source"
        );
        assert!(
            into.checked_add(len).is_some_and(|end| end <= self.window.len),
            "in the window"
        );
        if to == self.rank {
            // SAFETY: both are in their memory, as asserted; the rest is the caller's promise.
            unsafe {
                core::ptr::copy_nonoverlapping(self.source.start().add(from), self.window.start().add(into), len);
            }
            return;
        }
        let end = self.pieces.len();
        let range = &mut self.by_peer[to.index()];
        if range.start == range.end {
            *range = end..end;
        }
        assert_eq!(range.end, end, "the pieces for one rank one after another");
        let last = self.pieces[range.clone()].last_mut();
        let grown = last
            .filter(|last| last.from + last.len == from && last.into + last.len == into && last.len + len <= MAX_PIECE);
        if let Some(last) = grown {
            last.len += len;
            return;
        }
        for at in (0..len).step_by(MAX_PIECE) {
            self.pieces.push(Piece {
                from: from + at,
                into: into + at,
                len: MAX_PIECE.min(len - at),
            });
        }
        range.end = self.pieces.len();
    }

    /// As `add` for another rank, without its checks: a request that the rank has to refuse.
    #[cfg(test)]
    pub(crate) fn add_unchecked(&mut self, to: Rank, from: usize, into: usize, len: usize) {
        self.by_peer[to.index()] = self.pieces.len()..self.pieces.len() + 1;
        self.pieces.push(Piece { from, into, len });
    }

    /// Input and output of the plan.
    pub(crate) fn blocks(&self) -> (Data, Data) {
        (self.window.blocks(false), self.window.blocks(true))
    }

    /// The number of WRITEs for a rank, without the last one.
    pub(super) fn len(&self, to: Rank) -> usize {
        self.by_peer[to.index()].len()
    }

    /// The source and target of a WRITE.
    pub(super) fn write(&self, to: Rank, index: usize) -> Option<(BufferAlias, Remote<WriteAccess>)> {
        let piece = self.pieces[self.by_peer[to.index()].clone()].get(index)?;
        let source = self.source.alias(0, piece.from, piece.len)?;
        Some((source, self.window.remote(to, piece.into, piece.len)))
    }

    /// The last WRITE to a rank: the number and the credit, and where they go.
    pub(super) fn notification(&self, to: Rank) -> ([u8; NOTIFICATION], Remote<WriteAccess>) {
        let mut bytes = [0; NOTIFICATION];
        bytes[..CREDIT].copy_from_slice(&self.number.to_ne_bytes());
        bytes[CREDIT..].copy_from_slice(&self.gives.to_ne_bytes());
        self.window.credited[to.index()].store(self.gives, Ordering::Relaxed);
        (bytes, self.window.remote(to, self.window.line(self.rank), NOTIFICATION))
    }

    /// The credit that a rank may wait for in this exchange, if none has carried it yet.
    pub(super) fn credit(&self, to: Rank) -> Option<([u8; 8], Remote<WriteAccess>)> {
        let credited = &self.window.credited[to.index()];
        if credited.load(Ordering::Relaxed) >= self.needs {
            return None;
        }
        credited.store(self.gives, Ordering::Relaxed);
        let at = self.window.line(self.rank) + CREDIT;
        Some((self.gives.to_ne_bytes(), self.window.remote(to, at, size_of::<u64>())))
    }

    /// Whether a rank's window may be written.
    pub(super) fn may_write(&self, to: Rank) -> bool {
        self.window.word(self.window.line(to) + CREDIT) >= self.needs
    }

    /// Whether a rank's put of this exchange has arrived.
    pub(super) fn has_arrived(&self, from: Rank) -> bool {
        self.window.word(self.window.line(from)) >= self.number
    }
}

impl Engine {
    /// Memory for a window of `len` bytes.
    pub(crate) fn allocate_window(&mut self, len: usize) -> Result<Arc<Segment>, EngineError> {
        let bytes = Window::memory_bytes(len, self.ranks as usize).filter(|&bytes| isize::try_from(bytes).is_ok());
        let Some(bytes) = bytes else {
            return Err(EngineError::Operation {
                collective: Collective::AllToAll,
                what: "a window is larger than memory can be",
            });
        };
        self.allocate(bytes)
    }
}
