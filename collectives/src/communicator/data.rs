//! Memory of operations: registered buffers, and any slice.

use core::fmt;
use core::marker::PhantomData;
use core::ops::{Deref, DerefMut};
use std::sync::Arc;

use crate::kernel::Element;
use crate::memory::Segment;
use crate::types::DataType;

/// Elements in registered memory, for zero-copy operations on it and on slices of it; initially
/// zero. Allocated by [`Communicator::alloc`](super::Communicator::alloc); other communicators copy
/// it like any slice. Ranks trust one another: a device enforces only that a peer writes to this
/// communicator's memory.
#[doc(alias = "ncclMemAlloc")]
pub struct CommBuffer<T: Element> {
    segment: Arc<Segment>,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Element> CommBuffer<T> {
    /// `len` elements at the beginning of `segment`, which has no other owner.
    pub(super) fn new(segment: Arc<Segment>, len: usize) -> Self {
        debug_assert!(len * size_of::<T>() <= segment.len());
        Self {
            segment,
            len,
            element: PhantomData,
        }
    }
}

/// The memory of a call's buffer, valid as long as the buffer: null if there is none.
#[derive(Clone, Copy, Debug)]
pub struct BufferRef(*mut u8);

// SAFETY: the pointer is followed by an engine only, as those of `Data` are.
unsafe impl Send for BufferRef {}
// SAFETY: as above.
unsafe impl Sync for BufferRef {}

impl BufferRef {
    pub(super) const NONE: Self = Self(core::ptr::null_mut());

    #[cfg(feature = "gpu")]
    pub(super) fn segment(segment: &Segment) -> Self {
        Self(segment.start())
    }

    pub(super) fn is_some(self) -> bool {
        !self.0.is_null()
    }

    pub(super) fn start(self) -> *mut u8 {
        self.0
    }

    /// The part that begins so many elements behind its start; none if there is none.
    pub(super) fn offset_by(self, elements: usize, element: DataType) -> Self {
        match self.is_some() {
            true => Self(self.0.wrapping_add(elements * element.bytes())),
            false => self,
        }
    }
}

impl<T: Element> Deref for CommBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the segment is initialised, page-aligned and long enough for `len` elements, of
        // which every bit pattern is a value. Peers write it only while an operation borrows or
        // owns this buffer.
        unsafe { core::slice::from_raw_parts(self.segment.start().cast(), self.len) }
    }
}

impl<T: Element> DerefMut for CommBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and the buffer is the only path to the memory.
        unsafe { core::slice::from_raw_parts_mut(self.segment.start().cast(), self.len) }
    }
}

impl<T: Element> fmt::Debug for CommBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CommBuffer")
            .field("type", &T::TYPE)
            .field("len", &self.len)
            .finish()
    }
}

mod sealed {
    use super::{Arc, BufferRef, Segment};

    /// Address and length of memory.
    pub trait AsRegion {
        /// The memory and its number of elements.
        fn region(&mut self) -> (BufferRef, usize);
    }

    /// Buffers that can be kept until an operation is complete, even if its request is forgotten.
    pub trait KeepAlive {
        /// The segments to keep.
        fn segments(&self) -> [Option<Arc<Segment>>; 2];
    }
}

pub(super) use sealed::{AsRegion, KeepAlive};

/// Input of an operation: `&[T]`, `&[T; N]`, `&Vec<T>`, `&CommBuffer<T>`, or a `CommBuffer<T>`,
/// which is returned.
pub trait Source: sealed::AsRegion {
    /// The element type.
    type Element: Element;
}

/// Output of an operation: `&mut [T]`, `&mut [T; N]`, `&mut Vec<T>`, `&mut CommBuffer<T>`, or a
/// `CommBuffer<T>`, which is returned. A slice `data: &mut [T]` that is used again is given as
/// `&mut data`, or as `&mut *data`: a generic argument is moved.
pub trait Target: sealed::AsRegion {
    /// The element type.
    type Element: Element;
}

/// Buffers that an operation can own while in flight, so that its caller need not wait: one or two
/// [`CommBuffer`]s.
pub trait Owned: sealed::KeepAlive {}

macro_rules! region {
    ($trait:ident: $([$($generic:tt)*] $type:ty;)*) => {
        $(
            impl<T: Element, $($generic)*> AsRegion for $type {
                fn region(&mut self) -> (BufferRef, usize) {
                    (BufferRef(self.as_ptr().cast_mut().cast()), self.len())
                }
            }

            impl<T: Element, $($generic)*> $trait for $type {
                type Element = T;
            }
        )*
    };
}

region! {
    Source:
    [] &[T];
    [const N: usize] &[T; N];
    [] &Vec<T>;
}

macro_rules! region_mut {
    ($([$($generic:tt)*] $type:ty;)*) => {
        $(
            impl<T: Element, $($generic)*> AsRegion for $type {
                fn region(&mut self) -> (BufferRef, usize) {
                    (BufferRef(self.as_mut_ptr().cast()), self.len())
                }
            }

            impl<T: Element, $($generic)*> Target for $type {
                type Element = T;
            }
        )*
    };
}

region_mut! {
    [] &mut [T];
    [] &mut &mut [T];
    [const N: usize] &mut [T; N];
    [] &mut Vec<T>;
}

macro_rules! buffers {
    ($($type:ty: $($trait:ident)*;)*) => {
        $(
            impl<T: Element> AsRegion for $type {
                fn region(&mut self) -> (BufferRef, usize) {
                    (BufferRef(self.segment.start()), self.len)
                }
            }

            $(
                impl<T: Element> $trait for $type {
                    type Element = T;
                }
            )*
        )*
    };
}

buffers! {
    &CommBuffer<T>: Source;
    &mut CommBuffer<T>: Target;
    CommBuffer<T>: Source Target;
}

impl<T: Element> KeepAlive for CommBuffer<T> {
    fn segments(&self) -> [Option<Arc<Segment>>; 2] {
        [Some(Arc::clone(&self.segment)), None]
    }
}

impl<T: Element> Owned for CommBuffer<T> {}

impl<T: Element> KeepAlive for (CommBuffer<T>, CommBuffer<T>) {
    fn segments(&self) -> [Option<Arc<Segment>>; 2] {
        [Some(Arc::clone(&self.0.segment)), Some(Arc::clone(&self.1.segment))]
    }
}

impl<T: Element> Owned for (CommBuffer<T>, CommBuffer<T>) {}
