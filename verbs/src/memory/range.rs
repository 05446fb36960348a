//! A range of a region with its type erased: what a slot of a queue holds while a request is in flight.

use core::ptr::NonNull;
use std::sync::Arc;

use doorbell_verbs_sys as sys;

use super::buffer::Buffer;
use super::region::Region;
use super::rights::{Kind, Local};
use super::word::Word;

/// The header of a buffer, on the heap. Made when the range is made, never when it is posted.
#[repr(C)]
pub(crate) struct Range {
    /// Ready to be copied into a work request.
    pub(super) sge: sys::ibv_sge,
    /// The next buffer of the same request; `None` but in a list of several.
    next: Option<NonNull<Range>>,
    pub(super) region: Arc<Region>,
    pub(super) tag: u8,
}

/// The unique pointer to a range's header: whoever has it owns the range.
pub(crate) type RangePtr = NonNull<Range>;

impl Range {
    /// Allocates the header of `len` bytes at `addr`, which the caller owns and which lie in `region`.
    pub(super) fn allocate<K: Kind>(region: Arc<Region>, addr: u64, len: usize) -> RangePtr {
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
            tag: K::TAG,
        });
        // SAFETY: a box's pointer is never null.
        unsafe { NonNull::new_unchecked(Box::into_raw(range)) }
    }
}

/// The buffers of one request, in order: what its completion, or its refusal, gives back.
///
/// Buffers that are not taken are dropped with it, which is safe: by now the device is done with them.
pub struct Buffers {
    head: Option<RangePtr>,
}

// SAFETY: it owns its ranges, and a range is plain bytes and an `Arc<Region>`, both Send and Sync.
unsafe impl Send for Buffers {}
// SAFETY: as above; `&Buffers` gives no access to the bytes.
unsafe impl Sync for Buffers {}

impl Buffers {
    pub(crate) const NONE: Self = Self { head: None };

    /// Takes ownership of the list that begins at `head`.
    ///
    /// # Safety
    /// Each range of the list is owned by the caller, and no device will touch it before the value is given to one again.
    #[inline(always)]
    pub(crate) unsafe fn from_head(head: Option<RangePtr>) -> Self {
        Self { head }
    }

    /// Gives up ownership of the list.
    #[inline(always)]
    pub(crate) fn into_head(self) -> Option<RangePtr> {
        let head = self.head;
        core::mem::forget(self);
        head
    }

    /// Puts `first` before the others.
    pub(crate) fn prepend(&mut self, mut first: Self) {
        let Some(mut range) = first.head.take() else { return };
        // SAFETY: the list owns its ranges. `first` holds one range: it is that of a single source.
        unsafe { range.as_mut().next = self.head };
        self.head = Some(range);
    }

    /// The first buffer, if there is one and it is a `Buffer<K>`.
    ///
    /// A request has one buffer, or several in the order in which they were given; each call takes the next.
    #[inline]
    pub fn take<K: Kind>(&mut self) -> Option<Buffer<K>> {
        let mut range = self.head?;
        // SAFETY: the list owns its ranges.
        let header = unsafe { range.as_mut() };
        if header.tag != K::TAG {
            return None;
        }
        self.head = header.next;
        if self.head.is_some() {
            header.next = None;
        }
        // SAFETY: the range is owned, of this kind, and no longer in the list.
        Some(unsafe { Buffer::from_range(range) })
    }

    /// The first buffer as a word, if it is one: what an atomic operation gives back.
    #[inline]
    pub fn take_word(&mut self) -> Option<Word> {
        // SAFETY: the list owns its ranges.
        let header = unsafe { self.head?.as_ref() };
        if !Word::fits(&header.sge) {
            return None;
        }
        self.take::<Local>().and_then(|buffer| buffer.into_word().ok())
    }

    /// Whether there is none left.
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

/// Drops the list that begins at `head`. Takes it by value, so that a completion's fields can stay in registers.
///
/// # Safety
/// The caller owns the list, and gives it up.
#[cold]
#[inline(never)]
unsafe fn drop_list(head: RangePtr) {
    let mut next = Some(head);
    while let Some(range) = next {
        // SAFETY: owned by the list, allocated by `allocate`, freed once: the list goes on behind it.
        let header = unsafe { Box::from_raw(range.as_ptr()) };
        next = header.next;
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
            next = header.next;
        }
        list.finish()
    }
}
