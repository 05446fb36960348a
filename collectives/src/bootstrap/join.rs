//! How a rank comes into its group: to the rendezvous, and then to every other rank.
//!
//! A rank opens a door of its own, goes to the rendezvous, and gets the table of all. Each pair of ranks then has one connection, from the lower to the higher. A rank first connects to all above it and writes who it is,
//! then lets in all below it, and hears the answers last: nobody waits for anybody who waits for it.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use super::door::{Door, Guest, hear, say, told};
use super::error::{BootstrapError, in_words};
use super::id::Nonce;
use super::wire::{Entry, Letter, MAX_RANKS};
use super::{Member, Options};
use crate::types::Rank;

/// How long before a place is tried again where nobody was.
const RETRY: Duration = Duration::from_millis(20);
/// How long one of several places has to take a connection, and to say whether it is this group's.
const TRY: Duration = Duration::from_secs(2);

/// Who comes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrival {
    pub(super) nonce: Nonce,
    pub(super) rank: Rank,
    pub(super) ranks: u32,
}

/// All members, and the connections to them; none to this rank itself.
#[derive(Debug)]
pub(super) struct Links {
    pub(super) members: Vec<Member>,
    pub(super) streams: Vec<Option<TcpStream>>,
}

/// The addresses of a place.
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

/// Comes to the rendezvous at one of `places`, and then to all others.
pub(super) fn join(places: &[SocketAddr], arrival: Arrival, options: &Options) -> Result<Links, BootstrapError> {
    let Arrival { rank, ranks, .. } = arrival;
    if ranks == 0 || ranks > MAX_RANKS || rank.0 >= ranks {
        return Err(BootstrapError::Rank { rank, ranks });
    }
    let deadline = Instant::now() + options.patience;
    let (door, stream) = find(places, arrival, options, deadline)?;
    let by = stream
        .peer_addr()
        .map_err(BootstrapError::system("ask for the rendezvous' address"))?;
    let table = match hear(&stream, deadline) {
        Ok(Letter::Table(table)) if table.len() == ranks as usize => table,
        Ok(Letter::Refused(reason)) => return Err(BootstrapError::Refused { by, rank, reason }),
        Ok(_) => {
            return Err(lost(
                rank,
                format!("the rendezvous at {by}"),
                "it talks nonsense".to_owned(),
            ));
        }
        Err(e) => return Err(lost(rank, format!("the rendezvous at {by}"), told(&e))),
    };
    drop(stream);
    meet(door, arrival, &table, options.patience, deadline)
}

fn lost(rank: Rank, peer: String, reason: String) -> BootstrapError {
    BootstrapError::Lost { rank, peer, reason }
}

/// What came of an attempt at a place.
enum Attempt {
    Welcome(Door, TcpStream),
    /// Another place, or another time.
    Not(String),
    /// The rendezvous of another group.
    Stranger,
    Failed(BootstrapError),
}

/// Finds the rendezvous of this group: it may not be open yet, and at a place that is only likely there may be another.
fn find(
    places: &[SocketAddr],
    arrival: Arrival,
    options: &Options,
    deadline: Instant,
) -> Result<(Door, TcpStream), BootstrapError> {
    let mut last = "there is no address to look at".to_owned();
    let Arrival { rank, .. } = arrival;
    loop {
        for place in places {
            let left = deadline.saturating_duration_since(Instant::now());
            let patience = if places.len() > 1 { left.min(TRY) } else { left };
            if !patience.is_zero() {
                match attempt(*place, arrival, options, patience) {
                    Attempt::Welcome(door, stream) => return Ok((door, stream)),
                    Attempt::Not(why) => last = why,
                    Attempt::Stranger if places.len() == 1 => {
                        let reason = "this is another group's rendezvous: the nonces differ".to_owned();
                        return Err(BootstrapError::Refused {
                            by: *place,
                            rank,
                            reason,
                        });
                    }
                    Attempt::Stranger => last = format!("{place} is another group's rendezvous: the nonces differ"),
                    Attempt::Failed(error) => return Err(error),
                }
            }
        }
        if Instant::now() + RETRY >= deadline {
            let address = places.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(", ");
            return Err(BootstrapError::NoRendezvous {
                rank,
                address,
                within: options.patience,
                last,
            });
        }
        thread::sleep(RETRY);
    }
}

fn attempt(place: SocketAddr, arrival: Arrival, options: &Options, patience: Duration) -> Attempt {
    let Arrival { nonce, rank, ranks } = arrival;
    let until = Instant::now() + patience;
    let stream = match TcpStream::connect_timeout(&place, patience) {
        Ok(stream) => stream,
        Err(e) => return Attempt::Not(e.to_string()),
    };
    // A connection to a port of one's own choosing can meet itself: TCP calls it a simultaneous open.
    if stream.local_addr().ok() == Some(place) {
        return Attempt::Not("nobody listens there".to_owned());
    }
    let door = match own_door(&stream, options.bind, ranks) {
        Ok(door) => door,
        Err(e) => return Attempt::Failed(e),
    };
    let entry = Entry {
        listens: door.address(),
        member: Member::this(),
    };
    let come = Letter::Come {
        nonce,
        rank,
        ranks,
        entry,
    };
    match say(&stream, &come).and_then(|()| hear(&stream, until)) {
        Ok(Letter::Welcome) => Attempt::Welcome(door, stream),
        Ok(Letter::Refused(reason)) => Attempt::Failed(BootstrapError::Refused {
            by: place,
            rank,
            reason,
        }),
        Ok(Letter::Stranger) => Attempt::Stranger,
        Ok(_) => Attempt::Not(format!("{place} talks nonsense")),
        Err(e) => Attempt::Not(format!("{place}: {}", told(&e))),
    }
}

/// The door for the other ranks: where the rendezvous sees this process from, if it was not told otherwise.
fn own_door(stream: &TcpStream, bind: Option<IpAddr>, ranks: u32) -> Result<Door, BootstrapError> {
    let seen = stream
        .local_addr()
        .map_err(BootstrapError::system("ask for a socket's address"))?;
    let mut address = seen;
    address.set_ip(bind.unwrap_or(seen.ip()));
    address.set_port(0);
    Door::open(address, ranks).map_err(|source| BootstrapError::Listen {
        address: address.ip().to_string(),
        source,
    })
}

/// Connects with all in the table.
fn meet(
    mut door: Door,
    arrival: Arrival,
    table: &[Entry],
    within: Duration,
    deadline: Instant,
) -> Result<Links, BootstrapError> {
    let Arrival { nonce, rank, .. } = arrival;
    let named = |other: Rank| format!("rank {other} ({})", table[other.index()].member);
    let mut streams: Vec<Option<TcpStream>> = table.iter().map(|_| None).collect();
    let above = || (rank.0 + 1..table.len() as u32).map(Rank);
    for other in above() {
        let left = deadline
            .saturating_duration_since(Instant::now())
            .max(Duration::from_millis(1));
        let hello = Letter::Link {
            nonce,
            from: rank,
            to: other,
        };
        let connected = TcpStream::connect_timeout(&table[other.index()].listens, left).and_then(|stream| {
            stream
                .set_nodelay(true)
                .and_then(|()| say(&stream, &hello))
                .map(|()| stream)
        });
        streams[other.index()] = Some(connected.map_err(|e| lost(rank, named(other), told(&e)))?);
    }
    while streams[..rank.index()].iter().any(Option::is_none) {
        let Some(guest) = door
            .next(deadline, None)
            .map_err(BootstrapError::system("wait for the other ranks"))?
        else {
            let absent = (0..rank.0).map(Rank).filter(|other| streams[other.index()].is_none());
            return Err(BootstrapError::Missing {
                missing: in_words(&absent.collect::<Vec<_>>()),
                ranks: arrival.ranks,
                within,
                turned_away: String::new(),
            });
        };
        match welcome(&guest, arrival, &streams) {
            Ok(other) => match say(&guest.stream, &Letter::Welcome) {
                Ok(()) => streams[other.index()] = Some(guest.stream),
                Err(e) => return Err(lost(rank, named(other), told(&e))),
            },
            Err(answer) => {
                tracing::warn!("rank {rank}, at {}: turned {} away", door.address(), guest.from);
                // A courtesy: whoever it is may be gone.
                let _ = say(&guest.stream, &answer);
            }
        }
    }
    for other in above() {
        if let Some(stream) = &streams[other.index()] {
            match hear(stream, deadline) {
                Ok(Letter::Welcome) => {}
                Ok(Letter::Refused(reason)) => {
                    let by = table[other.index()].listens;
                    return Err(BootstrapError::Refused { by, rank, reason });
                }
                Ok(_) => return Err(lost(rank, named(other), "it talks nonsense".to_owned())),
                Err(e) => return Err(lost(rank, named(other), told(&e))),
            }
        }
    }
    Ok(Links {
        members: table.iter().map(|entry| entry.member.clone()).collect(),
        streams,
    })
}

/// Which rank a guest is, or what it is told if it is none.
fn welcome(guest: &Guest, arrival: Arrival, streams: &[Option<TcpStream>]) -> Result<Rank, Letter> {
    match &guest.said {
        Ok(Letter::Link { nonce, .. }) if *nonce != arrival.nonce => Err(Letter::Stranger),
        Ok(Letter::Link { from, to, .. }) if *to == arrival.rank && *from < *to && streams[from.index()].is_none() => {
            Ok(*from)
        }
        Ok(Letter::Link { from, to, .. }) => Err(Letter::Refused(format!(
            "rank {} expects no connection from rank {from} to rank {to}",
            arrival.rank
        ))),
        Ok(_) => Err(Letter::Refused("a rank is no rendezvous".to_owned())),
        Err(why) => Err(Letter::Refused((*why).to_owned())),
    }
}
