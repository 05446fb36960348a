//! The state of a port: that of its interface, and down during a configured outage.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use super::fault::OutageClock;
use super::interface::{PortState, PortWatch};

/// The port of a device.
pub struct Port {
    /// `None` where the interface cannot be watched: it counts as up.
    watch: Option<PortWatch>,
    interface: PortState,
    pub(super) outage: OutageClock,
    /// The state at the last call of [`changed`](Self::changed).
    last: PortState,
}

impl Port {
    pub(super) fn new(mut watch: Option<PortWatch>) -> Self {
        let state = watch.as_mut().and_then(PortWatch::state);
        Self {
            watch,
            interface: state.unwrap_or(PortState::UNKNOWN),
            outage: OutageClock::default(),
            last: PortState::UNKNOWN,
        }
    }

    /// Readable when the interface may have changed.
    pub(super) fn notices(&self) -> Option<Arc<OwnedFd>> {
        self.watch.as_ref().map(PortWatch::notices)
    }

    /// The state, if it differs from that at the last call, and at first from
    /// [`PortState::UNKNOWN`]. Never blocks.
    pub(crate) fn changed(&mut self) -> Option<PortState> {
        if let Some(state) = self.watch.as_mut().and_then(PortWatch::changed) {
            self.interface = state;
        }
        let now = PortState {
            active: self.interface.active && !self.outage.is_down(),
            ..self.interface
        };
        (std::mem::replace(&mut self.last, now) != now).then_some(now)
    }

    /// How long it is until an outage begins or ends.
    pub(crate) fn next_change(&self) -> Option<Duration> {
        self.outage.next_change()
    }
}
