//! Both ends of connections made by the connection manager, at one address of an RDMA device of
//! this machine: established, rejected, unanswered, refused and unreachable. Or one end of an
//! established one.

#![forbid(unsafe_code)]

use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use doorbell_verbs::cm::{
    CmError, Connection, ConnectionEvent, ConnectionManager, Listener, MAX_ACCEPT_DATA, MAX_CONNECT_DATA, Rejection,
};
use doorbell_verbs::{
    Buffer, CompletionQueue, Context, Library, Local, PeerWrite, PreparedQueuePair, QpState, QueueKind, QueuePair,
    Remote, Success, WriteAccess,
};

const USAGE: &str = "\
usage: cm IP                    (an address of an RDMA device of this machine)
       cm serve|connect IP:PORT";
const TIMEOUT: Duration = Duration::from_secs(20);
const LEN: usize = 100_000;

fn main() -> ExitCode {
    let words: Vec<_> = std::env::args().skip(1).collect();
    let words: Vec<_> = words.iter().map(String::as_str).collect();
    let Some(result) = (match words[..] {
        [address] => address.parse().ok().map(run),
        ["serve", address] => address.parse().ok().map(serve_one),
        ["connect", address] => address.parse().ok().map(connect_one),
        _ => None,
    }) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cm: {}: {error:#}", words.join(" "));
            ExitCode::FAILURE
        }
    }
}

fn serve_one(address: SocketAddr) -> Result<()> {
    let mut listener = ConnectionManager::system()?.listen(address, 8)?;
    println!("waits for a client");
    serve(&mut listener, address)
}

fn connect_one(address: SocketAddr) -> Result<()> {
    connect(ConnectionManager::system()?, address)
}

fn run(address: IpAddr) -> Result<()> {
    let manager = ConnectionManager::system()?;
    let mut listener = manager.listen(SocketAddr::new(address, 0), 8)?;
    let server = listener.local_addr().context("the listener has no address")?;
    ensure!(server.port() != 0 && server.ip() == address, "listening on {server}");
    conversation(manager, &mut listener, server).context("conversation")?;
    own_context(manager, &mut listener, server).context("the server's own context")?;
    rejected(manager, &mut listener, server).context("rejected")?;
    unanswered(manager, &listener, server).context("unanswered")?;
    drop(listener);
    refused(manager, server).context("refused")?;
    unreachable(manager).context("unreachable")
}

/// A queue pair before it is connected, with a receive posted, and memory for the peer's WRITE.
struct Prepared {
    cq: CompletionQueue,
    qp: PreparedQueuePair,
    inbox: Buffer<PeerWrite>,
    /// Two buffers with the same bytes: one to WRITE, one to SEND.
    messages: [Buffer<Local>; 2],
}

fn prepare(device: &Context, port: u8, fill: u8) -> Result<Prepared> {
    let pd = device.protection_domain()?;
    let cq = device.completion_queue(16)?;
    let builder = pd.queue_pair(&cq).max_send_wr(4).max_recv_wr(4).port(port);
    let mut qp = builder.allow_remote_write().rc()?;
    qp.receive(pd.register(vec![0; LEN], Local)?)?;
    Ok(Prepared {
        cq,
        qp,
        inbox: pd.register(vec![0; LEN], PeerWrite)?,
        messages: [
            pd.register(vec![fill; LEN], Local)?,
            pd.register(vec![fill; LEN], Local)?,
        ],
    })
}

/// Writes to the peer's inbox, notifies it by a SEND, and checks what the peer wrote and sent.
fn exchange(
    qp: &mut QueuePair,
    cq: &mut CompletionQueue,
    inbox: &Buffer<PeerWrite>,
    [to_write, to_send]: [Buffer<Local>; 2],
    to: Remote<WriteAccess>,
    expected: u8,
) -> Result<()> {
    qp.post(|batch| {
        batch.write(to_write, to);
        batch.send(to_send).signaled();
    })?;
    let (_, received) = wait_both(cq)?;
    ensure!(received.iter().all(|&byte| byte == expected), "a wrong message");
    let mut copy = vec![0; LEN];
    inbox.read_at(0, &mut copy);
    ensure!(copy.iter().all(|&byte| byte == expected), "wrong data was written");
    Ok(())
}

/// The message may arrive before our own WRITE is acknowledged.
fn wait_both(cq: &mut CompletionQueue) -> Result<(Buffer<Local>, Buffer<Local>)> {
    let deadline = Instant::now() + TIMEOUT;
    let (mut sent, mut received) = (None, None);
    loop {
        for mut done in cq.poll()? {
            if let Success::Receive { len, .. } = done.result()? {
                ensure!(len as usize == LEN, "{len} bytes received");
            }
            let back = if done.queue() == QueueKind::Send {
                &mut sent
            } else {
                &mut received
            };
            *back = done.take();
        }
        match (sent, received) {
            (Some(sent), Some(received)) => return Ok((sent, received)),
            pair => (sent, received) = pair,
        }
        ensure!(
            Instant::now() < deadline,
            "sent {}, received {} in {TIMEOUT:?}",
            sent.is_some(),
            received.is_some()
        );
    }
}

fn padded(private_data: &[u8], expected: &[u8]) -> Result<()> {
    ensure!(
        private_data.starts_with(expected) && private_data[expected.len()..].iter().all(|&byte| byte == 0),
        "private data {private_data:?}"
    );
    Ok(())
}

fn key(private_data: &[u8]) -> Result<Remote<WriteAccess>> {
    // Padded with zeros.
    let bytes = private_data.first_chunk::<24>().context("no key in the private data")?;
    Ok(Remote::from_bytes(bytes)?)
}

fn both<A: Send, B>(server: impl FnOnce() -> Result<A> + Send, client: impl FnOnce() -> Result<B>) -> Result<(A, B)> {
    thread::scope(|scope| {
        let server = scope.spawn(server);
        let client = client();
        let server = server.join().map_err(|_| anyhow!("the server panicked"))?;
        Ok((server.context("the server")?, client.context("the client")?))
    })
}

/// Data and private data both ways; the server sees the client's disconnect.
fn conversation(manager: ConnectionManager, listener: &mut Listener, server: SocketAddr) -> Result<()> {
    both(|| serve(listener, server), || connect(manager, server)).map(drop)
}

fn serve(listener: &mut Listener, server: SocketAddr) -> Result<()> {
    let request = listener.next_request(TIMEOUT)?.context("no request")?;
    let theirs = key(request.private_data())?;
    let Prepared {
        mut cq,
        qp,
        inbox,
        messages,
    } = prepare(&request.context()?, request.port(), 2)?;
    let mut answer = inbox.remote().to_bytes().to_vec();
    answer.resize(MAX_ACCEPT_DATA, 0xa5);
    let (mut qp, mut connection) = request.accept(qp, &answer, TIMEOUT)?;
    ensure!(
        connection.local_addr() == Some(server),
        "accepted at {:?}",
        connection.local_addr()
    );
    exchange(&mut qp, &mut cq, &inbox, messages, theirs, 1)?;
    wait_for(&mut connection, ConnectionEvent::Disconnected)?;
    qp.flush()?;
    ensure!(
        qp.state()? == QpState::Err,
        "not in error after the peer has disconnected"
    );
    Ok(())
}

fn connect(manager: ConnectionManager, server: SocketAddr) -> Result<()> {
    let route = manager.resolve(server, TIMEOUT)?;
    let Prepared {
        mut cq,
        qp,
        inbox,
        messages,
    } = prepare(&route.context()?, route.port(), 1)?;
    let mut request = inbox.remote().to_bytes().to_vec();
    request.resize(MAX_CONNECT_DATA, 0x5a);
    let (mut qp, connection) = route.connect(qp, &request, TIMEOUT)?;
    let answer = connection.private_data().to_vec();
    ensure!(
        answer.len() == MAX_ACCEPT_DATA && answer.ends_with(&[0xa5; 8]),
        "answer {answer:?}"
    );
    ensure!(
        connection.peer_addr() == Some(server),
        "connected to {:?}",
        connection.peer_addr()
    );
    exchange(&mut qp, &mut cq, &inbox, messages, key(&answer)?, 2)?;
    println!(
        "{server}: data both ways, path MTU {}, peer {}",
        qp.mtu(),
        qp.peer().gid
    );
    connection.disconnect(TIMEOUT)?;
    Ok(())
}

fn wait_for(connection: &mut Connection, wanted: ConnectionEvent) -> Result<()> {
    while let Some(event) = connection.next_event(TIMEOUT)? {
        if event == wanted {
            return Ok(());
        }
    }
    bail!("no {wanted:?} in {TIMEOUT:?}")
}

/// The server opens its own context; the client sees that the connection is dropped.
fn own_context(manager: ConnectionManager, listener: &mut Listener, server: SocketAddr) -> Result<()> {
    let serve = || {
        let request = listener.next_request(TIMEOUT)?.context("no request")?;
        padded(request.private_data(), b"own")?;
        let device = Library::system()?.open(request.context()?.name())?;
        let Prepared { qp, .. } = prepare(&device, request.port(), 2)?;
        drop(request.accept(qp, b"", TIMEOUT)?);
        Ok(())
    };
    let connect = || {
        let route = manager.resolve(server, TIMEOUT)?;
        let Prepared { qp, .. } = prepare(&route.context()?, route.port(), 1)?;
        let (_qp, mut connection) = route.connect(qp, b"own", TIMEOUT)?;
        padded(connection.private_data(), b"")?;
        wait_for(&mut connection, ConnectionEvent::Disconnected)?;
        connection.disconnect(TIMEOUT)?;
        Ok(())
    };
    both(serve, connect).map(drop)
}

fn failure(manager: ConnectionManager, server: SocketAddr, timeout: Duration) -> Result<CmError> {
    let route = manager.resolve(server, TIMEOUT)?;
    let Prepared { qp, .. } = prepare(&route.context()?, route.port(), 1)?;
    match route.connect(qp, b"please", timeout) {
        Ok(_) => bail!("it was accepted"),
        Err(error) => {
            println!("{error}");
            Ok(error)
        }
    }
}

/// Rejected by the server with a reason, and by dropping the request.
fn rejected(manager: ConnectionManager, listener: &mut Listener, server: SocketAddr) -> Result<()> {
    let mut reject = |with_reason: bool| {
        let serve = || {
            let request = listener.next_request(TIMEOUT)?.context("no request")?;
            padded(request.private_data(), b"please")?;
            // The request is rejected when dropped, even while its device is still in use.
            let device = request.context()?;
            if with_reason {
                request.reject(b"not today")?;
            }
            Ok(device)
        };
        both(serve, || failure(manager, server, TIMEOUT)).map(|(_, error)| error)
    };
    match reject(true)? {
        CmError::Rejected {
            reason: Rejection::ByPeer,
            private_data,
            ..
        } => padded(&private_data, b"not today")?,
        other => bail!("{other:?}"),
    }
    match reject(false)? {
        CmError::Rejected {
            reason: Rejection::ByPeer,
            ..
        } => Ok(()),
        other => bail!("{other:?}"),
    }
}

/// A listener that never answers its requests; and private data that is too long.
fn unanswered(manager: ConnectionManager, _listener: &Listener, server: SocketAddr) -> Result<()> {
    match failure(manager, server, Duration::from_millis(300))? {
        CmError::TimedOut {
            call: "rdma_connect", ..
        } => {}
        other => bail!("{other:?}"),
    }
    let route = manager.resolve(server, TIMEOUT)?;
    let Prepared { qp, .. } = prepare(&route.context()?, route.port(), 1)?;
    match route.connect(qp, &[0; MAX_CONNECT_DATA + 1], TIMEOUT) {
        Err(CmError::PrivateData { len: 57, max: 56, .. }) => Ok(()),
        other => bail!("{other:?}"),
    }
}

fn refused(manager: ConnectionManager, server: SocketAddr) -> Result<()> {
    match failure(manager, server, TIMEOUT)? {
        CmError::Rejected {
            reason: Rejection::NoListener,
            ..
        } => Ok(()),
        other => bail!("{other:?}"),
    }
}

/// A documentation address that no host has (RFC 5737); and a source address that is not ours.
fn unreachable(manager: ConnectionManager) -> Result<()> {
    let absent: SocketAddr = "192.0.2.1:7471".parse()?;
    for result in [
        manager.resolve(absent, Duration::from_secs(1)),
        manager.resolve_from(absent, absent, Duration::from_secs(1)),
    ] {
        match result {
            Ok(route) => bail!("{absent} was found: {route:?}"),
            Err(error) => println!("{error}"),
        }
    }
    Ok(())
}
