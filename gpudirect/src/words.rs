//! Words shared by host threads, kernels, streams and devices; never given out as slices.
#![expect(unsafe_code, reason = "memory that is reached through a pointer, by atomics alone")]

use core::any::Any;
use core::fmt;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::Arc;

use doorbell_cuda::{Context, DevicePtr, HostMemory, Memory as _, Span};
use doorbell_verbs::{Memory, MemoryError};

pub(crate) const WORD: usize = size_of::<u64>();

/// Page-aligned, zeroed memory as words. Handles are reference-counted.
#[derive(Clone)]
pub(crate) struct SharedWords {
    first: NonNull<AtomicU64>,
    count: usize,
    keep: Arc<dyn Any + Send + Sync>,
    /// The same memory, if mapped for CUDA devices.
    pinned: Option<HostMemory>,
    context: Option<Context>,
}

// SAFETY: the pointer is to atomics that `keep` keeps, and is used for nothing else.
unsafe impl Send for SharedWords {}
// SAFETY: as above.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// Allocates `count` words for host threads, and kernels run on the host.
    pub(crate) fn plain(count: usize) -> Self {
        Self::over(Memory::zeroed(count.max(1) * WORD))
    }

    pub(crate) fn pinned(context: &Context, count: usize) -> Result<Self, doorbell_cuda::Error> {
        let memory = HostMemory::alloc(context, count.max(1) * WORD)?;
        Ok(Self {
            // Never null; the memory is page-aligned.
            first: NonNull::new(memory.as_ptr().cast()).ok_or(doorbell_cuda::Error::Empty)?,
            count: count.max(1),
            keep: Arc::new(memory.clone()),
            pinned: Some(memory),
            context: Some(context.clone()),
        })
    }

    pub(crate) fn same_kind(&self, count: usize) -> Result<Self, doorbell_cuda::Error> {
        match &self.context {
            Some(context) => Self::pinned(context, count),
            None => Ok(Self::plain(count)),
        }
    }

    /// Words that other processes can map: a software device accesses them at memcpy speed.
    ///
    /// # Errors
    /// If memory or descriptors are exhausted.
    pub(crate) fn shared(len: usize) -> Result<Self, MemoryError> {
        Memory::shared(len.next_multiple_of(WORD).max(WORD)).map(Self::over)
    }

    fn over(mut memory: Memory) -> Self {
        let first = NonNull::from(&mut *memory).cast();
        Self {
            first,
            count: memory.len() / WORD,
            keep: Arc::new(memory),
            pinned: None,
            context: None,
        }
    }

    pub(crate) fn pin(&mut self, context: &Context) -> Result<(), doorbell_cuda::Error> {
        if self.pinned.is_none() {
            // SAFETY: the memory stays valid until the owner is dropped, and is accessed here by
            // atomics only.
            let pinned = unsafe {
                HostMemory::register_raw(context, self.first.cast(), self.count * WORD, Arc::clone(&self.keep))
            }?;
            self.pinned = Some(pinned);
            self.context = Some(context.clone());
        }
        Ok(())
    }

    pub(crate) fn len(&self) -> usize {
        self.count * WORD
    }

    pub(crate) fn start(&self) -> *mut u8 {
        self.first.as_ptr().cast()
    }

    pub(crate) fn owner(&self) -> Arc<dyn Any + Send + Sync> {
        Arc::clone(&self.keep)
    }

    /// Its device pointer; the host address if it is not mapped, for kernels run on the host.
    pub(crate) fn device_ptr(&self) -> DevicePtr {
        match &self.pinned {
            Some(pinned) => pinned.device_ptr(),
            None => DevicePtr(self.first.as_ptr().expose_provenance() as u64),
        }
    }

    pub(crate) fn span(&self, index: usize) -> Option<Span<'_>> {
        self.pinned.as_ref()?.span(index * WORD..(index + 1) * WORD).ok()
    }

    pub(crate) fn all(&self) -> Option<Span<'_>> {
        self.pinned.as_ref().map(|pinned| pinned.all())
    }

    /// The word `index`.
    ///
    /// # Panics
    /// If it is out of bounds: indices are this crate's own.
    #[inline]
    pub(crate) fn at(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.count, "word {index} of {}", self.count);
        // SAFETY: the word lies aligned in memory that `keep` keeps, and is accessed by atomics
        // only.
        unsafe { self.first.add(index).as_ref() }
    }
}

impl fmt::Debug for SharedWords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Words")
            .field("count", &self.count)
            .field("pinned", &self.pinned.is_some())
            .finish_non_exhaustive()
    }
}

/// Byte access, by atomics, to sources and targets of puts and gets, which devices access too.
impl SharedWords {
    /// Copies out the bytes at `offset`.
    ///
    /// # Panics
    /// If they are out of bounds: the callers have checked.
    pub(crate) fn copy_out(&self, offset: usize, into: &mut [u8]) {
        let mut at = offset;
        let mut rest = into;
        while !rest.is_empty() {
            let (word, skip) = (self.at(at / WORD).load(Ordering::Relaxed).to_ne_bytes(), at % WORD);
            let (now, later) = rest.split_at_mut((WORD - skip).min(rest.len()));
            now.copy_from_slice(&word[skip..skip + now.len()]);
            at += now.len();
            rest = later;
        }
    }

    /// Copies in bytes at `offset`. Only one thread may do so at a time, so that no word is
    /// accessed in mixed sizes.
    ///
    /// # Panics
    /// As [`copy_out`](Self::copy_out).
    pub(crate) fn copy_in(&self, offset: usize, from: &[u8]) {
        assert!(
            offset <= self.len() && from.len() <= self.len() - offset,
            "bytes beyond the memory"
        );
        let head = (offset.next_multiple_of(WORD) - offset).min(from.len());
        let (first, rest) = from.split_at(head);
        let (words, last) = rest.as_chunks::<WORD>();
        let byte = |at: usize, value: u8| {
            // SAFETY: in bounds, as checked above, and accessed by atomics only.
            unsafe { AtomicU8::from_ptr(self.start().add(at)) }.store(value, Ordering::Relaxed);
        };
        first.iter().zip(offset..).for_each(|(value, at)| byte(at, *value));
        let aligned = (offset + head) / WORD;
        for (index, word) in words.iter().enumerate() {
            self.at(aligned + index)
                .store(u64::from_ne_bytes(*word), Ordering::Relaxed);
        }
        last.iter()
            .zip((aligned + words.len()) * WORD..)
            .for_each(|(value, at)| byte(at, *value));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::SharedWords;

    proptest! {
        #[test]
        fn bytes_go_in_and_out(at in 0usize..40, bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            let words = SharedWords::shared(100).unwrap();
            prop_assert_eq!(words.len(), 104);
            words.copy_in(at, &bytes);
            let mut all = vec![1; words.len()];
            words.copy_out(0, &mut all);
            let mut expected = vec![0; words.len()];
            expected[at..at + bytes.len()].copy_from_slice(&bytes);
            prop_assert_eq!(&all, &expected);
            let mut part = vec![1; bytes.len()];
            words.copy_out(at, &mut part);
            prop_assert_eq!(part, bytes);
        }
    }
}
