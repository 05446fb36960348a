//! How a rank joins its group: it registers at the rendezvous, receives the table of all ranks, and
//! connects to each.
//!
//! Each pair has one connection, from the lower to the higher rank. A rank first connects to all
//! higher ranks and sends its hello, then accepts all lower ranks, and reads the replies last, so
//! that no cycle of waits can form.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use super::error::{BootstrapError, in_words};
use super::id::Nonce;
use super::listener::{Accepted, HelloListener, describe_io_error, receive_message, send_message};
use super::wire::{BootstrapMessage, Entry, MAX_RANKS};
use super::{Member, Options};
use crate::types::Rank;

const RETRY_INTERVAL: Duration = Duration::from_millis(20);
/// Timeout per candidate address, if there are several, with the rendezvous' reply.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, Debug)]
pub(super) struct JoinRequest {
    pub(super) nonce: Nonce,
    pub(super) rank: Rank,
    pub(super) ranks: u32,
}

/// All members and the connections to them; `None` for this rank.
#[derive(Debug)]
pub(super) struct PeerStreams {
    pub(super) members: Vec<Member>,
    pub(super) streams: Vec<Option<TcpStream>>,
}

pub(super) fn resolve(host: &str, port: u16) -> Result<Vec<SocketAddr>, BootstrapError> {
    let failed = |source| BootstrapError::Resolve {
        host: host.to_owned(),
        source,
    };
    let found: Vec<_> = (host, port).to_socket_addrs().map_err(failed)?.collect();
    if found.is_empty() {
        return Err(failed(io::Error::new(io::ErrorKind::NotFound, "it has no address")));
    }
    Ok(found)
}

pub(super) fn join(
    candidates: &[SocketAddr],
    request: JoinRequest,
    options: &Options,
) -> Result<PeerStreams, BootstrapError> {
    let JoinRequest { rank, ranks, .. } = request;
    if ranks == 0 || ranks > MAX_RANKS || rank.0 >= ranks {
        return Err(BootstrapError::Rank { rank, ranks });
    }
    let deadline = Instant::now() + options.timeout;
    let (listener, stream) = find_rendezvous(candidates, request, options, deadline)?;
    let by = stream
        .peer_addr()
        .map_err(BootstrapError::system("get the rendezvous' address"))?;
    let table = match receive_message(&stream, deadline) {
        Ok(BootstrapMessage::Table(table)) if table.len() == ranks as usize => table,
        Ok(BootstrapMessage::Reject(reason)) => return Err(BootstrapError::Refused { by, rank, reason }),
        Ok(_) => {
            return Err(lost(
                rank,
                format!("the rendezvous at {by}"),
                "it talks nonsense".to_owned(),
            ));
        }
        Err(e) => return Err(lost(rank, format!("the rendezvous at {by}"), describe_io_error(&e))),
    };
    drop(stream);
    connect_mesh(listener, request, &table, options.timeout, deadline)
}

fn lost(rank: Rank, peer: String, reason: String) -> BootstrapError {
    BootstrapError::Lost { rank, peer, reason }
}

enum Attempt {
    Joined(HelloListener, TcpStream),
    Retry(String),
    WrongGroup,
    Failed(BootstrapError),
}

/// The rendezvous may not be open yet, and a candidate may belong to another group.
fn find_rendezvous(
    candidates: &[SocketAddr],
    request: JoinRequest,
    options: &Options,
    deadline: Instant,
) -> Result<(HelloListener, TcpStream), BootstrapError> {
    let mut last = "there is no address to connect to".to_owned();
    let JoinRequest { rank, .. } = request;
    loop {
        for candidate in candidates {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = if candidates.len() > 1 {
                left.min(CONNECT_TIMEOUT)
            } else {
                left
            };
            if !timeout.is_zero() {
                match try_rendezvous(*candidate, request, options, timeout) {
                    Attempt::Joined(listener, stream) => return Ok((listener, stream)),
                    Attempt::Retry(why) => last = why,
                    Attempt::WrongGroup if candidates.len() == 1 => {
                        let reason = "this is another group's rendezvous: the nonces differ".to_owned();
                        return Err(BootstrapError::Refused {
                            by: *candidate,
                            rank,
                            reason,
                        });
                    }
                    Attempt::WrongGroup => {
                        last = format!("{candidate} is another group's rendezvous: the nonces differ")
                    }
                    Attempt::Failed(error) => return Err(error),
                }
            }
        }
        if Instant::now() + RETRY_INTERVAL >= deadline {
            let address = candidates
                .iter()
                .map(SocketAddr::to_string)
                .collect::<Vec<_>>()
                .join(", ");
            return Err(BootstrapError::NoRendezvous {
                rank,
                address,
                within: options.timeout,
                last,
            });
        }
        thread::sleep(RETRY_INTERVAL);
    }
}

fn try_rendezvous(candidate: SocketAddr, request: JoinRequest, options: &Options, timeout: Duration) -> Attempt {
    let JoinRequest { nonce, rank, ranks } = request;
    let until = Instant::now() + timeout;
    let stream = match TcpStream::connect_timeout(&candidate, timeout) {
        Ok(stream) => stream,
        Err(e) => return Attempt::Retry(e.to_string()),
    };
    // A connection to a local ephemeral port can connect to itself (TCP simultaneous open).
    if stream.local_addr().ok() == Some(candidate) {
        return Attempt::Retry("nothing listens there".to_owned());
    }
    let listener = match listen_for_peers(&stream, options.bind, ranks) {
        Ok(listener) => listener,
        Err(e) => return Attempt::Failed(e),
    };
    let entry = Entry {
        listen_addr: listener.address(),
        member: Member::this(),
    };
    let register = BootstrapMessage::Register {
        nonce,
        rank,
        ranks,
        entry,
    };
    match send_message(&stream, &register).and_then(|()| receive_message(&stream, until)) {
        Ok(BootstrapMessage::Accept) => Attempt::Joined(listener, stream),
        Ok(BootstrapMessage::Reject(reason)) => Attempt::Failed(BootstrapError::Refused {
            by: candidate,
            rank,
            reason,
        }),
        Ok(BootstrapMessage::WrongGroup) => Attempt::WrongGroup,
        Ok(_) => Attempt::Retry(format!("{candidate} sent an unexpected message")),
        Err(e) => Attempt::Retry(format!("{candidate}: {}", describe_io_error(&e))),
    }
}

/// Listens on the address that the rendezvous sees unless `bind` names another.
fn listen_for_peers(stream: &TcpStream, bind: Option<IpAddr>, ranks: u32) -> Result<HelloListener, BootstrapError> {
    let seen = stream
        .local_addr()
        .map_err(BootstrapError::system("get the address of a socket"))?;
    let mut address = seen;
    address.set_ip(bind.unwrap_or(seen.ip()));
    address.set_port(0);
    HelloListener::bind(address, ranks).map_err(|source| BootstrapError::Listen {
        address: address.ip().to_string(),
        source,
    })
}

fn connect_mesh(
    mut listener: HelloListener,
    request: JoinRequest,
    table: &[Entry],
    within: Duration,
    deadline: Instant,
) -> Result<PeerStreams, BootstrapError> {
    let JoinRequest { nonce, rank, .. } = request;
    let named = |other: Rank| format!("rank {other} ({})", table[other.index()].member);
    let mut streams: Vec<Option<TcpStream>> = table.iter().map(|_| None).collect();
    let above = || (rank.0 + 1..table.len() as u32).map(Rank);
    for other in above() {
        let left = deadline
            .saturating_duration_since(Instant::now())
            .max(Duration::from_millis(1));
        let hello = BootstrapMessage::Connect {
            nonce,
            from: rank,
            to: other,
        };
        let connected = TcpStream::connect_timeout(&table[other.index()].listen_addr, left).and_then(|stream| {
            stream
                .set_nodelay(true)
                .and_then(|()| send_message(&stream, &hello))
                .map(|()| stream)
        });
        streams[other.index()] = Some(connected.map_err(|e| lost(rank, named(other), describe_io_error(&e)))?);
    }
    while streams[..rank.index()].iter().any(Option::is_none) {
        let Some(accepted) = listener
            .next_hello(deadline, None)
            .map_err(BootstrapError::system("wait for the other ranks"))?
        else {
            let absent = (0..rank.0).map(Rank).filter(|other| streams[other.index()].is_none());
            return Err(BootstrapError::Missing {
                missing: in_words(&absent.collect::<Vec<_>>()),
                ranks: request.ranks,
                within,
                turned_away: String::new(),
            });
        };
        match validate_connect(&accepted, request, &streams) {
            Ok(other) => match send_message(&accepted.stream, &BootstrapMessage::Accept) {
                Ok(()) => streams[other.index()] = Some(accepted.stream),
                Err(e) => return Err(lost(rank, named(other), describe_io_error(&e))),
            },
            Err(answer) => {
                tracing::warn!(
                    "rank {rank}, at {}: turned {} away",
                    listener.address(),
                    accepted.peer_addr
                );
                // Best effort: the peer may be gone.
                let _ = send_message(&accepted.stream, &answer);
            }
        }
    }
    for other in above() {
        if let Some(stream) = &streams[other.index()] {
            match receive_message(stream, deadline) {
                Ok(BootstrapMessage::Accept) => {}
                Ok(BootstrapMessage::Reject(reason)) => {
                    let by = table[other.index()].listen_addr;
                    return Err(BootstrapError::Refused { by, rank, reason });
                }
                Ok(_) => return Err(lost(rank, named(other), "it talks nonsense".to_owned())),
                Err(e) => return Err(lost(rank, named(other), describe_io_error(&e))),
            }
        }
    }
    Ok(PeerStreams {
        members: table.iter().map(|entry| entry.member.clone()).collect(),
        streams,
    })
}

/// The rank of an accepted connection, or the reply that rejects it.
fn validate_connect(
    accepted: &Accepted,
    request: JoinRequest,
    streams: &[Option<TcpStream>],
) -> Result<Rank, BootstrapMessage> {
    match &accepted.hello {
        Ok(BootstrapMessage::Connect { nonce, .. }) if *nonce != request.nonce => Err(BootstrapMessage::WrongGroup),
        Ok(BootstrapMessage::Connect { from, to, .. })
            if *to == request.rank && *from < *to && streams[from.index()].is_none() =>
        {
            Ok(*from)
        }
        Ok(BootstrapMessage::Connect { from, to, .. }) => Err(BootstrapMessage::Reject(format!(
            "rank {} expects no connection from rank {from} to rank {to}",
            request.rank
        ))),
        Ok(_) => Err(BootstrapMessage::Reject("a rank is no rendezvous".to_owned())),
        Err(why) => Err(BootstrapMessage::Reject((*why).to_owned())),
    }
}
