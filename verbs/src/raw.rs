//! Raw C objects: pointers to those created here, and adoption of those created elsewhere, for
//! other verbs, other libraries, and C programs that move to this crate one part at a time.
//!
//! [`doorbell_verbs_sys`]'s types have C's layout: other bindings' pointers are a cast away.
//!
//! # Using the pointer
//!
//! `as_raw` is safe. The pointer is valid as long as the object, or one created from it, lives.
//! Code that uses it through [`Context::api`], or the function pointers of the context, may
//!
//! - read fields of the struct, and call queries: ibv_query_qp(3), ibv_query_port(3), …;
//! - create objects of its own from a context, protection domain, completion channel or shared
//!   receive queue, as long as these are destroyed before it is dropped (its `Drop` reports if the
//!   device then refuses, and leaks). For queue pairs on a [`CompletionQueue`] see below;
//! - modify attributes of a queue pair which [`change`](QueuePair::modify) does not support, as
//!   long as it stays in its state.
//!
//! It must not, as this crate's guarantees rest on it:
//!
//! - post, or poll, arm or resize a completion queue: slots, entries and events are counted here,
//!   and a foreign `wr_id` is taken for one of this crate's;
//! - put other queue pairs on a completion queue without keeping entries free for them (it can be
//!   created larger), as it could overflow;
//! - move a queue pair to another state but ERR (a prepared one may be connected:
//!   [`assume_connected`](PreparedQueuePair::assume_connected));
//! - acknowledge events, or close, destroy or free anything.
//!
//! # Taking over
//!
//! `from_raw` makes an object of this crate from a pointer. The caller promises that
//!
//! - the pointer is live, was created through the library, and on the device or in the domain, that
//!   is given with it, and is of the type's kind: a
//!   [`UnreliableDatagram`](crate::UnreliableDatagram) is a UD queue pair;
//! - nothing is in flight: no request is posted, no completion waits, no event is unacknowledged;
//! - nothing else posts to it, polls it, changes its state or destroys it from here on, nor makes
//!   another object here from it, until this one is dropped;
//! - the function's own conditions hold.
//!
//! Its [`Ownership`] determines who destroys it.
//!
//! ```no_run
//! use doorbell_verbs::{Library, ProtectionDomain};
//! use doorbell_verbs::raw::Ownership;
//!
//! # use doorbell_verbs_sys::{ibv_context, ibv_pd};
//! # fn example(c_program_allocates_a_domain: fn(*mut ibv_context) -> *mut ibv_pd) -> Result<(), Box<dyn std::error::Error>> {
//! let context = Library::system()?.open("mlx5_0")?;
//! let pd = c_program_allocates_a_domain(context.as_raw());
//! // SAFETY: a live domain of this context, created by the same libibverbs, which only we deallocate.
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
use crate::cq::{ClassicCq, CompletionQueue, CqKind, ExtendedCq};
use crate::error::{CompletionQueueError, DeviceError, EventError, MemoryError};
use crate::event::CompletionChannel;
use crate::library::Library;
use crate::memory::{
    BoundWindow, Buffer, DeviceMemory, KeyAccess, MemoryKind, MemoryWindow, Opaque, Rights, WindowType, adopt_region,
};
use crate::pd::ProtectionDomain;
use crate::qp::{Backend, Connected, PreparedQueuePair, QueuePair, Transport};
use crate::srq::{SharedReceiveQueue, SharedReceiveQueueError, SharedReceiveQueueHandle};

/// Who destroys an object made by `from_raw` when it and all objects created from it are dropped.
#[derive(Clone)]
pub enum Ownership {
    /// This crate, as if it had created the object.
    Taken,
    /// The lender, dropped when this crate is done with the object; its `Drop` may destroy it.
    ///
    /// A queue pair is moved to RESET before, so that its buffers are free; else both are leaked.
    Lent(Arc<dyn Send + Sync>),
}

/// The owner of an object that this crate does not destroy.
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
    /// The verbs of the library that opened it.
    #[must_use]
    pub fn api(&self) -> &'static Api {
        self.inner().api
    }

    /// The raw pointer: see [the rules](crate::raw#using-the-pointer).
    #[must_use]
    pub fn as_raw(&self) -> *mut sys::ibv_context {
        self.inner().raw
    }

    /// An open device created elsewhere (ibv_open_device(3)).
    ///
    /// # Errors
    /// When it cannot be queried. It is then closed, or returned to its lender.
    ///
    /// # Safety
    /// See [the rules](crate::raw#taking-over). Nothing reads its asynchronous events while
    /// [`Events`](crate::Events) of it do, and its descriptor for them is not set to block.
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
    /// The raw pointer: see [the rules](crate::raw#using-the-pointer).
    #[must_use]
    pub fn as_raw(&self) -> *mut sys::ibv_pd {
        self.inner().raw
    }

    /// A protection domain created elsewhere (ibv_alloc_pd(3)).
    ///
    /// # Safety
    /// See [the rules](crate::raw#taking-over). Others may create objects in a domain that is lent.
    #[must_use]
    pub unsafe fn from_raw(context: &Context, raw: *mut sys::ibv_pd, ownership: Ownership) -> Self {
        // SAFETY: by contract.
        unsafe { Self::adopt(context.inner(), raw, ownership.lender()) }
    }
}

impl CompletionChannel {
    /// The raw pointer: see [the rules](crate::raw#using-the-pointer).
    #[must_use]
    pub fn as_raw(&self) -> *mut sys::ibv_comp_channel {
        self.inner().raw()
    }

    /// A channel created elsewhere (ibv_create_comp_channel(3)), which is set to O_NONBLOCK.
    ///
    /// # Errors
    /// When that fails. It is then destroyed, or returned to its lender.
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
    /// The raw pointer: see [the rules](crate::raw#using-the-pointer). That of an [`ExtendedCq`]
    /// queue is an `ibv_cq_ex` as well.
    #[must_use]
    pub fn as_raw(&self) -> *mut sys::ibv_cq {
        self.inner().raw()
    }
}

impl CompletionQueue<ClassicCq> {
    /// A completion queue created elsewhere (ibv_create_cq(3)). It cannot be waited for.
    ///
    /// # Safety
    /// See [the rules](crate::raw#taking-over). It is on no channel, or at least never armed; queue
    /// pairs that are on it already never have a completion in it.
    #[must_use]
    pub unsafe fn from_raw(context: &Context, raw: *mut sys::ibv_cq, ownership: Ownership) -> Self {
        // SAFETY: by contract.
        unsafe { Self::adopt(context, raw, ownership.lender()) }
    }
}

impl CompletionQueue<ExtendedCq> {
    /// An extended queue created elsewhere (ibv_create_cq_ex(3)). It cannot be waited for.
    ///
    /// # Errors
    /// When it cannot be polled. Its ownership is then unchanged.
    ///
    /// # Safety
    /// As for [a classic one](CompletionQueue::<Classic>::from_raw). Its `wc_flags` include
    /// `IBV_WC_STANDARD_FLAGS`, and no poll of it is open.
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

// Queue pairs created elsewhere: qp/adopt.rs.

impl<T: Transport, B: Backend> QueuePair<T, B> {
    /// The raw pointer: see [the rules](crate::raw#using-the-pointer). With the backend
    /// [`WrPost`](crate::WrPost) `ibv_qp_to_qp_ex` converts it to an `ibv_qp_ex`.
    #[must_use]
    pub fn as_raw(&self) -> *mut sys::ibv_qp {
        self.raw()
    }
}

impl<T: Connected, B: Backend> PreparedQueuePair<T, B> {
    /// The raw pointer ([rules](crate::raw#using-the-pointer)), by which another connection manager
    /// may connect it to RTS, followed by [`assume_connected`](Self::assume_connected).
    #[must_use]
    pub fn as_raw(&self) -> *mut sys::ibv_qp {
        self.raw()
    }
}

impl AddressHandle {
    /// The raw pointer: see [the rules](crate::raw#using-the-pointer).
    #[must_use]
    pub fn as_raw(&self) -> *mut sys::ibv_ah {
        self.raw()
    }

    /// An address handle created elsewhere (ibv_create_ah(3)), for packets that leave by `port`.
    ///
    /// # Safety
    /// See [the rules](crate::raw#taking-over). Others may send to one that is lent.
    #[must_use]
    pub unsafe fn from_raw(pd: &ProtectionDomain, raw: *mut sys::ibv_ah, port: u8, ownership: Ownership) -> Self {
        // SAFETY: by contract.
        unsafe { Self::adopt(raw, (port, ANY_LENGTH), pd.inner(), ownership.lender()) }
    }
}

impl<K: MemoryKind> Buffer<K> {
    /// The raw pointer of the whole region: see [the rules](crate::raw#using-the-pointer).
    #[must_use]
    pub fn as_raw(&self) -> *mut sys::ibv_mr {
        self.region_raw()
    }
}

impl<R: Rights> Buffer<R> {
    /// A whole region registered elsewhere (ibv_reg_mr(3)); the memory stays its owner's.
    ///
    /// # Errors
    /// When it is empty, or longer than a message may be. Its ownership is then unchanged.
    ///
    /// # Safety
    /// See [the rules](crate::raw#taking-over). Besides:
    /// - The region's rights are those of `R`, it is not zero-based, and its `addr` and `length`
    ///   describe its bytes. They are initialised, and stay there until the region is deregistered;
    ///   those of a lent one until the lender is dropped.
    /// - Until then nothing else reads or writes them, except peers as `R` allows.
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
    /// A memory region registered elsewhere that the CPU cannot or must not access: `len` bytes
    /// that requests address from `addr` on (ibv_reg_dmabuf_mr(3), ibv_reg_mr_iova(3)).
    ///
    /// # Errors
    /// As for [host memory](Buffer::<R>::from_raw).
    ///
    /// # Safety
    /// See [the rules](crate::raw#taking-over). The region's rights are those of `R`, these are its
    /// addresses, and its bytes stay there until it is deregistered, or its lender dropped. Writes
    /// of peers and the device to it are harmless.
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
    /// The raw pointer: see [the rules](crate::raw#using-the-pointer).
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
    /// The raw pointer ([rules](crate::raw#using-the-pointer)); null if freed with its queue pair.
    #[must_use]
    pub fn as_raw(&self) -> *mut sys::ibv_mw {
        self.raw()
    }

    /// A memory window created elsewhere (ibv_alloc_mw(3)), taken over: it is freed to be unbound.
    ///
    /// # Safety
    /// See [the rules](crate::raw#taking-over). It is of type `T`, and not bound.
    #[must_use]
    pub unsafe fn from_raw(pd: &ProtectionDomain, raw: *mut sys::ibv_mw) -> Self {
        // SAFETY: by contract.
        unsafe { Self::adopt(pd.inner(), raw) }
    }
}

impl<K: KeyAccess, T: WindowType> BoundWindow<K, T> {
    /// The raw pointer ([rules](crate::raw#using-the-pointer)); null if freed with its queue pair.
    #[must_use]
    pub fn as_raw(&self) -> *mut sys::ibv_mw {
        self.raw()
    }
}

impl SharedReceiveQueueHandle {
    /// The raw pointer: see [the rules](crate::raw#using-the-pointer).
    #[must_use]
    pub fn as_raw(&self) -> *mut sys::ibv_srq {
        self.inner().raw()
    }
}

impl SharedReceiveQueue {
    /// The raw pointer: see [the rules](crate::raw#using-the-pointer).
    #[must_use]
    pub fn as_raw(&self) -> *mut sys::ibv_srq {
        self.handle().as_raw()
    }

    /// A shared receive queue created elsewhere (ibv_create_srq(3)), of `depth` receives of up to
    /// `max_sge` buffers. It is always taken over, and its `srq_context` overwritten.
    ///
    /// # Errors
    /// When the library has no shared receive queues. Its ownership is then unchanged.
    ///
    /// # Safety
    /// See [the rules](crate::raw#taking-over). It is at least as large as said.
    pub unsafe fn from_raw(
        pd: &ProtectionDomain,
        raw: *mut sys::ibv_srq,
        depth: u32,
        max_sge: u32,
    ) -> Result<Self, SharedReceiveQueueError> {
        // SAFETY: by contract.
        unsafe { Self::adopt_raw(pd.inner(), raw, (depth, max_sge)) }
    }
}
