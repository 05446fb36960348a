//! Asynchronous events of a device and its objects (IBTA vol 1, 11.6.3; ibv_get_async_event(3)).
//!
//! The single-reader flag needs no model: it is swapped and stored, a lock that is only tried.

use core::mem::MaybeUninit;
use core::sync::atomic::Ordering;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use doorbell_verbs_sys as sys;

use super::channel::CqId;
use crate::context::{Context, ContextInner};
use crate::error::EventError;
use crate::srq::SrqId;
use crate::types::Qpn;
use crate::wait::{Deadline, readable, set_nonblocking};

/// An asynchronous event of a device or its objects (ibv_get_async_event(3); IBTA vol 1, 11.6.3).
#[doc(alias("ibv_async_event", "ibv_event_type"))]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AsyncEvent {
    /// Of a queue pair.
    Qp {
        /// Its number.
        qpn: Qpn,
        /// What happened.
        event: QueuePairEvent,
    },
    /// Of a shared receive queue.
    SharedReceiveQueue {
        /// Its identifier: [`SharedReceiveQueue::id`](crate::SharedReceiveQueue::id).
        id: SrqId,
        /// What happened.
        event: SharedReceiveQueueEvent,
    },
    /// A completion queue has overrun: completions are lost, and its queue pairs must be dropped.
    #[doc(alias = "IBV_EVENT_CQ_ERR")]
    CqOverrun(CqId),
    /// Of a port.
    Port {
        /// Its number, from 1.
        port: u8,
        /// What happened.
        event: PortEvent,
    },
    /// The device has failed for good. Drop everything created from it, and open it again.
    #[doc(alias = "IBV_EVENT_DEVICE_FATAL")]
    DeviceFatal,
    /// Any other event, with its `ibv_event_type`.
    Other(u32),
}

/// An event of a queue pair (IBTA vol 1, 11.6.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum QueuePairEvent {
    /// It moved to ERR because of an error that no completion reports.
    #[doc(alias = "IBV_EVENT_QP_FATAL")]
    Fatal,
    /// The peer sent a request that is malformed or not allowed on this queue pair.
    #[doc(alias = "IBV_EVENT_QP_REQ_ERR")]
    RequestError,
    /// The peer accessed memory without the right to.
    #[doc(alias = "IBV_EVENT_QP_ACCESS_ERR")]
    AccessError,
    /// Communication established: the first message arrived while this side was still in RTR.
    #[doc(alias = "IBV_EVENT_COMM_EST")]
    CommunicationEstablished,
    /// Its send queue has drained (to SQD).
    #[doc(alias = "IBV_EVENT_SQ_DRAINED")]
    SendQueueDrained,
    /// It is in ERR, and has consumed its last receive from its shared receive queue.
    #[doc(alias = "IBV_EVENT_QP_LAST_WQE_REACHED")]
    LastRequestReached,
    /// It has migrated to its alternate path.
    #[doc(alias = "IBV_EVENT_PATH_MIG")]
    PathMigrated,
    /// It failed to migrate to its alternate path.
    #[doc(alias = "IBV_EVENT_PATH_MIG_ERR")]
    PathMigrationFailed,
}

/// An event of a shared receive queue (IBTA vol 1, 11.6.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SharedReceiveQueueEvent {
    /// Fewer receives are left than the [armed](crate::SharedReceiveQueue::arm_limit) limit, which
    /// is now disarmed.
    #[doc(alias = "IBV_EVENT_SRQ_LIMIT_REACHED")]
    LimitReached,
    /// The queue has failed: drop it, and the queue pairs on it.
    #[doc(alias = "IBV_EVENT_SRQ_ERR")]
    Error,
}

/// An event of a port (IBTA vol 1, 11.6.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PortEvent {
    /// The link came up.
    #[doc(alias = "IBV_EVENT_PORT_ACTIVE")]
    Active,
    /// The link went down.
    #[doc(alias = "IBV_EVENT_PORT_ERR")]
    Error,
    /// The LID changed.
    #[doc(alias = "IBV_EVENT_LID_CHANGE")]
    LidChanged,
    /// The P_Key table changed.
    #[doc(alias = "IBV_EVENT_PKEY_CHANGE")]
    PkeysChanged,
    /// The subnet manager changed.
    #[doc(alias = "IBV_EVENT_SM_CHANGE")]
    SubnetManagerChanged,
    /// The subnet manager requests that all clients register again.
    #[doc(alias = "IBV_EVENT_CLIENT_REREGISTER")]
    ClientsMustReregister,
    /// The GID table changed: an IP address of its network interface was added or removed.
    #[doc(alias = "IBV_EVENT_GID_CHANGE")]
    GidsChanged,
}

impl AsyncEvent {
    /// # Safety
    /// Filled by ibv_get_async_event and not acknowledged: the object that it names is live.
    unsafe fn from_sys(raw: &sys::ibv_async_event) -> Self {
        use {PortEvent as P, QueuePairEvent as Q};
        let qp = |event| {
            // SAFETY: called for types of queue pairs (ibv_get_async_event(3)), live by contract.
            let number = unsafe { (*raw.element.qp).qp_num };
            Self::Qp {
                qpn: Qpn::truncated(number),
                event,
            }
        };
        let port = |event| {
            // SAFETY: called for the types whose element is a port's number.
            let number = unsafe { raw.element.port_num };
            Self::Port {
                port: u8::try_from(number).unwrap_or(0),
                event,
            }
        };
        let srq = |event| {
            // SAFETY: called for types of shared receive queues, live by contract.
            let id = SrqId::from_context(unsafe { (*raw.element.srq).srq_context });
            id.map_or(Self::Other(raw.event_type), |id| Self::SharedReceiveQueue { id, event })
        };
        match raw.event_type {
            sys::IBV_EVENT_SRQ_LIMIT_REACHED => srq(SharedReceiveQueueEvent::LimitReached),
            sys::IBV_EVENT_SRQ_ERR => srq(SharedReceiveQueueEvent::Error),
            sys::IBV_EVENT_CQ_ERR => {
                // SAFETY: of this type the element is a completion queue, live by contract.
                let id = CqId::from_context(unsafe { (*raw.element.cq).cq_context });
                id.map_or(Self::Other(raw.event_type), Self::CqOverrun)
            }
            sys::IBV_EVENT_QP_FATAL => qp(Q::Fatal),
            sys::IBV_EVENT_QP_REQ_ERR => qp(Q::RequestError),
            sys::IBV_EVENT_QP_ACCESS_ERR => qp(Q::AccessError),
            sys::IBV_EVENT_COMM_EST => qp(Q::CommunicationEstablished),
            sys::IBV_EVENT_SQ_DRAINED => qp(Q::SendQueueDrained),
            sys::IBV_EVENT_PATH_MIG => qp(Q::PathMigrated),
            sys::IBV_EVENT_PATH_MIG_ERR => qp(Q::PathMigrationFailed),
            sys::IBV_EVENT_QP_LAST_WQE_REACHED => qp(Q::LastRequestReached),
            sys::IBV_EVENT_PORT_ACTIVE => port(P::Active),
            sys::IBV_EVENT_PORT_ERR => port(P::Error),
            sys::IBV_EVENT_LID_CHANGE => port(P::LidChanged),
            sys::IBV_EVENT_PKEY_CHANGE => port(P::PkeysChanged),
            sys::IBV_EVENT_SM_CHANGE => port(P::SubnetManagerChanged),
            sys::IBV_EVENT_CLIENT_REREGISTER => port(P::ClientsMustReregister),
            sys::IBV_EVENT_GID_CHANGE => port(P::GidsChanged),
            sys::IBV_EVENT_DEVICE_FATAL => Self::DeviceFatal,
            other => Self::Other(other),
        }
    }
}

/// The reader of a context's asynchronous events, one at a time: see [`Context::events`].
///
/// An event is acknowledged as soon as it is read, because destroying its object waits for that. So
/// it names the object by a number, which may be another's if other threads create queue pairs.
///
/// In an event loop watch the descriptor ([`AsFd`]), and drain [`try_next`](Self::try_next).
#[doc(alias("ibv_get_async_event", "async_fd", "ibv_ack_async_event"))]
pub struct Events {
    context: Arc<ContextInner>,
}

impl Events {
    pub(crate) fn new(context: &Context) -> Result<Self, EventError> {
        let context = context.inner();
        if context.has_event_reader.swap(true, Ordering::Acquire) {
            return Err(EventError::ReaderTaken {
                device: context.name.clone(),
            });
        }
        let events = Self {
            context: Arc::clone(context),
        };
        match set_nonblocking(events.as_fd()) {
            Ok(()) => Ok(events),
            Err(error) => Err(events.failed(error)),
        }
    }

    /// Sleeps until there is an event; `None` when `timeout` (if not `None`) expired first. A
    /// signal does not end it.
    ///
    /// # Errors
    /// When events cannot be read: the device is gone.
    #[doc(alias("ibv_get_async_event", "ibv_ack_async_event"))]
    pub fn wait(&mut self, timeout: impl Into<Option<Duration>>) -> Result<Option<AsyncEvent>, EventError> {
        let deadline = Deadline::after(timeout);
        loop {
            if let Some(event) = self.try_next()? {
                return Ok(Some(event));
            }
            if !readable(self.as_fd(), deadline).map_err(|error| self.failed(error))? {
                return Ok(None);
            }
        }
    }

    /// The next event, if there is one (ibv_get_async_event(3)); without blocking.
    ///
    /// # Errors
    /// As for [`wait`](Self::wait).
    #[doc(alias("ibv_get_async_event", "ibv_ack_async_event"))]
    pub fn try_next(&mut self) -> Result<Option<AsyncEvent>, EventError> {
        let mut raw = MaybeUninit::<sys::ibv_async_event>::zeroed();
        // SAFETY: the context is live, and `raw` may be written.
        if unsafe { (self.context.api.get_async_event)(self.context.raw, raw.as_mut_ptr()) } != 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(self.failed(error)),
            };
        }
        // SAFETY: the call returned 0, so it has filled this; the event is acknowledged below.
        let event = unsafe { AsyncEvent::from_sys(raw.assume_init_ref()) };
        // SAFETY: read just now, and acknowledged once.
        unsafe { (self.context.api.ack_async_event)(raw.as_mut_ptr()) };
        Ok(Some(event))
    }

    pub(super) fn failed(&self, error: io::Error) -> EventError {
        EventError::Wait {
            verb: "ibv_get_async_event",
            device: self.context.name.clone(),
            error,
        }
    }
}

impl AsFd for Events {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the context is live as long as `self`, and owns the descriptor.
        unsafe { BorrowedFd::borrow_raw((*self.context.raw).async_fd) }
    }
}

impl AsRawFd for Events {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl core::fmt::Debug for Events {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Events")
            .field("device", &self.context.name)
            .finish_non_exhaustive()
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.context.has_event_reader.store(false, Ordering::Release);
    }
}
