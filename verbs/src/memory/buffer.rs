//! Buffers: unique, owned ranges of registered memory.
//!
//! No model: the other side is a device. That the last word is stored last is tested.

use core::marker::PhantomData;
use core::mem::ManuallyDrop;
use core::ops::{Bound, Deref, DerefMut, Index, IndexMut, RangeBounds};
use core::slice::SliceIndex;
use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;

use super::copy;
use super::range::{Buffers, Range, RangePtr};
use super::region::{MAX_BUFFER, Region, RegionAttr};
use super::remote::Remote;
use super::rights::{HostMemory, KeyAccess, Local, MemoryKind, Opaque, PeerAccessible, PeerWritable, Readable, Rights};
use super::storage::Memory;
use super::word::AtomicWord;
use crate::describe::BufferDescription;
use crate::error::MemoryError;
use crate::qp::RemoteRights;
use crate::types::RKey;

/// A unique, owned range of registered memory, of kind `K` (IBTA vol 1, 10.6). Never empty.
///
/// Posting a buffer moves it to the queue, its completion returns it: while the device may touch
/// the memory, safe code cannot. The region's last buffer deregisters and frees it.
///
/// - `Buffer<Local>` is a `&mut [u8]` whenever you have it.
/// - `Buffer<PeerRead>` is a `&[u8]`, written by [`write_at`](Self::write_at): a peer may read it.
/// - Memory that peers may write is never a slice: see [`read_at`](Self::read_at) and the like.
/// - `Buffer<Frozen>` is a `&[u8]` that can be cloned, to be the source of many requests at once.
/// - `Buffer<Scratch>` can be cloned too, to be the target of many, and gives no bytes.
#[repr(transparent)]
#[doc(alias("ibv_mr", "ibv_sge", "ibv_dereg_mr"))]
pub struct Buffer<K: MemoryKind = Local> {
    range: RangePtr,
    kind: PhantomData<K>,
}

// SAFETY: a buffer owns its range, which is plain bytes and an `Arc<Region>`, both Send.
unsafe impl<K: MemoryKind> Send for Buffer<K> {}
// SAFETY: through `&Buffer` memory is only read, or accessed atomically.
unsafe impl<K: MemoryKind> Sync for Buffer<K> {}

impl<K: MemoryKind> Buffer<K> {
    /// `addr` and `len` are the caller's, lie in `region`, and are of kind `K`.
    pub(super) fn new(region: Arc<Region>, addr: u64, len: usize) -> Self {
        Self {
            range: Range::allocate::<K>(region, addr, len),
            kind: PhantomData,
        }
    }

    /// # Safety
    /// `range` is owned by the caller, in no list, and was made with `K`'s tag.
    #[inline(always)]
    pub(super) unsafe fn from_range(range: RangePtr) -> Self {
        Self {
            range,
            kind: PhantomData,
        }
    }

    #[inline(always)]
    pub(super) fn into_range(self) -> RangePtr {
        ManuallyDrop::new(self).range
    }

    #[inline(always)]
    pub(super) fn header(&self) -> &Range {
        // SAFETY: the buffer owns its header, of which no `&mut` exists while `self` is borrowed.
        unsafe { self.range.as_ref() }
    }

    #[inline(always)]
    pub(super) fn header_mut(&mut self) -> &mut Range {
        // SAFETY: the buffer owns its header.
        unsafe { self.range.as_mut() }
    }

    /// The first byte; valid for `len` bytes as long as `self` is.
    #[inline(always)]
    fn start(&self) -> *mut u8 {
        core::ptr::with_exposed_provenance_mut(self.header().sge.addr as usize)
    }

    /// Its length in bytes; never 0.
    #[inline]
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a buffer is never empty")]
    pub fn len(&self) -> usize {
        self.header().sge.length as usize
    }

    pub(crate) fn region_raw(&self) -> *mut doorbell_verbs_sys::ibv_mr {
        self.header().region.raw()
    }

    /// The region it is part of.
    #[must_use]
    pub fn region(&self) -> RegionAttr {
        self.header().region.attr()
    }

    /// Its address, for the device and peers.
    #[inline]
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.header().sge.addr
    }

    /// Its address and length, and the keys of its region.
    #[must_use]
    pub fn describe(&self) -> BufferDescription {
        let region = &self.header().region;
        BufferDescription {
            addr: self.addr(),
            len: self.len(),
            region_addr: region.start(),
            region_len: region.len(),
            lkey: region.lkey(),
            rkey: RKey(region.rkey()),
            rights: RemoteRights::from_sys(region.access()),
        }
    }

    /// Splits it in two, the first of `mid` bytes.
    ///
    /// # Panics
    /// If either would be empty.
    #[must_use]
    pub fn split_at(mut self, mid: usize) -> (Self, Self) {
        let (addr, len) = (self.addr(), self.len());
        assert!(
            0 < mid && mid < len,
            "split_at({mid}) of a buffer of {len} bytes would leave an empty one"
        );
        let region = Arc::clone(&self.header().region);
        let second = Range::allocate::<K>(region, addr + mid as u64, len - mid);
        self.header_mut().sge.length = mid as u32;
        // SAFETY: just made with K's tag over bytes that `self` no longer covers.
        (self, unsafe { Self::from_range(second) })
    }

    /// Splits it into buffers of `len` bytes; the last may be shorter.
    ///
    /// # Panics
    /// If `len` is 0.
    pub fn chunks(self, len: usize) -> Chunks<K> {
        assert!(len > 0, "chunks of 0 bytes");
        let header = self.header();
        Chunks::new(Arc::clone(&header.region), header.sge.addr, self.len(), len)
    }

    /// Joins two adjacent buffers, `next` directly following `self` in the same region.
    ///
    /// # Errors
    /// Returns both if they aren't adjacent, or too long together for one message.
    pub fn join(mut self, next: Self) -> Result<Self, (Self, Self)> {
        let len = self.len() + next.len();
        let neighbours =
            Arc::ptr_eq(&self.header().region, &next.header().region) && self.addr() + self.len() as u64 == next.addr();
        if !neighbours || len > MAX_BUFFER {
            return Err((self, next));
        }
        drop(next);
        self.header_mut().sge.length = len as u32;
        Ok(self)
    }

    /// The bytes of `range` only, still owning the whole: for a message shorter than its buffer.
    ///
    /// # Panics
    /// If the range is beyond the buffer.
    #[must_use]
    pub fn part(self, range: impl RangeBounds<usize>) -> BufferPart<K> {
        let (offset, len) = bytes_of(self.len(), range);
        BufferPart {
            buffer: self,
            offset: offset as u32,
            len: len as u32,
        }
    }

    /// The address of `len` bytes at `offset`, bounds-checked.
    #[inline]
    fn check(&self, offset: usize, len: usize) -> *mut u8 {
        let whole = self.len();
        assert!(
            offset <= whole && len <= whole - offset,
            "{len} bytes at offset {offset} are beyond a buffer of {whole} bytes"
        );
        self.start().wrapping_add(offset)
    }
}

impl<K: HostMemory> Buffer<K> {
    /// Deregisters the region and returns its memory, the whole of it, if this is its last buffer.
    ///
    /// # Errors
    /// Returns the buffer if there are others of the region, or the memory isn't the region's own;
    /// else the device's error.
    #[doc(alias = "ibv_dereg_mr")]
    pub fn into_memory(self) -> Result<Memory, IntoMemoryError<K>> {
        let region = {
            // SAFETY: owned, a Box of `Range::allocate`, whose ownership `into_range` gave up.
            let header = unsafe { Box::from_raw(self.into_range().as_ptr()) };
            let again = |region| {
                let range = Range::allocate::<K>(region, header.sge.addr, header.sge.length as usize);
                // SAFETY: the same range as before, with a header of its own again.
                unsafe { Self::from_range(range) }
            };
            if !header.region.owns_memory() {
                return Err(IntoMemoryError::Borrowed(again(header.region)));
            }
            match Arc::try_unwrap(header.region) {
                Ok(region) => region,
                Err(region) => return Err(IntoMemoryError::Shared(again(region))),
            }
        };
        region.into_memory().map_err(IntoMemoryError::Refused)
    }

    /// Copies from `offset` into `into`, reading each byte once.
    ///
    /// Where peers may write, the result may be torn between their writes.
    ///
    /// # Panics
    /// If the range is beyond the buffer.
    pub fn read_at(&self, offset: usize, into: &mut [u8]) {
        let from = self.check(offset, into.len());
        // SAFETY: `check` saw the range in the buffer; there is no `&mut` to these bytes, and the
        // copy is atomic by words: a peer's device may write them meanwhile.
        unsafe { copy::load(from, into) }
    }

    /// A hint to prefetch (ibv_advise_mr(3)), with on-demand paging; for writing if `writable`.
    ///
    /// # Errors
    /// When the device has no such call, or refuses.
    #[doc(alias("ibv_advise_mr", "IBV_ADVISE_MR_ADVICE_PREFETCH"))]
    pub fn prefetch(&self, writable: bool) -> Result<(), MemoryError> {
        let header = self.header();
        header.region.prefetch(header.sge, writable)
    }
}

impl<R: Rights> Buffer<R> {
    /// Changes the rights of the whole region without registering it anew (ibv_rereg_mr(3)), if
    /// this is its last buffer. Peers' keys to it may have changed: hand out new ones.
    ///
    /// # Errors
    /// Returns the unchanged buffer if there are others of the region, or the device refuses.
    #[doc(alias("ibv_rereg_mr", "IBV_REREG_MR_CHANGE_ACCESS"))]
    pub fn with_rights<N: Rights>(mut self, _: N) -> Result<Buffer<N>, ReregisterError<R>> {
        let header = self.header_mut();
        let Some(region) = Arc::get_mut(&mut header.region) else {
            return Err(ReregisterError::Shared(self));
        };
        match region.change_rights(N::ACCESS) {
            Ok(()) => {}
            Err((error, true)) => return Err(ReregisterError::Refused(self, error)),
            // The buffer is dropped, which deregisters what is left.
            Err((error, false)) => return Err(ReregisterError::Lost(error)),
        }
        header.sge.lkey = region.lkey();
        header.set_kind::<N>();
        // SAFETY: owned, in no list, now of this tag. The device refuses accesses by old rights.
        Ok(unsafe { Buffer::from_range(self.into_range()) })
    }

    /// Copies `from` to `offset`.
    ///
    /// # Panics
    /// If the range is beyond the buffer.
    pub fn write_at(&mut self, offset: usize, from: &[u8]) {
        let into = self.check(offset, from.len());
        // SAFETY: `check` saw the range in the buffer; by `&mut self` there is no slice of it here,
        // and the copy is atomic by words: a peer's device may touch the bytes meanwhile.
        unsafe { copy::store(into, from) }
    }

    /// Sets every byte to `byte`.
    pub fn fill(&mut self, byte: u8) {
        // SAFETY: as in `write_at`, for the whole buffer.
        unsafe { copy::fill(self.start(), self.len(), byte) }
    }
}

/// Offset and length of `range` in a buffer of `len` bytes.
///
/// # Panics
/// If the range is beyond the buffer.
pub(super) fn bytes_of(len: usize, range: impl RangeBounds<usize>) -> (usize, usize) {
    let start = match range.start_bound() {
        Bound::Included(&start) => start,
        Bound::Excluded(&before) => before.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&last) => last.saturating_add(1),
        Bound::Excluded(&end) => end,
        Bound::Unbounded => len,
    };
    assert!(
        start <= end && end <= len,
        "bytes {start}..{end} are beyond a buffer of {len} bytes"
    );
    (start, end - start)
}

fn remote_of<K: KeyAccess>(header: &Range) -> Remote<K> {
    Remote::from_raw(header.sge.addr, header.region.rkey(), u64::from(header.sge.length))
}

impl<R: PeerAccessible> Buffer<R> {
    /// The address and key for a peer to reach this buffer with the rights it has.
    ///
    /// Valid as long as the region lives; afterwards the peer gets a remote access error.
    #[must_use]
    #[doc(alias("rkey", "remote_addr"))]
    pub fn remote(&self) -> Remote<R::Key> {
        remote_of(self.header())
    }
}

impl<R: PeerAccessible> Buffer<Opaque<R>> {
    /// The address and key for a peer to reach this memory with the rights it has.
    #[must_use]
    #[doc(alias("rkey", "remote_addr"))]
    pub fn remote(&self) -> Remote<R::Key> {
        remote_of(self.header())
    }
}

macro_rules! loads {
    ($load:ident, $int:ty, $atomic:ty) => {
        #[doc = concat!("Loads the `", stringify!($int), "` at `offset` in one access: a flag or counter that a peer writes.")]
        /// With `Acquire`, what the peer wrote before it is visible after it (IBTA vol 1, o9-20).
        ///
        /// # Panics
        /// If it is beyond the buffer or unaligned, or the ordering is `Release` or `AcqRel`.
        #[inline]
        pub fn $load(&self, offset: usize, ordering: Ordering) -> $int {
            self.atomic::<$atomic>(offset).load(ordering)
        }
    };
}

macro_rules! stores {
    ($store:ident, $int:ty, $atomic:ty) => {
        #[doc = concat!("Stores the `", stringify!($int), "` at `offset` in one access: a peer reads the old value or the new.")]
        /// With `Release`, a peer that reads the new one sees what was written here before it.
        /// By `&mut`: concurrent loads of another width would be a data race even of atomics.
        ///
        /// # Panics
        /// If it is beyond the buffer or unaligned, or the ordering is `Acquire` or `AcqRel`.
        #[inline]
        pub fn $store(&mut self, offset: usize, value: $int, ordering: Ordering) {
            self.atomic::<$atomic>(offset).store(value, ordering);
        }
    };
}

impl<R: PeerWritable> Buffer<R> {
    loads!(load_u8, u8, AtomicU8);
    loads!(load_u32, u32, AtomicU32);
    loads!(load_u64, u64, AtomicU64);
}

impl<R: Rights> Buffer<R> {
    stores!(store_u8, u8, AtomicU8);
    stores!(store_u32, u32, AtomicU32);
    stores!(store_u64, u64, AtomicU64);

    #[inline]
    fn atomic<A>(&self, offset: usize) -> &A {
        let at = self.check(offset, size_of::<A>()).cast::<A>();
        assert!(
            at.is_aligned(),
            "offset {offset} is not aligned to {} bytes",
            size_of::<A>()
        );
        // SAFETY: in range and aligned, valid as long as `self`. Stores have the buffer alone.
        // Loads are of memory that is never lent as a slice: in this process all other access to
        // it is atomic (here and in `copy`), and of another width only by who has the buffer alone.
        // What devices do meanwhile is DMA (see `copy`).
        unsafe { &*at }
    }
}

impl Buffer<Local> {
    /// The buffer as the target of an atomic operation's result.
    ///
    /// # Errors
    /// Returns it if it isn't 8 bytes long and aligned to 8.
    pub fn into_word(self) -> Result<AtomicWord, Self> {
        if AtomicWord::fits(&self.header().sge) {
            Ok(AtomicWord::new(self))
        } else {
            Err(self)
        }
    }
}

impl<K: Readable> Deref for Buffer<K> {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes are initialised, live as long as `self`, and nothing writes them
        // meanwhile: peers have no right to, the local device only writes buffers that were posted
        // (moved into a queue), and this process only through `&mut Buffer`.
        unsafe { core::slice::from_raw_parts(self.start(), self.len()) }
    }
}

impl DerefMut for Buffer<Local> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and nothing else reads them: no rights of peers, and unique.
        unsafe { core::slice::from_raw_parts_mut(self.start(), self.len()) }
    }
}

/// As of its slice; here so that the compiler says why other memory has no index.
impl<K: Readable, I: SliceIndex<[u8]>> Index<I> for Buffer<K> {
    type Output = I::Output;

    #[inline]
    fn index(&self, index: I) -> &I::Output {
        &(**self)[index]
    }
}

impl<I: SliceIndex<[u8]>> IndexMut<I> for Buffer<Local> {
    #[inline]
    fn index_mut(&mut self, index: I) -> &mut I::Output {
        &mut (**self)[index]
    }
}

impl<K: MemoryKind> Drop for Buffer<K> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the buffer owns its range, and is not used after; it is not posted to a device.
        drop(unsafe { Buffers::from_head(Some(self.range)) });
    }
}

impl<K: MemoryKind> core::fmt::Debug for Buffer<K> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Buffer")
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}

/// The error of [`Buffer::into_memory`].
#[derive(Debug, thiserror::Error)]
pub enum IntoMemoryError<K: MemoryKind> {
    /// There are other buffers of the region; returns this one.
    #[error("other buffers of the region are still alive")]
    Shared(Buffer<K>),
    /// The memory is the user's of a [`RegistrationCache`](crate::RegistrationCache).
    #[error("the region's memory belongs to somebody else")]
    Borrowed(Buffer<K>),
    /// The device refused; the memory is leaked.
    #[error(transparent)]
    Refused(MemoryError),
}

/// The error of [`Buffer::with_rights`].
#[derive(Debug, thiserror::Error)]
pub enum ReregisterError<K: MemoryKind> {
    /// There are other buffers of the region; returns this one.
    #[error("other buffers of the region are still alive")]
    Shared(Buffer<K>),
    /// The device refused, and the region is unchanged; returns the buffer.
    #[error("{1}")]
    Refused(Buffer<K>, MemoryError),
    /// The device failed half-way: the region is deregistered, and its memory freed.
    #[error("{0}; the region is gone")]
    Lost(MemoryError),
}

/// Part of a buffer, owning the whole: see [`Buffer::part`].
#[derive(Debug)]
pub struct BufferPart<K: MemoryKind> {
    pub(super) buffer: Buffer<K>,
    pub(super) offset: u32,
    pub(super) len: u32,
}

/// Iterator over the buffers that a longer one, or a region, is split into.
pub struct Chunks<K: MemoryKind> {
    region: Arc<Region>,
    addr: u64,
    remaining: usize,
    chunk: usize,
    kind: PhantomData<K>,
}

impl<K: MemoryKind> Chunks<K> {
    pub(super) fn new(region: Arc<Region>, addr: u64, len: usize, chunk: usize) -> Self {
        Self {
            region,
            addr,
            remaining: len,
            chunk,
            kind: PhantomData,
        }
    }
}

impl<K: MemoryKind> Iterator for Chunks<K> {
    type Item = Buffer<K>;

    fn next(&mut self) -> Option<Buffer<K>> {
        let len = self.chunk.min(self.remaining);
        if len == 0 {
            return None;
        }
        let range = Range::allocate::<K>(Arc::clone(&self.region), self.addr, len);
        self.addr += len as u64;
        self.remaining -= len;
        // SAFETY: just made with K's tag, over bytes that were ours and no longer are.
        Some(unsafe { Buffer::from_range(range) })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.remaining.div_ceil(self.chunk);
        (left, Some(left))
    }
}

impl<K: MemoryKind> ExactSizeIterator for Chunks<K> {}

impl<K: MemoryKind> core::fmt::Debug for Chunks<K> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Chunks")
            .field("chunk", &self.chunk)
            .field("remaining", &self.remaining)
            .finish_non_exhaustive()
    }
}
