//! The objects of verbs for the cases, which also allow calls that a correct program must not make.
//!
//! All `unsafe` of the suite is in this folder. It is sound because an object holds the objects
//! that it is made from, registered memory is a [`Memory`] that its regions hold, and requests
//! point only to data that lives through the call. The numbers that a case chooses freely
//! (addresses, keys, masks, sizes) are for the device to check. A destruction that fails also fails
//! the case.

mod channel;
mod completion;
mod context;
mod device_memory;
mod endpoint;
mod event;
mod extended;
mod memory;
mod qp;
mod srq;
pub(super) mod states;
mod window;
mod wr;

use std::cell::{Cell, RefCell};
use std::ffi::c_int;
use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::rc::Rc;
use std::time::Duration;

use doorbell_verbs_sys::Api;

pub(super) use channel::Channel;
pub(super) use completion::{Completions, Cq, immediate, named};
pub(super) use context::{Device, gid_bytes};
pub(super) use endpoint::{End, Pair, Setup};
pub(super) use extended::{Calls, CqEx};
pub(super) use memory::{ALL_RIGHTS, Memory, Mr, Pd};
pub(super) use qp::{Ah, QKEY, Qp};
pub(super) use srq::Srq;
pub(super) use window::{Binding, Mw, invalidated, next_key};
pub(super) use wr::{Posted, Recv, Send};

pub(super) struct Bench {
    pub(super) api: &'static Api,
    pub(super) device: String,
    /// Seed of byte patterns and first PSNs.
    pub(super) seed: u64,
    /// How long to wait for events that must not occur.
    pub(super) quiet: Duration,
    pub(super) time_limit: Duration,
    /// Destructions that failed.
    complaints: Rc<RefCell<Vec<String>>>,
}

impl Bench {
    pub(super) fn new(api: &'static Api, device: &str, seed: u64, [quiet, time_limit]: [Duration; 2]) -> Self {
        Self {
            api,
            device: device.to_owned(),
            seed,
            quiet,
            time_limit,
            complaints: Rc::default(),
        }
    }

    pub(super) fn complaints(&self) -> Vec<String> {
        self.complaints.take()
    }
}

/// The device lacks, and does not report, the feature under test.
#[derive(Debug)]
pub(super) struct NotOffered(pub(super) String);

impl fmt::Display for NotOffered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not offered: {}", self.0)
    }
}

impl std::error::Error for NotOffered {}

/// A refusal, as an errno value.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Errno(pub(super) c_int);

impl Errno {
    pub(super) fn last() -> Self {
        Self(io::Error::last_os_error().raw_os_error().unwrap_or(0))
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            0 => "success",
            libc::EBUSY => "EBUSY",
            libc::EINVAL => "EINVAL",
            libc::ENOMEM => "ENOMEM",
            libc::EFAULT => "EFAULT",
            libc::EAGAIN => "EAGAIN",
            libc::ENOSYS => "ENOSYS",
            libc::EPERM => "EPERM",
            libc::EOPNOTSUPP => "EOPNOTSUPP",
            other => return write!(f, "errno {other}"),
        })
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl std::error::Error for Errno {}

pub(super) fn zeroed<T: Copy>() -> T {
    // SAFETY: used for the C structs of verbs only: integers, null pointers, absent functions and
    // unions of these.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

/// An object created by a verb, and the verb that destroys it.
struct Object<T> {
    ptr: Cell<*mut T>,
    destroy: unsafe extern "C" fn(*mut T) -> c_int,
    what: &'static str,
    complaints: Rc<RefCell<Vec<String>>>,
}

impl<T> Object<T> {
    /// Wraps a verb's result; errno when it is null.
    fn new(
        device: &Device,
        what: &'static str,
        ptr: *mut T,
        destroy: unsafe extern "C" fn(*mut T) -> c_int,
    ) -> Result<Self, Errno> {
        if ptr.is_null() {
            return Err(Errno::last());
        }
        Ok(Self {
            ptr: Cell::new(ptr),
            destroy,
            what,
            complaints: device.complaints(),
        })
    }

    /// Panics when the case has destroyed it.
    fn get(&self) -> *mut T {
        let ptr = self.ptr.get();
        assert!(!ptr.is_null(), "the case uses a {} that it has destroyed", self.what);
        ptr
    }

    /// Destroys it now rather than on drop, unless refused.
    fn destroy(&self) -> Errno {
        let ptr = self.get();
        // SAFETY: created by the verb that `destroy` belongs to, and live, as every successful
        // destruction clears the pointer.
        let result = unsafe { (self.destroy)(ptr) };
        if result == 0 {
            self.ptr.set(std::ptr::null_mut());
        }
        Errno(result)
    }
}

impl<T> Drop for Object<T> {
    fn drop(&mut self) {
        if self.ptr.get().is_null() {
            return;
        }
        let result = self.destroy();
        if result != Errno(0) {
            let what = self.what;
            self.complaints
                .borrow_mut()
                .push(format!("destroying the {what}: {result}"));
        }
    }
}
