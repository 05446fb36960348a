//! A range of a region with its type erased: what a slot holds while a request is in flight.

use core::ptr::NonNull;
use std::sync::Arc;

use doorbell_verbs_sys as sys;

use super::buffer::Buffer;
use super::region::Region;
use super::rights::{Local, MemoryKind};
use super::window::InFlightWindow;
use super::word::AtomicWord;

/// The header of a buffer, on the heap. Allocated with the range, never by posting it.
#[repr(C)]
pub(crate) struct Range {
    /// Ready to be copied into a work request.
    pub(super) sge: sys::ibv_sge,
    /// The next buffer of the request (tag [`LINKED`]) or of the pool; otherwise meaningless.
    pub(super) next: Option<NonNull<Range>>,
    pub(super) region: Arc<Region>,
    /// The kind's tag and [`LINKED`]: one comparison tests for a kind and for an only buffer.
    tag: u16,
}

const LINKED: u16 = 1 << 8;

/// Tag bit: the range is the beginning of an [`InFlightWindow`], and no buffer's.
pub(super) const WINDOW: u16 = 1 << 9;

/// The unique, owning pointer to a range's header.
pub(crate) type RangePtr = NonNull<Range>;

impl Range {
    fn next_in_request(&self) -> Option<RangePtr> {
        if self.tag & LINKED == 0 { None } else { self.next }
    }

    pub(super) fn set_kind<K: MemoryKind>(&mut self) {
        self.tag = K::TAG.into();
    }

    /// The range of a window in flight: no bytes, with a `tag` that has [`WINDOW`].
    pub(super) fn of_window(region: Arc<Region>, tag: u16) -> Self {
        Self {
            sge: sys::ibv_sge {
                addr: 0,
                length: 0,
                lkey: 0,
            },
            next: None,
            region,
            tag: tag | WINDOW,
        }
    }

    /// The header of `len` bytes at `addr`, which the caller owns and which lie in `region`.
    pub(super) fn allocate<K: MemoryKind>(region: Arc<Region>, addr: u64, len: usize) -> RangePtr {
        debug_assert!((1..=super::region::MAX_BUFFER).contains(&len));
        let sge = sys::ibv_sge {
            addr,
            length: len as u32,
            lkey: region.lkey(),
        };
        let range = Box::new(Self {
            sge,
            next: None,
            region,
            tag: K::TAG.into(),
        });
        // SAFETY: a box's pointer is never null.
        unsafe { NonNull::new_unchecked(Box::into_raw(range)) }
    }
}

/// The buffers of one request, in order, returned by its completion or rejection.
///
/// Buffers not taken are dropped with it, which is safe: by now the device is done with them.
pub struct Buffers {
    head: Option<RangePtr>,
}

// SAFETY: it owns its ranges, and a range is plain bytes and an `Arc<Region>`, both Send and Sync.
unsafe impl Send for Buffers {}
// SAFETY: as above; `&Buffers` gives no access to the bytes.
unsafe impl Sync for Buffers {}

impl Buffers {
    pub(crate) const NONE: Self = Self { head: None };

    /// # Safety
    /// Each range is owned by the caller, and no device touches it until the value is posted again.
    #[inline(always)]
    pub(crate) unsafe fn from_head(head: Option<RangePtr>) -> Self {
        Self { head }
    }

    #[inline(always)]
    pub(crate) fn into_head(self) -> Option<RangePtr> {
        let head = self.head;
        core::mem::forget(self);
        head
    }

    pub(crate) fn prepend(&mut self, mut first: Self) {
        let Some(mut range) = first.head.take() else { return };
        // SAFETY: the list owns its ranges. `first` holds one range: it is that of a single source.
        let header = unsafe { range.as_mut() };
        if self.head.is_some() {
            (header.next, header.tag) = (self.head, header.tag | LINKED);
        }
        self.head = Some(range);
    }

    /// Takes the first buffer, if it is a `Buffer<K>`.
    ///
    /// A request has one buffer, or several in the given order; each call takes the next.
    #[inline]
    pub fn take<K: MemoryKind>(&mut self) -> Option<Buffer<K>> {
        let range = self.head?;
        // SAFETY: the list owns its ranges.
        if unsafe { range.as_ref() }.tag == u16::from(K::TAG) {
            self.head = None;
        } else {
            // SAFETY: as above.
            let (taken, rest) = unsafe { take_linked(range, K::TAG) };
            self.head = rest;
            taken?;
        }
        // SAFETY: the range is owned, of this kind, and no longer in the list.
        Some(unsafe { Buffer::from_range(range) })
    }

    pub(super) fn of_window(cell: Box<InFlightWindow>) -> Self {
        // SAFETY: a box's pointer is never null.
        let range = unsafe { NonNull::new_unchecked(Box::into_raw(cell)) };
        // It begins with its range, whose tag says that there is more.
        Self {
            head: Some(range.cast()),
        }
    }

    /// Takes the window, if the request had one and its tag `is_match`.
    pub(super) fn take_window(&mut self, is_match: impl FnOnce(u16) -> bool) -> Option<Box<InFlightWindow>> {
        let range = self.head?;
        // SAFETY: the list owns its ranges.
        let tag = unsafe { range.as_ref() }.tag;
        if tag & WINDOW == 0 || !is_match(tag) {
            return None;
        }
        self.head = None;
        // SAFETY: by its tag made by `of_window`, which gave up the box; no longer in the list.
        Some(unsafe { Box::from_raw(range.cast::<InFlightWindow>().as_ptr()) })
    }

    /// Takes the first buffer as a word, if it is one: the result of an atomic operation.
    #[inline]
    pub fn take_word(&mut self) -> Option<AtomicWord> {
        // SAFETY: the list owns its ranges.
        let header = unsafe { self.head?.as_ref() };
        if !AtomicWord::fits(&header.sge) {
            return None;
        }
        self.take::<Local>().and_then(|buffer| buffer.into_word().ok())
    }

    /// Whether it is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.head.is_none()
    }
}

impl Drop for Buffers {
    #[inline(always)]
    fn drop(&mut self) {
        if let Some(head) = self.head {
            // SAFETY: the list owns its ranges, and is not used after.
            unsafe { drop_list(head) }
        }
    }
}

/// Takes the first buffer, if of this kind and with a successor; returns it and the rest.
///
/// # Safety
/// The caller owns the list.
#[cold]
#[inline(never)]
unsafe fn take_linked(mut head: RangePtr, tag: u8) -> (Option<RangePtr>, Option<RangePtr>) {
    // SAFETY: owned by the list.
    let header = unsafe { head.as_mut() };
    if header.tag != u16::from(tag) | LINKED {
        return (None, Some(head));
    }
    header.tag = tag.into();
    (Some(head), header.next)
}

/// Drops the list at `head`. By value, so that a completion's fields can stay in registers.
///
/// # Safety
/// The caller owns the list, and gives it up.
#[cold]
#[inline(never)]
unsafe fn drop_list(head: RangePtr) {
    let mut next = Some(head);
    while let Some(range) = next {
        // SAFETY: owned by the list.
        if unsafe { range.as_ref() }.tag & WINDOW != 0 {
            // SAFETY: as in `take_window`. Nothing is linked to a window.
            drop(unsafe { Box::from_raw(range.cast::<InFlightWindow>().as_ptr()) });
            return;
        }
        // SAFETY: owned by the list, of `allocate`, freed once: the loop continues behind it.
        let header = unsafe { Box::from_raw(range.as_ptr()) };
        next = header.next_in_request();
    }
}

impl core::fmt::Debug for Buffers {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let mut list = f.debug_list();
        let mut next = self.head;
        while let Some(range) = next {
            // SAFETY: the list owns its ranges.
            let header = unsafe { range.as_ref() };
            list.entry(&format_args!("{} bytes", header.sge.length));
            next = header.next_in_request();
        }
        list.finish()
    }
}
