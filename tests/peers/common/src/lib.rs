//! The common part of the peers' columns of `cargo xtask instructions`: `PROGRAM ROW ITERATIONS`,
//! and the accounting of `tests/instructions/accounting.c`, as none of these crates tracks buffers
//! or free slots.

use std::error::Error;
use std::process::ExitCode;

/// As in the other columns.
pub const DEPTH: u32 = 128;
pub const BATCH: usize = 16;
pub const BYTES: usize = 64;

#[derive(Clone, Copy)]
pub struct Buffer {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

impl Buffer {
    /// All buffers that the queues can hold, cut from one region, which is never freed.
    pub fn pool(memory: *mut u8, lkey: u32) -> Vec<&'static Self> {
        (0..2 * DEPTH as usize)
            .map(|n| {
                &*Box::leak(Box::new(Self {
                    addr: memory as u64 + (n * BYTES) as u64,
                    length: BYTES as u32,
                    lkey,
                }))
            })
            .collect()
    }
}

/// The target of WRITEs.
pub struct Remote {
    pub addr: u64,
    pub rkey: u32,
}

/// The queue of a `wr_id`: its upper half. The lower half is the slot.
pub const RECEIVE: u64 = 1 << 32;

/// A queue's slots, from the oldest not retired to the next free one.
pub struct Queue<B> {
    head: u32,
    tail: u32,
    signal_at: u32,
    slots: [Option<B>; DEPTH as usize],
}

impl<B: Copy> Default for Queue<B> {
    fn default() -> Self {
        Self {
            head: 0,
            tail: 0,
            signal_at: DEPTH / 2 - 1,
            slots: [None; DEPTH as usize],
        }
    }
}

impl<B: Copy> Queue<B> {
    #[inline]
    pub fn has_room(&self, requests: usize) -> bool {
        self.head.wrapping_sub(self.tail) <= DEPTH - requests as u32
    }

    #[inline]
    pub fn put(&mut self, buffer: Option<B>) -> u64 {
        let slot = self.head % DEPTH;
        self.slots[slot as usize] = buffer;
        self.head = self.head.wrapping_add(1);
        u64::from(slot)
    }

    /// Whether the next request must be signaled: one per half queue (selective signaling).
    #[inline]
    pub fn is_signaled(&mut self) -> bool {
        if self.head != self.signal_at {
            return false;
        }
        self.signal_at = self.head.wrapping_add(DEPTH / 2);
        true
    }

    /// Retires slots up to this one, and returns their buffers.
    #[inline]
    pub fn retire(&mut self, slot: u32, pool: &mut Vec<B>) {
        let end = slot.wrapping_add(1);
        let mut tail = self.tail;
        loop {
            if let Some(buffer) = self.slots[(tail % DEPTH) as usize] {
                pool.push(buffer);
            }
            tail = tail.wrapping_add(1);
            if (tail ^ end) % DEPTH == 0 {
                break;
            }
        }
        self.tail = tail;
    }
}

/// A peer's operations for [`main`]. Errors of the data path are `false`.
pub trait Peer: Sized {
    /// Why the crate has no such call.
    fn lacks(row: &str) -> Option<&'static str>;
    fn open(row: &str) -> Result<Self, Box<dyn Error>>;
    fn post(&mut self, row: &str) -> bool;
    /// Polls until the queue is empty, and retires completed slots.
    fn drain(&mut self) -> bool;
}

/// `PROGRAM ROW ITERATIONS`. Exit status 3: the crate has no such call, for the reason on stdout.
pub fn main<P: Peer>() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let (Some(row), Some(Ok(iterations))) = (arguments.next(), arguments.next().map(|n| n.parse::<u32>())) else {
        eprintln!("usage: PROGRAM ROW ITERATIONS");
        return ExitCode::from(2);
    };
    if let Some(reason) = P::lacks(&row) {
        println!("{reason}");
        return ExitCode::from(3);
    }
    let mut peer = match P::open(&row) {
        Ok(peer) => peer,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let done = (0..iterations).all(|_| peer.post(&row) && peer.drain());
    if !done {
        eprintln!("{row} failed");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
