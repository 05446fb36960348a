//! Streams that the connection manager connects (rdma_cm(7)). It serves the process's configured
//! devices, thus not those of a test: here `soft0`, whose connections are to itself.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use doorbell::cm::{self, CmError, ConnectionManager, Rejection};
use doorbell::softroce::{CM_API, api};
use doorbell::{CompletionQueue, QueuePair};
use doorbell_tokio::{ConnectError, RdmaListener, RdmaStream};
use tokio::io::AsyncReadExt;

use crate::stream::{random_bytes, small, write_pieces};
use crate::{LIMIT, Result, run};

/// Of the device, and any port.
pub(crate) fn address() -> Result<SocketAddr> {
    let gid = doorbell::open("soft0")?.default_gid(1)?.gid;
    Ok(SocketAddr::new(gid.to_ip(), 0))
}

fn manager() -> ConnectionManager {
    ConnectionManager::new(&CM_API, api())
}

fn listener() -> Result<RdmaListener> {
    Ok(RdmaListener::bind_cm(manager(), address()?, small())?)
}

type RawClient = (QueuePair, CompletionQueue, cm::Connection);

/// A client by verbs with this private data.
fn raw_client(address: SocketAddr, data: &[u8]) -> std::result::Result<RawClient, CmError> {
    let route = manager().resolve(address, LIMIT)?;
    let context = route.context()?;
    let pd = context.protection_domain().expect("a device has one more");
    let cq = context.completion_queue(8).expect("a device has one more");
    let qp = pd.queue_pair(&cq).max_send_wr(4).max_recv_wr(4).rc();
    let (qp, connection) = route.connect(qp.expect("a device has one more"), data, LIMIT)?;
    Ok((qp, cq, connection))
}

#[test]
fn every_byte_arrives_in_both_directions_and_each_ends_by_itself() -> Result {
    run(async {
        let mut listener = listener()?;
        let client = RdmaStream::connect_cm(manager(), listener.local_addr(), small());
        let (right, left) = tokio::join!(listener.accept(), client);
        let (mut right, mut left) = (right?, left?);
        assert_eq!(left.peer_addr(), listener.local_addr());
        assert_eq!(right.peer_addr().ip(), left.peer_addr().ip());

        let (to_left, to_right) = (random_bytes(1, 100_000), random_bytes(2, 100_000));
        let (expected_left, expected_right) = (to_left.clone(), to_right.clone());
        let server = tokio::spawn(async move {
            let mut bytes = Vec::new();
            right.read_to_end(&mut bytes).await?;
            write_pieces(&mut right, &to_left, 3, 5000).await?;
            io::Result::Ok(bytes)
        });
        write_pieces(&mut left, &to_right, 4, 5000).await?;
        let mut bytes = Vec::new();
        left.read_to_end(&mut bytes).await?;
        assert!(bytes == expected_left, "left has other bytes");
        assert!(server.await?? == expected_right, "right has other bytes");
        Ok(())
    })
}

#[test]
fn a_peer_that_disconnects_resets_the_stream() -> Result {
    run(async {
        let mut listener = listener()?;
        let address = listener.local_addr();
        // Version 1, six chunks of 512 bytes.
        let peer = tokio::task::spawn_blocking(move || raw_client(address, &[0, 1, 0, 6, 0, 0, 2, 0]));
        let (stream, peer) = tokio::join!(listener.accept(), peer);
        let (mut stream, (qp, cq, connection)) = (stream?, peer??);
        let reader = tokio::spawn(async move { stream.read(&mut [0; 4]).await });
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!reader.is_finished());
        drop((qp, cq, connection));
        let error = reader.await?.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset, "{error}");
        Ok(())
    })
}

#[test]
fn a_client_that_is_no_stream_is_rejected() -> Result {
    run(async {
        let mut listener = listener()?;
        let address = listener.local_addr();
        let client = tokio::task::spawn_blocking(move || raw_client(address, b"no sizes"));
        let (accepted, client) = tokio::join!(listener.accept(), client);
        assert!(matches!(accepted, Err(ConnectError::NoStream { .. })), "{accepted:?}");
        let rejected = client?.map(drop).unwrap_err();
        let by_peer = |error: &CmError| {
            matches!(
                error,
                CmError::Rejected {
                    reason: Rejection::ByPeer,
                    ..
                }
            )
        };
        assert!(by_peer(&rejected), "{rejected}");
        Ok(())
    })
}
