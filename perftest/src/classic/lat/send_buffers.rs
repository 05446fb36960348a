//! The send buffers of one end of a ping-pong, and its selective signaling.

use doorbell_verbs::{Buffer, Local};

use crate::classic::settings::Settings;
use crate::classic::test_end::{TestEnd, allocate, registration};
use crate::engine::transport::TestTransport;
use crate::failure::{Failure, refused};

/// Buffers per end: the completion of a message may arrive after its answer.
pub(super) const BUFFERS: u32 = 8;
/// One message in so many is signaled.
const SIGNAL_EVERY: u64 = 4;
/// Messages longer than this have only [`LARGE_BUFFERS`] buffers, to save memory.
const LARGE_MESSAGE: u64 = 1 << 20;
const LARGE_BUFFERS: u32 = 2;

#[derive(Debug)]
pub(super) struct SendBuffers {
    pub(super) free: Vec<Buffer<Local>>,
    /// Payload of inline messages, reusable at once; as long as the inline limit.
    pub(super) inline: Vec<u8>,
    pub(super) bytes: usize,
}

impl SendBuffers {
    /// For messages of up to `longest` bytes; registered memory only for those too long for inline.
    ///
    /// # Errors
    /// [`Failure::Test`] when there is none.
    pub(super) fn new<T: TestTransport>(
        settings: &Settings,
        test_end: &TestEnd<T>,
        longest: u64,
    ) -> Result<SendBuffers, Failure> {
        let free = if longest <= test_end.inline.into() {
            Vec::new()
        } else {
            buffers(settings, test_end, longest)?
        };
        Ok(SendBuffers {
            free,
            inline: vec![0; test_end.inline as usize],
            bytes: 0,
        })
    }

    /// No buffers: the messages lie elsewhere.
    pub(super) fn none() -> SendBuffers {
        SendBuffers {
            free: Vec::new(),
            inline: Vec::new(),
            bytes: 0,
        }
    }

    #[inline]
    pub(super) fn are_inline(&self) -> bool {
        self.bytes <= self.inline.len()
    }

    #[inline]
    pub(super) fn has_free(&self) -> bool {
        self.are_inline() || !self.free.is_empty()
    }

    #[inline]
    pub(super) fn signals(&self, index: u64, last: bool) -> bool {
        let free = if self.are_inline() {
            BUFFERS as usize
        } else {
            self.free.len()
        };
        last || needs_completion(index, free)
    }
}

/// Whether message `index`, which takes one of `free` buffers, is signaled: every
/// [`SIGNAL_EVERY`]th, and whenever it takes the last free buffer.
#[inline]
pub(super) fn needs_completion(index: u64, free: usize) -> bool {
    index.is_multiple_of(SIGNAL_EVERY) || free <= 1
}

/// Buffers of at least `bytes` each.
pub(super) fn buffers<T: TestTransport>(
    settings: &Settings,
    test_end: &TestEnd<T>,
    bytes: u64,
) -> Result<Vec<Buffer<Local>>, Failure> {
    // Each starts at a cache line, so that no two share one.
    let apart = bytes.checked_next_multiple_of(test_end.parameters.cache_line.into());
    let count = if bytes > LARGE_MESSAGE { LARGE_BUFFERS } else { BUFFERS };
    let too_long = || Failure::test(format!("{bytes} B exceed the address space"));
    let apart = apart
        .and_then(|apart| usize::try_from(apart).ok())
        .ok_or_else(too_long)?;
    let whole = apart.checked_mul(count as usize).ok_or_else(too_long)?;
    let chunks = registration(settings, &test_end.pd)
        .register_chunks(allocate(settings, whole)?, apart, Local)
        .map_err(refused)?;
    Ok(chunks.collect())
}
