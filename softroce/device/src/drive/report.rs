//! The port's state, and what is reported to the owners of objects: port events and fatal errors.

use std::fmt::Display;

use super::Shared;
use crate::event::{Event, PortEvent};
use crate::links::udp::PortState;
use crate::sync::Ordering;

impl Shared {
    pub(crate) fn port(&self) -> PortState {
        *self.port.lock()
    }

    pub(crate) fn set_port(&self, now: PortState) {
        let mut core = self.core.lock();
        if let Some(mtu) = now.mtu {
            core.connections.set_mtu(mtu);
        }
        let before = std::mem::replace(&mut *self.port.lock(), now);
        let entry = |port: PortState| (port.addressed, port.interface);
        let gid = (entry(now) != entry(before)).then_some(PortEvent::GidChange);
        let link = (now.active != before.active).then_some(if now.active {
            PortEvent::Active
        } else {
            PortEvent::Error
        });
        for event in gid.into_iter().chain(link) {
            for listener in &core.objects.listeners {
                listener.push(Event::Port(event));
            }
        }
    }

    /// Reports a failed link once, in the log and to the owners. Outstanding work then times out.
    pub(super) fn fail(&self, error: &dyn Display) {
        if !self.broken.swap(true, Ordering::Relaxed) {
            tracing::error!("the soft device's link failed: {error}");
            self.report_fatal();
        }
    }

    /// Skipped where the caller holds core: there the timeouts report it.
    pub(crate) fn report_fatal(&self) {
        if let Some(core) = self.core.try_lock() {
            core.report_fatal();
        }
    }
}
