//! The control connection over a queue pair that the connection manager connects (`-R`, `-z`).

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::thread;
use std::time::Instant;

use doorbell_verbs::cm::{CmError, ConnectionManager, Rejection};

use super::connect::addresses_of;
use super::control_connection::{ControlConnection, Role};
use super::qp_channel::PreparedChannel;
use crate::engine::cm::{CONNECT_TIMEOUT, CmEndpoint, PendingConnection, RETRY_DELAY, resolve};
use crate::failure::{Failure, one_line};
use crate::interrupt::Interrupt;

/// # Errors
/// [`Failure::Test`] when no server answers; [`Failure::Interrupted`].
pub(crate) fn connect_by_cm(
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

/// # Errors
/// [`Failure::Interrupted`]; [`Failure::Test`] when the connection manager fails.
pub(crate) fn accept_by_cm(
    mut cm: CmEndpoint,
    interrupt: &Interrupt,
    make: impl Fn() -> Result<PreparedChannel, Failure>,
) -> Result<(ControlConnection, CmEndpoint), Failure> {
    let pending = cm.pending(None, interrupt)?;
    let client = match &pending {
        PendingConnection::Request(request) => request.peer_addr(),
        PendingConnection::Route(_) => None,
    };
    let channel = make()?
        .connect(|qp| pending.connect(qp))
        .map_err(|e| Failure::test(format!("the client did not connect: {}", one_line(&e.to_string()))))?;
    if let CmEndpoint::Server { peer, .. } = &mut cm {
        *peer = client.map(|client| client.ip());
    }
    let client = client.unwrap_or(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0));
    Ok((ControlConnection::over(channel, client, Role::Server, interrupt), cm))
}

enum AttemptError {
    Setup(Failure),
    Connect(CmError),
}
