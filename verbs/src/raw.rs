//! C's own objects: the pointers to those made here, and those made elsewhere for use here. It is the way to verbs that this crate lacks, to other libraries
//! that use the same device, and from a C program to this crate one part at a time.
//!
//! Pointers are those of [`doorbell_verbs_sys`], whose types are laid out as `<infiniband/verbs.h>` has them: any other binding's pointer to the same struct is
//! a cast away.
//!
//! # Looking in
//!
//! `as_raw` gives the pointer to an object, and is safe, as nothing happens by it. The pointer is good as long as the object, or one made of it, lives. Who
//! uses it (which is `unsafe`) through [`Context::api`], or through the function pointers of the context, may
//!
//! - read fields of the struct, and call verbs that ask: ibv_query_qp(3), ibv_query_port(3), …;
//! - make objects of its own from a context, protection domain, completion channel or shared receive queue, as long as these are destroyed before it is dropped
//!   (its `Drop` reports what the device then refuses, and leaks). Queue pairs on a [`CompletionQueue`] are another matter: see below;
//! - change attributes of a queue pair which [`change`](QueuePair::change) does not know, as long as it stays in its state.
//!
//! It may not, for this crate's promises rest on it:
//!
//! - post to a queue pair or shared receive queue, or poll, arm or resize a completion queue: slots, entries and events are counted here, and a `wr_id` that
//!   was not made here is taken for one that was;
//! - put other queue pairs on a completion queue, which might overflow then, without keeping room in it: it can be made that much larger;
//! - move a queue pair to another state but ERR (one that is only prepared may be connected: [`assume_connected`](PreparedQueuePair::assume_connected));
//! - acknowledge events, or close, destroy or free anything.
//!
//! # Taking over
//!
//! `from_raw` makes an object of this crate of a pointer. It is `unsafe`, and who calls it promises that
//!
//! - the pointer is live, was made through the library, and on the device or in the domain, that is given with it, and is what the type says: a
//!   [`Ud`](crate::Ud) is one;
//! - nothing is in flight: no request is posted, no completion waits, no event is unacknowledged;
//! - nobody else posts to it, polls it, changes its state or destroys it from here on, nor makes another object here of it, until this one is dropped;
//! - whatever else is said on the function.
//!
//! Its [`Ownership`] says what becomes of it in the end.
//!
//! ```no_run
//! use doorbell_verbs::{Library, ProtectionDomain};
//! use doorbell_verbs::raw::Ownership;
//!
//! # use doorbell_verbs_sys::{ibv_context, ibv_pd};
//! # fn example(c_program_allocates_a_domain: fn(*mut ibv_context) -> *mut ibv_pd) -> Result<(), Box<dyn std::error::Error>> {
//! let context = Library::system()?.open("mlx5_0")?;
//! let pd = c_program_allocates_a_domain(context.as_raw());
//! // SAFETY: a live domain of this context, made by the same libibverbs, which nobody but us deallocates.
//! let pd = unsafe { ProtectionDomain::from_raw(&context, pd, Ownership::Taken) };
//! # Ok(())
//! # }
//! ```

use std::ffi::CStr;
use std::io;
use std::sync::Arc;

use doorbell_verbs_sys::{self as sys, Api};

use crate::ah::{ANY_LENGTH, AddressHandle};
use crate::context::Context;
use crate::cq::{Classic, CompletionQueue, CqKind, Extended};
use crate::error::{CompletionQueueError, DeviceError, EventError, MemoryError};
use crate::event::CompletionChannel;
use crate::library::Library;
use crate::memory::{
    BoundWindow, Buffer, DeviceMemory, Key, Kind, MemoryWindow, Opaque, Rights, WindowType, adopt_region,
};
use crate::pd::ProtectionDomain;
use crate::qp::{Backend, Connected, PreparedQueuePair, QueuePair, Transport};
use crate::srq::{SharedReceiveError, SharedReceiveHandle, SharedReceiveQueue};

/// What becomes of an object made by `from_raw` when it is dropped, with all that was made of it.
#[derive(Clone)]
pub enum Ownership {
    /// It is destroyed, as if it had been made here.
    Taken,
    /// It is not: it is the lender's, who is kept alive until this crate is done with the object, and dropped then. What the lender's `Drop` does may be to
    /// destroy it.
    ///
    /// A queue pair is taken to RESET before, so that the device is done with the buffers posted to it. If that fails both stay as they are, for ever.
    Lent(Arc<dyn Send + Sync>),
}

/// Who destroys an object, if it is not ours.
pub(crate) type Lender = Option<Arc<dyn Send + Sync>>;

impl Ownership {
    pub(crate) fn lender(self) -> Lender {
        match self {
            Self::Taken => None,
            Self::Lent(lender) => Some(lender),
        }
    }
}

impl core::fmt::Debug for Ownership {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Taken => "Taken",
            Self::Lent(_) => "Lent",
        })
    }
}

impl Context {
    /// The functions of the library that has opened it.
    #[must_use]
    pub fn api(&self) -> &'static Api {
        self.inner().api
    }

    /// C's object: see [the rules](crate::raw#looking-in).
    #[must_use]
    pub fn as_raw(&self) -> *mut sys::ibv_context {
        self.inner().raw
    }

    /// An open device made elsewhere (ibv_open_device(3)).
    ///
    /// # Errors
    /// When it cannot be queried. It has been closed then, or is its lender's again.
    ///
    /// # Safety
    /// See [the rules](crate::raw#taking-over). Nobody reads its asynchronous events while [`Events`](crate::Events) of it do, and its descriptor for them is
    /// not set to block.
    pub unsafe fn from_raw(
        library: Library,
        raw: *mut sys::ibv_context,
        ownership: Ownership,
    ) -> Result<Self, DeviceError> {
        let api = library.api();
        // SAFETY: live by contract; an open device has a name, which lives as long.
        let name = unsafe { CStr::from_ptr((api.get_device_name)((*raw).device)) };
        let name = name.to_string_lossy().into_owned();
        match ownership {
            Ownership::Taken => Self::adopt(api, raw, name),
            Ownership::Lent(lender) => Self::borrow(api, raw, name, lender),
        }
    }
}

impl ProtectionDomain {
    /// C's object: see [the rules](crate::raw#looking-in).
    #[must_use]
    pub fn as_raw(&self) -> *mut sys::ibv_pd {
        self.inner().raw
    }

    /// A protection domain made elsewhere (ibv_alloc_pd(3)).
    ///
    /// # Safety
    /// See [the rules](crate::raw#taking-over). Others may make objects in a domain that is lent.
    #[must_use]
    pub unsafe fn from_raw(context: &Context, raw: *mut sys::ibv_pd, ownership: Ownership) -> Self {
        // SAFETY: by contract.
        unsafe { Self::adopt(context.inner(), raw, ownership.lender()) }
    }
}

impl CompletionChannel {
    /// C's object: see [the rules](crate::raw#looking-in).
    #[must_use]
    pub fn as_raw(&self) -> *mut sys::ibv_comp_channel {
        self.inner().raw()
    }

    /// A completion channel made elsewhere (ibv_create_comp_channel(3)). Its descriptor is set not to block.
    ///
    /// # Errors
    /// When that fails. It has been destroyed then, or is its lender's again.
    ///
    /// # Safety
    /// See [the rules](crate::raw#taking-over). No completion queue is on it.
    pub unsafe fn from_raw(
        context: &Context,
        raw: *mut sys::ibv_comp_channel,
        ownership: Ownership,
    ) -> Result<Self, EventError> {
        // SAFETY: by contract.
        unsafe { Self::adopt(context.inner(), raw, ownership.lender()) }.map_err(|error| EventError::CreateChannel {
            device: context.name().to_owned(),
            error,
        })
    }
}

impl<Q: CqKind> CompletionQueue<Q> {
    /// C's object: see [the rules](crate::raw#looking-in). Of an [`Extended`] queue it is an `ibv_cq_ex` as well.
    #[must_use]
    pub fn as_raw(&self) -> *mut sys::ibv_cq {
        self.inner().raw()
    }
}

impl CompletionQueue<Classic> {
    /// A completion queue made elsewhere (ibv_create_cq(3)). It cannot be waited for.
    ///
    /// # Safety
    /// See [the rules](crate::raw#taking-over). It is on no channel, or at least never armed; queue pairs that are on it already may have no completion in it
    /// ever.
    #[must_use]
    pub unsafe fn from_raw(context: &Context, raw: *mut sys::ibv_cq, ownership: Ownership) -> Self {
        // SAFETY: by contract.
        unsafe { Self::adopt(context, raw, ownership.lender()) }
    }
}

impl CompletionQueue<Extended> {
    /// An extended completion queue made elsewhere (ibv_create_cq_ex(3)). It cannot be waited for.
    ///
    /// # Errors
    /// When it cannot be polled. It is whose it was then.
    ///
    /// # Safety
    /// As for [a classic one](CompletionQueue::<Classic>::from_raw). Its `wc_flags` have all of `IBV_WC_STANDARD_FLAGS`, and nobody has begun to poll it.
    pub unsafe fn from_raw(
        context: &Context,
        raw: *mut sys::ibv_cq_ex,
        ownership: Ownership,
    ) -> Result<Self, CompletionQueueError> {
        // SAFETY: live by contract.
        let queue = unsafe { &*raw };
        if queue.start_poll.is_none() || queue.next_poll.is_none() || queue.end_poll.is_none() {
            return Err(CompletionQueueError::Create {
                verb: "ibv_create_cq_ex",
                device: context.name().to_owned(),
                entries: queue.cqe.cast_unsigned(),
                error: io::ErrorKind::Unsupported.into(),
            });
        }
        // SAFETY: by contract, and it can be polled.
        Ok(unsafe { Self::adopt_extended(context, raw, ownership.lender()) })
    }
}

// Queue pairs made elsewhere: qp/adopt.rs.

impl<T: Transport, B: Backend> QueuePair<T, B> {
    /// C's object: see [the rules](crate::raw#looking-in). With the backend [`WorkRequests`](crate::WorkRequests) `ibv_qp_to_qp_ex` makes an `ibv_qp_ex` of it.
    #[must_use]
    pub fn as_raw(&self) -> *mut sys::ibv_qp {
        self.raw()
    }
}

impl<T: Connected, B: Backend> PreparedQueuePair<T, B> {
    /// C's object: see [the rules](crate::raw#looking-in). A connection manager of one's own may connect it by this, to RTS, and then say so by
    /// [`assume_connected`](Self::assume_connected).
    #[must_use]
    pub fn as_raw(&self) -> *mut sys::ibv_qp {
        self.raw()
    }
}

impl AddressHandle {
    /// C's object: see [the rules](crate::raw#looking-in).
    #[must_use]
    pub fn as_raw(&self) -> *mut sys::ibv_ah {
        self.raw()
    }

    /// An address handle made elsewhere (ibv_create_ah(3)), for packets that leave by `port`.
    ///
    /// # Safety
    /// See [the rules](crate::raw#taking-over). Others may send to one that is lent.
    #[must_use]
    pub unsafe fn from_raw(pd: &ProtectionDomain, raw: *mut sys::ibv_ah, port: u8, ownership: Ownership) -> Self {
        // SAFETY: by contract.
        unsafe { Self::adopt(raw, (port, ANY_LENGTH), pd.inner(), ownership.lender()) }
    }
}

impl<K: Kind> Buffer<K> {
    /// C's object: see [the rules](crate::raw#looking-in). It is that of the whole region, of which the buffer may be a part.
    #[must_use]
    pub fn as_raw(&self) -> *mut sys::ibv_mr {
        self.region_raw()
    }
}

impl<R: Rights> Buffer<R> {
    /// Memory registered elsewhere (ibv_reg_mr(3)), all of the region. Whoever owns the memory still does: it is not freed here, nor given by
    /// [`into_memory`](Self::into_memory).
    ///
    /// # Errors
    /// When it is empty, or longer than a message may be. It is whose it was then.
    ///
    /// # Safety
    /// See [the rules](crate::raw#taking-over). Besides:
    /// - The region's rights are those of `R`, it is not zero-based, and its `addr` and `length` say where its bytes are. They are initialised, and stay there
    ///   until the region is deregistered; of one that is lent, until the lender is dropped.
    /// - Until then nobody else reads or writes them, but peers as far as `R` lets them.
    pub unsafe fn from_raw(
        pd: &ProtectionDomain,
        raw: *mut sys::ibv_mr,
        _: R,
        ownership: Ownership,
    ) -> Result<Self, MemoryError> {
        // SAFETY: live by contract.
        let (addr, len) = unsafe { ((*raw).addr.expose_provenance() as u64, (*raw).length) };
        // SAFETY: by contract.
        unsafe { adopt_region(pd.inner(), raw, (addr, len), R::ACCESS, ownership.lender()) }
    }
}

impl<R: Rights> Buffer<Opaque<R>> {
    /// Memory registered elsewhere that the processor does not reach, or shall not: `len` bytes that requests name by addresses from `addr` on
    /// (ibv_reg_dmabuf_mr(3), ibv_reg_mr_iova(3)).
    ///
    /// # Errors
    /// As for [memory of the host](Buffer::<R>::from_raw).
    ///
    /// # Safety
    /// See [the rules](crate::raw#taking-over). The region's rights are those of `R`, these are its addresses, and its bytes stay there until it is
    /// deregistered, or its lender dropped. What peers and the device write there harms nobody.
    pub unsafe fn from_raw(
        pd: &ProtectionDomain,
        raw: *mut sys::ibv_mr,
        (addr, len): (u64, usize),
        _: R,
        ownership: Ownership,
    ) -> Result<Self, MemoryError> {
        // SAFETY: by contract.
        unsafe { adopt_region(pd.inner(), raw, (addr, len), R::ACCESS, ownership.lender()) }
    }
}

impl DeviceMemory {
    /// C's object: see [the rules](crate::raw#looking-in).
    #[must_use]
    pub fn as_raw(&self) -> *mut sys::ibv_dm {
        self.raw()
    }

    /// `len` bytes of device memory allocated elsewhere (ibv_alloc_dm(3)).
    ///
    /// # Safety
    /// See [the rules](crate::raw#taking-over). Others may copy to and from memory that is lent.
    #[must_use]
    pub unsafe fn from_raw(context: &Context, raw: *mut sys::ibv_dm, len: usize, ownership: Ownership) -> Self {
        // SAFETY: by contract.
        unsafe { Self::adopt(context.inner(), raw, len, ownership.lender()) }
    }
}

impl<T: WindowType> MemoryWindow<T> {
    /// C's object, null if it went with its queue pair: see [the rules](crate::raw#looking-in).
    #[must_use]
    pub fn as_raw(&self) -> *mut sys::ibv_mw {
        self.raw()
    }

    /// A memory window made elsewhere (ibv_alloc_mw(3)). It is always taken over: a window is freed to be unbound.
    ///
    /// # Safety
    /// See [the rules](crate::raw#taking-over). It is of type `T`, and not bound.
    #[must_use]
    pub unsafe fn from_raw(pd: &ProtectionDomain, raw: *mut sys::ibv_mw) -> Self {
        // SAFETY: by contract.
        unsafe { Self::adopt(pd.inner(), raw) }
    }
}

impl<K: Key, T: WindowType> BoundWindow<K, T> {
    /// C's object, null if it went with its queue pair: see [the rules](crate::raw#looking-in).
    #[must_use]
    pub fn as_raw(&self) -> *mut sys::ibv_mw {
        self.raw()
    }
}

impl SharedReceiveHandle {
    /// C's object: see [the rules](crate::raw#looking-in).
    #[must_use]
    pub fn as_raw(&self) -> *mut sys::ibv_srq {
        self.inner().raw()
    }
}

impl SharedReceiveQueue {
    /// C's object: see [the rules](crate::raw#looking-in).
    #[must_use]
    pub fn as_raw(&self) -> *mut sys::ibv_srq {
        self.handle().as_raw()
    }

    /// A shared receive queue made elsewhere (ibv_create_srq(3)), of `depth` receives of up to `max_sge` buffers. It is always taken over: what is posted to it
    /// comes back only when it is destroyed. Its `srq_context` is changed.
    ///
    /// # Errors
    /// When the library has no such queues. It is whose it was then.
    ///
    /// # Safety
    /// See [the rules](crate::raw#taking-over). It is at least as large as said.
    pub unsafe fn from_raw(
        pd: &ProtectionDomain,
        raw: *mut sys::ibv_srq,
        depth: u32,
        max_sge: u32,
    ) -> Result<Self, SharedReceiveError> {
        // SAFETY: by contract.
        unsafe { Self::adopt_raw(pd.inner(), raw, (depth, max_sge)) }
    }
}
