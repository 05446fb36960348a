//! Communication management on the device: the engine's [`Cm`] between queue pair 1 and its owners.
//!
//! Its datagrams and deadlines are handled by the driving thread like the engine's; its events go
//! to the connection's sink. All of it is under core: connections are thousands of times rarer than
//! messages.

mod pending;

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

pub use doorbell_roce_proto::cm as protocol;
use doorbell_roce_proto::cm::{
    Accept, Cm, CmConfig, CmError, CmEvent, ConnectRequest, ConnectionId, ListenerId, Parameters, RejectReason,
    ServiceId, SidrReply, SidrRequest,
};
use doorbell_roce_proto::qp::Path;
use doorbell_roce_proto::{Endpoint, Instant, Mtu};

use crate::device::Device;
use crate::event::{EventQueue, Token};
use crate::host::ServiceError;
use crate::state::Core;
use crate::sync::MutexGuard;

pub(crate) use pending::PendingRequests;

/// Receives the events of connections. Called under the device's lock: it must not call the device.
pub trait CmSink: Send + Sync {
    /// An event of the connection or listener named `token`.
    fn push(&self, token: Token, event: CmEvent);
}

impl CmSink for EventQueue<(Token, CmEvent)> {
    fn push(&self, token: Token, event: CmEvent) {
        self.push((token, event));
    }
}

/// The sink for the events of a connection or a listener, and its name there.
#[derive(Clone)]
pub struct CmOwner {
    /// The sink.
    pub sink: Arc<dyn CmSink>,
    /// The name in it.
    pub token: Token,
}

impl fmt::Debug for CmOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CmOwner")
            .field("token", &self.token)
            .finish_non_exhaustive()
    }
}

#[derive(Debug)]
pub(crate) struct Connections {
    cm: Cm,
    local: IpAddr,
    owners: HashMap<ConnectionId, CmOwner>,
    listeners: HashMap<ListenerId, (ServiceId, CmOwner)>,
}

impl Connections {
    pub(crate) fn new(config: CmConfig) -> Self {
        Self {
            cm: Cm::new(config),
            local: config.address,
            owners: HashMap::new(),
            listeners: HashMap::new(),
        }
    }

    pub(crate) fn set_mtu(&mut self, mtu: Mtu) {
        self.cm.set_mtu(mtu);
    }

    pub(crate) fn exchange(&mut self, now: Instant, endpoint: &mut Endpoint) {
        while let Some(received) = endpoint.poll_mad() {
            self.cm.handle_mad(now, received.from, &received.mad);
        }
        while let Some(transmit) = self.cm.poll_transmit() {
            let path = Path::new(self.local, transmit.to);
            // What does not fit is lost, and retransmitted by the manager.
            endpoint.send_mad(path, transmit.mad);
        }
    }

    /// Delivers events to their owners. A request whose listener is gone is rejected.
    pub(crate) fn deliver(&mut self, now: impl Fn() -> Instant) {
        while let Some(event) = self.cm.poll_event() {
            if let CmEvent::Request { listener, id, .. } | CmEvent::SidrRequest { listener, id, .. } = &event {
                if let Some((_, owner)) = self.listeners.get(listener) {
                    self.owners.insert(*id, owner.clone());
                } else {
                    let _ = self.cm.destroy(now(), *id);
                }
            }
            if let Some(owner) = self.owners.get(&event.connection()) {
                owner.sink.push(owner.token, event);
            }
        }
    }

    fn listen(&mut self, service: ServiceId, backlog: usize, owner: CmOwner) -> Result<ListenerId, CmError> {
        let id = self.cm.listen(service, backlog)?;
        self.listeners.insert(id, (service, owner));
        Ok(id)
    }

    fn unlisten(&mut self, listener: ListenerId) {
        let _ = self.cm.unlisten(listener);
        self.listeners.remove(&listener);
    }

    pub(crate) fn remove_member(&mut self, now: Instant, slot: u16) {
        self.cm.handle_peer_gone(now, self.local, slot);
    }

    pub(crate) fn handle_timeout(&mut self, now: Instant) {
        self.cm.handle_timeout(now);
    }

    pub(crate) fn due(&self) -> Option<Instant> {
        self.cm.poll_timeout()
    }
}

/// The connection manager of a device: connects its queue pairs to peers by address and service.
///
/// A connection is named by its id, and lives until [`destroy`](Self::destroy): the owner that got
/// a [`CmEvent::Request`] owns the connection. The events of a connection are in order; after its
/// destruction only those follow that its sink has already.
#[derive(Clone, Debug)]
pub struct ConnectionManager {
    device: Arc<Device>,
}

impl ConnectionManager {
    pub(crate) fn new(device: Arc<Device>) -> Self {
        Self { device }
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    fn command<T>(&self, run: impl FnOnce(Instant, &mut Connections) -> T) -> T {
        let shared = self.device.shared();
        let mut core: MutexGuard<'_, Core> = shared.core.lock();
        let result = run(shared.now(), &mut core.connections);
        shared.flush(core);
        result
    }

    /// Listens for a service (connections and SIDR); requests go to `owner`, at most `backlog` of
    /// them unanswered. The service is then taken on the device's address.
    ///
    /// # Errors
    /// [`CmError::InUse`] when a process on the address listens there already;
    /// [`CmError::Exhausted`] when the address has no more services, or a stopped process has kept
    /// the lock for three seconds.
    pub fn listen(&self, service: ServiceId, backlog: usize, owner: CmOwner) -> Result<ListenerId, CmError> {
        // Before other processes can find it: what they send then is not rejected.
        let listener = self.command(|_, connections| connections.listen(service, backlog, owner))?;
        let added = self.device.host().add_service(service.0);
        added.map_err(|error| {
            self.command(|_, connections| connections.unlisten(listener));
            match error {
                ServiceError::InUse { .. } => CmError::InUse,
                ServiceError::Full | ServiceError::Busy { .. } => CmError::Exhausted,
            }
        })?;
        Ok(listener)
    }

    /// Removes a listener. Its reported requests stay, to be answered or destroyed.
    ///
    /// # Errors
    /// [`CmError::Unknown`] when there is none.
    pub fn unlisten(&self, listener: ListenerId) -> Result<(), CmError> {
        let host = self.device.host();
        self.command(|_, connections| {
            let (service, _) = connections.listeners.get(&listener).ok_or(CmError::Unknown)?;
            // First, so that no process sends a request here that would be rejected.
            host.remove_service(service.0);
            connections.unlisten(listener);
            Ok(())
        })
    }

    /// Requests a connection; see [`Cm::connect`].
    pub fn connect(&self, request: &ConnectRequest, owner: CmOwner) -> Result<ConnectionId, CmError> {
        self.command(|now, connections| {
            let id = connections.cm.connect(now, request)?;
            connections.owners.insert(id, owner);
            Ok(id)
        })
    }

    /// Accepts a request; see [`Cm::accept`].
    pub fn accept(&self, id: ConnectionId, accept: &Accept) -> Result<(), CmError> {
        self.command(|now, connections| connections.cm.accept(now, id, accept))
    }

    /// Rejects a request or a reply; see [`Cm::reject`].
    pub fn reject(&self, id: ConnectionId, reason: RejectReason, private_data: &[u8]) -> Result<(), CmError> {
        self.command(|now, connections| connections.cm.reject(now, id, reason, private_data))
    }

    /// Acknowledges the peer's reply (RTU); see [`Cm::establish`].
    pub fn establish(&self, id: ConnectionId, private_data: &[u8]) -> Result<(), CmError> {
        self.command(|_, connections| connections.cm.establish(id, private_data))
    }

    /// The queue pair has received a packet; see [`Cm::notify`].
    pub fn notify(&self, id: ConnectionId) -> Result<(), CmError> {
        self.command(|_, connections| connections.cm.notify(id))
    }

    /// Disconnects; see [`Cm::disconnect`].
    pub fn disconnect(&self, id: ConnectionId, private_data: &[u8]) -> Result<(), CmError> {
        self.command(|now, connections| connections.cm.disconnect(now, id, private_data))
    }

    /// Destroys a connection or a SIDR exchange; see [`Cm::destroy`].
    ///
    /// # Errors
    /// [`CmError::Unknown`] when there is none.
    pub fn destroy(&self, id: ConnectionId) -> Result<(), CmError> {
        self.command(|now, connections| {
            connections.owners.remove(&id);
            connections.cm.destroy(now, id)
        })
    }

    /// Requests a datagram service (SIDR); see [`Cm::sidr_request`].
    pub fn sidr_request(&self, request: &SidrRequest, owner: CmOwner) -> Result<ConnectionId, CmError> {
        self.command(|now, connections| {
            let id = connections.cm.sidr_request(now, request)?;
            connections.owners.insert(id, owner);
            Ok(id)
        })
    }

    /// Answers a SIDR request; see [`Cm::sidr_reply`].
    pub fn sidr_reply(&self, id: ConnectionId, reply: &SidrReply) -> Result<(), CmError> {
        self.command(|now, connections| connections.cm.sidr_reply(now, id, reply))
    }

    /// Sends further events of a connection to another owner.
    ///
    /// # Errors
    /// [`CmError::Unknown`] when there is none.
    pub fn set_owner(&self, id: ConnectionId, owner: CmOwner) -> Result<(), CmError> {
        let mut core = self.device.shared().core.lock();
        let now = core.connections.owners.get_mut(&id).ok_or(CmError::Unknown)?;
        *now = owner;
        Ok(())
    }

    /// The attributes for the queue pair of a connection; see [`Cm::parameters`].
    pub fn parameters(&self, id: ConnectionId) -> Option<Parameters> {
        self.device.shared().core.lock().connections.cm.parameters(id)
    }
}
