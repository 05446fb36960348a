//! Words of memory that threads of this process, kernels, streams and devices share: all reach them by whole words, and nobody has a slice of them.
#![expect(unsafe_code, reason = "memory that is reached through a pointer, by atomics alone")]

use core::any::Any;
use core::fmt;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::Arc;

use doorbell_cuda::{Context, DevicePtr, HostMemory, Memory as _, Span};
use doorbell_verbs::{Memory, MemoryError};

/// What a word takes.
pub(crate) const WORD: usize = size_of::<u64>();

/// Memory that begins at a page boundary, zero at first, as words. Handles are reference-counted.
#[derive(Clone)]
pub(crate) struct Words {
    first: NonNull<AtomicU64>,
    count: usize,
    /// Whatever the words lie in.
    keep: Arc<dyn Any + Send + Sync>,
    /// The same, where devices of CUDA reach it.
    pinned: Option<HostMemory>,
    context: Option<Context>,
}

// SAFETY: the pointer is to atomics that `keep` keeps, and is followed for nothing else.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    /// So many words for the threads of this process, and kernels that the processor runs.
    pub(crate) fn plain(count: usize) -> Self {
        Self::over(Memory::zeroed(count.max(1) * WORD))
    }

    /// So many words, which kernels and streams reach, too.
    ///
    /// # Errors
    /// The driver's error.
    pub(crate) fn pinned(context: &Context, count: usize) -> Result<Self, doorbell_cuda::Error> {
        let memory = HostMemory::alloc(context, count.max(1) * WORD)?;
        Ok(Self {
            // A null pointer is never given; the memory begins at a page.
            first: NonNull::new(memory.as_ptr().cast()).ok_or(doorbell_cuda::Error::Empty)?,
            count: count.max(1),
            keep: Arc::new(memory.clone()),
            pinned: Some(memory),
            context: Some(context.clone()),
        })
    }

    /// So many words of the same kind.
    ///
    /// # Errors
    /// As of [`pinned`](Self::pinned).
    pub(crate) fn another(&self, count: usize) -> Result<Self, doorbell_cuda::Error> {
        match &self.context {
            Some(context) => Self::pinned(context, count),
            None => Ok(Self::plain(count)),
        }
    }

    /// Such as other processes can map: a device in software reaches it at the speed of a copy.
    ///
    /// # Errors
    /// When there is no memory or no descriptor left.
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

    /// Has devices of CUDA reach it too.
    ///
    /// # Errors
    /// The driver's error.
    pub(crate) fn pin(&mut self, context: &Context) -> Result<(), doorbell_cuda::Error> {
        if self.pinned.is_none() {
            // SAFETY: the memory stays until the owner is dropped, and all that is done to it here is done by atomics.
            let pinned = unsafe {
                HostMemory::register_raw(context, self.first.cast(), self.count * WORD, Arc::clone(&self.keep))
            }?;
            self.pinned = Some(pinned);
            self.context = Some(context.clone());
        }
        Ok(())
    }

    /// Its bytes.
    pub(crate) fn len(&self) -> usize {
        self.count * WORD
    }

    /// Where it begins, for the processor and its devices.
    pub(crate) fn start(&self) -> *mut u8 {
        self.first.as_ptr().cast()
    }

    /// What keeps it.
    pub(crate) fn owner(&self) -> Arc<dyn Any + Send + Sync> {
        Arc::clone(&self.keep)
    }

    /// Where kernels reach it: the processor's own address where no device does, for kernels that the processor runs.
    pub(crate) fn device_ptr(&self) -> DevicePtr {
        match &self.pinned {
            Some(pinned) => pinned.device_ptr(),
            None => DevicePtr(self.first.as_ptr().expose_provenance() as u64),
        }
    }

    /// The word `index`, for streams.
    pub(crate) fn span(&self, index: usize) -> Option<Span<'_>> {
        self.pinned.as_ref()?.span(index * WORD..(index + 1) * WORD).ok()
    }

    /// All of it, for copies and launches.
    pub(crate) fn all(&self) -> Option<Span<'_>> {
        self.pinned.as_ref().map(|pinned| pinned.all())
    }

    /// The word `index`.
    ///
    /// # Panics
    /// If it is beyond them: indices are this crate's own.
    #[inline]
    pub(crate) fn at(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.count, "word {index} of {}", self.count);
        // SAFETY: it lies in memory that `keep` keeps, on its boundary, and is reached by atomics alone.
        unsafe { self.first.add(index).as_ref() }
    }
}

impl fmt::Debug for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Words")
            .field("count", &self.count)
            .field("pinned", &self.pinned.is_some())
            .finish_non_exhaustive()
    }
}

/// Bytes, where they are memory that threads put into and get from: copied in and out by atomics, as devices and kernels touch them meanwhile.
impl Words {
    /// Copies the bytes from `offset` on.
    ///
    /// # Panics
    /// If they do not lie in it: the callers have checked.
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

    /// Copies bytes to `offset`. Whoever calls it is the only thread that does, so that no word is reached as bytes by one and as a whole by another.
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
            // SAFETY: in the memory, as checked above, which is reached by atomics alone.
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

    use super::Words;

    proptest! {
        #[test]
        fn bytes_go_in_and_out(at in 0usize..40, bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            let words = Words::shared(100).unwrap();
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
