//! Bounds on connections, so that no peer can use up the space of others or of this side's own.
//!
//! Connections made here and those that peers made count apart. One without an owner lasts only to
//! answer a peer that repeats itself: it is the first to go, the oldest first, also when its peer
//! has more than its share of them.

use core::net::IpAddr;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Maximum number of connections of a budget, with those that have no owner.
pub(super) const MAX: usize = 1 << 15;
/// Maximum number of connections without an owner of one peer.
pub(super) const MAX_OVER: usize = 1 << 10;

#[derive(Debug, Default)]
pub(super) struct Budget {
    used: usize,
    next: u64,
    /// Connections without an owner, in the order in which they lost it.
    over: BTreeMap<u64, u32>,
    peers: HashMap<IpAddr, BTreeSet<u64>>,
}

impl Budget {
    pub(super) fn is_full(&self) -> bool {
        self.used >= MAX
    }

    pub(super) fn add(&mut self) {
        self.used += 1;
    }

    /// A connection ends; `over` is what [`lost_owner`](Self::lost_owner) returned.
    pub(super) fn remove(&mut self, peer: IpAddr, over: Option<u64>) {
        self.used -= 1;
        let Some(number) = over else { return };
        self.over.remove(&number);
        if let Some(numbers) = self.peers.get_mut(&peer) {
            numbers.remove(&number);
            if numbers.is_empty() {
                self.peers.remove(&peer);
            }
        }
    }

    /// Returns the connection's number, and the one that has to go for it.
    pub(super) fn lost_owner(&mut self, peer: IpAddr, id: u32) -> (u64, Option<u32>) {
        let number = self.next;
        self.next += 1;
        self.over.insert(number, id);
        let numbers = self.peers.entry(peer).or_default();
        numbers.insert(number);
        let excess = numbers.first().filter(|_| numbers.len() > MAX_OVER);
        (number, excess.and_then(|number| self.over.get(number)).copied())
    }

    /// The oldest connection without an owner.
    pub(super) fn oldest(&self) -> Option<u32> {
        self.over.first_key_value().map(|(_, id)| *id)
    }
}
