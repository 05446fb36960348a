//! Registered memory that an executor sends from, receives into and computes on. The executor's
//! protocols determine which bytes are in use; nothing here lends them as slices.

use core::ptr::NonNull;
use std::sync::Arc;

use doorbell_verbs::{Buffer, BufferAlias, Memory, MemoryError, PeerWrite, ProtectionDomain};

/// Shared memory registered on each device of a communicator, remotely writable by its peers.
/// Initially zero and page-aligned.
#[derive(Debug)]
pub struct Segment {
    start: NonNull<u8>,
    len: usize,
    rails: Box<[Registered]>,
}

#[derive(Debug)]
struct Registered {
    whole: BufferAlias,
    rkey: u32,
    _buffer: Buffer<PeerWrite>,
}

// SAFETY: it owns its memory, and gives no references to the bytes.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    pub(crate) fn new<'a>(
        domains: impl IntoIterator<Item = &'a ProtectionDomain>,
        len: usize,
    ) -> Result<Self, MemoryError> {
        let mut memory = Memory::shared(len)?;
        let start = NonNull::from(&mut *memory).cast::<u8>();
        let memory = Arc::new(memory);
        let register = |domain: &ProtectionDomain| {
            let owner = Arc::clone(&memory);
            // SAFETY: the bytes are initialised, and mapped until the owner is dropped, which
            // nothing borrows. The executor's protocols determine which bytes are accessed.
            let buffer = unsafe { domain.register_raw(start.as_ptr(), len, PeerWrite, owner) }?;
            Ok(Registered {
                // SAFETY: the buffer lives beside it; the executor keeps a segment until no request
                // refers to it.
                whole: unsafe { buffer.alias(..) },
                rkey: buffer.remote().rkey().0,
                _buffer: buffer,
            })
        };
        Ok(Self {
            start,
            len,
            rails: domains.into_iter().map(register).collect::<Result<_, MemoryError>>()?,
        })
    }

    /// The first byte. Accesses race with devices and peers while an operation uses the segment.
    #[must_use]
    pub fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Its length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a segment is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The `len` bytes at `offset`, for requests on the device `rail`; `None` out of bounds.
    #[inline]
    pub(crate) fn alias(&self, rail: usize, offset: usize, len: usize) -> Option<BufferAlias> {
        self.rails.get(rail)?.whole.slice(offset, len)
    }

    #[inline]
    pub(crate) fn rkey(&self, rail: usize) -> u32 {
        self.rails[rail].rkey
    }
}

/// Memory of an operation's caller while the operation is in flight, registered on each device for
/// requests that read it.
#[derive(Debug)]
pub(crate) struct Lent {
    start: usize,
    rails: Box<[(BufferAlias, Buffer)]>,
}

impl Lent {
    /// # Safety
    /// The bytes are initialised, and mapped until this is dropped; what requests read of them
    /// nothing writes meanwhile.
    pub(crate) unsafe fn new<'a>(
        domains: impl IntoIterator<Item = &'a ProtectionDomain>,
        start: *mut u8,
        len: usize,
    ) -> Result<Self, MemoryError> {
        let register = |domain: &ProtectionDomain| {
            // SAFETY: by contract.
            let buffer = unsafe { domain.register_raw_on_demand(start, len, Arc::new(())) }?;
            // SAFETY: the buffer lives beside it; the executor keeps this until no request refers
            // to it.
            Ok((unsafe { buffer.alias(..) }, buffer))
        };
        Ok(Self {
            start: start.addr(),
            rails: domains.into_iter().map(register).collect::<Result<_, MemoryError>>()?,
        })
    }

    /// The `len` bytes at an address, for requests on the device `rail`; `None` out of bounds.
    #[inline]
    pub(crate) fn alias_at(&self, rail: usize, address: usize, len: usize) -> Option<BufferAlias> {
        let offset = address.checked_sub(self.start)?;
        self.rails.get(rail)?.0.slice(offset, len)
    }
}
