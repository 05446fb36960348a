//! The 64-byte request descriptor. Each of its words carries the ring lap for which it was written.
//!
//! | word | bits 0–7 | bits 8–63 |
//! |---|---|---|
//! | 0 | lap | operation (8), signal operation (8), peer (32) |
//! | 1 | lap | length in bytes |
//! | 2 | lap | offset in local memory |
//! | 3 | lap | offset in the peer's memory |
//! | 4 | lap | index of the peer's signal |
//! | 5 | lap | the signal's value, its lower 56 bits |
//! | 6 | lap | the signal's value, its upper 8 bits |
//! | 7 | lap | the writer's request id |
//!
//! Words are stored atomically and arrive in any order; a descriptor is complete when all its words
//! have the expected lap. `gpudirect/cuda/kernels/doorbell.cuh` writes the same format.

use core::fmt;

/// Words of a descriptor.
pub const DESCRIPTOR_WORDS: usize = 8;

const LAP_BITS: u32 = 8;
/// The payload bits of a word.
const FIELD: u64 = u64::MAX >> LAP_BITS;

/// An operation on a signal of the peer (`NVSHMEM_SIGNAL_SET`, `NVSHMEM_SIGNAL_ADD`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignalOp {
    /// Sets the value.
    Set(u64),
    /// Adds modulo 2^64, atomically with regard to other additions by this device.
    Add(u64),
}

/// A signal update, ordered behind earlier puts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SignalUpdate {
    /// The index of the peer's signal.
    pub signal: u64,
    /// The operation.
    pub update: SignalOp,
}

/// The operation of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Copies local bytes to the peer's memory; then updates the signal, if any.
    Put(Option<SignalUpdate>),
    /// Copies bytes of the peer's memory to local memory.
    Get,
    /// Updates a signal alone.
    Signal(SignalUpdate),
}

/// A request to the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Descriptor {
    /// The operation.
    pub operation: Operation,
    /// The peer's rank.
    pub peer: u32,
    /// The length in bytes: at most 2^56 − 1, like every field.
    pub len: u64,
    /// The offset in local memory.
    pub local: u64,
    /// The offset in the peer's memory.
    pub remote: u64,
    /// The writer's request id, included in failure reports.
    pub id: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct InvalidDescriptor;

const PUT: u64 = 1;
const GET: u64 = 2;
const SIGNAL: u64 = 3;
const NO_SIGNAL: u64 = 0;
const SET: u64 = 1;
const ADD: u64 = 2;

/// The lap (generation) in which descriptor `index` is written to a ring of `slots`: 1 to 255,
/// never equal to that of the previous lap, and never 0, the initial memory.
#[inline]
pub(crate) fn lap(index: u64, slots: u64) -> u8 {
    (index / slots % 255 + 1) as u8
}

#[inline]
pub(crate) fn previous_lap(index: u64, slots: u64) -> u8 {
    index.checked_sub(slots).map_or(0, |before| lap(before, slots))
}

#[inline]
pub(crate) fn lap_of(word: u64) -> u8 {
    word as u8
}

impl Descriptor {
    /// Encodes it for a lap. Values that exceed a field are truncated.
    #[inline]
    pub(crate) fn encode(&self, lap: u8) -> [u64; DESCRIPTOR_WORDS] {
        let (operation, signaling) = match self.operation {
            Operation::Put(signaling) => (PUT, signaling),
            Operation::Get => (GET, None),
            Operation::Signal(signaling) => (SIGNAL, Some(signaling)),
        };
        let (kind, signal, value) = match signaling {
            None => (NO_SIGNAL, 0, 0),
            Some(SignalUpdate { signal, update }) => match update {
                SignalOp::Set(value) => (SET, signal, value),
                SignalOp::Add(value) => (ADD, signal, value),
            },
        };
        let head = operation | kind << 8 | u64::from(self.peer) << 16;
        let fields = [
            head,
            self.len,
            self.local,
            self.remote,
            signal,
            value & FIELD,
            value >> (u64::BITS - LAP_BITS),
            self.id,
        ];
        fields.map(|field| (field & FIELD) << LAP_BITS | u64::from(lap))
    }

    /// Decodes words of any lap. Ranges are not checked here.
    #[inline]
    pub(crate) fn decode(words: &[u64; DESCRIPTOR_WORDS]) -> Result<Self, InvalidDescriptor> {
        let [head, len, local, remote, signal, low, high, id] = words.map(|word| word >> LAP_BITS);
        // The upper part of the value is 8 bits; other bits of its word are shifted out.
        let value = low | high << (u64::BITS - LAP_BITS);
        let signaling = match head >> 8 & 0xff {
            NO_SIGNAL => None,
            SET => Some(SignalOp::Set(value)),
            ADD => Some(SignalOp::Add(value)),
            _ => return Err(InvalidDescriptor),
        }
        .map(|update| SignalUpdate { signal, update });
        let operation = match (head & 0xff, signaling) {
            (PUT, signaling) => Operation::Put(signaling),
            (GET, None) => Operation::Get,
            (SIGNAL, Some(signaling)) => Operation::Signal(signaling),
            _ => return Err(InvalidDescriptor),
        };
        Ok(Self {
            operation,
            peer: (head >> 16) as u32,
            len,
            local,
            remote,
            id,
        })
    }
}

impl fmt::Display for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            peer,
            len,
            local,
            remote,
            id,
            ..
        } = self;
        match self.operation {
            Operation::Put(_) => write!(f, "put {id} of {len} bytes at {local} to {remote} of rank {peer}"),
            Operation::Get => write!(f, "get {id} of {len} bytes to {local} from {remote} of rank {peer}"),
            Operation::Signal(SignalUpdate { signal, .. }) => write!(f, "signal {id} to {signal} of rank {peer}"),
        }
    }
}
