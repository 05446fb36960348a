//! Whom this rank can reach: for those who look for the culprit of a link that has failed.
//!
//! A link shows that it has failed where something is sent on it, and of a rank that is cut off from all it may be one link alone that does. So each rank then writes a word to every other, by the connection for messages between the
//! two, and sees who confirms it. An engine that has failed with a connection keeps those for it, if no message is under way on them.

use std::time::{Duration, Instant};

use super::Engine;
use crate::types::Rank;

/// A trial of all links.
pub(super) struct LinkProbe {
    began: Instant,
    /// SlotTransport rank, the requests that have to be confirmed.
    posted: Vec<(Rank, u64)>,
}

impl Engine {
    /// Whether it has connections to try.
    pub(crate) fn has_links(&self) -> bool {
        self.links.last().is_some_and(|links| !links.is_empty())
    }

    /// Tries the links to all ranks, and gives those who have confirmed: when all have, or so long after this was called first. `None` before that.
    pub(crate) fn probe_links(&mut self, timeout: Duration) -> Option<Vec<Rank>> {
        if self.failed.is_some() {
            self.take_confirmations();
        }
        let links = self.links.last_mut()?;
        let probe = self.probe.get_or_insert_with(|| LinkProbe {
            began: Instant::now(),
            posted: links
                .iter_mut()
                .flatten()
                .filter_map(|link| Some((link.peer, link.send_probe()?)))
                .collect(),
        });
        let confirmed = |(peer, posted): &(Rank, u64)| {
            let link = links.get(peer.index())?.as_ref()?;
            (link.completed >= *posted).then_some(*peer)
        };
        let reached: Vec<_> = probe.posted.iter().filter_map(confirmed).collect();
        let all = reached.len() + 1 == self.ranks as usize;
        (all || probe.began.elapsed() >= timeout).then_some(reached)
    }

    /// Takes completions of an engine that has failed, of which those that went wrong are no news.
    fn take_confirmations(&mut self) {
        for rail in &mut self.rails {
            let links = &mut self.links;
            // A device that gives none says that nobody is reached.
            let Ok(done) = rail.cq.poll() else { continue };
            done.for_each(|done| {
                let (connection, peer) = ((done.tag() >> 32) as usize, done.tag() as u32);
                let link = links.get_mut(connection).and_then(|links| links.get_mut(peer as usize));
                if let Some(Some(link)) = link.filter(|_| done.check().is_ok()) {
                    link.completed = done.sequence() + 1;
                }
            });
        }
    }

    /// Has no queue p2p any more, if it has failed: nobody looks for the culprit.
    pub(crate) fn release_queue_pairs(&mut self) {
        if self.failed.is_some() {
            self.links.clear();
        }
    }
}
