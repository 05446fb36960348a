//! A free list of buffers, linked through their headers.

use core::marker::PhantomData;

use super::buffer::Buffer;
use super::range::RangePtr;
use super::rights::{Local, MemoryKind};

/// A free list of buffers, last in, first out: the last is the likeliest to be in caches.
///
/// It is linked through the buffers themselves: it never allocates, is never full, and costs about
/// as much as C's array of pointers.
///
/// ```no_run
/// # fn example(cq: &mut doorbell_verbs::CompletionQueue, qp: &mut doorbell_verbs::QueuePair) -> Result<(), Box<dyn std::error::Error>> {
/// use doorbell_verbs::BufferPool;
///
/// let mut pool: BufferPool = BufferPool::new();
/// cq.poll()?.try_for_each(|done| {
///     done.result()?;
///     pool.extend(done.into_buffer());
///     Ok::<_, doorbell_verbs::CompletionError>(())
/// })?;
/// while let Some(buffer) = pool.pop() {
///     qp.receive(buffer)?;
/// }
/// # Ok(())
/// # }
/// ```
pub struct BufferPool<K: MemoryKind = Local> {
    /// Each header links to the next; the last one's `next` is `None`.
    first: Option<RangePtr>,
    kind: PhantomData<Buffer<K>>,
}

// SAFETY: it owns its buffers, which are Send.
unsafe impl<K: MemoryKind> Send for BufferPool<K> {}
// SAFETY: shared access only tests for emptiness and reads lengths.
unsafe impl<K: MemoryKind> Sync for BufferPool<K> {}

impl<K: MemoryKind> BufferPool<K> {
    /// An empty pool.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            first: None,
            kind: PhantomData,
        }
    }

    /// Adds `buffer`.
    #[inline]
    pub fn push(&mut self, buffer: Buffer<K>) {
        let mut range = buffer.into_range();
        // SAFETY: the buffer, now ours, owned its header.
        unsafe { range.as_mut().next = self.first };
        self.first = Some(range);
    }

    /// Takes the buffer that was added last.
    #[inline]
    pub fn pop(&mut self) -> Option<Buffer<K>> {
        let range = self.first?;
        // SAFETY: the pool owns it.
        self.first = unsafe { range.as_ref().next };
        // SAFETY: owned, of this kind as `push` took it from one, and no longer in the list.
        Some(unsafe { Buffer::from_range(range) })
    }

    /// Takes up to `n` buffers, one by one; the rest stays, unless the iterator is leaked.
    ///
    /// ```no_run
    /// # fn example(pool: &mut doorbell_verbs::BufferPool, qp: &mut doorbell_verbs::QueuePair) -> Result<(), doorbell_verbs::PostError> {
    /// qp.post_receives(|batch| pool.drain(16).for_each(|buffer| batch.receive(buffer)))
    /// # }
    /// ```
    #[inline]
    pub fn drain(&mut self, n: usize) -> BufferPoolDrain<'_, K> {
        let first = self.first.take();
        BufferPoolDrain {
            pool: self,
            first,
            left: n,
        }
    }

    /// Whether it is empty.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    /// The number of buffers; walks the list.
    #[must_use]
    pub fn count(&self) -> usize {
        let next = |range: &RangePtr| {
            // SAFETY: the pool owns it.
            unsafe { range.as_ref().next }
        };
        core::iter::successors(self.first, next).count()
    }
}

impl<K: MemoryKind> Default for BufferPool<K> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K: MemoryKind> Extend<Buffer<K>> for BufferPool<K> {
    #[inline]
    fn extend<I: IntoIterator<Item = Buffer<K>>>(&mut self, buffers: I) {
        buffers.into_iter().for_each(|buffer| self.push(buffer));
    }
}

impl<K: MemoryKind> FromIterator<Buffer<K>> for BufferPool<K> {
    fn from_iter<I: IntoIterator<Item = Buffer<K>>>(buffers: I) -> Self {
        let mut pool = Self::new();
        pool.extend(buffers);
        pool
    }
}

/// Iterator of [`BufferPool::drain`].
pub struct BufferPoolDrain<'p, K: MemoryKind> {
    /// Empty meanwhile: the remaining buffers return when this is dropped.
    pool: &'p mut BufferPool<K>,
    first: Option<RangePtr>,
    left: usize,
}

// SAFETY: it owns its buffers, which are Send.
unsafe impl<K: MemoryKind> Send for BufferPoolDrain<'_, K> {}
// SAFETY: shared access does nothing.
unsafe impl<K: MemoryKind> Sync for BufferPoolDrain<'_, K> {}

impl<K: MemoryKind> Iterator for BufferPoolDrain<'_, K> {
    type Item = Buffer<K>;

    #[inline]
    fn next(&mut self) -> Option<Buffer<K>> {
        // Decremented before the list is tested for emptiness: one instruction less.
        let (left, none) = self.left.overflowing_sub(1);
        if none {
            return None;
        }
        self.left = left;
        let range = self.first?;
        // SAFETY: owned, as the pool holds it no more.
        self.first = unsafe { range.as_ref().next };
        // SAFETY: owned, of this kind as `push` took it from one, and no longer in the list.
        Some(unsafe { Buffer::from_range(range) })
    }

    #[inline]
    fn size_hint(&self) -> (usize, Option<usize>) {
        (0, Some(self.left))
    }
}

impl<K: MemoryKind> Drop for BufferPoolDrain<'_, K> {
    #[inline]
    fn drop(&mut self) {
        self.pool.first = self.first;
    }
}

impl<K: MemoryKind> core::fmt::Debug for BufferPoolDrain<'_, K> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Drain")
            .field("left", &self.left)
            .finish_non_exhaustive()
    }
}

impl<K: MemoryKind> Drop for BufferPool<K> {
    fn drop(&mut self) {
        while self.pop().is_some() {}
    }
}

impl<K: MemoryKind> core::fmt::Debug for BufferPool<K> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Pool")
            .field("count", &self.count())
            .finish_non_exhaustive()
    }
}
