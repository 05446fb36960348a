//! The kernels against a reference by other means, one element at a time.

use std::alloc::{Layout, alloc_zeroed, dealloc};

mod convert;
mod lines;
mod properties;
mod reduce;
mod reference;
mod user;

/// SplitMix64 with a fixed seed.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}

/// Bytes at the end of an allocation, so that a sanitizer detects accesses beyond.
pub(super) struct Memory {
    base: *mut u8,
    layout: Layout,
    offset: usize,
}

impl Memory {
    pub(super) fn new(content: &[u8], offset: usize) -> Self {
        let layout = Layout::from_size_align((offset + content.len()).max(1), 64).expect("small");
        // SAFETY: the layout has a size. The content fits behind the offset.
        let base = unsafe {
            let base = alloc_zeroed(layout);
            assert!(!base.is_null());
            base.add(offset)
                .copy_from_nonoverlapping(content.as_ptr(), content.len());
            base
        };
        Self { base, layout, offset }
    }

    pub(super) fn at(&mut self) -> *mut u8 {
        self.base.wrapping_add(self.offset)
    }

    pub(super) fn content(&self, len: usize) -> &[u8] {
        assert!(self.offset + len <= self.layout.size());
        // SAFETY: within the allocation, which is initialised; it is not written while borrowed.
        unsafe { core::slice::from_raw_parts(self.base.add(self.offset), len) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.base, self.layout) };
    }
}
