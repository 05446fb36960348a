//! Connecting the queue pairs of a native test by the connection manager: the server waits at a
//! port of its own for each size, which its setup advertises.

use std::net::{IpAddr, SocketAddr};

use doorbell_verbs::{Endpoint, LinkLayer};

use super::test_end::Test;
use crate::device::PORT;
use crate::engine::cm::{CmEndpoint, QpConnector};
use crate::engine::transport::TestTransport;
use crate::failure::{Failure, refused};

/// The IP address that the connection manager knows an end by: its GID's on Ethernet, else that of
/// the control connection.
fn address(test: &Test<'_>, endpoint: Option<&Endpoint>, otherwise: IpAddr) -> IpAddr {
    let port = test.device.context.port(PORT);
    let routes_by_ip = port.is_ok_and(|port| port.link_layer == LinkLayer::Ethernet);
    endpoint
        .filter(|_| routes_by_ip)
        .map_or(otherwise, |endpoint| endpoint.gid.to_ip())
}

/// A server's part, before the setups are exchanged.
///
/// # Errors
/// [`Failure::Test`] when there is no connection manager, or it cannot listen.
pub(super) fn listen(test: &Test<'_>, own: &[Endpoint]) -> Result<Option<CmEndpoint>, Failure> {
    if !test.plan.mode.rdma_cm || !test.is_server {
        return Ok(None);
    }
    let manager = test.device.manager.get().map_err(refused)?;
    let address = address(test, own.first(), test.control.local().map_err(refused)?.ip());
    CmEndpoint::listen(manager, SocketAddr::new(address, 0)).map(Some)
}

/// What connects the queue pairs, if the connection manager does: a server accepts the requests of
/// its client alone.
///
/// # Errors
/// [`Failure::Test`] when there is no connection manager, or the server does not wait for it.
pub(super) fn connector<T: TestTransport>(
    test: &Test<'_>,
    waiting: Option<CmEndpoint>,
    server_port: Option<u16>,
    own: &[Endpoint],
    peers: &[Endpoint],
) -> Result<Option<QpConnector>, Failure> {
    if !test.plan.mode.rdma_cm {
        return Ok(None);
    }
    let (peer, local) = (test.control.peer(), test.control.local().map_err(refused)?);
    let from = address(test, peers.first(), peer.ip());
    let end = match (waiting, server_port) {
        (Some(waiting), _) => waiting.only_from(from),
        (None, Some(port)) => CmEndpoint::Client {
            manager: test.device.manager.get().map_err(refused)?,
            peer: SocketAddr::new(from, port),
            source: Some(SocketAddr::new(address(test, own.first(), local.ip()), 0)),
        },
        (None, None) => {
            let reason = "its connection manager does not wait: are both ends the same doorbell?";
            return Err(Failure::test(format!("peer {peer}: {reason}")));
        }
    };
    end.into_connector(T::HEADER > 0).map(Some)
}
