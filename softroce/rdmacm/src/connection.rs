//! Listening and connecting: rdma_listen(3), rdma_connect(3), rdma_accept(3).
//!
//! The device's connection manager implements the protocol; `dispatch` routes its events to the
//! identifier, and [`apply_event`] performs the queue pair transitions when the application takes
//! the event, as the man pages require.

use core::ffi::{c_int, c_void};
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use doorbell_roce_proto::cm::{
    Accept, CmError, ConnectRequest, ConnectionId, Ece, IpHeader, ListenerId, Parameters, RejectReason, ServiceId,
    SidrReply, SidrRequest, SidrStatus, private_data_len,
};
use doorbell_roce_proto::{Psn, Qpn};
use doorbell_softroce::capacity;
use doorbell_verbs_sys::rdmacm::{
    RDMA_CM_EVENT_CONNECT_ERROR, RDMA_CM_EVENT_CONNECT_REQUEST, RDMA_CM_EVENT_CONNECT_RESPONSE,
    RDMA_CM_EVENT_ESTABLISHED, RDMA_CM_EVENT_MULTICAST_JOIN, RDMA_CM_EVENT_REJECTED, RDMA_MAX_INIT_DEPTH,
    RDMA_UDP_QKEY, rdma_cm_id, rdma_conn_param, rdma_port_space,
};
use doorbell_verbs_sys::{IBV_EVENT_COMM_EST, IBV_QPT_UC, IBV_QPT_UD, ibv_event_type};

use crate::channel::EventInfo;
use crate::devices::{OpenDevice, for_wildcard};
use crate::errno::{self, Errno};
use crate::id::{Phase, Shared, State, UnownedId, complete, shared};
use crate::{dispatch, multicast, queue_pair, route};

#[derive(Default)]
pub(crate) struct CmLink {
    listeners: Vec<(&'static OpenDevice, ListenerId)>,
    pub(crate) connection: Option<ConnectionId>,
    /// Responder resources and initiator depth that this side has accepted.
    accepted: Option<(u8, u8)>,
    /// Those that the peer requested.
    requested: (u8, u8),
    /// Vendor options: offered by this side and by its peer.
    pub(crate) local_ece: Ece,
    pub(crate) remote_ece: Ece,
}

impl CmLink {
    pub(crate) fn of_request(connection: ConnectionId, requested: (u8, u8), remote_ece: Ece) -> Self {
        Self {
            connection: Some(connection),
            requested,
            remote_ece,
            ..Self::default()
        }
    }
}

pub(crate) fn errno_of(error: CmError) -> Errno {
    tracing::debug!("connection manager: {error}");
    match error {
        CmError::InUse => libc::EADDRINUSE,
        CmError::Exhausted => libc::ENOMEM,
        CmError::Unknown | CmError::State | CmError::PrivateData { .. } | CmError::Transport => libc::EINVAL,
    }
}

fn service(space: rdma_port_space, port: u16) -> ServiceId {
    ServiceId(u64::from(space) << 16 | u64::from(port))
}

/// `None` before the peer has sent its own.
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

fn cm_connection(state: &State) -> Result<(&'static OpenDevice, ConnectionId), Errno> {
    state.opened.zip(state.link.connection).ok_or(libc::EINVAL)
}

/// rdma_listen(3): on its device, or on those of its wildcard. `EADDRINUSE` when another process
/// listens there too.
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
    // Of a wildcard there may be none, as for Linux: then no request arrives.
    let opened = match state.opened {
        Some(opened) => vec![opened],
        None => for_wildcard(local.ip(), state.options.afonly(local.ip()))?,
    };
    for opened in opened {
        match dispatch::listen(opened, service(shared.space, local.port()), backlog, &shared) {
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

fn unlisten(link: &mut CmLink) {
    for (opened, listener) in link.listeners.drain(..) {
        dispatch::unlisten(opened, listener);
    }
}

pub(crate) fn destroy_cm(shared: &Arc<Shared>) {
    let mut state = shared.state();
    unlisten(&mut state.link);
    state.binding = None;
    if let (Some(opened), Some(connection)) = (state.opened, state.link.connection.take()) {
        dispatch::destroy(opened, connection);
    }
}

struct ConnectParams {
    qpn: Qpn,
    srq: bool,
    responder_resources: u8,
    initiator_depth: u8,
    flow_control: bool,
    retry_count: u8,
    rnr_retry_count: u8,
    private_data: Vec<u8>,
}

/// Reads the parameters of a call; the default is `given`, bounded by the device's limits.
///
/// # Errors
/// `EINVAL` for more READs and atomics than the device supports.
///
/// # Safety
/// `id` is live and ours, in a call on it; `param` is null, or live with its private data.
unsafe fn connect_params(
    id: *mut rdma_cm_id,
    param: *const rdma_conn_param,
    given: (u8, u8),
) -> Result<ConnectParams, Errno> {
    let most = |value: u8| match value {
        value if u32::from(value) == RDMA_MAX_INIT_DEPTH => Ok(capacity::RD_ATOMIC),
        value if value > capacity::RD_ATOMIC => Err(libc::EINVAL),
        value => Ok(value),
    };
    // SAFETY: live, or null.
    let mut params = match unsafe { param.as_ref() } {
        None => ConnectParams {
            qpn: Qpn::new(0),
            srq: false,
            responder_resources: given.0.min(capacity::RD_ATOMIC),
            initiator_depth: given.1.min(capacity::RD_ATOMIC),
            flow_control: false,
            retry_count: 7,
            rnr_retry_count: 7,
            private_data: Vec::new(),
        },
        Some(param) => ConnectParams {
            qpn: Qpn::new(param.qp_num),
            srq: param.srq != 0,
            responder_resources: most(param.responder_resources)?,
            initiator_depth: most(param.initiator_depth)?,
            flow_control: param.flow_control != 0,
            retry_count: param.retry_count.min(7),
            rnr_retry_count: param.rnr_retry_count.min(7),
            // SAFETY: that many bytes are readable by contract.
            private_data: unsafe { bytes(param.private_data, param.private_data_len) },
        },
    };
    // SAFETY: in a call on the identifier; its queue pair is live.
    unsafe {
        if let Some(qp) = (*id).qp.as_ref() {
            params.qpn = Qpn::new(qp.qp_num);
            params.srq = !qp.srq.is_null();
        }
    }
    Ok(params)
}

/// # Safety
/// `len` bytes are readable at `data`, unless it is null.
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
    let (shared, params) = unsafe {
        (
            shared(id)?,
            connect_params(id, param, (capacity::RD_ATOMIC, capacity::RD_ATOMIC))?,
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
        private_data.extend_from_slice(&params.private_data);
        let service = service(shared.space, peer.port());
        let connection = if qp_type == IBV_QPT_UD {
            let mut request = SidrRequest::new(peer.ip(), service);
            request.private_data = private_data;
            dispatch::sidr_request(opened, &request, &shared)?
        } else {
            let psn = Psn::new(RandomState::new().hash_one(local) as u32);
            let mut request = ConnectRequest::new(peer.ip(), service, params.qpn, psn, opened.device.mtu());
            if qp_type == IBV_QPT_UC {
                request.transport = doorbell_roce_proto::wire::Transport::Uc;
            }
            request.responder_resources = params.responder_resources;
            request.initiator_depth = params.initiator_depth;
            request.flow_control = params.flow_control;
            request.retry_count = params.retry_count;
            request.rnr_retry_count = params.rnr_retry_count;
            request.srq = params.srq;
            request.traffic_class = state.options.traffic_class;
            if let Some(code) = state.options.ack_timeout {
                request.ack_timeout = code;
            }
            request.ece = state.link.local_ece;
            request.private_data = private_data;
            dispatch::connect(opened, &request, &shared)?
        };
        state.link.connection = Some(connection);
        state.phase = Phase::CmActive;
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
        let (opened, connection) = cm_connection(&shared.state())?;
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
    let ((opened, connection), requested, ece) = {
        let state = shared.state();
        (cm_connection(&state)?, state.link.requested, state.link.local_ece)
    };
    // SAFETY: by contract, in a call on the identifier.
    let (params, qp, qp_type) = unsafe { (connect_params(id, param, requested)?, (*id).qp, (*id).qp_type) };
    let cm = opened.device.cm();
    if qp_type == IBV_QPT_UD {
        let reply = SidrReply {
            status: SidrStatus::SUCCESS,
            qpn: params.qpn,
            qkey: RDMA_UDP_QKEY,
            private_data: params.private_data,
        };
        return cm.sidr_reply(connection, &reply).map_err(errno_of);
    }
    if params.private_data.len() > private_data_len::REP {
        return Err(libc::EINVAL);
    }
    shared.state().link.accepted = Some((params.responder_resources, params.initiator_depth));
    if !qp.is_null() {
        // SAFETY: in a call on the identifier that owns the queue pair.
        unsafe { queue_pair::connect(id, qp) }?;
    }
    let accept = Accept {
        qpn: params.qpn,
        responder_resources: params.responder_resources,
        initiator_depth: params.initiator_depth,
        flow_control: params.flow_control,
        rnr_retry_count: params.rnr_retry_count,
        srq: params.srq,
        ece,
        private_data: params.private_data,
    };
    cm.accept(connection, &accept).map_err(errno_of)?;
    // SAFETY: by contract, and in a call on it.
    unsafe { complete(id) }
}

/// rdma_reject(3).
///
/// # Safety
/// `id` is null or live and ours; `len` bytes are readable at `private_data`, unless it is null.
pub unsafe extern "C" fn rdma_reject(id: *mut rdma_cm_id, private_data: *const c_void, len: u8) -> c_int {
    // SAFETY: the same contract.
    errno::result(unsafe { reject(id, private_data, len, RejectReason::CONSUMER) })
}

/// As rdma_reject(3), because of the peer's vendor extensions.
///
/// # Safety
/// As for [`rdma_reject`].
pub unsafe extern "C" fn rdma_reject_ece(id: *mut rdma_cm_id, private_data: *const c_void, len: u8) -> c_int {
    // SAFETY: the same contract.
    errno::result(unsafe { reject(id, private_data, len, RejectReason::VENDOR_OPTION) })
}

unsafe fn reject(id: *mut rdma_cm_id, private_data: *const c_void, len: u8, reason: RejectReason) -> Result<(), Errno> {
    // SAFETY: by contract.
    let (shared, private_data) = unsafe { (shared(id)?, bytes(private_data, len)) };
    let (opened, connection) = cm_connection(&shared.state())?;
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
        cm.reject(connection, reason, &private_data)
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
    let (opened, connection) = cm_connection(&shared.state())?;
    // SAFETY: in a call on the identifier.
    unsafe {
        queue_pair::fail(id)?;
        opened.device.cm().disconnect(connection, &[]).map_err(errno_of)?;
        complete(id)
    }
}

/// rdma_notify(3): `EISCONN` if already established; only IBV_EVENT_COMM_EST has an effect.
///
/// # Safety
/// `id` is null or live and ours.
pub unsafe extern "C" fn rdma_notify(id: *mut rdma_cm_id, event: ibv_event_type) -> c_int {
    let notify = || {
        // SAFETY: by contract.
        let shared = unsafe { shared(id) }?;
        let (opened, connection) = cm_connection(&shared.state())?;
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

pub(crate) fn apply_event(shared: &Arc<Shared>, info: &mut EventInfo) {
    let id = shared.as_ptr();
    match info.kind {
        RDMA_CM_EVENT_CONNECT_REQUEST => {
            if let Some(child) = &info.child {
                attach_child(shared, child);
            }
        }
        RDMA_CM_EVENT_CONNECT_RESPONSE => {
            // SAFETY: live until the event is acknowledged; modified only where events are taken.
            let qp = unsafe { (*id).qp };
            if !qp.is_null() {
                match establish(shared) {
                    Ok(()) => info.kind = RDMA_CM_EVENT_ESTABLISHED,
                    Err(value) => {
                        info.kind = RDMA_CM_EVENT_CONNECT_ERROR;
                        info.status = -value;
                    }
                }
            }
        }
        RDMA_CM_EVENT_REJECTED => {
            // SAFETY: as above. A queue pair that cannot enter the error state is in RESET, and has
            // nothing to flush.
            let _ = unsafe { queue_pair::fail(id) };
        }
        RDMA_CM_EVENT_MULTICAST_JOIN => multicast::attach(shared, info),
        _ => {}
    }
}

fn attach_child(listener: &Arc<Shared>, child: &UnownedId) {
    let (parent, id) = (listener.as_ptr(), child.shared().as_ptr());
    // SAFETY: the listener is live until the event is acknowledged; the child is not shared yet.
    unsafe {
        (*id).channel = (*parent).channel;
        (*id).context = (*parent).context;
    }
    let queue = listener.state().queue.clone();
    if let Some(queue) = queue {
        crate::id::move_events(child.shared(), queue);
    }
}

/// Connects the queue pair of an identifier whose peer has accepted, and sends the RTU.
fn establish(shared: &Arc<Shared>) -> Result<(), Errno> {
    let id = shared.as_ptr();
    let (opened, connection) = cm_connection(&shared.state())?;
    let cm = opened.device.cm();
    // SAFETY: live until the event is acknowledged, and modified only where its events are taken.
    let connected = unsafe { queue_pair::connect(id, (*id).qp) };
    let connected = connected.and_then(|()| cm.establish(connection, &[]).map_err(errno_of));
    connected.inspect_err(|_| {
        // No effect if the peer has ended the connection meanwhile.
        let _ = cm.reject(connection, RejectReason::CONSUMER, &[]);
    })
}

/// The destination and the source address of a request.
pub(crate) fn ends_of(opened: &OpenDevice, header: &IpHeader, service: ServiceId) -> (SocketAddr, SocketAddr) {
    let port = service.0 as u16;
    // The peer's claim about its own address is accepted, but not one about ours.
    let own: IpAddr = match header.destination {
        claimed if claimed == opened.ip() => claimed,
        _ => opened.ip(),
    };
    (SocketAddr::new(own, port), header.source)
}
