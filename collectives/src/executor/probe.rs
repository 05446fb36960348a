//! Link test: which ranks this one can reach, for failure detection.
//!
//! A failed link shows only where something is sent on it. So each rank writes a word to every
//! other, on the connection for point-to-point messages, which a failed engine keeps if idle.

use std::time::{Duration, Instant};

use super::Engine;
use crate::types::Rank;

pub(super) struct LinkProbe {
    began: Instant,
    /// By rank, the number of requests whose completion confirms it.
    posted: Vec<(Rank, u64)>,
}

impl Engine {
    pub(crate) fn has_links(&self) -> bool {
        self.links.last().is_some_and(|links| !links.is_empty())
    }

    /// Returns the ranks that have acknowledged, once all have, or `timeout` after the first call.
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

    /// Polls completions of an engine that has failed; failed ones are ignored.
    fn take_confirmations(&mut self) {
        for rail in &mut self.rails {
            let links = &mut self.links;
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

    pub(crate) fn release_queue_pairs(&mut self) {
        if self.failed.is_some() {
            self.links.clear();
        }
    }
}
