//! Connecting by the connection manager (rdma_cm): one queue pair for the control connection, and
//! with `-R` one more for each queue pair of the test, on the same port.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::thread;
use std::time::{Duration, Instant};

use doorbell_verbs::cm::{
    CmError, Connection, ConnectionManager, ConnectionRequest, Listener as ManagedListener, Rejection, Route,
};
use doorbell_verbs::{PreparedQueuePair, QueuePair, Reliable};

use super::connect::addresses_of;
use super::conversation::{ANSWER, Conversation, Role};
use super::line::Prepared;
use crate::failure::{Failure, one_line};
use crate::interrupt::Interrupt;

/// How long a client retries while the server refuses, as it may still be starting.
const CONNECT: Duration = Duration::from_secs(3);
/// Delay between attempts.
const RETRY: Duration = Duration::from_millis(50);
/// How often a wait checks for Ctrl-C.
const LOOK: Duration = Duration::from_millis(50);
/// Time limit for the rest of the CM handshake, after the REQ.
const FINISH: Duration = Duration::from_secs(10);
/// Backlog of connection requests: a test may connect as many queue pairs at once.
const BACKLOG: u16 = 1024;

/// One end's CM state.
#[derive(Debug)]
pub(crate) enum Managed {
    /// The active side.
    Client {
        manager: ConnectionManager,
        /// The server.
        peer: SocketAddr,
        /// The source address, if it is given.
        source: Option<SocketAddr>,
    },
    /// The passive side.
    Server {
        listener: ManagedListener,
        /// The client whose requests are accepted; all others are refused.
        peer: Option<IpAddr>,
    },
}

/// A connection that waits for its queue pair.
#[derive(Debug)]
pub(crate) enum Half {
    /// The resolved route to the server.
    Route(Route),
    /// A client's connection request.
    Request(ConnectionRequest),
}

impl Half {
    /// Connects a queue pair.
    ///
    /// # Errors
    /// When the peer does not take part, or the device refuses.
    pub(crate) fn connect<T: Reliable>(self, qp: PreparedQueuePair<T>) -> Result<(QueuePair<T>, Connection), CmError> {
        match self {
            Half::Route(route) => route.connect(qp, &[], FINISH),
            Half::Request(request) => request.accept(qp, &[], FINISH),
        }
    }
}

impl Managed {
    /// Connects to a server, for the control connection.
    ///
    /// # Errors
    /// As [`connect`](fn@super::connect).
    pub(crate) fn connect(
        manager: ConnectionManager,
        (host, port): (&str, u16),
        source: Option<IpAddr>,
        interrupt: &Interrupt,
        make: impl Fn() -> Result<Prepared, Failure>,
    ) -> Result<(Conversation, Managed), Failure> {
        let addresses = addresses_of(host, port, source)?;
        let deadline = Instant::now() + CONNECT;
        loop {
            let mut reason = "it has no address of this kind".to_owned();
            let mut may_come = false;
            for &peer in &addresses {
                let source = source.map(|source| SocketAddr::new(source, 0));
                let line = resolve(manager, source, peer)
                    .map_err(Attempt::Connecting)
                    .and_then(|route| {
                        make()
                            .map_err(Attempt::Making)?
                            .connect(|qp| Half::Route(route).connect(qp))
                            .map_err(Attempt::Connecting)
                    });
                match line {
                    Ok(line) => {
                        let managed = Managed::Client { manager, peer, source };
                        return Ok((Conversation::over(line, peer, Role::Client, interrupt), managed));
                    }
                    Err(Attempt::Making(failure)) => return Err(failure),
                    Err(Attempt::Connecting(e)) => {
                        may_come = matches!(
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
            if !may_come || Instant::now() >= deadline {
                return Err(Failure::test(format!("cannot reach the server: {reason}")));
            }
            thread::sleep(RETRY);
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
    ) -> Result<Managed, Failure> {
        let everywhere = if ipv6 {
            Ipv6Addr::UNSPECIFIED.into()
        } else {
            Ipv4Addr::UNSPECIFIED.into()
        };
        let address = SocketAddr::new(source.unwrap_or(everywhere), port);
        let listener = manager
            .listen(address, BACKLOG)
            .map_err(|e| Failure::test(format!("cannot listen: {}", one_line(&e.to_string()))))?;
        Ok(Managed::Server { listener, peer: None })
    }

    /// Waits for the client's control connection.
    ///
    /// # Errors
    /// [`Failure::Interrupted`]; [`Failure::Test`] when the connection manager fails.
    pub(crate) fn accept(
        mut self,
        interrupt: &Interrupt,
        make: impl Fn() -> Result<Prepared, Failure>,
    ) -> Result<(Conversation, Managed), Failure> {
        let half = self.half(None, interrupt)?;
        let asking = match &half {
            Half::Request(request) => request.peer_addr(),
            Half::Route(_) => None,
        };
        let line = make()?
            .connect(|qp| half.connect(qp))
            .map_err(|e| Failure::test(format!("the client did not connect: {}", one_line(&e.to_string()))))?;
        if let Managed::Server { peer, .. } = &mut self {
            *peer = asking.map(|asking| asking.ip());
        }
        let asking = asking.unwrap_or(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0));
        Ok((Conversation::over(line, asking, Role::Server, interrupt), self))
    }

    /// The next connection: the client resolves a route, the server waits for a request.
    ///
    /// # Errors
    /// [`Failure::Test`] when there is none in time; [`Failure::Interrupted`].
    pub(crate) fn next(&mut self, interrupt: &Interrupt) -> Result<Half, Failure> {
        self.half(Some(ANSWER), interrupt)
    }

    fn half(&mut self, within: Option<Duration>, interrupt: &Interrupt) -> Result<Half, Failure> {
        let failed = |e: CmError| Failure::test(one_line(&e.to_string()));
        let (listener, peer) = match self {
            Managed::Client { manager, peer, source } => {
                return resolve(*manager, *source, *peer).map(Half::Route).map_err(failed);
            }
            Managed::Server { listener, peer } => (listener, *peer),
        };
        let deadline = within.map(|within| Instant::now() + within);
        loop {
            if interrupt.requested() {
                return Err(Failure::Interrupted);
            }
            if let Some(request) = listener.next_request(LOOK).map_err(failed)? {
                let asks = request.peer_addr().map(|asking| asking.ip());
                // A second client is refused: dropping its request rejects it.
                if peer.is_none() || asks == peer {
                    return Ok(Half::Request(request));
                }
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(Failure::test(
                    "the client did not connect all its queue pairs in time: has it the same options (-q)?",
                ));
            }
        }
    }
}

/// Why an attempt failed.
enum Attempt {
    Making(Failure),
    Connecting(CmError),
}

fn resolve(manager: ConnectionManager, source: Option<SocketAddr>, peer: SocketAddr) -> Result<Route, CmError> {
    match source {
        Some(source) => manager.resolve_from(source, peer, CONNECT),
        None => manager.resolve(peer, CONNECT),
    }
}
