//! An identifier (`rdma_cm_id`) with its event channel: all calls of librdmacm with either.

use core::ffi::{c_int, c_void};
use core::mem::MaybeUninit;
use core::ptr;
use std::ffi::CStr;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use doorbell_verbs_sys::rdmacm as sys;
use doorbell_verbs_sys::{ibv_qp_attr, ibv_qp_state};
use nix::sys::socket::{SockaddrLike, SockaddrStorage};

use super::error::{CmError, Rejection};
use super::event::{Child, Event, no_parameters};
use super::{ConnectionManager, address};
use crate::context::Context;
use crate::qp::managed::ConnParams;
use crate::wait::{Deadline, readable, set_nonblocking};

/// An event channel (rdma_create_event_channel(3)), with a non-blocking descriptor.
struct Channel {
    manager: ConnectionManager,
    raw: *mut sys::rdma_event_channel,
}

impl Channel {
    fn new(manager: ConnectionManager) -> Result<Self, CmError> {
        // SAFETY: takes no arguments.
        let raw = unsafe { (manager.cm.create_event_channel)() };
        if raw.is_null() {
            return Err(CmError::Unavailable(io::Error::last_os_error()));
        }
        let channel = Self { manager, raw };
        set_nonblocking(channel.fd()).map_err(CmError::Unavailable)?;
        Ok(channel)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is live, and its descriptor is open as long.
        unsafe { BorrowedFd::borrow_raw((*self.raw).fd) }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: destroyed once, here, and leaked unless `CmId` has destroyed its identifier.
        unsafe { (self.manager.cm.destroy_event_channel)(self.raw) }
    }
}

/// The port space of an identifier.
#[derive(Clone, Copy)]
pub(super) enum PortSpace {
    Connections,
    Datagrams,
}

impl PortSpace {
    fn to_sys(self) -> sys::rdma_port_space {
        match self {
            Self::Connections => sys::RDMA_PS_TCP,
            Self::Datagrams => sys::RDMA_PS_UDP,
        }
    }
}

/// An identifier (rdma_create_id(3)) and its event channel; errors name it by the address.
pub(super) struct CmId {
    raw: *mut sys::rdma_cm_id,
    /// `None` only while it is dropped.
    channel: Option<Channel>,
    manager: ConnectionManager,
    name: SocketAddr,
}

// SAFETY: librdmacm may be called from any thread (rdma_cm(7)). It changes an identifier only
// within calls on it, all of which but queries need the one owner: Route, Listener,
// ConnectionRequest or Connection. One that keeps a device open for a Context is never called
// again.
unsafe impl Send for CmId {}
// SAFETY: as above.
unsafe impl Sync for CmId {}

impl CmId {
    pub(super) fn new(manager: ConnectionManager, name: SocketAddr, space: PortSpace) -> Result<Self, CmError> {
        let channel = Channel::new(manager)?;
        let mut raw = ptr::null_mut();
        // SAFETY: the channel is live, `raw` may be written.
        let result = unsafe { (manager.cm.create_id)(channel.raw, &mut raw, ptr::null_mut(), space.to_sys()) };
        if result != 0 {
            return Err(CmError::Unavailable(io::Error::last_os_error()));
        }
        Ok(Self {
            raw,
            channel: Some(channel),
            manager,
            name,
        })
    }

    pub(super) fn listening(
        manager: ConnectionManager,
        address: SocketAddr,
        space: PortSpace,
        backlog: u16,
    ) -> Result<Self, CmError> {
        let id = Self::new(manager, address, space)?;
        id.bind(address)?;
        id.listen(backlog)?;
        Ok(id)
    }

    /// Takes over an event's identifier, to a channel of its own (rdma_migrate_id(3)).
    fn adopt(manager: ConnectionManager, Child(raw): Child, listener: SocketAddr) -> Result<Self, CmError> {
        let mut id = Self {
            raw,
            channel: None,
            manager,
            // SAFETY: live, and not shared yet.
            name: unsafe { address::peer(raw) }.unwrap_or(listener),
        };
        let channel = Channel::new(manager)?;
        // SAFETY: both live, and the event with the identifier is acknowledged: this does not wait.
        let result = unsafe { (manager.cm.migrate_id)(raw, channel.raw) };
        id.check("rdma_migrate_id", result)?;
        id.channel = Some(channel);
        Ok(id)
    }

    pub(super) fn name(&self) -> SocketAddr {
        self.name
    }

    pub(super) fn local(&self) -> Option<SocketAddr> {
        // SAFETY: live; nothing changes it while the caller borrows its owner.
        unsafe { address::local(self.raw) }
    }

    pub(super) fn peer(&self) -> Option<SocketAddr> {
        // SAFETY: as above.
        unsafe { address::peer(self.raw) }
    }

    pub(super) fn port(&self) -> u8 {
        // SAFETY: live; set when it was bound to a device.
        unsafe { (*self.raw).port_num }
    }

    pub(super) fn device(&self) -> Result<String, CmError> {
        // SAFETY: live; set when it was bound to a device, and constant from then on.
        let context = unsafe { (*self.raw).verbs };
        if context.is_null() {
            return Err(CmError::DeviceRemoved { address: self.name });
        }
        // SAFETY: an open context has a device, which has a name that lives as long.
        let name = unsafe { CStr::from_ptr((self.manager.verbs.get_device_name)((*context).device)) };
        Ok(name.to_string_lossy().into_owned())
    }

    /// librdmacm keeps a device open only as long as an identifier is bound to it: the context
    /// holds another one, so that this one and its connection can be destroyed meanwhile.
    pub(super) fn context(&self) -> Result<Context, CmError> {
        let address = self.name;
        let name = self.device()?;
        let mut at = self.local().ok_or(CmError::DeviceRemoved { address })?;
        at.set_port(0);
        let device_ref = Self::new(self.manager, at, PortSpace::Connections)?;
        device_ref.bind(at)?;
        // SAFETY: both are live; set when they were bound, and constant from then on.
        let (raw, kept) = unsafe { ((*self.raw).verbs, (*device_ref.raw).verbs) };
        if raw != kept {
            return Err(CmError::DeviceRemoved { address });
        }
        Ok(Context::borrow(self.manager.verbs, raw, name, Arc::new(device_ref))?)
    }

    fn bind(&self, to: SocketAddr) -> Result<(), CmError> {
        let to = SockaddrStorage::from(to);
        // SAFETY: live; the address is read only.
        let result = unsafe { (self.manager.cm.bind_addr)(self.raw, to.as_ptr().cast_mut()) };
        self.check("rdma_bind_addr", result)
    }

    fn listen(&self, backlog: u16) -> Result<(), CmError> {
        // SAFETY: live.
        let result = unsafe { (self.manager.cm.listen)(self.raw, backlog.into()) };
        self.check("rdma_listen", result)
    }

    pub(super) fn resolve(&self, from: Option<SocketAddr>, to: SocketAddr, deadline: Deadline) -> Result<(), CmError> {
        let (from, to) = (from.map(SockaddrStorage::from), SockaddrStorage::from(to));
        let from = from.as_ref().map_or(ptr::null(), SockaddrStorage::as_ptr);
        let (cm, ms) = (self.manager.cm, deadline.remaining_ms().max(1));
        // SAFETY: live; the addresses are read only, and may be null for the source.
        let result = unsafe { (cm.resolve_addr)(self.raw, from.cast_mut(), to.as_ptr().cast_mut(), ms) };
        self.check("rdma_resolve_addr", result)?;
        self.wait_event(sys::RDMA_CM_EVENT_ADDR_RESOLVED, "rdma_resolve_addr", deadline)?;
        // SAFETY: live.
        let result = unsafe { (cm.resolve_route)(self.raw, deadline.remaining_ms().max(1)) };
        self.check("rdma_resolve_route", result)?;
        self.wait_event(sys::RDMA_CM_EVENT_ROUTE_RESOLVED, "rdma_resolve_route", deadline)?;
        Ok(())
    }

    pub(super) fn attributes(&self, state: ibv_qp_state) -> Result<ibv_qp_attr, CmError> {
        let mut attr = MaybeUninit::<ibv_qp_attr>::zeroed();
        let mut mask = 0;
        // SAFETY: live; both may be written, and all-zero is a valid value; the state is read.
        let (result, attr) = unsafe {
            (*attr.as_mut_ptr()).qp_state = state;
            let result = (self.manager.cm.init_qp_attr)(self.raw, attr.as_mut_ptr(), &mut mask);
            (result, attr.assume_init())
        };
        self.check("rdma_init_qp_attr", result)?;
        Ok(attr)
    }

    pub(super) fn connect(&self, offer: &ConnParams, private_data: &[u8]) -> Result<(), CmError> {
        let mut parameters = parameters(offer, private_data);
        // SAFETY: live; the parameters, and the data behind them, are only read during the call.
        let result = unsafe { (self.manager.cm.connect)(self.raw, &mut parameters) };
        self.check("rdma_connect", result)
    }

    pub(super) fn accept(&self, offer: &ConnParams, private_data: &[u8]) -> Result<(), CmError> {
        let mut parameters = parameters(offer, private_data);
        // SAFETY: as above.
        let result = unsafe { (self.manager.cm.accept)(self.raw, &mut parameters) };
        self.check("rdma_accept", result)
    }

    pub(super) fn establish(&self) -> Result<(), CmError> {
        // SAFETY: live.
        let result = unsafe { (self.manager.cm.establish)(self.raw) };
        self.check("rdma_establish", result)
    }

    pub(super) fn reject(&self, private_data: &[u8]) -> Result<(), CmError> {
        let len = u8::try_from(private_data.len()).unwrap_or(u8::MAX);
        // SAFETY: live; at least `len` bytes are read, only during the call.
        let result = unsafe { (self.manager.cm.reject)(self.raw, private_data.as_ptr().cast::<c_void>(), len) };
        self.check("rdma_reject", result)
    }

    pub(super) fn disconnect(&self) -> Result<(), CmError> {
        // SAFETY: live.
        let result = unsafe { (self.manager.cm.disconnect)(self.raw) };
        self.check("rdma_disconnect", result)
    }

    pub(super) fn next_event(&self, deadline: Deadline) -> Result<Option<Event>, CmError> {
        let Some(channel) = &self.channel else { return Ok(None) };
        loop {
            let mut raw = ptr::null_mut();
            // SAFETY: the channel is live, `raw` may be written.
            if unsafe { (self.manager.cm.get_cm_event)(channel.raw, &mut raw) } == 0 {
                // SAFETY: just got; copied before it is acknowledged, once.
                let event = unsafe {
                    let event = Event::copy(raw);
                    (self.manager.cm.ack_cm_event)(raw);
                    event
                };
                return Ok(Some(event));
            }
            let error = io::Error::last_os_error();
            if !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) {
                return Err(self.failed("rdma_get_cm_event", error));
            }
            if !readable(channel.fd(), deadline).map_err(|error| self.failed("poll", error))? {
                return Ok(None);
            }
        }
    }

    /// The next request of a listener, and its event.
    pub(super) fn next_request(&self, deadline: Deadline) -> Result<Option<(Self, Event)>, CmError> {
        while let Some(mut event) = self.next_event(deadline)? {
            if event.kind == sys::RDMA_CM_EVENT_DEVICE_REMOVAL {
                return Err(CmError::DeviceRemoved { address: self.name });
            }
            let Some(child) = event.child.take() else { continue };
            return Ok(Some((Self::adopt(self.manager, child, self.name)?, event)));
        }
        Ok(None)
    }

    pub(super) fn wait_event(
        &self,
        kind: sys::rdma_cm_event_type,
        call: &'static str,
        deadline: Deadline,
    ) -> Result<Event, CmError> {
        let address = self.name;
        while let Some(event) = self.next_event(deadline)? {
            let error = match event.kind {
                found if found == kind => return Ok(event),
                sys::RDMA_CM_EVENT_REJECTED => CmError::Rejected {
                    address,
                    reason: Rejection::of(event.status),
                    private_data: event.private_data,
                },
                // The status of a SIDR_REP; otherwise it is a negative errno.
                sys::RDMA_CM_EVENT_UNREACHABLE if event.status > 0 => CmError::Rejected {
                    address,
                    reason: Rejection::of_service(event.status),
                    private_data: event.private_data,
                },
                sys::RDMA_CM_EVENT_ADDR_ERROR
                | sys::RDMA_CM_EVENT_ROUTE_ERROR
                | sys::RDMA_CM_EVENT_UNREACHABLE
                | sys::RDMA_CM_EVENT_CONNECT_ERROR => CmError::Unreachable {
                    call,
                    address,
                    error: io::Error::from_raw_os_error(event.status.saturating_abs()),
                },
                sys::RDMA_CM_EVENT_DISCONNECTED => CmError::Disconnected { address },
                sys::RDMA_CM_EVENT_DEVICE_REMOVAL => CmError::DeviceRemoved { address },
                _ => continue,
            };
            return Err(error);
        }
        Err(CmError::TimedOut { call, address })
    }

    fn check(&self, call: &'static str, result: c_int) -> Result<(), CmError> {
        match result {
            0 => Ok(()),
            _ => Err(self.failed(call, io::Error::last_os_error())),
        }
    }

    pub(super) fn failed(&self, call: &'static str, error: io::Error) -> CmError {
        CmError::Call {
            call,
            address: self.name,
            error,
        }
    }
}

impl AsFd for CmId {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel
            .as_ref()
            .expect("an identifier has a channel until it is dropped")
            .fd()
    }
}

impl core::fmt::Debug for CmId {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "CmId({})", self.name)
    }
}

impl Drop for CmId {
    fn drop(&mut self) {
        // SAFETY: destroyed once, here, with all events acknowledged, and without a queue pair.
        let result = unsafe { (self.manager.cm.destroy_id)(self.raw) };
        if result != 0 {
            let error = io::Error::last_os_error();
            tracing::error!(address = %self.name, %error, "rdma_destroy_id failed; it is leaked with its event channel");
            core::mem::forget(self.channel.take());
        }
    }
}

fn parameters(offer: &ConnParams, private_data: &[u8]) -> sys::rdma_conn_param {
    let mut parameters = no_parameters();
    parameters.private_data = private_data.as_ptr().cast();
    parameters.private_data_len = u8::try_from(private_data.len()).unwrap_or(u8::MAX);
    parameters.responder_resources = offer.responder_resources;
    parameters.initiator_depth = offer.initiator_depth;
    parameters.flow_control = 1;
    parameters.retry_count = offer.retry_count;
    parameters.rnr_retry_count = offer.rnr_retry;
    parameters.qp_num = offer.qpn.get();
    parameters
}
