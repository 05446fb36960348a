//! How a rank joins its group: it registers at the rendezvous, receives the table of all ranks, and
//! connects to each.
//!
//! Each pair has one connection, from the lower to the higher rank. A rank first connects to all
//! higher ranks and sends its hello, then accepts all lower ranks, and reads the replies last, so
//! that no cycle of waits can form: the server's nonces of the handshakes are in the table.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::Duration;

use doorbell_rendezvous::{
    Connection, Deadline, Hello, HelloListener, Nonce, ReceiveError, Secret, connect, describe, random,
};

use super::error::{BootstrapError, in_words};
use super::wire::{BootstrapMessage, Entry, MAX_RANKS, PROTOCOL, Registration};
use super::{Member, Options};
use crate::types::Rank;

const RETRY_INTERVAL: Duration = Duration::from_millis(20);
/// Timeout per candidate address, if there are several, with the rendezvous' reply.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, Debug)]
pub(super) struct JoinRequest {
    pub(super) secret: Secret,
    pub(super) rank: Rank,
    pub(super) ranks: u32,
}

/// How much longer than its own timeout a rank waits for the rendezvous' answer.
const ANSWER: Duration = Duration::from_millis(500);

/// All members and the connections to them; `None` for this rank.
#[derive(Debug)]
pub(super) struct PeerStreams {
    pub(super) members: Vec<Member>,
    pub(super) connections: Vec<Option<Connection>>,
}

pub(super) fn resolve(host: &str, port: u16) -> Result<Vec<SocketAddr>, BootstrapError> {
    let failed = |error| BootstrapError::Resolve {
        host: host.to_owned(),
        error,
    };
    let found: Vec<_> = (host, port).to_socket_addrs().map_err(failed)?.collect();
    if found.is_empty() {
        return Err(failed(io::Error::new(io::ErrorKind::NotFound, "it has no address")));
    }
    Ok(found)
}

pub(super) fn join(
    candidates: &[SocketAddr],
    request: &JoinRequest,
    options: &Options,
) -> Result<PeerStreams, BootstrapError> {
    let &JoinRequest { rank, ranks, .. } = request;
    if ranks == 0 || ranks > MAX_RANKS || rank.0 >= ranks {
        return Err(BootstrapError::Rank { rank, ranks });
    }
    let deadline = Deadline::after(options.timeout);
    let (listener, mut rendezvous) = find_rendezvous(candidates, request, options, deadline)?;
    let by = rendezvous
        .stream()
        .peer_addr()
        .map_err(BootstrapError::system("get the rendezvous' address"))?;
    // When its time has passed, it names the ranks that are missing: a little later than this
    // rank's time.
    let answer = Deadline::after(options.timeout.saturating_add(ANSWER));
    let table = match BootstrapMessage::receive(&mut rendezvous, answer) {
        Ok(BootstrapMessage::Table(table)) if table.len() == ranks as usize => table,
        Ok(BootstrapMessage::Reject(reason)) => return Err(BootstrapError::Refused { by, rank, reason }),
        other => return Err(lost(rank, format!("the rendezvous at {by}"), unexpected(other))),
    };
    drop(rendezvous);
    connect_mesh(listener, request, &table, options.timeout, deadline)
}

fn lost(rank: Rank, peer: String, reason: String) -> BootstrapError {
    BootstrapError::Lost { rank, peer, reason }
}

fn unexpected(received: Result<BootstrapMessage, ReceiveError>) -> String {
    received.map_or_else(|e| e.to_string(), |_| "it talks nonsense".to_owned())
}

enum Attempt {
    Joined(Box<(HelloListener, Connection)>),
    Retry(String),
    Unauthenticated(String),
    Failed(BootstrapError),
}

/// The rendezvous may not be open yet, and a candidate may belong to another group.
fn find_rendezvous(
    candidates: &[SocketAddr],
    request: &JoinRequest,
    options: &Options,
    deadline: Deadline,
) -> Result<(HelloListener, Connection), BootstrapError> {
    let mut last = "there is no address to connect to".to_owned();
    let mut unauthenticated = None;
    let &JoinRequest { rank, .. } = request;
    loop {
        for &by in candidates {
            let until = if candidates.len() > 1 {
                deadline.min(Deadline::after(CONNECT_TIMEOUT))
            } else {
                deadline
            };
            if !until.has_passed() {
                match try_rendezvous(by, request, options, until) {
                    Attempt::Joined(joined) => return Ok(*joined),
                    Attempt::Retry(why) => last = why,
                    Attempt::Unauthenticated(reason) if candidates.len() == 1 => {
                        return Err(BootstrapError::Unauthenticated { by, rank, reason });
                    }
                    Attempt::Unauthenticated(reason) => unauthenticated = Some((by, reason)),
                    Attempt::Failed(error) => return Err(error),
                }
            }
        }
        if deadline.remaining() <= RETRY_INTERVAL {
            if let Some((by, reason)) = unauthenticated {
                return Err(BootstrapError::Unauthenticated { by, rank, reason });
            }
            let address = candidates.iter().map(SocketAddr::to_string);
            return Err(BootstrapError::NoRendezvous {
                rank,
                address: address.collect::<Vec<_>>().join(", "),
                within: options.timeout,
                last,
            });
        }
        thread::sleep(RETRY_INTERVAL);
    }
}

fn try_rendezvous(candidate: SocketAddr, request: &JoinRequest, options: &Options, until: Deadline) -> Attempt {
    let stream = match connect(&[candidate], None, until, || false) {
        Ok((stream, _)) => stream,
        Err(e) => return Attempt::Retry(e.to_string()),
    };
    match register(stream, candidate, request, options, until) {
        Ok(Ok(joined)) => Attempt::Joined(Box::new(joined)),
        Ok(Err(error)) => Attempt::Failed(error),
        Err(ReceiveError::Io(e)) => Attempt::Retry(format!("{candidate}: {}", describe(&e))),
        Err(e) => Attempt::Unauthenticated(e.to_string()),
    }
}

/// Registers at a server that may not be this group's: what it sends counts once it proves the
/// secret.
fn register(
    stream: TcpStream,
    by: SocketAddr,
    request: &JoinRequest,
    options: &Options,
    until: Deadline,
) -> Result<Result<(HelloListener, Connection), BootstrapError>, ReceiveError> {
    let &JoinRequest { secret, rank, ranks } = request;
    let nonce = random()?;
    let listener = match listen_for_peers(&stream, options.bind, request, nonce) {
        Ok(listener) => listener,
        Err(error) => return Ok(Err(error)),
    };
    let entry = Entry {
        listen_addr: listener.address(),
        nonce,
        member: Member::this(),
    };
    let hello = Registration { ranks, entry }.hello(rank);
    let mut connection = Connection::greet(stream, &PROTOCOL, &secret, &hello, None, until)?;
    let answer = BootstrapMessage::receive(&mut connection, until)?;
    Ok(match answer {
        BootstrapMessage::Accept => Ok((listener, connection)),
        BootstrapMessage::Reject(reason) => Err(BootstrapError::Refused { by, rank, reason }),
        other => Err(lost(rank, format!("the rendezvous at {by}"), unexpected(Ok(other)))),
    })
}

/// Listens on the address that the rendezvous sees unless `bind` names another.
fn listen_for_peers(
    stream: &TcpStream,
    bind: Option<IpAddr>,
    request: &JoinRequest,
    nonce: Nonce,
) -> Result<HelloListener, BootstrapError> {
    let seen = stream
        .local_addr()
        .map_err(BootstrapError::system("get the address of a socket"))?;
    let mut address = seen;
    address.set_ip(bind.unwrap_or(seen.ip()));
    address.set_port(0);
    let JoinRequest { secret, ranks, .. } = *request;
    TcpListener::bind(address)
        .and_then(|listener| HelloListener::new(listener, ranks, &PROTOCOL, secret, Some(nonce)))
        .map_err(|error| BootstrapError::Listen {
            address: address.ip().to_string(),
            error,
        })
}

fn connect_mesh(
    mut listener: HelloListener,
    request: &JoinRequest,
    table: &[Entry],
    within: Duration,
    deadline: Deadline,
) -> Result<PeerStreams, BootstrapError> {
    let &JoinRequest { secret, rank, ranks } = request;
    let named = |other: Rank| format!("rank {other} ({})", table[other.index()].member);
    let mut connections: Vec<Option<Connection>> = table.iter().map(|_| None).collect();
    let above = || (rank.0 + 1..table.len() as u32).map(Rank);
    for other in above() {
        let connected = connect_to(&table[other.index()], &secret, (rank, other), deadline);
        connections[other.index()] = Some(connected.map_err(|e| lost(rank, named(other), e.to_string()))?);
    }
    let mut turned_away = String::new();
    while connections[..rank.index()].iter().any(Option::is_none) {
        let accepted = listener
            .next(deadline, None)
            .map_err(BootstrapError::system("wait for the other ranks"))?;
        match accepted {
            Some((peer, Ok((hello, mut connection)))) => match validate_connect(&hello, rank, &connections) {
                Ok(other) => match BootstrapMessage::Accept.send(&mut connection) {
                    Ok(()) => connections[other.index()] = Some(connection),
                    Err(e) => return Err(lost(rank, named(other), describe(&e))),
                },
                Err(reason) => {
                    tracing::warn!("rank {rank}: turned {peer} away: {reason}");
                    // Best effort: the peer may be gone.
                    let _ = BootstrapMessage::Reject(reason).send(&mut connection);
                }
            },
            Some((peer, Err(reason))) => {
                tracing::warn!("rank {rank}: turned {peer} away: {reason}");
                turned_away = format!("; {peer} was turned away: {reason}");
            }
            None => {
                let absent = (0..rank.0)
                    .map(Rank)
                    .filter(|other| connections[other.index()].is_none());
                return Err(BootstrapError::Missing {
                    missing: in_words(&absent.collect::<Vec<_>>()),
                    ranks,
                    within,
                    turned_away,
                });
            }
        }
    }
    for other in above() {
        if let Some(connection) = &mut connections[other.index()] {
            match BootstrapMessage::receive(connection, deadline) {
                Ok(BootstrapMessage::Accept) => {}
                Ok(BootstrapMessage::Reject(reason)) => {
                    let by = table[other.index()].listen_addr;
                    return Err(BootstrapError::Refused { by, rank, reason });
                }
                answer => return Err(lost(rank, named(other), unexpected(answer))),
            }
        }
    }
    Ok(PeerStreams {
        members: table.iter().map(|entry| entry.member.clone()).collect(),
        connections,
    })
}

/// Connects to a member, with the hello of this pair of ranks.
fn connect_to(
    member: &Entry,
    secret: &Secret,
    (from, to): (Rank, Rank),
    deadline: Deadline,
) -> Result<Connection, ReceiveError> {
    let (stream, _) = connect(&[member.listen_addr], None, deadline, || false)?;
    let hello = Hello {
        client: from.0,
        server: to.0,
        nonce: random()?,
        payload: Vec::new(),
    };
    Connection::greet(stream, &PROTOCOL, secret, &hello, Some(member.nonce), deadline)
}

/// The rank of an accepted connection, or why it is rejected.
fn validate_connect(hello: &Hello, rank: Rank, connections: &[Option<Connection>]) -> Result<Rank, String> {
    let (from, to) = (Rank(hello.client), Rank(hello.server));
    if to == rank && from < to && connections[from.index()].is_none() {
        return Ok(from);
    }
    Err(format!(
        "rank {rank} expects no connection from rank {from} to rank {to}"
    ))
}
