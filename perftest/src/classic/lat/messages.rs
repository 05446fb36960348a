//! The messages that one end of a ping-pong sends, and what completes of them.

use doorbell_verbs::{Buffer, Local};

use crate::classic::settings::Settings;
use crate::classic::station::{Service, Station, allocate, refused, registration};
use crate::failure::Failure;

/// Messages of which the memory may not have come back yet: the completion of one may be late while its answer is there.
pub(super) const SOURCES: u32 = 8;
/// A completion is asked for once in so many messages.
const SIGNAL_EVERY: u64 = 4;
/// Of messages longer than this there are few: they take memory.
const LONG: u64 = 1 << 20;
/// So few.
const FEW: u32 = 2;

/// Their memory.
#[derive(Debug)]
pub(super) struct Messages {
    /// Registered: what is not under way.
    pub(super) free: Vec<Buffer<Local>>,
    /// What is sent inline, and so has come back at once; as long as the queue pair takes at most.
    pub(super) inline: Vec<u8>,
    /// How long a message is now.
    pub(super) bytes: usize,
}

impl Messages {
    /// For messages of up to `longest` bytes, those of them that do not travel inline from registered memory.
    ///
    /// # Errors
    /// [`Failure::Test`] when there is none.
    pub(super) fn new<T: Service>(
        settings: &Settings,
        station: &Station<T>,
        longest: u64,
    ) -> Result<Messages, Failure> {
        let free = if longest <= station.inline.into() {
            Vec::new()
        } else {
            buffers(settings, station, longest)?
        };
        Ok(Messages {
            free,
            inline: vec![0; station.inline as usize],
            bytes: 0,
        })
    }

    /// None: they lie elsewhere.
    pub(super) fn none() -> Messages {
        Messages {
            free: Vec::new(),
            inline: Vec::new(),
            bytes: 0,
        }
    }

    /// Whether messages travel inline now.
    #[inline]
    pub(super) fn are_inline(&self) -> bool {
        self.bytes <= self.inline.len()
    }

    /// Whether there is one to send.
    #[inline]
    pub(super) fn has_one(&self) -> bool {
        self.are_inline() || !self.free.is_empty()
    }

    /// Whether message `index` has to have a completion: often enough, and where its memory is the last there is.
    #[inline]
    pub(super) fn signals(&self, index: u64, last: bool) -> bool {
        let free = if self.are_inline() {
            SOURCES as usize
        } else {
            self.free.len()
        };
        last || needs_completion(index, free)
    }
}

/// Whether message `index`, which takes one of `free` buffers, has to have a completion: often enough, and where its memory is the last there is.
#[inline]
pub(super) fn needs_completion(index: u64, free: usize) -> bool {
    index.is_multiple_of(SIGNAL_EVERY) || free <= 1
}

/// A few buffers, each of at least `bytes`.
///
/// # Errors
/// [`Failure::Test`] when there is no memory for them.
pub(super) fn buffers<T: Service>(
    settings: &Settings,
    station: &Station<T>,
    bytes: u64,
) -> Result<Vec<Buffer<Local>>, Failure> {
    // Each begins at a cache line, so that no two have one in common.
    let apart = bytes.checked_next_multiple_of(station.greeting.cache_line.into());
    let count = if bytes > LONG { FEW } else { SOURCES };
    let too_long = || Failure::test(format!("{bytes} B are more than there can be"));
    let apart = apart
        .and_then(|apart| usize::try_from(apart).ok())
        .ok_or_else(too_long)?;
    let whole = apart.checked_mul(count as usize).ok_or_else(too_long)?;
    let chunks = registration(settings, &station.pd)
        .register_chunks(allocate(settings, whole)?, apart, Local)
        .map_err(refused)?;
    Ok(chunks.collect())
}
