//! The rendezvous: the server at which the ranks of a group register.
//!
//! The process that makes the [`UniqueId`] listens: a launcher, or rank 0. When all ranks have
//! registered, each receives the table of all, and the rendezvous is over when all are connected to
//! each other. When one ends before, all are notified, also those that register later. A
//! connection that does not prove the group's secret, an invalid rank or a duplicate rank is
//! rejected with a reason and changes nothing.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use doorbell_rendezvous::{Connection, Deadline, Hello, HelloListener, Secret};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::error::{BootstrapError, in_words};
use super::id::UniqueId;
use super::registered::{Ended, Polled, Ranks};
use super::wire::{BootstrapMessage, Entry, MAX_RANKS, PROTOCOL, Registration};
use crate::types::Rank;

/// The rendezvous of one group.
#[derive(Debug)]
pub struct Rendezvous {
    listener: HelloListener,
    id: UniqueId,
    /// `None` until a rank says it.
    ranks: Option<u32>,
    registered: Ranks,
    failure: Option<Ended>,
    turned_away: Option<(SocketAddr, String)>,
}

impl Rendezvous {
    /// Listens on `address` for a group of `ranks`, and makes its id, with a random secret.
    ///
    /// # Errors
    /// [`BootstrapError::Listen`], [`BootstrapError::Rank`] for more than 4096 ranks or none,
    /// [`BootstrapError::System`] where there are no random numbers.
    pub fn open(address: IpAddr, ranks: u32) -> Result<Self, BootstrapError> {
        Self::open_at(SocketAddr::new(address, 0), random_secret()?, ranks)
    }

    /// The same where the number of ranks is not known yet: the first rank that registers says it.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    #[doc(alias = "ncclGetUniqueId")]
    pub fn open_for_any(address: IpAddr) -> Result<Self, BootstrapError> {
        Self::listen(SocketAddr::new(address, 0), random_secret()?, None)
    }

    /// Listens at a known address, with a secret that the ranks have already.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_at(address: SocketAddr, secret: Secret, ranks: u32) -> Result<Self, BootstrapError> {
        if !is_valid(ranks) {
            return Err(BootstrapError::Rank { rank: Rank(0), ranks });
        }
        Self::listen(address, secret, Some(ranks))
    }

    fn listen(address: SocketAddr, secret: Secret, ranks: Option<u32>) -> Result<Self, BootstrapError> {
        let listen = |error| BootstrapError::Listen {
            address: address.to_string(),
            error,
        };
        if !is_connectable(address.ip()) {
            let what = "the others need one address to connect to, and this stands for many";
            return Err(listen(io::Error::new(io::ErrorKind::InvalidInput, what)));
        }
        let listener = TcpListener::bind(address)
            .and_then(|listener| HelloListener::new(listener, ranks.unwrap_or(MAX_RANKS), &PROTOCOL, secret, None))
            .map_err(listen)?;
        let address = listener.address();
        let id = UniqueId::new(&address.ip().to_string(), address.port(), secret)
            .map_err(|e| listen(io::Error::new(io::ErrorKind::InvalidInput, e)))?;
        let mut registered = Ranks::new().map_err(BootstrapError::system("make an epoll instance"))?;
        registered.expect(ranks.unwrap_or(0));
        Ok(Self {
            listener,
            id,
            ranks,
            registered,
            failure: None,
            turned_away: None,
        })
    }

    /// The id that the ranks need to join.
    #[must_use]
    pub fn id(&self) -> &UniqueId {
        &self.id
    }

    /// Waits until all ranks have registered, sends each the table, and waits until they are
    /// connected to each other.
    ///
    /// # Errors
    /// [`BootstrapError::Missing`] when some have not done so within `timeout`; the others are
    /// informed. [`BootstrapError::Ended`] when a rank has ended, once all others know.
    /// [`BootstrapError::System`] when the socket fails.
    pub fn serve(self, timeout: Duration) -> Result<(), BootstrapError> {
        self.serve_until(timeout, None)
    }

    /// Serves in a thread.
    ///
    /// # Errors
    /// [`BootstrapError::System`] when the thread cannot be started.
    pub fn spawn(self, timeout: Duration) -> Result<RendezvousServer, BootstrapError> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let wakeup = EventFd::from_value_and_flags(0, flags)
            .map_err(io::Error::from)
            .map_err(BootstrapError::system("make an eventfd"))?;
        let wakeup = Arc::new(wakeup);
        let id = self.id.clone();
        let hears = Arc::clone(&wakeup);
        let serve = move || self.serve_until(timeout, Some(hears.as_fd()));
        let thread = doorbell_threads::spawn("rendezvous", serve).map_err(BootstrapError::system("start a thread"))?;
        Ok(RendezvousServer {
            id,
            wakeup,
            thread: Some(thread),
        })
    }

    fn serve_until(mut self, timeout: Duration, wakeup: Option<BorrowedFd<'_>>) -> Result<(), BootstrapError> {
        let deadline = Deadline::after(timeout);
        let system = || BootstrapError::system("wait for the ranks");
        let mut cancelled = false;
        if let Some(wakeup) = wakeup {
            self.registered.watch_wakeup(wakeup).map_err(system())?;
        }
        while !self.registered.are_finished() {
            let woken = self.step(deadline).map_err(system())?;
            if let Some(wakeup) = wakeup.filter(|_| woken) {
                self.registered.ignore_wakeup(wakeup).map_err(system())?;
                cancelled = true;
            }
            // When all have come, they end soon, with a group or without.
            let is_cancelled = cancelled && (self.failure.is_some() || !self.registered.have_table());
            if (is_cancelled || deadline.has_passed()) && !self.registered.are_finished() {
                return Err(self.time_out(timeout));
            }
        }
        self.failure.map_or(Ok(()), |ended| Err(ended_error(ended)))
    }

    /// Waits for a rank to come or to end. Returns whether the wake-up has ended the wait.
    fn step(&mut self, deadline: Deadline) -> io::Result<bool> {
        let until = self.registered.due().min(deadline);
        let arrived = self.listener.next(until, Some(self.registered.as_fd()))?;
        // What has ended comes first: a rank closes its connection before it registers again.
        let Polled { woken, ended } = self.registered.poll()?;
        self.fail(ended);
        match arrived {
            Some((peer, Ok((hello, connection)))) => self.receive(peer, &hello, connection)?,
            Some((peer, Err(reason))) => self.note_turned_away(peer, &reason),
            None => {}
        }
        if self.failure.is_none() {
            let ended = self.registered.send_table();
            self.fail(ended);
        }
        Ok(woken)
    }

    /// The first rank that ends fails the group.
    fn fail(&mut self, ended: Option<Ended>) {
        if let Some((rank, member)) = ended
            && self.failure.is_none()
        {
            tracing::warn!("rendezvous {}: rank {rank} ({member}) ended", self.listener.address());
            self.registered.fail(&BootstrapMessage::Ended(rank, member.clone()));
            self.failure = Some((rank, member));
        }
    }

    fn receive(&mut self, peer: SocketAddr, hello: &Hello, mut connection: Connection) -> io::Result<()> {
        match (self.validate(hello), &self.failure) {
            (Ok((rank, _)), Some((ended, member))) => {
                // Best effort: the peer may be gone.
                let _ = BootstrapMessage::Ended(*ended, member.clone()).send(&mut connection);
                self.registered.finish(rank);
            }
            (Ok((rank, entry)), None) => {
                // One that has disconnected may register again.
                if BootstrapMessage::Accept.send(&mut connection).is_ok() {
                    self.registered.register(rank, entry, connection)?;
                }
            }
            (Err(reason), _) => {
                self.note_turned_away(peer, &reason);
                // Best effort: the peer may be gone.
                let _ = BootstrapMessage::Reject(reason).send(&mut connection);
            }
        }
        Ok(())
    }

    fn note_turned_away(&mut self, peer_addr: SocketAddr, reason: &str) {
        let address = self.listener.address();
        tracing::warn!("rendezvous {address}: turned {peer_addr} away: {reason}");
        self.turned_away = Some((peer_addr, reason.to_owned()));
    }

    fn validate(&mut self, hello: &Hello) -> Result<(Rank, Entry), String> {
        let Some(Registration { ranks, entry }) = Registration::of(hello) else {
            return Err("this message is not one for a rendezvous".to_owned());
        };
        let rank = Rank(hello.client);
        if !is_valid(ranks) {
            return Err(format!("a group has 1 to {MAX_RANKS} ranks, and not {ranks}"));
        }
        let expected = *self.ranks.get_or_insert(ranks);
        if ranks != expected {
            return Err(format!(
                "this group has {expected} ranks, and it was started for {ranks}"
            ));
        }
        self.registered.expect(ranks);
        self.registered.may_register(rank)?;
        if !is_connectable(entry.listen_addr.ip()) {
            return Err(format!("no rank can connect to {}", entry.listen_addr));
        }
        Ok((rank, entry))
    }

    fn time_out(mut self, within: Duration) -> BootstrapError {
        if let Some(ended) = self.failure {
            return ended_error(ended);
        }
        let turned_away = self
            .turned_away
            .take()
            .map_or_else(String::new, |(from, why)| format!("; {from} was turned away: {why}"));
        let error = match self.ranks {
            Some(ranks) => BootstrapError::Missing {
                missing: in_words(&self.registered.missing()),
                ranks,
                within,
                turned_away,
            },
            None => BootstrapError::NoRank { within, turned_away },
        };
        self.registered.fail(&BootstrapMessage::Reject(error.to_string()));
        error
    }
}

fn random_secret() -> Result<Secret, BootstrapError> {
    Secret::random().map_err(BootstrapError::system("get random numbers"))
}

/// Whether a group has so many ranks.
fn is_valid(ranks: u32) -> bool {
    (1..=MAX_RANKS).contains(&ranks)
}

/// Whether other ranks can connect to `ip`: the wildcard address is not for the table.
fn is_connectable(ip: IpAddr) -> bool {
    !ip.is_unspecified() && !ip.is_multicast()
}

pub(super) fn ended_error((rank, member): Ended) -> BootstrapError {
    BootstrapError::Ended {
        rank,
        member: member.to_string(),
    }
}

/// A rendezvous that a thread serves. Dropping it cancels the wait and informs the registered
/// ranks; when all have registered, it waits until they are connected to each other.
#[derive(Debug)]
pub struct RendezvousServer {
    id: UniqueId,
    wakeup: Arc<EventFd>,
    thread: Option<JoinHandle<Result<(), BootstrapError>>>,
}

impl RendezvousServer {
    /// The id that the ranks need to join.
    #[must_use]
    pub fn id(&self) -> &UniqueId {
        &self.id
    }

    /// Lets it serve until all ranks are connected, or the timeout; it ends with the process.
    pub fn detach(mut self) {
        self.thread = None;
    }

    /// Waits until all ranks are connected to each other, or the timeout.
    ///
    /// # Errors
    /// As [`Rendezvous::serve`].
    pub fn wait(mut self) -> Result<(), BootstrapError> {
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(served)) => served,
            _ => Err(BootstrapError::System {
                what: "serve the rendezvous",
                error: io::Error::other("its thread panicked"),
            }),
        }
    }
}

impl Drop for RendezvousServer {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            // Both fail only if the thread has ended.
            let _ = self.wakeup.write(1);
            let _ = thread.join();
        }
    }
}
