//! The allocation behind a region.

use core::mem::ManuallyDrop;
use core::ops::{Deref, DerefMut};
use core::ptr::NonNull;
use std::alloc::{self, Layout};

/// An owned allocation that can be registered: made from a `Vec<u8>` or `Box<[u8]>` without copying, or page-aligned by [`Memory::zeroed`].
///
/// Unlike a `Box` it may be moved while others hold pointers into it, which is what a device does.
pub struct Memory {
    start: NonNull<u8>,
    /// Initialised bytes.
    len: usize,
    /// What the allocation was made with; size 0 when there is none.
    layout: Layout,
}

/// The page size assumed for alignment: what x86-64 and most arm64 kernels use.
const PAGE: usize = 4096;

// SAFETY: it owns plain bytes, as a `Vec<u8>` does.
unsafe impl Send for Memory {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for Memory {}

impl Memory {
    /// `len` bytes of zeros, beginning at a page boundary.
    ///
    /// # Panics
    /// If `len` is beyond `isize::MAX`. Aborts, as `Vec` does, when there is no memory.
    #[must_use]
    pub fn zeroed(len: usize) -> Self {
        let layout = Layout::from_size_align(len, PAGE).expect("a length below isize::MAX");
        if len == 0 {
            return Self {
                start: NonNull::dangling(),
                len,
                layout,
            };
        }
        // SAFETY: the layout's size is not 0.
        let start = unsafe { alloc::alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else {
            alloc::handle_alloc_error(layout)
        };
        Self { start, len, layout }
    }

    /// The bytes as a `Vec`; page-aligned memory is copied, memory that came from a `Vec` or `Box` is not.
    #[must_use]
    pub fn into_vec(self) -> Vec<u8> {
        if self.layout.align() != 1 {
            return self.to_vec();
        }
        let this = ManuallyDrop::new(self);
        // SAFETY: memory of alignment 1 came from a `Vec<u8>` or `Box<[u8]>` (the only constructors but `zeroed`), whose pointer, length and
        // capacity these are; it is given up here without running its own Drop.
        unsafe { Vec::from_raw_parts(this.start.as_ptr(), this.len, this.layout.size()) }
    }

    /// How many bytes, without a reference to them: a device may be writing.
    pub(super) fn size(&self) -> usize {
        self.len
    }

    pub(super) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

impl From<Vec<u8>> for Memory {
    fn from(vec: Vec<u8>) -> Self {
        let mut vec = ManuallyDrop::new(vec);
        let layout = Layout::array::<u8>(vec.capacity()).expect("a Vec's capacity fits isize");
        Self {
            start: NonNull::new(vec.as_mut_ptr()).expect("a Vec's pointer is not null"),
            len: vec.len(),
            layout,
        }
    }
}

impl From<Box<[u8]>> for Memory {
    fn from(slice: Box<[u8]>) -> Self {
        slice.into_vec().into()
    }
}

impl Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `start` is valid for `len` initialised bytes, owned by `self`; while it is part of a region nobody has a `&Memory`.
        unsafe { core::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` is exclusive.
        unsafe { core::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.layout.size() != 0 {
            // SAFETY: allocated by the global allocator with this layout, freed once.
            unsafe { alloc::dealloc(self.start.as_ptr(), self.layout) }
        }
    }
}

impl core::fmt::Debug for Memory {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Memory").field("len", &self.len).finish_non_exhaustive()
    }
}
