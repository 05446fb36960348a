//! The memory behind a region, and how it is freed.

use core::mem::ManuallyDrop;
use core::num::NonZeroUsize;
use core::ops::{Deref, DerefMut};
use core::ptr::NonNull;
use std::alloc::{self, Layout};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use nix::unistd::ftruncate;

use crate::error::MemoryError;

/// Owned memory that can be registered: from a `Vec<u8>` or `Box<[u8]>` without copying,
/// [`Memory::zeroed`], [`Memory::huge`], [`Memory::shared`], or [`Memory::from_owner`].
///
/// Unlike a `Box` it may be moved while others (a device) hold pointers into it.
pub struct Memory {
    start: NonNull<u8>,
    /// Initialised bytes.
    len: usize,
    origin: Origin,
}

enum Origin {
    /// From the global allocator, with this layout; size 0 when there is none.
    Heap(Layout),
    Mapped(NonZeroUsize),
    /// A mapping of a file, kept open: it is registered by its descriptor.
    Shared {
        len: NonZeroUsize,
        file: OwnedFd,
    },
    /// Another value's; a raw pointer, as a moved `Box` claims its content for itself.
    Owned(NonNull<dyn Send>),
}

/// The page size assumed for alignment: what x86-64 and most arm64 kernels use.
pub(super) const PAGE: usize = 4096;

/// A size of huge pages (Linux' Documentation/admin-guide/mm/hugetlbpage.rst).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HugePage {
    /// 2 MiB.
    Size2M,
    /// 1 GiB.
    Size1G,
}

impl HugePage {
    /// Its size in bytes.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::Size2M => 2 << 20,
            Self::Size1G => 1 << 30,
        }
    }

    const fn flag(self) -> MapFlags {
        match self {
            Self::Size2M => MapFlags::MAP_HUGE_2MB,
            Self::Size1G => MapFlags::MAP_HUGE_1GB,
        }
    }
}

// SAFETY: it owns plain bytes, as a `Vec<u8>` does, or a value that is Send.
unsafe impl Send for Memory {}
// SAFETY: as above; shared access only reads bytes, and never touches the owner.
unsafe impl Sync for Memory {}

impl Memory {
    /// `len` bytes of zeros, beginning at a page boundary.
    ///
    /// # Panics
    /// If `len` is beyond `isize::MAX`. Aborts, as `Vec` does, when there is no memory.
    #[must_use]
    pub fn zeroed(len: usize) -> Self {
        Self::aligned(len, PAGE)
    }

    /// `len` bytes of zeros in preallocated huge pages (mmap(2), `MAP_HUGETLB`), each one entry of
    /// a device's translation table. `len` is rounded up to whole pages.
    ///
    /// # Errors
    /// When too few are free; [`transparent_huge`](Self::transparent_huge) needs none preallocated.
    #[doc(alias("MAP_HUGETLB", "hugetlbfs"))]
    pub fn huge(len: usize, page: HugePage) -> Result<Self, MemoryError> {
        let failed = |error| MemoryError::HugePages {
            len,
            page_kib: page.bytes() >> 10,
            error,
        };
        let whole = len.checked_next_multiple_of(page.bytes()).and_then(NonZeroUsize::new);
        let Some(whole) = whole.filter(|_| len != 0) else {
            return Err(MemoryError::Empty);
        };
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_HUGETLB | page.flag();
        // SAFETY: a new mapping at an address that the kernel chooses: nothing there is replaced.
        let start = unsafe { mmap_anonymous(None, whole, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, flags) };
        let start = start.map_err(|errno| failed(io::Error::from(errno)))?;
        Ok(Self {
            start: start.cast(),
            len,
            origin: Origin::Mapped(whole),
        })
    }

    /// `len` zeros, aligned to 2 MiB, for transparent huge pages (madvise(2), `MADV_HUGEPAGE`).
    ///
    /// # Panics
    /// As [`zeroed`](Self::zeroed).
    #[must_use]
    #[doc(alias = "MADV_HUGEPAGE")]
    pub fn transparent_huge(len: usize) -> Self {
        Self::aligned(len, HugePage::Size2M.bytes())
    }

    /// Zeros in an anonymous file (memfd_create(2)), mapped shared: a software device shares it
    /// with its peers on this host, which reach such memory at the speed of a copy. The file stays
    /// open, which takes a descriptor, and its length is sealed.
    ///
    /// A child made by fork(2) shares the memory, it does not get a copy.
    ///
    /// # Errors
    /// When there is no memory or no descriptor left; or [`MemoryError::Empty`].
    #[doc(alias = "memfd_create")]
    pub fn shared(len: usize) -> Result<Self, MemoryError> {
        let whole = len.checked_next_multiple_of(PAGE).and_then(NonZeroUsize::new);
        let Some(whole) = whole.filter(|_| len != 0) else {
            return Err(MemoryError::Empty);
        };
        Self::shared_file(len, whole).map_err(|errno| MemoryError::Shared {
            len,
            error: errno.into(),
        })
    }

    fn shared_file(len: usize, whole: NonZeroUsize) -> nix::Result<Self> {
        let file = memfd_create(c"doorbell", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
        ftruncate(&file, i64::try_from(whole.get()).map_err(|_| Errno::EFBIG)?)?;
        // An access beyond the end of a shrunk file raises SIGBUS in processes that map it.
        let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
        let rights = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping where the kernel chooses; its file is ours until given away.
        let start = unsafe { mmap(None, whole, rights, MapFlags::MAP_SHARED, &file, 0) }?;
        // SAFETY: our range; the advice changes no byte; a kernel without such pages refuses it.
        let _ = unsafe { madvise(start, whole.get(), MmapAdvise::MADV_HUGEPAGE) };
        Ok(Self {
            start: start.cast(),
            len,
            origin: Origin::Shared { len: whole, file },
        })
    }

    /// Zeros at a multiple of `align`; with huge pages if that is the alignment of one.
    fn aligned(len: usize, align: usize) -> Self {
        let layout = Layout::from_size_align(len, align).expect("a length below isize::MAX");
        let origin = Origin::Heap(layout);
        if len == 0 {
            return Self {
                start: NonNull::dangling(),
                len,
                origin,
            };
        }
        // SAFETY: the layout's size is not 0.
        let start = unsafe { alloc::alloc(layout) };
        let Some(start) = NonNull::new(start) else {
            alloc::handle_alloc_error(layout)
        };
        if align > PAGE {
            // Before the first touch, which decides what backs a page. SAFETY: the range is ours;
            // this changes no byte. A kernel without transparent huge pages refuses.
            let _ = unsafe { madvise(start.cast(), len, MmapAdvise::MADV_HUGEPAGE) };
        }
        // SAFETY: `len` bytes, just allocated.
        unsafe { start.write_bytes(0, len) };
        Self { start, len, origin }
    }

    /// The bytes that `owner` lends by `as_mut`, which it owns until it is dropped: a mapped file,
    /// a pinned allocation, an array. `as_mut` is called once; `owner` is dropped with the memory.
    #[must_use]
    pub fn from_owner(owner: impl AsMut<[u8]> + Send + 'static) -> Self {
        let owner = Box::into_raw(Box::new(owner));
        // SAFETY: a box's pointer, which nothing else has. What `as_mut` lends stays lent as long
        // as the value is neither touched nor dropped; `Memory` touches it only to drop it.
        let bytes = unsafe { (*owner).as_mut() };
        let (start, len) = (NonNull::from(&mut *bytes).cast(), bytes.len());
        // SAFETY: a box's pointer is never null.
        let owner: NonNull<dyn Send> = unsafe { NonNull::new_unchecked(owner) };
        Self {
            start,
            len,
            origin: Origin::Owned(owner),
        }
    }

    /// The file of [shared](Self::shared) memory, mapped from its beginning. For devices alone: by
    /// a descriptor that can be written, safe code would change bytes behind a reference to them.
    pub(super) fn memfd(&self) -> Option<BorrowedFd<'_>> {
        match &self.origin {
            Origin::Shared { file, .. } => Some(file.as_fd()),
            _ => None,
        }
    }

    /// The bytes as a `Vec`; memory that came from a `Vec` or `Box` is not copied, other memory is.
    #[must_use]
    pub fn into_vec(self) -> Vec<u8> {
        let Origin::Heap(layout) = self.origin else {
            return self.to_vec();
        };
        if layout.align() != 1 {
            return self.to_vec();
        }
        let this = ManuallyDrop::new(self);
        // SAFETY: heap memory of alignment 1 came from a `Vec<u8>` or `Box<[u8]>` (others align
        // it), whose pointer, length and capacity these are; given up without its own Drop.
        unsafe { Vec::from_raw_parts(this.start.as_ptr(), this.len, layout.size()) }
    }

    /// Its length, without a reference to the bytes: a device may be writing them.
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
            origin: Origin::Heap(layout),
        }
    }
}

impl From<Box<[u8]>> for Memory {
    fn from(slice: Box<[u8]>) -> Self {
        slice.into_vec().into()
    }
}

impl From<&'static mut [u8]> for Memory {
    fn from(slice: &'static mut [u8]) -> Self {
        Self::from_owner(slice)
    }
}

impl Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes of `self`; of a region's memory there is no `&Memory`.
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
        match &self.origin {
            Origin::Heap(layout) if layout.size() == 0 => {}
            // SAFETY: allocated by the global allocator with this layout, freed once.
            Origin::Heap(layout) => unsafe { alloc::dealloc(self.start.as_ptr(), *layout) },
            Origin::Mapped(len) | Origin::Shared { len, .. } => {
                // SAFETY: mapped by `huge` or `shared_file` with this length, and unmapped once.
                if let Err(error) = unsafe { munmap(self.start.cast(), len.get()) } {
                    tracing::error!(len, %error, "munmap failed; the memory is leaked");
                }
            }
            // SAFETY: from a box in `from_owner`, dropped once.
            Origin::Owned(owner) => drop(unsafe { Box::from_raw(owner.as_ptr()) }),
        }
    }
}

impl core::fmt::Debug for Memory {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Memory").field("len", &self.len).finish_non_exhaustive()
    }
}
