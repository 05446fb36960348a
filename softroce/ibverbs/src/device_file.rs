//! The device file of a context, `cmd_fd`, and the objects that are imported by their handles in it
//! (ibv_import_device(3), ibv_import_pd(3)).
//!
//! Duplicates of the descriptor name the same file, of this process alone: objects live in its
//! memory. An imported object is one with the original, and either destroys it; unimporting
//! releases no more than the C struct.

use core::any::Any;
use core::ffi::c_int;
use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::process;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::context::{Context, next_handle};
use crate::errno;
use crate::registry::SoftDevice;

/// What the contexts of one device file share.
pub(crate) struct DeviceFile {
    inode: Inode,
    /// Not a child of fork(2), which has the file too.
    process: u32,
    pub(crate) soft: Arc<SoftDevice>,
    /// Each is an [`Object`], owned by its C structs.
    objects: Mutex<HashMap<u32, Weak<dyn Any + Send + Sync>>>,
}

/// Device and inode number, unique while the file is open.
pub(crate) type Inode = (u64, u64);

static FILES: Mutex<Vec<Weak<DeviceFile>>> = Mutex::new(Vec::new());

impl DeviceFile {
    /// An empty memfd, for its inode.
    ///
    /// # Errors
    /// The errno value.
    pub(crate) fn create(soft: Arc<SoftDevice>) -> Result<(Arc<Self>, OwnedFd), c_int> {
        // SAFETY: the name is a C string.
        let fd = unsafe { libc::memfd_create(c"doorbell-uverbs".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(errno::of(&std::io::Error::last_os_error()));
        }
        // SAFETY: just opened, and owned by nothing else.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let file = Arc::new(Self {
            inode: inode_of(fd.as_raw_fd()).ok_or(libc::EBADF)?,
            process: process::id(),
            soft,
            objects: Mutex::default(),
        });
        let mut files = FILES.lock();
        files.retain(|file| file.strong_count() > 0);
        files.push(Arc::downgrade(&file));
        Ok((file, fd))
    }

    /// The file of a descriptor, while a context is open on it.
    ///
    /// # Errors
    /// `EINVAL` if it is no descriptor, `EOPNOTSUPP` for any other file, such as another process's.
    pub(crate) fn find(fd: RawFd) -> Result<Arc<Self>, c_int> {
        let inode = inode_of(fd).ok_or(libc::EINVAL)?;
        let files = FILES.lock();
        let mut open = files.iter().filter_map(Weak::upgrade);
        open.find(|file| (file.inode, file.process) == (inode, process::id()))
            .ok_or(libc::EOPNOTSUPP)
    }

    /// The object with this handle, if it is of this type. A child of fork(2) has none.
    pub(crate) fn object<T: Send + Sync + 'static>(&self, handle: u32) -> Option<Arc<Object<T>>> {
        if self.process != process::id() {
            return None;
        }
        let found = self.objects.lock().get(&handle)?.upgrade()?;
        found.downcast().ok()
    }
}

pub(crate) fn inode_of(fd: RawFd) -> Option<Inode> {
    let mut found = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: there is space for what fstat(2) writes, which fails if `fd` is no descriptor.
    if unsafe { libc::fstat(fd, found.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: filled on success.
    let found = unsafe { found.assume_init() };
    Some((found.st_dev, found.st_ino))
}

/// An object that can be imported.
pub(crate) struct Object<T> {
    file: Arc<DeviceFile>,
    pub(crate) handle: u32,
    object: T,
}

impl<T: Send + Sync + 'static> Object<T> {
    pub(crate) fn new(context: &Context, object: T) -> Arc<Self> {
        let (file, handle) = (Arc::clone(&context.file), next_handle());
        let new = Arc::new(Self { file, handle, object });
        let weak: Weak<Self> = Arc::downgrade(&new);
        context.file.objects.lock().insert(handle, weak);
        new
    }

    /// Its C structs can only be unimported from here on.
    pub(crate) fn destroy(&self) {
        self.file.objects.lock().remove(&self.handle);
    }
}

impl<T> Deref for Object<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.object
    }
}
