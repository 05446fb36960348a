//! Stream memory operations: a stream writes, or waits for, a word without a kernel.

use core::ffi::c_uint;

use crate::error::Error;
use crate::memory::Span;
use crate::stream::Stream;
use crate::sys;

/// The condition that ends a wait: `CUstreamWaitValue_flags`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(alias = "CUstreamWaitValue_flags")]
pub enum WaitCondition<T> {
    /// The word is at least the value, compared by the signed difference, so counters may wrap.
    AtLeast(T),
    /// The word equals the value.
    Equal(T),
    /// The word has at least one of the value's bits.
    AnyBit(T),
}

impl<T: Copy> WaitCondition<T> {
    fn parts(self) -> (T, c_uint) {
        match self {
            Self::AtLeast(value) => (value, sys::WAIT_AT_LEAST),
            Self::Equal(value) => (value, sys::WAIT_EQUAL),
            Self::AnyBit(value) => (value, sys::WAIT_ANY_BIT),
        }
    }
}

impl Stream {
    /// Writes `value` to the first 4 bytes of `word` when all earlier work is done and visible.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::Misaligned`], [`Error::Missing`] before CUDA 11.7, or the
    /// driver's error.
    #[doc(alias = "cuStreamWriteValue32")]
    pub fn write_value32(&self, word: Span<'_>, value: u32) -> Result<(), Error> {
        let word = first(word, 4)?;
        let Some(write) = self.driver().table().stream_write_value32 else {
            return Err(self.driver().missing("cuStreamWriteValue32_v2"));
        };
        self.enqueue("cuStreamWriteValue32", &[word.resource()], |_, stream| {
            // SAFETY: the word lies aligned in memory that is kept until this is done; on the host
            // it is referenced only as an atomic.
            unsafe { write(stream, word.address(), value, 0) }
        })
    }

    /// As [`Stream::write_value32`], for 8 bytes.
    ///
    /// # Errors
    /// As [`Stream::write_value32`]; [`Error::NotSupported`] if the device supports only 32 bits.
    #[doc(alias = "cuStreamWriteValue64")]
    pub fn write_value64(&self, word: Span<'_>, value: u64) -> Result<(), Error> {
        let word = first(word, 8)?;
        let Some(write) = self.driver().table().stream_write_value64 else {
            return Err(self.driver().missing("cuStreamWriteValue64_v2"));
        };
        self.enqueue("cuStreamWriteValue64", &[word.resource()], |_, stream| {
            // SAFETY: as above.
            unsafe { write(stream, word.address(), value, 0) }
        })
    }

    /// Writes `bytes` to `into` in words of 8 and 4 bytes, each at 1 µs. Unlike copies of less than
    /// 32 KiB from the host, and kernels, it does not wait for the context's turn on the device.
    ///
    /// # Errors
    /// As [`Stream::write_value64`].
    pub fn write_words(&self, into: Span<'_>, bytes: &[u8]) -> Result<(), Error> {
        let mut at = 0;
        let head = if into.address().is_multiple_of(8) { 0 } else { 4 };
        while let Some(rest) = bytes.get(at..).filter(|rest| !rest.is_empty()) {
            let word = into.span(at..)?;
            if let Some(value) = rest.first_chunk().filter(|_| at >= head) {
                self.write_value64(word, u64::from_ne_bytes(*value))?;
                at += 8;
                continue;
            }
            let Some(value) = rest.first_chunk() else {
                return Err(Error::Misaligned {
                    offset: word.offset(),
                    word: 4,
                });
            };
            self.write_value32(word, u32::from_ne_bytes(*value))?;
            at += 4;
        }
        Ok(())
    }

    /// Later work waits until the first 4 bytes of `word` satisfy `until`. A stream that waits
    /// forever cannot be drained, nor its device synchronized.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::Misaligned`], [`Error::Missing`] before CUDA 11.7, or the
    /// driver's error.
    #[doc(alias = "cuStreamWaitValue32")]
    pub fn wait_value32(&self, word: Span<'_>, until: WaitCondition<u32>) -> Result<(), Error> {
        let word = first(word, 4)?;
        let Some(wait) = self.driver().table().stream_wait_value32 else {
            return Err(self.driver().missing("cuStreamWaitValue32_v2"));
        };
        let (value, flags) = until.parts();
        self.enqueue("cuStreamWaitValue32", &[word.resource()], |_, stream| {
            // SAFETY: as above.
            unsafe { wait(stream, word.address(), value, flags) }
        })
    }

    /// As [`Stream::wait_value32`], for 8 bytes.
    ///
    /// # Errors
    /// As [`Stream::wait_value32`]; [`Error::NotSupported`] if the device supports only 32 bits.
    #[doc(alias = "cuStreamWaitValue64")]
    pub fn wait_value64(&self, word: Span<'_>, until: WaitCondition<u64>) -> Result<(), Error> {
        let word = first(word, 8)?;
        let Some(wait) = self.driver().table().stream_wait_value64 else {
            return Err(self.driver().missing("cuStreamWaitValue64_v2"));
        };
        let (value, flags) = until.parts();
        self.enqueue("cuStreamWaitValue64", &[word.resource()], |_, stream| {
            // SAFETY: as above.
            unsafe { wait(stream, word.address(), value, flags) }
        })
    }
}

fn first(span: Span<'_>, word: usize) -> Result<Span<'_>, Error> {
    let span = span.span(..word)?;
    if !span.address().is_multiple_of(word as u64) {
        return Err(Error::Misaligned {
            offset: span.offset(),
            word,
        });
    }
    Ok(span)
}
