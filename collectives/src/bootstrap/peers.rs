//! How the ranks that have the table connect to each other.
//!
//! Each pair has one connection, from the lower to the higher rank. A rank first connects to all
//! higher ranks and sends its hello, then accepts all lower ranks, and reads the replies last, so
//! that no cycle of waits can form: the server's nonces of the handshakes are in the table. While
//! it waits, the rendezvous reports a rank that has ended.

use std::net::SocketAddr;
use std::time::Duration;

use doorbell_rendezvous::{
    Connection, Deadline, Hello, HelloListener, ReceiveError, Secret, connect, describe, random,
};

use super::Member;
use super::error::{BootstrapError, in_words};
use super::join::{JoinRequest, JoinedRendezvous, lost, unexpected};
use super::wire::{BootstrapMessage, Entry, PROTOCOL};
use crate::types::Rank;

/// All members and the connections to them; `None` for this rank.
#[derive(Debug)]
pub(super) struct PeerStreams {
    pub(super) members: Vec<Member>,
    pub(super) connections: Vec<Option<Connection>>,
}

/// The connections of a rank to the others, as far as they exist.
struct Peers<'a> {
    request: &'a JoinRequest,
    table: &'a [Entry],
    connections: Vec<Option<Connection>>,
    turned_away: String,
}

pub(super) fn connect_peers(
    listener: HelloListener,
    rendezvous: &mut JoinedRendezvous,
    request: &JoinRequest,
    table: &[Entry],
    within: Duration,
    deadline: Deadline,
) -> Result<PeerStreams, BootstrapError> {
    let mut peers = Peers {
        request,
        table,
        connections: table.iter().map(|_| None).collect(),
        turned_away: String::new(),
    };
    peers.connect(rendezvous, deadline)?;
    peers.accept(listener, rendezvous, within, deadline)?;
    peers.receive_replies(rendezvous, deadline)?;
    Ok(PeerStreams {
        members: table.iter().map(|entry| entry.member.clone()).collect(),
        connections: peers.connections,
    })
}

impl Peers<'_> {
    fn above(&self) -> impl Iterator<Item = Rank> + use<> {
        (self.request.rank.0 + 1..self.table.len() as u32).map(Rank)
    }

    fn lost(&self, other: Rank, reason: String) -> BootstrapError {
        let member = &self.table[other.index()].member;
        lost(self.request.rank, format!("rank {other} ({member})"), reason)
    }

    fn connect(&mut self, rendezvous: &mut JoinedRendezvous, deadline: Deadline) -> Result<(), BootstrapError> {
        let &JoinRequest { secret, rank, .. } = self.request;
        for other in self.above() {
            let connected = connect_to(&self.table[other.index()], &secret, (rank, other), deadline);
            let connected = connected.map_err(|e| rendezvous.cause(self.lost(other, e.to_string())))?;
            self.connections[other.index()] = Some(connected);
        }
        Ok(())
    }

    fn accept(
        &mut self,
        mut listener: HelloListener,
        rendezvous: &mut JoinedRendezvous,
        within: Duration,
        deadline: Deadline,
    ) -> Result<(), BootstrapError> {
        let &JoinRequest { rank, ranks, .. } = self.request;
        let absent = |connections: &[Option<Connection>]| -> Vec<Rank> {
            let absent = (0..rank.0).map(Rank);
            absent.filter(|other| connections[other.index()].is_none()).collect()
        };
        while let missing @ [_, ..] = &absent(&self.connections)[..] {
            let accepted = listener
                .next(deadline, Some(rendezvous.as_fd()))
                .map_err(BootstrapError::system("wait for the other ranks"))?;
            match accepted {
                Some((peer, Ok((hello, connection)))) => self.admit(peer, &hello, connection, rendezvous)?,
                Some((peer, Err(reason))) => {
                    tracing::warn!("rank {rank}: turned {peer} away: {reason}");
                    self.turned_away = format!("; {peer} was turned away: {reason}");
                }
                None if deadline.has_passed() => {
                    return Err(BootstrapError::Missing {
                        missing: in_words(missing),
                        ranks,
                        within,
                        turned_away: std::mem::take(&mut self.turned_away),
                    });
                }
                None => return Err(rendezvous.failure()),
            }
        }
        Ok(())
    }

    fn admit(
        &mut self,
        peer: SocketAddr,
        hello: &Hello,
        mut connection: Connection,
        rendezvous: &mut JoinedRendezvous,
    ) -> Result<(), BootstrapError> {
        let rank = self.request.rank;
        match validate_connect(hello, rank, &self.connections) {
            Ok(other) => match BootstrapMessage::Accept.send(&mut connection) {
                Ok(()) => self.connections[other.index()] = Some(connection),
                Err(e) => return Err(rendezvous.cause(self.lost(other, describe(&e)))),
            },
            Err(reason) => {
                tracing::warn!("rank {rank}: turned {peer} away: {reason}");
                // Best effort: the peer may be gone.
                let _ = BootstrapMessage::Reject(reason).send(&mut connection);
            }
        }
        Ok(())
    }

    fn receive_replies(&mut self, rendezvous: &mut JoinedRendezvous, deadline: Deadline) -> Result<(), BootstrapError> {
        for other in self.above() {
            let Some(connection) = &mut self.connections[other.index()] else {
                continue;
            };
            rendezvous.wait_for(connection.stream(), deadline)?;
            match BootstrapMessage::receive(connection, deadline) {
                Ok(BootstrapMessage::Accept) => {}
                Ok(BootstrapMessage::Reject(reason)) => {
                    let by = self.table[other.index()].listen_addr;
                    let rank = self.request.rank;
                    return Err(BootstrapError::Refused { by, rank, reason });
                }
                answer => return Err(rendezvous.cause(self.lost(other, unexpected(answer)))),
            }
        }
        Ok(())
    }
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
