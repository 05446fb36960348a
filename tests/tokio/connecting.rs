//! Connecting, whose futures are dropped at each of their await points on both sides: no other
//! client is delayed, and what had begun is as if it had been connected and dropped.

use std::future::Future;
use std::net::TcpStream;

use doorbell::Context;
use doorbell::cm::ConnectionManager;
use doorbell_tokio::{AsyncQueuePair, RdmaListener, RdmaServer, RdmaStream, ServerConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::stream::small;
use crate::{Result, cancelled, dropped_at, managed};

/// Those of `accept` and `next`, which poll what has begun: the last is their sleep.
const POINTS: u32 = 5;

/// By an exchange over TCP: dropped before its first poll, a stream's connecting has not begun;
/// after that its connection comes to the listener.
pub(crate) async fn streams(a: &Context, b: &Context, clients: u32) -> Result {
    let mut listener = RdmaListener::bind("127.0.0.1:0", a.protection_domain()?, small()).await?;
    let (address, pd) = (listener.local_addr(), b.protection_domain()?);
    let mut begun = 0;
    for client in 0..clients {
        begun += client % 2;
        let connect = RdmaStream::connect(address, pd.clone(), small());
        assert!(dropped_at(connect, client % 2).await.is_none());
    }
    let last = tokio::spawn(whole(RdmaStream::connect(address, pd, small())));
    let mut accepted = Vec::new();
    accept(&mut listener, begun + 1, &mut accepted).await;
    assert_eq!(whole_ones(accepted).await, 1);
    last.await??;
    // A client that says nothing is being connected when its listener goes.
    let silent = TcpStream::connect(address)?;
    assert!(cancelled(listener.accept(), POINTS).await.is_none());
    drop((listener, silent));
    Ok(())
}

/// By the connection manager: while it resolves the address, and while it connects.
pub(crate) async fn managed(manager: ConnectionManager, clients: u32) -> Result {
    let mut listener = RdmaListener::bind_cm(manager, managed::address()?, small())?;
    let address = listener.local_addr();
    let (mut accepted, mut dropped) = (Vec::new(), 0);
    for client in 0..clients {
        let connect = RdmaStream::connect_cm(manager, address, small());
        let connect = tokio::spawn(dropped_at(connect, client % 3));
        tokio::select! {
            connected = connect => dropped += u32::from(connected?.is_none()),
            () = accept(&mut listener, u32::MAX, &mut accepted) => unreachable!("so many never come"),
        }
    }
    // A thread that is quicker than its task leaves it nothing to wait for.
    assert!(dropped >= clients / 2, "{dropped} of {clients}");
    let last = tokio::spawn(whole(RdmaStream::connect_cm(manager, address, small())));
    let mut found = whole_ones(accepted).await;
    while found == 0 {
        let mut next = Vec::new();
        accept(&mut listener, 1, &mut next).await;
        found += whole_ones(next).await;
    }
    last.await??;
    Ok(())
}

/// Of queue pairs to a server: while the exchange connects, and while it pairs them.
pub(crate) async fn queue_pairs(a: &Context, b: &Context, clients: u32) -> Result {
    let config = ServerConfig::default().message(64).receives(4).clients(clients);
    let welcome = |_: &_| Ok((b"welcome".to_vec(), ()));
    let mut server = RdmaServer::bind("127.0.0.1:0", a.protection_domain()?, config, |qp| qp, welcome).await?;
    let (address, pd, mut dropped) = (server.local_addr(), b.protection_domain()?, 0);
    for client in 0..clients {
        let connect = AsyncQueuePair::connect(address, pd.clone(), |qp| qp, b"");
        let connect = tokio::spawn(dropped_at(connect, client % 3));
        let serve = async {
            for times in (0..POINTS).cycle() {
                cancelled(server.next(), times).await.transpose()?;
            }
            Result::Ok(())
        };
        tokio::select! {
            connected = connect => dropped += u32::from(connected?.is_none()),
            served = serve => served?,
        }
    }
    assert!(dropped >= clients / 2, "{dropped} of {clients}");
    let last = async {
        let (qp, _) = AsyncQueuePair::connect(address, pd, |qp| qp, b"").await?;
        Result::Ok(qp.send(qp.register(b"whole".to_vec())?).await?)
    };
    let message = async { Result::Ok(server.next().await?.bytes.to_vec()) };
    let (_, message) = tokio::try_join!(last, message)?;
    assert_eq!(message, b"whole");
    Ok(())
}

async fn accept(listener: &mut RdmaListener, clients: u32, accepted: &mut Vec<RdmaStream>) {
    let (mut left, mut times) = (clients, 0);
    while left > 0 {
        times = (times + 1) % POINTS;
        if let Some(stream) = cancelled(listener.accept(), times).await {
            left -= 1;
            accepted.extend(stream);
        }
    }
}

async fn whole(connect: impl Future<Output = std::result::Result<RdmaStream, doorbell_tokio::ConnectError>>) -> Result {
    let mut stream = connect.await?;
    stream.write_all(b"whole").await?;
    Ok(stream.shutdown().await?)
}

async fn whole_ones(streams: Vec<RdmaStream>) -> u32 {
    let mut whole = 0;
    for mut stream in streams {
        let mut bytes = [0; 5];
        whole += u32::from(stream.read_exact(&mut bytes).await.is_ok() && &bytes == b"whole");
    }
    whole
}
