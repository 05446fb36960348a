//! Dispatch of connection manager events to identifiers: the directory of listener and connection
//! ids, and one thread per device.
//!
//! Lock order: an identifier's state, the directory, the connection manager's own lock. The thread
//! holds the directory's lock for lookups only.

use core::ffi::c_int;
use std::collections::HashMap;
use std::io::ErrorKind;
use std::net::IpAddr;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use doorbell_roce_proto::Qpn;
use doorbell_roce_proto::cm::{
    CmEvent, ConnectRequest, ConnectionId, Ece, IpHeader, ListenerId, PeerReply, PeerRequest, ServiceId, SidrReply,
    SidrRequest, SidrStatus,
};
use doorbell_roce_proto::qp::Path;
use doorbell_verbs_sys::rdmacm::{
    RDMA_CM_EVENT_CONNECT_REQUEST, RDMA_CM_EVENT_CONNECT_RESPONSE, RDMA_CM_EVENT_DISCONNECTED,
    RDMA_CM_EVENT_ESTABLISHED, RDMA_CM_EVENT_REJECTED, RDMA_CM_EVENT_TIMEWAIT_EXIT, RDMA_CM_EVENT_UNREACHABLE,
    rdma_cm_event_type, rdma_conn_param, rdma_ud_param,
};

use crate::channel::{EventInfo, Param};
use crate::connection::{CmLink, ends_of, errno_of};
use crate::devices::OpenDevice;
use crate::errno::Errno;
use crate::id::{Phase, Shared, UnownedId};
use crate::queue_pair::address_vector;

#[derive(Default)]
pub(crate) struct Directory {
    listeners: HashMap<ListenerId, Arc<Shared>>,
    connections: HashMap<ConnectionId, Arc<Shared>>,
}

// Commands whose ids must be in the directory before their events arrive

pub(crate) fn listen(
    opened: &'static OpenDevice,
    service: ServiceId,
    backlog: usize,
    shared: &Arc<Shared>,
) -> Result<ListenerId, Errno> {
    let mut directory = opened.directory.lock();
    let listener = opened
        .device
        .cm()
        .listen(service, backlog, opened.owner())
        .map_err(errno_of)?;
    directory.listeners.insert(listener, Arc::clone(shared));
    Ok(listener)
}

pub(crate) fn unlisten(opened: &OpenDevice, listener: ListenerId) {
    let mut directory = opened.directory.lock();
    directory.listeners.remove(&listener);
    // It exists until this call.
    let _ = opened.device.cm().unlisten(listener);
}

pub(crate) fn connect(
    opened: &OpenDevice,
    request: &ConnectRequest,
    shared: &Arc<Shared>,
) -> Result<ConnectionId, Errno> {
    let mut directory = opened.directory.lock();
    let connection = opened.device.cm().connect(request, opened.owner()).map_err(errno_of)?;
    directory.connections.insert(connection, Arc::clone(shared));
    Ok(connection)
}

pub(crate) fn sidr_request(
    opened: &OpenDevice,
    request: &SidrRequest,
    shared: &Arc<Shared>,
) -> Result<ConnectionId, Errno> {
    let mut directory = opened.directory.lock();
    let exchange = opened
        .device
        .cm()
        .sidr_request(request, opened.owner())
        .map_err(errno_of)?;
    directory.connections.insert(exchange, Arc::clone(shared));
    Ok(exchange)
}

pub(crate) fn destroy(opened: &OpenDevice, connection: ConnectionId) {
    let mut directory = opened.directory.lock();
    directory.connections.remove(&connection);
    // It exists until this call.
    let _ = opened.device.cm().destroy(connection);
}

pub(crate) fn destroy_all(opened: &OpenDevice, timeout: Duration) {
    let Some(mut directory) = opened.directory.try_lock_for(timeout) else {
        return;
    };
    for (connection, _) in directory.connections.drain() {
        let _ = opened.device.cm().destroy(connection);
    }
}

/// # Errors
/// When the thread cannot be created.
pub(crate) fn start_thread(opened: &'static OpenDevice) -> std::io::Result<()> {
    let name = format!("{}-rdmacm", opened.device.info().name);
    let run = move || {
        loop {
            match opened.events.wait(|_| {}) {
                Ok((_, event)) => dispatch(opened, event),
                // By a signal that its threads do not block, such as SIGSEGV sent by kill(2).
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // The descriptor is closed.
                Err(_) => return,
            }
        }
    };
    doorbell_threads::spawn(name, run).map(drop)
}

fn dispatch(opened: &'static OpenDevice, event: CmEvent) {
    match event {
        CmEvent::Request { listener, id, request } => connect_requested(opened, listener, id, &request),
        CmEvent::SidrRequest {
            listener,
            id,
            peer,
            service,
            private_data,
        } => sidr_requested(opened, listener, id, peer, service, &private_data),
        CmEvent::Reply { id, reply } => replied(opened, id, *reply),
        CmEvent::SidrReply { id, reply } => sidr_replied(opened, id, *reply),
        CmEvent::Established { id, .. } => notify(opened, id, connection(RDMA_CM_EVENT_ESTABLISHED, 0, Vec::new())),
        CmEvent::Rejected {
            id,
            reason,
            private_data,
        } => notify(
            opened,
            id,
            connection(RDMA_CM_EVENT_REJECTED, reason.0.into(), private_data),
        ),
        CmEvent::Unreachable { id } => {
            notify(
                opened,
                id,
                EventInfo::plain(RDMA_CM_EVENT_UNREACHABLE, -libc::ETIMEDOUT),
            );
        }
        CmEvent::Disconnected { id } => notify(opened, id, connection(RDMA_CM_EVENT_DISCONNECTED, 0, Vec::new())),
        CmEvent::TimewaitExit { id } => notify(opened, id, connection(RDMA_CM_EVENT_TIMEWAIT_EXIT, 0, Vec::new())),
    }
}

/// The identifier of a connection, unless it was destroyed.
fn identifier(opened: &OpenDevice, id: ConnectionId) -> Option<Arc<Shared>> {
    opened.directory.lock().connections.get(&id).cloned()
}

fn notify(opened: &OpenDevice, id: ConnectionId, info: EventInfo) {
    if let Some(shared) = identifier(opened, id) {
        shared.notify(info);
    }
}

fn connection(kind: rdma_cm_event_type, status: c_int, private_data: Vec<u8>) -> EventInfo {
    EventInfo {
        kind,
        status,
        param: Param::Conn(no_parameters()),
        private_data,
        child: None,
    }
}

fn no_parameters() -> rdma_conn_param {
    rdma_conn_param {
        private_data: ptr::null(),
        private_data_len: 0,
        responder_resources: 0,
        initiator_depth: 0,
        flow_control: 0,
        retry_count: 0,
        rnr_retry_count: 0,
        srq: 0,
        qp_num: 0,
    }
}

fn replied(opened: &OpenDevice, id: ConnectionId, reply: PeerReply) {
    let Some(shared) = identifier(opened, id) else { return };
    let param = rdma_conn_param {
        responder_resources: reply.responder_resources,
        initiator_depth: reply.initiator_depth,
        flow_control: reply.flow_control.into(),
        rnr_retry_count: reply.rnr_retry_count,
        srq: reply.srq.into(),
        qp_num: reply.qpn.get(),
        ..no_parameters()
    };
    shared.state().link.remote_ece = reply.ece;
    shared.notify(EventInfo {
        param: Param::Conn(param),
        ..connection(RDMA_CM_EVENT_CONNECT_RESPONSE, 0, reply.private_data)
    });
}

fn connect_requested(opened: &'static OpenDevice, listener: ListenerId, id: ConnectionId, request: &PeerRequest) {
    let param = rdma_conn_param {
        responder_resources: request.responder_resources,
        initiator_depth: request.initiator_depth,
        flow_control: request.flow_control.into(),
        retry_count: request.retry_count,
        rnr_retry_count: request.rnr_retry_count,
        srq: request.srq.into(),
        qp_num: request.qpn.get(),
        ..no_parameters()
    };
    let link = CmLink::of_request(id, (request.responder_resources, request.initiator_depth), request.ece);
    report_request(
        opened,
        listener,
        id,
        link,
        request.service,
        &request.private_data,
        Param::Conn(param),
    );
}

fn sidr_requested(
    opened: &'static OpenDevice,
    listener: ListenerId,
    id: ConnectionId,
    peer: IpAddr,
    service: ServiceId,
    private_data: &[u8],
) {
    let link = CmLink::of_request(id, (0, 0), Ece::default());
    report_request(
        opened,
        listener,
        id,
        link,
        service,
        private_data,
        Param::Ud(datagrams(&Path::new(opened.ip(), peer), Qpn::new(0), 0)),
    );
}

/// Rejects the request if the listener or the IP CM header is missing.
fn report_request(
    opened: &'static OpenDevice,
    listener: ListenerId,
    id: ConnectionId,
    link: CmLink,
    service: ServiceId,
    private_data: &[u8],
    param: Param,
) {
    let parent = opened.directory.lock().listeners.get(&listener).cloned();
    let queue = parent.as_ref().and_then(|parent| parent.state().queue.clone());
    let (Some(parent), Some(queue), Some((header, rest))) = (parent, queue, IpHeader::split(private_data)) else {
        return destroy(opened, id);
    };
    let child = UnownedId::new(parent.space, ptr::null_mut(), ptr::null_mut(), queue);
    // Before this thread takes its next event, which may be of this connection.
    opened
        .directory
        .lock()
        .connections
        .insert(id, Arc::clone(child.shared()));
    {
        let (local, peer) = ends_of(opened, &header, service);
        let shared = child.shared();
        let mut state = shared.state();
        shared.set_device(&mut state, opened);
        shared.set_local(&mut state, local);
        shared.set_peer(&mut state, peer);
        state.link = link;
        state.phase = Phase::CmActive;
    }
    parent.notify(EventInfo {
        kind: RDMA_CM_EVENT_CONNECT_REQUEST,
        status: 0,
        param,
        private_data: rest.to_vec(),
        child: Some(child),
    });
}

fn sidr_replied(opened: &OpenDevice, id: ConnectionId, reply: SidrReply) {
    let Some(shared) = identifier(opened, id) else { return };
    let path = {
        let state = shared.state();
        state.peer.map(|peer| Path {
            traffic_class: state.options.traffic_class,
            ..Path::new(opened.ip(), peer.ip())
        })
    };
    let (kind, status) = match reply.status {
        SidrStatus::SUCCESS => (RDMA_CM_EVENT_ESTABLISHED, 0),
        status => (RDMA_CM_EVENT_UNREACHABLE, status.0.into()),
    };
    let Some(path) = path else { return };
    shared.notify(EventInfo {
        kind,
        status,
        param: Param::Ud(datagrams(&path, reply.qpn, reply.qkey)),
        private_data: reply.private_data,
        child: None,
    });
}

fn datagrams(path: &Path, qpn: Qpn, qkey: u32) -> rdma_ud_param {
    rdma_ud_param {
        private_data: ptr::null(),
        private_data_len: 0,
        ah_attr: address_vector(path),
        qp_num: qpn.get(),
        qkey,
    }
}
