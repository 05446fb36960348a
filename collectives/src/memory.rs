//! Registered memory that an executor sends from, receives into and computes on.
//!
//! A [`Segment`] is shared memory (so that a device in software reaches it from other processes at the speed of a copy), registered on every device of a communicator. Which of its bytes are whose
//! at a time is the executor's to know: nothing here lends them as slices.

use core::ptr::NonNull;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use doorbell_verbs::{Alias, Buffer, Memory, MemoryError, ProtectionDomain, RemoteWrite};

/// Shared memory registered on each device of a communicator, for peers of that communicator to write. It is zeros at first, and begins at a page boundary.
#[derive(Debug)]
pub struct Segment {
    start: NonNull<u8>,
    len: usize,
    /// By which the file is open that its memory is of.
    descriptor: Option<RawFd>,
    rails: Box<[Registered]>,
}

/// The segment on one device.
#[derive(Debug)]
struct Registered {
    whole: Alias,
    rkey: u32,
    _buffer: Buffer<RemoteWrite>,
}

// SAFETY: it owns its memory, and gives no references to the bytes.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    /// `len` bytes, registered in each of the domains.
    pub(crate) fn new<'a>(
        domains: impl IntoIterator<Item = &'a ProtectionDomain>,
        len: usize,
    ) -> Result<Self, MemoryError> {
        let mut memory = Memory::shared(len)?;
        let start = NonNull::from(&mut *memory).cast::<u8>();
        let descriptor = memory.file().map(|file| file.as_raw_fd());
        let memory = Arc::new(memory);
        let register = |domain: &ProtectionDomain| {
            let owner = Arc::clone(&memory);
            // SAFETY: the bytes are zeros, and mapped until the owner is dropped, which nobody looks into any more. Who touches which bytes is the executor's to know, by its protocols.
            let buffer = unsafe { domain.register_raw(start.as_ptr(), len, RemoteWrite, owner) }?;
            Ok(Registered {
                // SAFETY: the buffer stays beside it; the executor keeps a segment until no request names it.
                whole: unsafe { buffer.alias(..) },
                rkey: buffer.remote().rkey().0,
                _buffer: buffer,
            })
        };
        Ok(Self {
            start,
            len,
            descriptor,
            rails: domains.into_iter().map(register).collect::<Result<_, MemoryError>>()?,
        })
    }

    /// Its first byte. What is done with it there is a race with devices and peers while an operation has it.
    #[must_use]
    pub fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// How many bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a segment is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The descriptor by which its memory's file is open, for as long as it lives.
    pub(crate) fn descriptor(&self) -> Option<RawFd> {
        self.descriptor
    }

    /// The `len` bytes at `offset`, for requests on the device `rail`; `None` beyond it.
    #[inline]
    pub(crate) fn alias(&self, rail: usize, offset: usize, len: usize) -> Option<Alias> {
        self.rails.get(rail)?.whole.slice(offset, len)
    }

    /// The key by which peers reach it on the device `rail`.
    #[inline]
    pub(crate) fn rkey(&self, rail: usize) -> u32 {
        self.rails[rail].rkey
    }
}
