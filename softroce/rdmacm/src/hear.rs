//! Between the connection managers of the devices and the identifiers: who is called what, and a thread for each device that brings events where they belong.
//!
//! Locks: an identifier's state comes before the directory, which comes before the manager's own. The thread holds the directory only to look somebody up.

use core::ffi::c_int;
use std::collections::HashMap;
use std::net::IpAddr;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use doorbell_roce_proto::Qpn;
use doorbell_roce_proto::cm::{
    CmEvent, ConnectionId, IpHeader, ListenerId, PeerReply, PeerRequest, Request, ServiceId, SidrReply, SidrRequest,
    SidrStatus,
};
use doorbell_verbs_sys::rdmacm::{
    RDMA_CM_EVENT_CONNECT_REQUEST, RDMA_CM_EVENT_CONNECT_RESPONSE, RDMA_CM_EVENT_DISCONNECTED,
    RDMA_CM_EVENT_ESTABLISHED, RDMA_CM_EVENT_REJECTED, RDMA_CM_EVENT_TIMEWAIT_EXIT, RDMA_CM_EVENT_UNREACHABLE,
    rdma_cm_event_type, rdma_conn_param, rdma_ud_param,
};

use crate::channel::{Param, Told};
use crate::connection::{Link, ends_of, errno_of};
use crate::devices::Opened;
use crate::errno::Errno;
use crate::id::{Orphan, Phase, Shared};
use crate::queue_pair::address_vector;

/// TTL or hop limit of datagrams to a peer that was looked up.
const HOP_LIMIT: u8 = 64;

/// Whose the manager's listeners and connections are.
#[derive(Default)]
pub(crate) struct Directory {
    listeners: HashMap<ListenerId, Arc<Shared>>,
    connections: HashMap<ConnectionId, Arc<Shared>>,
}

// Commands whose results the directory has to know before their events come

pub(crate) fn listen(
    opened: &'static Opened,
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

pub(crate) fn unlisten(opened: &Opened, listener: ListenerId) {
    let mut directory = opened.directory.lock();
    directory.listeners.remove(&listener);
    // It is there until this.
    let _ = opened.device.cm().unlisten(listener);
}

pub(crate) fn connect(opened: &Opened, request: &Request, shared: &Arc<Shared>) -> Result<ConnectionId, Errno> {
    let mut directory = opened.directory.lock();
    let connection = opened.device.cm().connect(request, opened.owner()).map_err(errno_of)?;
    directory.connections.insert(connection, Arc::clone(shared));
    Ok(connection)
}

pub(crate) fn ask(opened: &Opened, request: &SidrRequest, shared: &Arc<Shared>) -> Result<ConnectionId, Errno> {
    let mut directory = opened.directory.lock();
    let exchange = opened
        .device
        .cm()
        .sidr_request(request, opened.owner())
        .map_err(errno_of)?;
    directory.connections.insert(exchange, Arc::clone(shared));
    Ok(exchange)
}

pub(crate) fn destroy(opened: &Opened, connection: ConnectionId) {
    let mut directory = opened.directory.lock();
    directory.connections.remove(&connection);
    // It is there until this.
    let _ = opened.device.cm().destroy(connection);
}

/// Destroys what the device has of this process, which exits.
pub(crate) fn leave(opened: &Opened, patience: Duration) {
    let Some(mut directory) = opened.directory.try_lock_for(patience) else {
        return;
    };
    for (connection, _) in directory.connections.drain() {
        let _ = opened.device.cm().destroy(connection);
    }
}

// Events

/// Starts the thread of a device.
///
/// # Errors
/// When there is no thread for it.
pub(crate) fn start(opened: &'static Opened) -> std::io::Result<()> {
    let name = format!("{}-rdmacm", opened.device.info().name);
    let run = move || {
        // An error is final: the descriptor is gone.
        while let Ok((_, event)) = opened.events.wait(|_| {}) {
            hear(opened, event);
        }
    };
    std::thread::Builder::new().name(name).spawn(run).map(drop)
}

fn hear(opened: &'static Opened, event: CmEvent) {
    match event {
        CmEvent::Request { listener, id, request } => requested(opened, listener, id, &request),
        CmEvent::SidrRequest {
            listener,
            id,
            peer,
            service,
            private_data,
        } => looked_for(opened, listener, id, peer, service, &private_data),
        CmEvent::Reply { id, reply } => tell(opened, id, replied(*reply)),
        CmEvent::SidrReply { id, reply } => found(opened, id, *reply),
        CmEvent::Established { id, .. } => tell(opened, id, connection(RDMA_CM_EVENT_ESTABLISHED, 0, Vec::new())),
        CmEvent::Rejected {
            id,
            reason,
            private_data,
        } => tell(
            opened,
            id,
            connection(RDMA_CM_EVENT_REJECTED, reason.0.into(), private_data),
        ),
        CmEvent::Unreachable { id } => {
            tell(opened, id, Told::plain(RDMA_CM_EVENT_UNREACHABLE, -libc::ETIMEDOUT));
        }
        CmEvent::Disconnected { id } => tell(opened, id, connection(RDMA_CM_EVENT_DISCONNECTED, 0, Vec::new())),
        CmEvent::TimewaitExit { id } => tell(opened, id, connection(RDMA_CM_EVENT_TIMEWAIT_EXIT, 0, Vec::new())),
    }
}

/// Tells the identifier of a connection. One that is gone has told the manager so.
fn tell(opened: &Opened, id: ConnectionId, told: Told) {
    let shared = opened.directory.lock().connections.get(&id).cloned();
    if let Some(shared) = shared {
        shared.tell(told);
    }
}

fn connection(kind: rdma_cm_event_type, status: c_int, private_data: Vec<u8>) -> Told {
    Told {
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

fn replied(reply: PeerReply) -> Told {
    let param = rdma_conn_param {
        responder_resources: reply.responder_resources,
        initiator_depth: reply.initiator_depth,
        flow_control: reply.flow_control.into(),
        rnr_retry_count: reply.rnr_retry_count,
        srq: reply.srq.into(),
        qp_num: reply.qpn.get(),
        ..no_parameters()
    };
    Told {
        param: Param::Conn(param),
        ..connection(RDMA_CM_EVENT_CONNECT_RESPONSE, 0, reply.private_data)
    }
}

/// A peer wants to connect.
fn requested(opened: &'static Opened, listener: ListenerId, id: ConnectionId, request: &PeerRequest) {
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
    let link = Link::of_request(id, (request.responder_resources, request.initiator_depth));
    introduce(
        opened,
        listener,
        id,
        link,
        request.service,
        &request.private_data,
        Param::Conn(param),
    );
}

/// A peer looks for a datagram service.
fn looked_for(
    opened: &'static Opened,
    listener: ListenerId,
    id: ConnectionId,
    peer: IpAddr,
    service: ServiceId,
    private_data: &[u8],
) {
    let link = Link::of_request(id, (0, 0));
    introduce(
        opened,
        listener,
        id,
        link,
        service,
        private_data,
        Param::Ud(datagrams(peer, Qpn::new(0), 0)),
    );
}

/// Makes the identifier of a request, and tells its listener. Without one, or without the addresses of its ends, it is refused.
fn introduce(
    opened: &'static Opened,
    listener: ListenerId,
    id: ConnectionId,
    link: Link,
    service: ServiceId,
    private_data: &[u8],
    param: Param,
) {
    let parent = opened.directory.lock().listeners.get(&listener).cloned();
    let queue = parent.as_ref().and_then(|parent| parent.state().queue.clone());
    let (Some(parent), Some(queue), Some((header, rest))) = (parent, queue, IpHeader::split(private_data)) else {
        return destroy(opened, id);
    };
    let child = Orphan::new(parent.space, ptr::null_mut(), ptr::null_mut(), queue);
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
        state.phase = Phase::Linked;
    }
    parent.tell(Told {
        kind: RDMA_CM_EVENT_CONNECT_REQUEST,
        status: 0,
        param,
        private_data: rest.to_vec(),
        child: Some(child),
    });
}

/// The answer about a datagram service.
fn found(opened: &Opened, id: ConnectionId, reply: SidrReply) {
    let peer = {
        let directory = opened.directory.lock();
        directory.connections.get(&id).cloned()
    };
    let Some(shared) = peer else { return };
    let peer = shared.state().peer.map(|peer| peer.ip());
    let (kind, status) = match reply.status {
        SidrStatus::SUCCESS => (RDMA_CM_EVENT_ESTABLISHED, 0),
        status => (RDMA_CM_EVENT_UNREACHABLE, status.0.into()),
    };
    let Some(peer) = peer else { return };
    shared.tell(Told {
        kind,
        status,
        param: Param::Ud(datagrams(peer, reply.qpn, reply.qkey)),
        private_data: reply.private_data,
        child: None,
    });
}

/// Where datagrams to a peer go.
fn datagrams(peer: IpAddr, qpn: Qpn, qkey: u32) -> rdma_ud_param {
    rdma_ud_param {
        private_data: ptr::null(),
        private_data_len: 0,
        ah_attr: address_vector(peer, 0, HOP_LIMIT),
        qp_num: qpn.get(),
        qkey,
    }
}
