//! Connecting streams by the connection manager (rdma_cm(7)): the sizes are private data.

use std::net::SocketAddr;

use doorbell_verbs::QueuePair;
use doorbell_verbs::cm::{self, ConnectionManager, ConnectionRequest, TokioConnection};
use tokio::task::spawn_blocking;

use crate::config::{Sizes, StreamConfig};
use crate::connect::{ConnectError, Connected, joined, open, socket};
use crate::peer::Peer;
use crate::stream::RdmaStream;

pub(crate) async fn connect(
    manager: ConnectionManager,
    to: SocketAddr,
    config: StreamConfig,
) -> Result<RdmaStream, ConnectError> {
    let timeout = config.timeout;
    let resolved = spawn_blocking(move || manager.resolve(to, timeout));
    let route = joined(resolved.await)??;
    let (pd, port) = (route.context()?.protection_domain()?, route.port());
    let connect = move |prepared, own: Sizes| {
        let (qp, connection) = route.connect(prepared, &own.to_bytes(), timeout)?;
        let theirs = sizes(connection.private_data(), to)?;
        connected(qp, theirs, connection, to)
    };
    open(&pd, |qp| qp.port(port), &config, connect).await
}

/// Accepts a client of the listener on `address`; rejects one that is no stream.
pub(crate) async fn accept(
    request: ConnectionRequest,
    address: SocketAddr,
    config: StreamConfig,
) -> Result<RdmaStream, ConnectError> {
    let timeout = config.timeout;
    let peer = request.peer_addr().unwrap_or(address);
    let theirs = sizes(request.private_data(), peer)?;
    let (pd, port) = (request.context()?.protection_domain()?, request.port());
    let connect = move |prepared, own: Sizes| {
        let (qp, connection) = request.accept(prepared, &own.to_bytes(), timeout)?;
        connected(qp, theirs, connection, peer)
    };
    open(&pd, |qp| qp.port(port), &config, connect).await
}

/// The peer's, of private data that is followed by zeros.
fn sizes(private_data: &[u8], peer: SocketAddr) -> Result<Sizes, ConnectError> {
    let bytes = private_data.get(..Sizes::LEN);
    bytes.and_then(Sizes::from_bytes).ok_or(ConnectError::NoStream { peer })
}

fn connected(
    qp: QueuePair,
    theirs: Sizes,
    connection: cm::Connection,
    address: SocketAddr,
) -> Result<Connected, ConnectError> {
    Ok(Connected {
        qp,
        theirs,
        peer: Peer::Managed(TokioConnection::new(connection).map_err(socket)?),
        address,
    })
}
