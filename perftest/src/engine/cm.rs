//! Connecting by the connection manager (rdma_cm): the queue pairs of a test, n-th to n-th.

use std::net::{IpAddr, SocketAddr};
use std::thread;
use std::time::{Duration, Instant};

use doorbell_verbs::cm::{
    CmError, Connection, ConnectionManager, ConnectionRequest, DatagramService, Listener, Rejection, Route,
    ServiceListener, ServiceRequest,
};
use doorbell_verbs::{PreparedQueuePair, QueuePair, Reliable};

use super::transport::TestTransport;
use crate::failure::{Failure, one_line, refused};
use crate::interrupt::Interrupt;

/// How long a client retries while the server refuses, as it may still be starting.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
pub(crate) const RETRY_DELAY: Duration = Duration::from_millis(50);
/// How often a wait checks for Ctrl-C.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Time limit for the rest of the CM handshake, after the REQ.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a server waits for the request of the next queue pair.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Backlog of connection requests: a test may connect as many queue pairs at once.
const BACKLOG: u16 = 1024;

/// One end's CM state.
#[derive(Debug)]
pub(crate) enum CmEndpoint {
    Client {
        manager: ConnectionManager,
        peer: SocketAddr,
        source: Option<SocketAddr>,
    },
    Server {
        manager: ConnectionManager,
        listener: Listener,
        /// The client whose requests are accepted; all others are refused.
        peer: Option<IpAddr>,
    },
}

/// What connects the queue pairs of the test. Datagrams (UD) find each other by SIDR.
#[derive(Debug)]
pub(crate) struct QpConnector {
    end: CmEndpoint,
    datagrams: bool,
    /// A server's, of datagrams.
    services: Option<ServiceListener>,
}

/// What gives a queue pair of the test its peer.
#[derive(Debug)]
pub(crate) enum Pending {
    Connection(PendingConnection),
    Service(DatagramService),
    ServiceRequest(ServiceRequest),
}

/// A queue pair after the connection manager's part.
#[derive(Debug)]
pub(crate) enum Managed<T: TestTransport> {
    /// Connected when the peer's endpoint is known.
    NotConnected(T::Prepared),
    /// With the connection that it is on, if the manager keeps one.
    Connected(Box<(QueuePair<T>, T::Destination)>, Option<Connection>),
}

impl QpConnector {
    /// The next queue pair's: the client resolves a route or a service, the server waits for a
    /// request.
    ///
    /// # Errors
    /// [`Failure::Test`] when there is none in time; [`Failure::Interrupted`].
    pub(crate) fn next(&mut self, interrupt: &Interrupt) -> Result<Pending, Failure> {
        match (&mut self.end, &mut self.services) {
            (CmEndpoint::Client { manager, peer, source }, _) if self.datagrams => {
                let service = resolve_service(*manager, *source, *peer);
                service.map(Pending::Service).map_err(refused)
            }
            (CmEndpoint::Server { peer, .. }, Some(services)) => {
                let next = || services.next_request(POLL_INTERVAL);
                request_of(*peer, Some(REQUEST_TIMEOUT), interrupt, next, ServiceRequest::peer_addr)
                    .map(Pending::ServiceRequest)
            }
            (end, _) => end.pending(Some(REQUEST_TIMEOUT), interrupt).map(Pending::Connection),
        }
    }
}

#[derive(Debug)]
pub(crate) enum PendingConnection {
    Route(Route),
    Request(ConnectionRequest),
}

impl PendingConnection {
    pub(crate) fn connect<T: Reliable>(self, qp: PreparedQueuePair<T>) -> Result<(QueuePair<T>, Connection), CmError> {
        match self {
            PendingConnection::Route(route) => route.connect(qp, &[], HANDSHAKE_TIMEOUT),
            PendingConnection::Request(request) => request.accept(qp, &[], HANDSHAKE_TIMEOUT),
        }
    }
}

impl CmEndpoint {
    /// Listens at an address; at an unspecified one on all devices.
    ///
    /// # Errors
    /// [`Failure::Test`] when the port is in use or the address is no RDMA device's.
    pub(crate) fn listen(manager: ConnectionManager, address: SocketAddr) -> Result<CmEndpoint, Failure> {
        let listener = manager
            .listen(address, BACKLOG)
            .map_err(|e| Failure::test(format!("cannot listen: {}", one_line(&e.to_string()))))?;
        Ok(CmEndpoint::Server {
            manager,
            listener,
            peer: None,
        })
    }

    /// The port at which a server listens.
    pub(crate) fn port(&self) -> Option<u16> {
        match self {
            CmEndpoint::Client { .. } => None,
            CmEndpoint::Server { listener, .. } => Some(listener.local_addr()?.port()),
        }
    }

    /// A server that refuses all but the client at this address.
    pub(crate) fn only_from(mut self, client: IpAddr) -> CmEndpoint {
        if let CmEndpoint::Server { peer, .. } = &mut self {
            *peer = Some(client);
        }
        self
    }

    /// Connects the queue pairs of the test: on the same port, as the control connection.
    ///
    /// # Errors
    /// [`Failure::Test`] when the port is in use for datagrams.
    pub(crate) fn into_connector(self, datagrams: bool) -> Result<QpConnector, Failure> {
        let services = match &self {
            CmEndpoint::Server { manager, listener, .. } if datagrams => {
                let no_address = || Failure::test("the connection manager listens on no address");
                let address = listener.local_addr().ok_or_else(no_address)?;
                Some(manager.listen_for_datagrams(address, BACKLOG).map_err(refused)?)
            }
            _ => None,
        };
        Ok(QpConnector {
            end: self,
            datagrams,
            services,
        })
    }

    pub(crate) fn pending(
        &mut self,
        within: Option<Duration>,
        interrupt: &Interrupt,
    ) -> Result<PendingConnection, Failure> {
        match self {
            CmEndpoint::Client { manager, peer, source } => resolve(*manager, *source, *peer)
                .map(PendingConnection::Route)
                .map_err(refused),
            CmEndpoint::Server { listener, peer, .. } => {
                let next = || listener.next_request(POLL_INTERVAL);
                request_of(*peer, within, interrupt, next, ConnectionRequest::peer_addr).map(PendingConnection::Request)
            }
        }
    }
}

/// Waits for a request of the client at `peer`, of any if that is not known yet.
fn request_of<R>(
    peer: Option<IpAddr>,
    within: Option<Duration>,
    interrupt: &Interrupt,
    mut next: impl FnMut() -> Result<Option<R>, CmError>,
    from: impl Fn(&R) -> Option<SocketAddr>,
) -> Result<R, Failure> {
    let deadline = within.map(|within| Instant::now() + within);
    loop {
        if interrupt.requested() {
            return Err(Failure::Interrupted);
        }
        // A second client is refused: dropping its request rejects it.
        let request = next().map_err(refused)?;
        let own = |request: &R| peer.is_none() || from(request).map(|client| client.ip()) == peer;
        if let Some(request) = request.filter(own) {
            return Ok(request);
        }
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Err(Failure::test(
                "the client did not connect all its queue pairs in time: has it the same options (-q)?",
            ));
        }
    }
}

pub(crate) fn resolve(
    manager: ConnectionManager,
    source: Option<SocketAddr>,
    peer: SocketAddr,
) -> Result<Route, CmError> {
    match source {
        Some(source) => manager.resolve_from(source, peer, CONNECT_TIMEOUT),
        None => manager.resolve(peer, CONNECT_TIMEOUT),
    }
}

/// Retries for a while, as a C tool listens only when both ends are ready to connect.
fn resolve_service(
    manager: ConnectionManager,
    source: Option<SocketAddr>,
    peer: SocketAddr,
) -> Result<DatagramService, CmError> {
    let deadline = Instant::now() + CONNECT_TIMEOUT;
    loop {
        match manager.resolve_service(source, peer, &[], HANDSHAKE_TIMEOUT) {
            Err(CmError::Rejected {
                reason: Rejection::NoListener,
                ..
            }) if Instant::now() < deadline => thread::sleep(RETRY_DELAY),
            result => return result,
        }
    }
}
