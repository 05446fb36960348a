//! Connecting by the connection manager (rdma_cm): one queue pair for the control connection, and
//! with `-R` one more for each queue pair of the test, on the same port.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::thread;
use std::time::{Duration, Instant};

use doorbell_verbs::cm::{
    CmError, Connection, ConnectionManager, ConnectionRequest, DatagramService, Listener as CmListener, Rejection,
    Route, ServiceListener, ServiceRequest,
};
use doorbell_verbs::{PreparedQueuePair, QueuePair, Reliable};

use super::connect::addresses_of;
use super::control_connection::{ControlConnection, REPLY_TIMEOUT, Role};
use super::qp_channel::PreparedChannel;
use crate::failure::{Failure, one_line};
use crate::interrupt::Interrupt;

/// How long a client retries while the server refuses, as it may still be starting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const RETRY_DELAY: Duration = Duration::from_millis(50);
/// How often a wait checks for Ctrl-C.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Time limit for the rest of the CM handshake, after the REQ.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
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
        listener: CmListener,
        /// The client whose requests are accepted; all others are refused.
        peer: Option<IpAddr>,
    },
}

/// What connects the queue pairs of the test, with `-R`. Datagrams (UD) find each other by SIDR.
#[derive(Debug)]
pub(crate) enum QpConnector {
    Connections(CmEndpoint),
    ServiceClient {
        manager: ConnectionManager,
        peer: SocketAddr,
        source: Option<SocketAddr>,
    },
    ServiceServer {
        listener: ServiceListener,
        /// As in [`CmEndpoint::Server`].
        peer: Option<IpAddr>,
    },
}

/// What gives a queue pair of the test its peer.
#[derive(Debug)]
pub(crate) enum Pending {
    Connection(PendingConnection),
    Service(DatagramService),
    ServiceRequest(ServiceRequest),
}

impl QpConnector {
    /// The next queue pair's: the client resolves a route or a service, the server waits for a
    /// request.
    ///
    /// # Errors
    /// [`Failure::Test`] when there is none in time; [`Failure::Interrupted`].
    pub(crate) fn next(&mut self, interrupt: &Interrupt) -> Result<Pending, Failure> {
        match self {
            QpConnector::Connections(cm) => cm.pending(Some(REPLY_TIMEOUT), interrupt).map(Pending::Connection),
            QpConnector::ServiceClient { manager, peer, source } => resolve_service(*manager, *source, *peer)
                .map(Pending::Service)
                .map_err(|e| failed(&e)),
            QpConnector::ServiceServer { listener, peer } => {
                let next = || listener.next_request(POLL_INTERVAL);
                request_of(*peer, Some(REPLY_TIMEOUT), interrupt, next, ServiceRequest::peer_addr)
                    .map(Pending::ServiceRequest)
            }
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
    pub(crate) fn connect(
        manager: ConnectionManager,
        (host, port): (&str, u16),
        source: Option<IpAddr>,
        interrupt: &Interrupt,
        make: impl Fn() -> Result<PreparedChannel, Failure>,
    ) -> Result<(ControlConnection, CmEndpoint), Failure> {
        let addresses = addresses_of(host, port, source)?;
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        loop {
            let mut reason = "it has no address of this kind".to_owned();
            let mut may_retry = false;
            for &peer in &addresses {
                let source = source.map(|source| SocketAddr::new(source, 0));
                let channel = resolve(manager, source, peer)
                    .map_err(AttemptError::Connect)
                    .and_then(|route| {
                        make()
                            .map_err(AttemptError::Setup)?
                            .connect(|qp| PendingConnection::Route(route).connect(qp))
                            .map_err(AttemptError::Connect)
                    });
                match channel {
                    Ok(channel) => {
                        let cm = CmEndpoint::Client { manager, peer, source };
                        return Ok((ControlConnection::over(channel, peer, Role::Client, interrupt), cm));
                    }
                    Err(AttemptError::Setup(failure)) => return Err(failure),
                    Err(AttemptError::Connect(e)) => {
                        may_retry = matches!(
                            e,
                            CmError::Rejected {
                                reason: Rejection::NoListener,
                                ..
                            }
                        );
                        reason = one_line(&e.to_string());
                    }
                }
            }
            if interrupt.requested() {
                return Err(Failure::Interrupted);
            }
            if !may_retry || Instant::now() >= deadline {
                return Err(Failure::test(format!("cannot reach the server: {reason}")));
            }
            thread::sleep(RETRY_DELAY);
        }
    }

    /// Listens, on all devices unless an address is given.
    ///
    /// # Errors
    /// [`Failure::Test`] when the port is in use or the address is no RDMA device's.
    pub(crate) fn listen(
        manager: ConnectionManager,
        source: Option<IpAddr>,
        port: u16,
        ipv6: bool,
    ) -> Result<CmEndpoint, Failure> {
        let any_address = if ipv6 {
            Ipv6Addr::UNSPECIFIED.into()
        } else {
            Ipv4Addr::UNSPECIFIED.into()
        };
        let address = SocketAddr::new(source.unwrap_or(any_address), port);
        let listener = manager
            .listen(address, BACKLOG)
            .map_err(|e| Failure::test(format!("cannot listen: {}", one_line(&e.to_string()))))?;
        Ok(CmEndpoint::Server {
            manager,
            listener,
            peer: None,
        })
    }

    /// Connects the queue pairs of the test: on the same port, as the control connection.
    ///
    /// # Errors
    /// [`Failure::Test`] when the port is in use for datagrams.
    pub(crate) fn into_connector(self, datagrams: bool) -> Result<QpConnector, Failure> {
        if !datagrams {
            return Ok(QpConnector::Connections(self));
        }
        match self {
            CmEndpoint::Client { manager, peer, source } => Ok(QpConnector::ServiceClient { manager, peer, source }),
            CmEndpoint::Server {
                manager,
                listener,
                peer,
            } => {
                let no_address = || Failure::test("the connection manager listens on no address");
                let address = listener.local_addr().ok_or_else(no_address)?;
                let listener = manager.listen_for_datagrams(address, BACKLOG).map_err(|e| failed(&e))?;
                Ok(QpConnector::ServiceServer { listener, peer })
            }
        }
    }

    /// # Errors
    /// [`Failure::Interrupted`]; [`Failure::Test`] when the connection manager fails.
    pub(crate) fn accept(
        mut self,
        interrupt: &Interrupt,
        make: impl Fn() -> Result<PreparedChannel, Failure>,
    ) -> Result<(ControlConnection, CmEndpoint), Failure> {
        let pending = self.pending(None, interrupt)?;
        let client = match &pending {
            PendingConnection::Request(request) => request.peer_addr(),
            PendingConnection::Route(_) => None,
        };
        let channel = make()?
            .connect(|qp| pending.connect(qp))
            .map_err(|e| Failure::test(format!("the client did not connect: {}", one_line(&e.to_string()))))?;
        if let CmEndpoint::Server { peer, .. } = &mut self {
            *peer = client.map(|client| client.ip());
        }
        let client = client.unwrap_or(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0));
        Ok((ControlConnection::over(channel, client, Role::Server, interrupt), self))
    }

    fn pending(&mut self, within: Option<Duration>, interrupt: &Interrupt) -> Result<PendingConnection, Failure> {
        match self {
            CmEndpoint::Client { manager, peer, source } => resolve(*manager, *source, *peer)
                .map(PendingConnection::Route)
                .map_err(|e| failed(&e)),
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
        let request = next().map_err(|e| failed(&e))?;
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

fn failed(error: &CmError) -> Failure {
    Failure::test(one_line(&error.to_string()))
}

enum AttemptError {
    Setup(Failure),
    Connect(CmError),
}

fn resolve(manager: ConnectionManager, source: Option<SocketAddr>, peer: SocketAddr) -> Result<Route, CmError> {
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
