//! The memory that requests of the disk use: blocks, aligned for O_DIRECT, and pinned where a GPU
//! copies from and to them.
#![expect(unsafe_code, reason = "the kernel and the GPU write it beside this program")]

use std::ptr::{self, NonNull};
use std::sync::Arc;

use doorbell_cuda::{Context, HostMemory, Memory, Span};
use doorbell_verbs as verbs;

/// Blocks of memory; a block has one user at a time: a request, a copy, or this program.
pub(super) struct Staging {
    /// Unpinned before the bytes are freed: it holds them, too.
    pinned: Option<HostMemory>,
    bytes: Arc<Bytes>,
    block: usize,
}

struct Bytes {
    start: NonNull<u8>,
    len: usize,
    /// Reached only through `start`. In huge pages, as each page of a request is an entry of the
    /// disk controller's list.
    _memory: verbs::Memory,
}

// SAFETY: plain memory, reached only through its address by the rules of `Staging`.
unsafe impl Send for Bytes {}
// SAFETY: as above.
unsafe impl Sync for Bytes {}

impl Staging {
    /// `blocks` blocks of `block` bytes, pinned for the GPU of `context` if there is one.
    pub(super) fn new(block: usize, blocks: usize, context: Option<&Context>) -> Result<Self, doorbell_cuda::Error> {
        let len = block * blocks;
        let mut memory = verbs::Memory::transparent_huge(len);
        let bytes = Arc::new(Bytes {
            start: NonNull::from(&mut *memory).cast(),
            len,
            _memory: memory,
        });
        let pin = |context| {
            // SAFETY: the owner keeps the bytes. This program accesses a block only while neither
            // a request nor a copy has it, so atomics would change nothing.
            unsafe { HostMemory::register_raw(context, bytes.start, len, Arc::clone(&bytes) as Arc<_>) }
        };
        let pinned = context.map(pin).transpose()?;
        Ok(Self { pinned, bytes, block })
    }

    pub(super) fn blocks(&self) -> usize {
        self.bytes.len / self.block
    }

    /// The address of a block.
    pub(super) fn block(&self, block: usize) -> *mut u8 {
        assert!(block < self.blocks(), "block {block}");
        // SAFETY: within the allocation, as asserted.
        unsafe { self.bytes.start.as_ptr().add(block * self.block) }
    }

    /// All of it, as one range.
    pub(super) fn range(&self) -> (*mut u8, usize) {
        (self.bytes.start.as_ptr(), self.bytes.len)
    }

    /// Bytes of a block, for copies of the GPU.
    pub(super) fn span(&self, block: usize, skip: usize, len: usize) -> Option<Result<Span<'_>, doorbell_cuda::Error>> {
        let start = block * self.block + skip;
        let pinned = self.pinned.as_ref()?;
        Some(pinned.span(start..start + len))
    }

    /// Copies bytes of a block to `into`.
    ///
    /// # Safety
    /// No request and no copy has the block, and `into` has `len` bytes that are the caller's.
    pub(super) unsafe fn copy_out(&self, block: usize, skip: usize, into: *mut u8, len: usize) {
        assert!(skip + len <= self.block);
        // SAFETY: the block has the bytes, and no other user; `into` by the caller's promise.
        unsafe { ptr::copy_nonoverlapping(self.block(block).add(skip), into, len) }
    }

    /// Copies `from` to the start of a block.
    ///
    /// # Safety
    /// No request and no copy has the block, and `from` has `len` bytes that can be read.
    pub(super) unsafe fn copy_in(&self, block: usize, from: *const u8, len: usize) {
        assert!(len <= self.block);
        // SAFETY: as above.
        unsafe { ptr::copy_nonoverlapping(from, self.block(block), len) }
    }
}
