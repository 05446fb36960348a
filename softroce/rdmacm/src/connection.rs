//! Listening, connecting and what comes of it: rdma_listen(3), rdma_connect(3), rdma_accept(3), rdma_reject(3), rdma_disconnect(3).
//!
//! The connection manager of the device speaks the protocol and tells what happens; `hear` brings that to the identifier it is about, and [`follow`] does what the man
//! pages want done when the application takes the event: there the queue pair follows.

use core::ffi::{c_int, c_void};
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use doorbell_roce_proto::cm::{
    Accept, CmError, ConnectionId, IpHeader, ListenerId, Parameters, RejectReason, Request, ServiceId, SidrReply,
    SidrRequest, SidrStatus, private_data_len,
};
use doorbell_roce_proto::{Psn, Qpn};
use doorbell_softroce::capacity;
use doorbell_verbs_sys::rdmacm::{
    RDMA_CM_EVENT_CONNECT_ERROR, RDMA_CM_EVENT_CONNECT_REQUEST, RDMA_CM_EVENT_CONNECT_RESPONSE,
    RDMA_CM_EVENT_ESTABLISHED, RDMA_CM_EVENT_REJECTED, RDMA_MAX_INIT_DEPTH, RDMA_UDP_QKEY, rdma_cm_id, rdma_conn_param,
    rdma_port_space,
};
use doorbell_verbs_sys::{IBV_EVENT_COMM_EST, IBV_QPT_UC, IBV_QPT_UD, ibv_event_type};

use crate::channel::Told;
use crate::devices::{Opened, all};
use crate::errno::{self, Errno};
use crate::id::{Orphan, Phase, Shared, State, complete, shared};
use crate::{hear, queue_pair, route};

/// What the connection manager has of an identifier.
#[derive(Default)]
pub(crate) struct Link {
    /// Where it listens.
    listeners: Vec<(&'static Opened, ListenerId)>,
    /// Its connection, or exchange about a datagram service.
    pub(crate) connection: Option<ConnectionId>,
    /// READs and atomics that the peer may have outstanding here, and we there, as this side has accepted.
    accepted: Option<(u8, u8)>,
    /// Of what was asked for: as `accepted`.
    requested: (u8, u8),
}

impl Link {
    /// That of a request: READs and atomics that the peer wants to have outstanding here, and those that it takes.
    pub(crate) fn of_request(connection: ConnectionId, requested: (u8, u8)) -> Self {
        Self {
            connection: Some(connection),
            requested,
            ..Self::default()
        }
    }
}

/// The `errno` value of a refusal.
pub(crate) fn errno_of(error: CmError) -> Errno {
    tracing::debug!("connection manager: {error}");
    match error {
        CmError::InUse => libc::EADDRINUSE,
        CmError::Exhausted => libc::ENOMEM,
        CmError::Unknown | CmError::State | CmError::PrivateData { .. } | CmError::Transport => libc::EINVAL,
    }
}

/// The service of a port.
fn service(space: rdma_port_space, port: u16) -> ServiceId {
    ServiceId(u64::from(space) << 16 | u64::from(port))
}

/// What the queue pair of a connection is to be connected with; `None` before its peer has said so.
pub(crate) fn parameters(shared: &Shared) -> Option<Parameters> {
    let (opened, connection, accepted) = {
        let state = shared.state();
        (state.opened?, state.link.connection?, state.link.accepted)
    };
    let mut parameters = opened.device.cm().parameters(connection)?;
    if let Some((responder_resources, initiator_depth)) = accepted {
        parameters.responder_resources = responder_resources;
        parameters.initiator_depth = initiator_depth;
    }
    Some(parameters)
}

/// The device and the connection of an identifier that has one.
fn linked(state: &State) -> Result<(&'static Opened, ConnectionId), Errno> {
    state.opened.zip(state.link.connection).ok_or(libc::EINVAL)
}

// Listening

/// rdma_listen(3): on the device of its address, or on every device. `EADDRINUSE` when another process of the host listens there too.
///
/// # Safety
/// `id` is null or live and ours.
pub unsafe extern "C" fn rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int {
    // SAFETY: the same contract.
    errno::result(unsafe { listen(id, backlog) })
}

unsafe fn listen(id: *mut rdma_cm_id, backlog: c_int) -> Result<(), Errno> {
    // SAFETY: by contract.
    let shared = unsafe { shared(id) }?;
    let mut state = shared.state();
    if state.phase == Phase::Idle {
        route::bind(&shared, &mut state, (Ipv4Addr::UNSPECIFIED, 0).into())?;
    }
    let Some(local) = state.local.filter(|_| state.phase == Phase::Bound) else {
        return Err(libc::EINVAL);
    };
    let backlog = usize::try_from(backlog)
        .ok()
        .filter(|&backlog| backlog > 0)
        .unwrap_or(usize::MAX);
    let v6_only = state.options.v6_only;
    // The unspecified address of IPv6 is that of IPv4 too (ipv6(7), IPV6_V6ONLY).
    let suits = |opened: &Opened| opened.ip().is_ipv4() == local.is_ipv4() || local.is_ipv6() && !v6_only;
    let opened: Vec<_> = match state.opened {
        Some(opened) => vec![opened],
        None => all()?.iter().filter(|opened| suits(opened)).collect(),
    };
    if opened.is_empty() {
        return Err(libc::ENODEV);
    }
    for opened in opened {
        match hear::listen(opened, service(shared.space, local.port()), backlog, &shared) {
            Ok(listener) => state.link.listeners.push((opened, listener)),
            Err(value) => {
                unlisten(&mut state.link);
                return Err(value);
            }
        }
    }
    state.phase = Phase::Listening;
    Ok(())
}

fn unlisten(link: &mut Link) {
    for (opened, listener) in link.listeners.drain(..) {
        hear::unlisten(opened, listener);
    }
}

/// Ends what the connection manager has of an identifier that is being destroyed.
pub(crate) fn end(shared: &Arc<Shared>) {
    let mut state = shared.state();
    unlisten(&mut state.link);
    state.claim = None;
    if let (Some(opened), Some(connection)) = (state.opened, state.link.connection.take()) {
        hear::destroy(opened, connection);
    }
}

// Connecting

/// What a connection is asked for or accepted with.
struct Wanted {
    qpn: Qpn,
    srq: bool,
    responder_resources: u8,
    initiator_depth: u8,
    flow_control: bool,
    retry_count: u8,
    rnr_retry_count: u8,
    private_data: Vec<u8>,
}

/// Reads the parameters of a call; without any they are `given`, of which there is what the device can do.
///
/// # Errors
/// `EINVAL` for more READs and atomics than the device can do.
///
/// # Safety
/// `id` is live and ours, in a call on it; `param` is null, or live with its private data.
unsafe fn wanted(id: *mut rdma_cm_id, param: *const rdma_conn_param, given: (u8, u8)) -> Result<Wanted, Errno> {
    let most = |value: u8| match value {
        value if u32::from(value) == RDMA_MAX_INIT_DEPTH => Ok(capacity::RD_ATOMIC),
        value if value > capacity::RD_ATOMIC => Err(libc::EINVAL),
        value => Ok(value),
    };
    // SAFETY: live, or null.
    let mut wanted = match unsafe { param.as_ref() } {
        None => Wanted {
            qpn: Qpn::new(0),
            srq: false,
            responder_resources: given.0.min(capacity::RD_ATOMIC),
            initiator_depth: given.1.min(capacity::RD_ATOMIC),
            flow_control: false,
            retry_count: 7,
            rnr_retry_count: 7,
            private_data: Vec::new(),
        },
        Some(param) => Wanted {
            qpn: Qpn::new(param.qp_num),
            srq: param.srq != 0,
            responder_resources: most(param.responder_resources)?,
            initiator_depth: most(param.initiator_depth)?,
            flow_control: param.flow_control != 0,
            retry_count: param.retry_count.min(7),
            rnr_retry_count: param.rnr_retry_count.min(7),
            // SAFETY: so many bytes are there by contract.
            private_data: unsafe { bytes(param.private_data, param.private_data_len) },
        },
    };
    // SAFETY: in a call on the identifier; its queue pair is live.
    unsafe {
        if let Some(qp) = (*id).qp.as_ref() {
            wanted.qpn = Qpn::new(qp.qp_num);
            wanted.srq = !qp.srq.is_null();
        }
    }
    Ok(wanted)
}

/// # Safety
/// `len` bytes are at `data`, unless it is null.
unsafe fn bytes(data: *const c_void, len: u8) -> Vec<u8> {
    if data.is_null() {
        return Vec::new();
    }
    // SAFETY: by contract.
    unsafe { core::slice::from_raw_parts(data.cast::<u8>(), len.into()) }.to_vec()
}

/// rdma_connect(3).
///
/// # Safety
/// `id` is null or live and ours; `param` is null, or live with its private data.
pub unsafe extern "C" fn rdma_connect(id: *mut rdma_cm_id, param: *mut rdma_conn_param) -> c_int {
    // SAFETY: the same contract.
    errno::result(unsafe { connect(id, param) })
}

unsafe fn connect(id: *mut rdma_cm_id, param: *const rdma_conn_param) -> Result<(), Errno> {
    // SAFETY: by contract.
    let (shared, wanted) = unsafe {
        (
            shared(id)?,
            wanted(id, param, (capacity::RD_ATOMIC, capacity::RD_ATOMIC))?,
        )
    };
    // SAFETY: in a call on the identifier.
    let qp_type = unsafe { (*id).qp_type };
    {
        let mut state = shared.state();
        let (Some(opened), Some(local), Some(peer), Phase::RouteResolved) =
            (state.opened, state.local, state.peer, state.phase)
        else {
            return Err(libc::EINVAL);
        };
        let header = IpHeader {
            source: local,
            destination: peer.ip(),
        };
        let mut private_data = header.to_bytes().to_vec();
        private_data.extend_from_slice(&wanted.private_data);
        let service = service(shared.space, peer.port());
        let connection = if qp_type == IBV_QPT_UD {
            let mut request = SidrRequest::new(peer.ip(), service);
            request.private_data = private_data;
            hear::ask(opened, &request, &shared)?
        } else {
            let psn = Psn::new(RandomState::new().hash_one(local) as u32);
            let mut request = Request::new(peer.ip(), service, wanted.qpn, psn, opened.device.info().mtu);
            if qp_type == IBV_QPT_UC {
                request.transport = doorbell_roce_proto::wire::Transport::Uc;
            }
            request.responder_resources = wanted.responder_resources;
            request.initiator_depth = wanted.initiator_depth;
            request.flow_control = wanted.flow_control;
            request.retry_count = wanted.retry_count;
            request.rnr_retry_count = wanted.rnr_retry_count;
            request.srq = wanted.srq;
            request.traffic_class = state.options.traffic_class;
            if let Some(code) = state.options.ack_timeout {
                request.ack_timeout = code;
            }
            request.private_data = private_data;
            hear::connect(opened, &request, &shared)?
        };
        state.link.connection = Some(connection);
        state.phase = Phase::Linked;
    }
    // SAFETY: by contract, and in a call on it.
    unsafe { complete(id) }
}

/// rdma_establish(3), for an identifier without a queue pair.
///
/// # Safety
/// `id` is null or live and ours.
pub unsafe extern "C" fn rdma_establish(id: *mut rdma_cm_id) -> c_int {
    let establish = || {
        // SAFETY: by contract.
        let shared = unsafe { shared(id) }?;
        // SAFETY: in a call on the identifier.
        if !unsafe { (*id).qp }.is_null() {
            return Err(libc::EINVAL);
        }
        let (opened, connection) = linked(&shared.state())?;
        opened.device.cm().establish(connection, &[]).map_err(errno_of)
    };
    errno::result(establish())
}

/// rdma_accept(3).
///
/// # Safety
/// `id` is null or live and ours; `param` is null, or live with its private data.
pub unsafe extern "C" fn rdma_accept(id: *mut rdma_cm_id, param: *mut rdma_conn_param) -> c_int {
    // SAFETY: the same contract.
    errno::result(unsafe { accept(id, param) })
}

unsafe fn accept(id: *mut rdma_cm_id, param: *const rdma_conn_param) -> Result<(), Errno> {
    // SAFETY: by contract.
    let shared = unsafe { shared(id) }?;
    let ((opened, connection), requested) = {
        let state = shared.state();
        (linked(&state)?, state.link.requested)
    };
    // SAFETY: by contract, in a call on the identifier.
    let (wanted, qp, qp_type) = unsafe { (wanted(id, param, requested)?, (*id).qp, (*id).qp_type) };
    let cm = opened.device.cm();
    if qp_type == IBV_QPT_UD {
        let reply = SidrReply {
            status: SidrStatus::SUCCESS,
            qpn: wanted.qpn,
            qkey: RDMA_UDP_QKEY,
            private_data: wanted.private_data,
        };
        return cm.sidr_reply(connection, &reply).map_err(errno_of);
    }
    if wanted.private_data.len() > private_data_len::REP {
        return Err(libc::EINVAL);
    }
    shared.state().link.accepted = Some((wanted.responder_resources, wanted.initiator_depth));
    if !qp.is_null() {
        // SAFETY: in a call on the identifier, whose queue pair it is.
        unsafe { queue_pair::connect(id, qp) }?;
    }
    let accept = Accept {
        qpn: wanted.qpn,
        responder_resources: wanted.responder_resources,
        initiator_depth: wanted.initiator_depth,
        flow_control: wanted.flow_control,
        rnr_retry_count: wanted.rnr_retry_count,
        srq: wanted.srq,
        private_data: wanted.private_data,
    };
    cm.accept(connection, &accept).map_err(errno_of)?;
    // SAFETY: by contract, and in a call on it.
    unsafe { complete(id) }
}

/// rdma_reject(3).
///
/// # Safety
/// `id` is null or live and ours; `len` bytes are at `private_data`, unless it is null.
pub unsafe extern "C" fn rdma_reject(id: *mut rdma_cm_id, private_data: *const c_void, len: u8) -> c_int {
    // SAFETY: the same contract.
    errno::result(unsafe { reject(id, private_data, len) })
}

/// rdma_reject(3), as there are no vendor's extensions to disagree about.
///
/// # Safety
/// As for [`rdma_reject`].
pub unsafe extern "C" fn rdma_reject_ece(id: *mut rdma_cm_id, private_data: *const c_void, len: u8) -> c_int {
    // SAFETY: the same contract.
    errno::result(unsafe { reject(id, private_data, len) })
}

unsafe fn reject(id: *mut rdma_cm_id, private_data: *const c_void, len: u8) -> Result<(), Errno> {
    // SAFETY: by contract.
    let (shared, private_data) = unsafe { (shared(id)?, bytes(private_data, len)) };
    let (opened, connection) = linked(&shared.state())?;
    let cm = opened.device.cm();
    // SAFETY: in a call on the identifier.
    let rejected = if unsafe { (*id).qp_type } == IBV_QPT_UD {
        let reply = SidrReply {
            status: SidrStatus::REJECTED,
            qpn: Qpn::new(0),
            qkey: 0,
            private_data,
        };
        cm.sidr_reply(connection, &reply)
    } else {
        cm.reject(connection, RejectReason::CONSUMER, &private_data)
    };
    rejected.map_err(errno_of)
}

/// rdma_disconnect(3).
///
/// # Safety
/// `id` is null or live and ours.
pub unsafe extern "C" fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: the same contract.
    errno::result(unsafe { disconnect(id) })
}

unsafe fn disconnect(id: *mut rdma_cm_id) -> Result<(), Errno> {
    // SAFETY: by contract.
    let shared = unsafe { shared(id) }?;
    let (opened, connection) = linked(&shared.state())?;
    // SAFETY: in a call on the identifier.
    unsafe {
        queue_pair::fail(id)?;
        opened.device.cm().disconnect(connection, &[]).map_err(errno_of)?;
        complete(id)
    }
}

/// rdma_notify(3): `EISCONN` when the connection is established already. Of other events than IBV_EVENT_COMM_EST it need not be told.
///
/// # Safety
/// `id` is null or live and ours.
pub unsafe extern "C" fn rdma_notify(id: *mut rdma_cm_id, event: ibv_event_type) -> c_int {
    let notify = || {
        // SAFETY: by contract.
        let shared = unsafe { shared(id) }?;
        let (opened, connection) = linked(&shared.state())?;
        match event {
            IBV_EVENT_COMM_EST => opened.device.cm().notify(connection).map_err(|error| match error {
                CmError::State => libc::EISCONN,
                error => errno_of(error),
            }),
            _ => Ok(()),
        }
    };
    errno::result(notify())
}

// Following

/// Does what an event that was just taken asks for.
pub(crate) fn follow(shared: &Arc<Shared>, told: &mut Told) {
    let id = shared.as_ptr();
    match told.kind {
        RDMA_CM_EVENT_CONNECT_REQUEST => {
            if let Some(child) = &told.child {
                adopt(shared, child);
            }
        }
        RDMA_CM_EVENT_CONNECT_RESPONSE => {
            // SAFETY: live until the event is acknowledged, and changed where its events are taken.
            let qp = unsafe { (*id).qp };
            if !qp.is_null() {
                match establish(shared) {
                    Ok(()) => told.kind = RDMA_CM_EVENT_ESTABLISHED,
                    Err(value) => {
                        told.kind = RDMA_CM_EVENT_CONNECT_ERROR;
                        told.status = -value;
                    }
                }
            }
        }
        RDMA_CM_EVENT_REJECTED => {
            // SAFETY: as above. A queue pair that cannot go into the error state is in RESET, and has nothing to flush.
            let _ = unsafe { queue_pair::fail(id) };
        }
        _ => {}
    }
}

/// Shows a request's identifier as its listener's: on the same channel, with the same context.
fn adopt(listener: &Arc<Shared>, child: &Orphan) {
    let (parent, id) = (listener.as_ptr(), child.shared().as_ptr());
    // SAFETY: the listener is live until the event is acknowledged; the new identifier is known to nobody yet.
    unsafe {
        (*id).channel = (*parent).channel;
        (*id).context = (*parent).context;
    }
    let queue = listener.state().queue.clone();
    if let Some(queue) = queue {
        crate::id::rehome(child.shared(), queue);
    }
}

/// Connects the queue pair of an identifier whose peer has accepted, and tells the peer.
fn establish(shared: &Arc<Shared>) -> Result<(), Errno> {
    let id = shared.as_ptr();
    let (opened, connection) = linked(&shared.state())?;
    let cm = opened.device.cm();
    // SAFETY: live until the event is acknowledged, and changed where its events are taken.
    let connected = unsafe { queue_pair::connect(id, (*id).qp) };
    let connected = connected.and_then(|()| cm.establish(connection, &[]).map_err(errno_of));
    connected.inspect_err(|_| {
        // Nothing to reject when the peer has given up meanwhile.
        let _ = cm.reject(connection, RejectReason::CONSUMER, &[]);
    })
}

/// The address that a request came to, and the one that it came from.
pub(crate) fn ends_of(opened: &Opened, header: &IpHeader, service: ServiceId) -> (SocketAddr, SocketAddr) {
    let port = service.0 as u16;
    // What the peer says is believed where it may be: it may say what it likes of itself, but not that we are somebody else.
    let own: IpAddr = match header.destination {
        claimed if claimed == opened.ip() => claimed,
        _ => opened.ip(),
    };
    (SocketAddr::new(own, port), header.source)
}
