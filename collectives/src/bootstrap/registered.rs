//! The ranks at a rendezvous: which have registered, which are connected to all others, and which
//! have ended.
//!
//! One epoll(7) instance watches their connections, beside what cancels the rendezvous; its
//! descriptor is readable when one of them is.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use doorbell_rendezvous::{Connection, Deadline};
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::wire::{BootstrapMessage, Entry, SEND_TIMEOUT};
use super::{Member, keep_alive};
use crate::types::Rank;

/// How long a rank may take to register again whose connection ended before it had confirmed. It
/// waits for two seconds at each of its addresses, of which eight are a derived rendezvous'.
const RETURN_TIMEOUT: Duration = Duration::from_secs(30);
/// The event of the wake-up has this in place of a rank.
const WAKEUP: u64 = u64::MAX;

#[derive(Debug)]
enum Slot {
    Awaited,
    /// The connection ended before this rank had confirmed, and it has until then to return.
    Lost(Member, Deadline),
    Registered(Box<Registered>),
    /// It needs the rendezvous no more, or has ended.
    Finished,
}

#[derive(Debug)]
struct Registered {
    connection: Connection,
    entry: Entry,
    /// Whether it knows that it is registered.
    has_confirmed: bool,
    is_connected: bool,
}

/// A rank that has ended.
pub(super) type Ended = (Rank, Member);

#[derive(Debug)]
pub(super) struct Ranks {
    epoll: Epoll,
    /// Empty until their number is known.
    slots: Vec<Slot>,
    /// Whether they have the table, and connect to each other.
    have_table: bool,
    /// Whether there will be no group, and all are to be notified.
    have_failed: bool,
}

/// What the connections have brought.
#[derive(Debug, Default)]
pub(super) struct Polled {
    pub(super) woken: bool,
    pub(super) ended: Option<Ended>,
}

impl Ranks {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            slots: Vec::new(),
            have_table: false,
            have_failed: false,
        })
    }

    /// Readable when there is something to [poll](Self::poll).
    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.0.as_fd()
    }

    pub(super) fn watch_wakeup(&self, wakeup: BorrowedFd<'_>) -> io::Result<()> {
        self.watch(wakeup, WAKEUP)
    }

    pub(super) fn ignore_wakeup(&self, wakeup: BorrowedFd<'_>) -> io::Result<()> {
        Ok(self.epoll.delete(wakeup)?)
    }

    fn watch(&self, fd: impl AsFd, data: u64) -> io::Result<()> {
        Ok(self.epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, data))?)
    }

    /// Awaits so many, unless their number was known.
    pub(super) fn expect(&mut self, ranks: u32) {
        self.slots.resize_with(ranks as usize, || Slot::Awaited);
    }

    /// Whether a rank may register; any may once there will be no group, to be notified.
    ///
    /// # Errors
    /// Why it may not.
    pub(super) fn may_register(&self, rank: Rank) -> Result<(), String> {
        match self.slots.get(rank.index()) {
            Some(Slot::Awaited | Slot::Lost(..)) => Ok(()),
            Some(_) if self.have_failed => Ok(()),
            Some(Slot::Registered(registered)) => {
                Err(format!("rank {rank} has come already: {}", registered.entry.member))
            }
            Some(Slot::Finished) => Err(format!("rank {rank} has come already")),
            None => Err(format!("there is no rank {rank} in a group of {}", self.slots.len())),
        }
    }

    /// Watches a rank that may register, and was sent its acceptance.
    pub(super) fn register(&mut self, rank: Rank, entry: Entry, connection: Connection) -> io::Result<()> {
        // It fails for a connection that has ended, which the next poll notices.
        let _ = keep_alive(connection.stream());
        self.watch(connection.stream(), u64::from(rank.0))?;
        self.slots[rank.index()] = Slot::Registered(Box::new(Registered {
            connection,
            entry,
            has_confirmed: false,
            is_connected: false,
        }));
        Ok(())
    }

    /// Awaits nothing more of a rank.
    pub(super) fn finish(&mut self, rank: Rank) -> Option<Member> {
        match std::mem::replace(&mut self.slots[rank.index()], Slot::Finished) {
            Slot::Registered(registered) => {
                // It fails only for a connection that is not watched.
                let _ = self.epoll.delete(registered.connection.stream());
                Some(registered.entry.member)
            }
            Slot::Lost(member, _) => Some(member),
            Slot::Awaited | Slot::Finished => None,
        }
    }

    /// Reads what registered ranks have sent, without waiting for any.
    pub(super) fn poll(&mut self) -> io::Result<Polled> {
        let mut polled = Polled::default();
        loop {
            let mut events = [EpollEvent::empty(); 64];
            let count = match self.epoll.wait(&mut events, EpollTimeout::ZERO) {
                Err(Errno::EINTR) => continue,
                count => count?,
            };
            for event in &events[..count] {
                match event.data() {
                    WAKEUP => polled.woken = true,
                    rank => polled.ended = polled.ended.or(self.read(Rank(rank as u32))),
                }
            }
            if count < events.len() {
                break;
            }
        }
        polled.ended = polled.ended.or_else(|| self.overdue());
        self.complete();
        Ok(polled)
    }

    /// Notifies all that the group is complete, if they are connected.
    fn complete(&mut self) {
        let is_connected = |slot: &Slot| matches!(slot, Slot::Registered(registered) if registered.is_connected);
        if !self.have_failed && !self.slots.is_empty() && self.slots.iter().all(is_connected) {
            // One that has ended in the meantime is missed by the others.
            self.send(&BootstrapMessage::Accept);
            for rank in (0..self.slots.len() as u32).map(Rank) {
                self.finish(rank);
            }
        }
    }

    fn read(&mut self, rank: Rank) -> Option<Ended> {
        let Some(Slot::Registered(registered)) = self.slots.get_mut(rank.index()) else {
            return None;
        };
        let received = BootstrapMessage::receive(&mut registered.connection, Deadline::after(SEND_TIMEOUT));
        match received {
            Ok(BootstrapMessage::Confirm) => {
                registered.has_confirmed = true;
                return None;
            }
            Ok(BootstrapMessage::Connected) if self.have_table => {
                registered.is_connected = true;
                return None;
            }
            _ => {}
        }
        let has_confirmed = registered.has_confirmed;
        let member = self.finish(rank)?;
        if has_confirmed {
            return Some((rank, member));
        }
        if !self.have_failed {
            self.slots[rank.index()] = Slot::Lost(member, Deadline::after(RETURN_TIMEOUT));
        }
        None
    }

    /// A rank that has not returned in time.
    fn overdue(&mut self) -> Option<Ended> {
        let is_overdue = |slot: &Slot| matches!(slot, Slot::Lost(_, until) if until.has_passed());
        let rank = Rank(self.slots.iter().position(is_overdue)? as u32);
        Some((rank, self.finish(rank)?))
    }

    /// When the next rank has to have returned.
    pub(super) fn due(&self) -> Deadline {
        let dues = self.slots.iter().filter_map(|slot| match slot {
            Slot::Lost(_, until) => Some(*until),
            _ => None,
        });
        dues.fold(Deadline::NEVER, Deadline::min)
    }

    /// Sends the table if all have registered, and none will do so again. Returns a rank that
    /// cannot be sent it.
    pub(super) fn send_table(&mut self) -> Option<Ended> {
        let entry = |slot: &Slot| match slot {
            Slot::Registered(registered) if registered.has_confirmed => Some(registered.entry.clone()),
            _ => None,
        };
        if self.have_table || self.slots.is_empty() {
            return None;
        }
        let table: Vec<_> = self.slots.iter().map(entry).collect::<Option<_>>()?;
        self.have_table = true;
        let unsent = self.send(&BootstrapMessage::Table(table))?;
        Some((unsent, self.finish(unsent)?))
    }

    pub(super) fn have_table(&self) -> bool {
        self.have_table
    }

    /// Notifies those that have registered that there will be no group, whereupon they close their
    /// connections. The others are awaited, to be sent the same.
    pub(super) fn fail(&mut self, message: &BootstrapMessage) {
        self.have_failed = true;
        self.send(message);
        for slot in &mut self.slots {
            if let Slot::Lost(..) = slot {
                *slot = Slot::Awaited;
            }
        }
    }

    /// Sends all that have registered a message. Returns the first whose connection failed.
    fn send(&mut self, message: &BootstrapMessage) -> Option<Rank> {
        let mut failed = None;
        for (rank, slot) in (0..).map(Rank).zip(&mut self.slots) {
            if let Slot::Registered(registered) = slot
                && let Err(e) = message.send(&mut registered.connection)
            {
                tracing::warn!("{} left the rendezvous: {e}", registered.entry.member);
                failed.get_or_insert(rank);
            }
        }
        failed
    }

    /// Whether none needs the rendezvous any more.
    pub(super) fn are_finished(&self) -> bool {
        !self.slots.is_empty() && self.slots.iter().all(|slot| matches!(slot, Slot::Finished))
    }

    /// Those that have not registered; behind the table, those that are not connected.
    pub(super) fn missing(&self) -> Vec<Rank> {
        let is_missing = |slot: &Slot| match slot {
            Slot::Awaited | Slot::Lost(..) => true,
            Slot::Registered(registered) => self.have_table && !registered.is_connected,
            Slot::Finished => false,
        };
        let missing = (0..).map(Rank).zip(&self.slots).filter(|(_, slot)| is_missing(slot));
        missing.map(|(rank, _)| rank).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_does_not_return_in_time_has_ended() {
        let member = Member {
            host: "here".to_owned(),
            process: 7,
        };
        let mut ranks = Ranks::new().unwrap();
        ranks.expect(2);
        ranks.slots[1] = Slot::Lost(member.clone(), Deadline::after(RETURN_TIMEOUT));
        assert!(ranks.due().remaining() <= RETURN_TIMEOUT);
        assert_eq!(ranks.poll().unwrap().ended, None);
        ranks.slots[1] = Slot::Lost(member.clone(), Deadline::after(Duration::ZERO));
        assert_eq!(ranks.poll().unwrap().ended, Some((Rank(1), member)));
        assert_eq!(ranks.missing(), [Rank(0)]);
    }
}
