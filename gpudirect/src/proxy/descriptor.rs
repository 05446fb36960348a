//! What a put is told by: 64 bytes, each word of which says for which turn of the ring it was written.
//!
//! | word | bits 0–7 | bits 8–63 |
//! |---|---|---|
//! | 0 | turn | operation (8), signal's kind (8), peer (32) |
//! | 1 | turn | length in bytes |
//! | 2 | turn | offset in the own memory |
//! | 3 | turn | offset in the peer's memory |
//! | 4 | turn | which of the peer's signals |
//! | 5 | turn | the signal's value, its lower 56 bits |
//! | 6 | turn | the signal's value, its upper 8 bits |
//! | 7 | turn | a number of the writer's own |
//!
//! A word is stored as a whole, so one that has the turn's number is as it was meant; a descriptor of which all words have it is there, in whatever order they came. `gpudirect/cuda/kernels/doorbell.cuh` writes the same.

use core::fmt;

/// Words of a descriptor.
pub const DESCRIPTOR_WORDS: usize = 8;

/// Bits of a word that say the turn.
const TURN_BITS: u32 = 8;
/// What a word has besides.
const FIELD: u64 = u64::MAX >> TURN_BITS;

/// What is done with a signal: a word of the peer's, of 64 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Update {
    /// It becomes this value.
    Set(u64),
    /// So much is added, modulo 2^64, atomically with regard to other additions by this device.
    Add(u64),
}

/// A signal that goes behind what was put before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signalling {
    /// Which of the peer's signals.
    pub signal: u64,
    /// What becomes of it.
    pub update: Update,
}

/// What is asked of the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Bytes of the own memory go to the peer's; then the signal, if there is one.
    Put(Option<Signalling>),
    /// Bytes of the peer's memory come to the own.
    Get,
    /// A signal alone.
    Signal(Signalling),
}

/// One request of the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Descriptor {
    /// What is done.
    pub operation: Operation,
    /// With whom.
    pub peer: u32,
    /// How many bytes: at most 2^56 − 1, as all that is written in a word is.
    pub len: u64,
    /// Where in the own memory.
    pub local: u64,
    /// Where in the peer's.
    pub remote: u64,
    /// A number of the writer's own, which is in reports of failures.
    pub id: u64,
}

/// Words that say nothing that could be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NoOperation;

const PUT: u64 = 1;
const GET: u64 = 2;
const SIGNAL: u64 = 3;
const NO_SIGNAL: u64 = 0;
const SET: u64 = 1;
const ADD: u64 = 2;

/// The number of the turn in which the descriptor `index` is written to a ring of `slots`: 1 to 255, never that of the turn before, and never 0, which is what memory is at first.
#[inline]
pub(crate) fn turn(index: u64, slots: u64) -> u8 {
    (index / slots % 255 + 1) as u8
}

/// The number that a slot has before the descriptor `index` is written to it.
#[inline]
pub(crate) fn turn_before(index: u64, slots: u64) -> u8 {
    index.checked_sub(slots).map_or(0, |before| turn(before, slots))
}

/// The turn that a word was written for.
#[inline]
pub(crate) fn turn_of(word: u64) -> u8 {
    word as u8
}

impl Descriptor {
    /// Its words for a turn. What does not fit a word's field is cut off.
    #[inline]
    pub(crate) fn encode(&self, turn: u8) -> [u64; DESCRIPTOR_WORDS] {
        let (operation, signalling) = match self.operation {
            Operation::Put(signalling) => (PUT, signalling),
            Operation::Get => (GET, None),
            Operation::Signal(signalling) => (SIGNAL, Some(signalling)),
        };
        let (kind, signal, value) = match signalling {
            None => (NO_SIGNAL, 0, 0),
            Some(Signalling { signal, update }) => match update {
                Update::Set(value) => (SET, signal, value),
                Update::Add(value) => (ADD, signal, value),
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
            value >> (u64::BITS - TURN_BITS),
            self.id,
        ];
        fields.map(|field| (field & FIELD) << TURN_BITS | u64::from(turn))
    }

    /// What such words say, whatever turn they were written for. Numbers are not checked here.
    #[inline]
    pub(crate) fn decode(words: &[u64; DESCRIPTOR_WORDS]) -> Result<Self, NoOperation> {
        let [head, len, local, remote, signal, low, high, id] = words.map(|word| word >> TURN_BITS);
        // The upper bits of the value are 8, whatever else was written beside them.
        let value = low | high << (u64::BITS - TURN_BITS);
        let signalling = match head >> 8 & 0xff {
            NO_SIGNAL => None,
            SET => Some(Update::Set(value)),
            ADD => Some(Update::Add(value)),
            _ => return Err(NoOperation),
        }
        .map(|update| Signalling { signal, update });
        let operation = match (head & 0xff, signalling) {
            (PUT, signalling) => Operation::Put(signalling),
            (GET, None) => Operation::Get,
            (SIGNAL, Some(signalling)) => Operation::Signal(signalling),
            _ => return Err(NoOperation),
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
            Operation::Signal(Signalling { signal, .. }) => write!(f, "signal {id} to {signal} of rank {peer}"),
        }
    }
}
