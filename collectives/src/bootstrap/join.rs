//! How a rank joins its group: it registers at the rendezvous, receives the table of all ranks, and
//! connects to each (`peers.rs`).
//!
//! It confirms that it was accepted: until then its connection may be lost, and it registers
//! again. Behind that, and until all are connected to each other, the rendezvous takes the end of
//! its connection for its own end, and notifies the others.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::thread;
use std::time::Duration;

use doorbell_rendezvous::{
    Connection, Deadline, HelloListener, Nonce, ReceiveError, Secret, connect, describe, random, readable,
};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};

use super::error::BootstrapError;
use super::peers::{PeerStreams, connect_peers};
use super::rendezvous::ended_error;
use super::wire::{BootstrapMessage, Entry, MAX_RANKS, PROTOCOL, Registration, SEND_TIMEOUT};
use super::{Member, Options, keep_alive};
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
/// How long a rank that has lost a peer waits for the rendezvous to say which rank has ended.
const VERDICT_TIMEOUT: Duration = Duration::from_millis(500);

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
    // When its time has passed, it names the ranks that are missing: a little later than this
    // rank's time.
    let answer = Deadline::after(options.timeout.saturating_add(ANSWER));
    let table = match rendezvous.receive(answer)? {
        BootstrapMessage::Table(table) if table.len() == ranks as usize => table,
        other => return Err(rendezvous.lost(unexpected(Ok(other)))),
    };
    let streams = connect_peers(listener, &mut rendezvous, request, &table, options.timeout, deadline)?;
    // Where that fails, the rendezvous has said why, or has ended.
    let _ = BootstrapMessage::Connected.send(&mut rendezvous.connection);
    match rendezvous.receive(answer)? {
        BootstrapMessage::Accept => Ok(streams),
        other => Err(rendezvous.lost(unexpected(Ok(other)))),
    }
}

/// The connection to the rendezvous, which this rank keeps until all are connected to each other:
/// it learns from it that another has ended.
#[derive(Debug)]
pub(super) struct JoinedRendezvous {
    connection: Connection,
    by: SocketAddr,
    rank: Rank,
}

impl JoinedRendezvous {
    /// Readable when it says that there will be no group, or has ended.
    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.stream().as_fd()
    }

    fn lost(&self, reason: String) -> BootstrapError {
        lost(self.rank, format!("the rendezvous at {}", self.by), reason)
    }

    /// A message that does not end the rendezvous.
    fn receive(&mut self, deadline: Deadline) -> Result<BootstrapMessage, BootstrapError> {
        let message = BootstrapMessage::receive(&mut self.connection, deadline);
        let message = message.map_err(|e| self.lost(e.to_string()))?;
        refusal(message, self.by, self.rank)
    }

    /// What it said, or its end.
    pub(super) fn failure(&mut self) -> BootstrapError {
        match self.receive(Deadline::after(SEND_TIMEOUT)) {
            Ok(other) => self.lost(unexpected(Ok(other))),
            Err(failure) => failure,
        }
    }

    /// Waits until a peer has sent something.
    pub(super) fn wait_for(&mut self, peer: &TcpStream, deadline: Deadline) -> Result<(), BootstrapError> {
        loop {
            let mut fds = [self.as_fd(), peer.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
            match poll(&mut fds, deadline.poll_timeout()) {
                Ok(0) if !deadline.has_passed() => {}
                Err(Errno::EINTR) => {}
                Ok(_) if fds[0].any().unwrap_or(true) => return Err(self.failure()),
                Ok(_) => return Ok(()),
                Err(errno) => return Err(BootstrapError::system("wait for another rank")(errno.into())),
            }
        }
    }

    /// Why a peer was lost: another rank may have ended, of which the peer has learned first.
    pub(super) fn cause(&mut self, lost: BootstrapError) -> BootstrapError {
        match readable(self.as_fd(), Deadline::after(VERDICT_TIMEOUT)) {
            Ok(true) => match self.failure() {
                ended @ BootstrapError::Ended { .. } => ended,
                _ => lost,
            },
            _ => lost,
        }
    }
}

/// The message, unless it says that this rank is in no group.
fn refusal(message: BootstrapMessage, by: SocketAddr, rank: Rank) -> Result<BootstrapMessage, BootstrapError> {
    match message {
        BootstrapMessage::Reject(reason) => Err(BootstrapError::Refused { by, rank, reason }),
        BootstrapMessage::Ended(rank, member) => Err(ended_error((rank, member))),
        other => Ok(other),
    }
}

pub(super) fn lost(rank: Rank, peer: String, reason: String) -> BootstrapError {
    BootstrapError::Lost { rank, peer, reason }
}

pub(super) fn unexpected(received: Result<BootstrapMessage, ReceiveError>) -> String {
    received.map_or_else(|e| e.to_string(), |_| "it talks nonsense".to_owned())
}

enum Attempt {
    Joined(Box<(HelloListener, JoinedRendezvous)>),
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
) -> Result<(HelloListener, JoinedRendezvous), BootstrapError> {
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
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused && options.rendezvous_is_open => {
            return Attempt::Failed(BootstrapError::Closed {
                by: candidate,
                rank: request.rank,
            });
        }
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
) -> Result<Result<(HelloListener, JoinedRendezvous), BootstrapError>, ReceiveError> {
    let &JoinRequest { secret, rank, ranks } = request;
    keep_alive(&stream)?;
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
    Ok(match refusal(answer, by, rank) {
        Ok(BootstrapMessage::Accept) => {
            BootstrapMessage::Confirm.send(&mut connection)?;
            Ok((listener, JoinedRendezvous { connection, by, rank }))
        }
        Ok(other) => Err(lost(rank, format!("the rendezvous at {by}"), unexpected(Ok(other)))),
        Err(refused) => Err(refused),
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
