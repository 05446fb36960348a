//! A dump of a completion queue.

use core::fmt;

use super::kind::CqKind;
use super::{CompletionQueue, CqId};

/// What is known of a completion queue (verbs have no query for one): see [`CompletionQueue::describe`]. Shown by [`Display`](fmt::Display) one item a line.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CompletionQueueDescription {
    /// What names it in events.
    pub id: CqId,
    /// The device's name.
    pub device: String,
    /// `classic` or `extended`.
    pub kind: &'static str,
    /// Entries it has.
    pub capacity: u32,
    /// Entries that queue pairs have reserved; those of queue pairs that are gone are among them until the queue has been seen empty.
    pub reserved: u32,
    /// Whether it is on a channel, so that it can be slept on.
    pub on_channel: bool,
}

impl<Q: CqKind> CompletionQueue<Q> {
    /// What is known of it.
    #[must_use]
    pub fn describe(&self) -> CompletionQueueDescription {
        let inner = self.inner();
        let registry = inner.registry();
        CompletionQueueDescription {
            id: inner.id,
            device: inner.context.name.clone(),
            kind: Q::NAME,
            capacity: registry.capacity(),
            reserved: registry.reserved(),
            on_channel: inner.channel.is_some(),
        }
    }
}

impl fmt::Display for CompletionQueueDescription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "completion queue: {} of {}", self.id, self.device)?;
        writeln!(f, "  kind: {}", self.kind)?;
        writeln!(f, "  cqe: {}, of which reserved: {}", self.capacity, self.reserved)?;
        write!(f, "  channel: {}", if self.on_channel { "yes" } else { "no" })
    }
}
