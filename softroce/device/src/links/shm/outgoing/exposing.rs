//! Gives peers the tables and segments for direct operations (see [`direct`](crate::direct)).

use std::os::fd::AsFd;
use std::sync::Arc;

use super::OutgoingRings;
use crate::host::{Connection, Message};
use crate::links::shm_ring::segment::{Segment, SegmentId};

impl OutgoingRings {
    /// Gives a new peer the tables, and the segments that are exposed already.
    pub(super) fn send_exposed(&self, connection: &Connection) {
        if let Some(published) = &self.published
            && connection.send(Message::Tables, &[published.fd()]).is_ok()
        {
            for (segment, writable) in &self.exposed {
                if let Some(segment) = segment.upgrade() {
                    send(connection, &segment, *writable);
                }
            }
        }
    }

    /// Gives a segment to all peers, for direct access.
    pub(crate) fn expose(&mut self, segment: &Arc<Segment>, writable: bool) {
        self.exposed.retain(|(known, _)| known.strong_count() > 0);
        let known = self
            .exposed
            .iter_mut()
            .find(|(known, _)| known.as_ptr() == Arc::as_ptr(segment));
        match known {
            Some((_, before)) if *before || !writable => return,
            Some((_, before)) => *before = true,
            None => self.exposed.push((Arc::downgrade(segment), writable)),
        }
        let connections = self.rings.iter().flatten().filter_map(|ring| ring.connection.as_ref());
        connections.for_each(|connection| send(connection, segment, writable));
    }

    pub(super) fn is_exposed(&self, id: SegmentId) -> bool {
        let exposed = self.exposed.iter().filter_map(|(segment, _)| segment.upgrade());
        exposed.into_iter().any(|segment| segment.id() == id)
    }
}

/// If the peer does not get it, requests to that memory take the ring.
fn send(connection: &Connection, segment: &Segment, writable: bool) {
    let message = Message::Exposed {
        id: u64::from(segment.id().0),
        writable,
    };
    let _ = match writable {
        true => segment
            .writable()
            .and_then(|fd| connection.send(message, &[fd.as_fd()])),
        false => connection.send(message, &[segment.fd()]),
    };
}
