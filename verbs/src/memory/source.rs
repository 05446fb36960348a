//! What can be posted: as the source of a send or write, or as the target of a receive or read.

use doorbell_verbs_sys as sys;

use super::buffer::{Buffer, Part};
use super::range::Buffers;
use super::rights::{Kind, Rights};
use super::word::Word;

/// Memory that a request may read: any [`Buffer`], or [`Part`] of one.
pub trait Source: sealed::IntoSingle {}

/// Memory that a request may write: any but frozen.
pub trait Sink: Source {}

pub(crate) mod sealed {
    use super::Single;

    pub trait IntoSingle {
        fn into_single(self) -> Single;
    }
}

/// One scatter-gather element, and the buffer it is of.
#[derive(Debug)]
pub struct Single {
    pub(crate) sge: sys::ibv_sge,
    pub(crate) buffers: Buffers,
}

impl<K: Kind> sealed::IntoSingle for Buffer<K> {
    #[inline(always)]
    fn into_single(self) -> Single {
        let sge = self.header().sge;
        // SAFETY: the range is owned by `self`, which gives it up.
        let buffers = unsafe { Buffers::from_head(Some(self.into_range())) };
        Single { sge, buffers }
    }
}

impl<K: Kind> sealed::IntoSingle for Part<K> {
    #[inline(always)]
    fn into_single(self) -> Single {
        let mut single = self.buffer.into_single();
        single.sge.addr += u64::from(self.offset);
        single.sge.length = self.len;
        single
    }
}

impl sealed::IntoSingle for Word {
    #[inline(always)]
    fn into_single(self) -> Single {
        self.into_buffer().into_single()
    }
}

impl<K: Kind> Source for Buffer<K> {}
impl<K: Kind> Source for Part<K> {}
impl<R: Rights> Sink for Buffer<R> {}
impl<R: Rights> Sink for Part<R> {}
impl Source for Word {}
impl Sink for Word {}
