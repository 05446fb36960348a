//! A textual description of a completion queue.

use core::fmt;

use super::kind::CqKind;
use super::{CompletionQueue, CqId};

/// The attributes of a completion queue; [`Display`](fmt::Display) prints one item a line.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CompletionQueueDescription {
    /// Its identifier in events.
    pub id: CqId,
    /// The device's name.
    pub device: String,
    /// `classic` or `extended`.
    pub kind: &'static str,
    /// The number of entries.
    pub capacity: u32,
    /// Entries reserved; by destroyed queue pairs until a poll finds the queue empty, or
    /// polls have taken as many completions as the queue has entries.
    pub reserved: u32,
    /// Whether it is on a completion channel, so that a thread can sleep on it.
    pub on_channel: bool,
}

impl<Q: CqKind> CompletionQueue<Q> {
    /// Its attributes.
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
