//! A queue pair's reaction point: what the requester and the responder send is paced, and what
//! becomes of it is reported to the controller.

use core::time::Duration;

use crate::Instant;
use crate::congestion::notifier::Notification;
use crate::congestion::{Congestion, ecn};
use crate::memory::Memory;
use crate::outbox::Outbox;
use crate::qp::packet::{InboundPacket, PacketLens};
use crate::qp::{Path, QueuePair};
use crate::wire::IpFields;

impl QueuePair {
    /// The traffic class of a packet on `path`: an ECN-capable one if it reacts to congestion.
    pub(crate) fn traffic_class(&self, path: &Path) -> u8 {
        if self.congestion.is_some() {
            ecn::capable(path.traffic_class)
        } else {
            path.traffic_class
        }
    }

    pub(crate) fn rate(&self) -> Option<u64> {
        self.reaction().and_then(|congestion| congestion.rate())
    }

    /// The reaction point, if its packets take UDP.
    fn reaction(&self) -> Option<&Congestion> {
        self.congestion.as_deref().filter(|_| self.connection.link.is_none())
    }

    pub(super) fn reset_congestion(&mut self) {
        if let Some(congestion) = &mut self.congestion {
            congestion.reset();
        }
        self.notified = None;
    }

    /// Where a CNP is to be sent, if the last one was at least `interval` ago.
    pub(crate) fn take_notification(&mut self, now: Instant, interval: Duration) -> Option<Notification> {
        if !self.init.transport.is_connected() || self.notified.is_some_and(|last| now.since(last) < interval) {
            return None;
        }
        self.notified = Some(now);
        Some(Notification {
            path: self.set.path?,
            from: self.connection.qpn,
            to: self.connection.peer,
        })
    }

    /// Whether a CNP has an effect.
    pub(crate) fn handle_cnp(&mut self, now: Instant) -> bool {
        self.congestion
            .as_mut()
            .is_some_and(|congestion| congestion.handle_cnp(now))
    }

    /// As [`handle`](Self::handle), and reports what it acknowledges.
    #[cold]
    pub(super) fn handle_reporting<M: Memory>(
        &mut self,
        now: Instant,
        packet: &InboundPacket<'_>,
        ip: IpFields,
        memory: &mut M,
        out: &mut Outbox,
    ) {
        let acked = self.requester.acked();
        self.handle_any(now, packet, ip, memory, out);
        self.report_progress(now, acked);
    }

    /// A packet was handled, before which packets below `acked` were acknowledged.
    fn report_progress(&mut self, now: Instant, acked: u64) {
        if self.connection.link.is_some() {
            return;
        }
        let (una, recoveries) = (self.requester.acked(), self.requester.recoveries());
        let bytes = una.saturating_sub(acked) * self.connection.mtu as u64;
        if let Some(congestion) = &mut self.congestion {
            congestion.handle_progress(now, una, bytes, recoveries);
        }
    }

    #[cold]
    pub(super) fn paced_deadline(&self) -> Option<Instant> {
        let paced = self.congestion.as_ref().and_then(|congestion| congestion.deadline());
        self.requester.deadline().into_iter().chain(paced).min()
    }

    #[cold]
    pub(super) fn handle_congestion_timeout(&mut self, now: Instant) {
        self.report_progress(now, self.requester.acked());
        if let Some(congestion) = &mut self.congestion {
            congestion.unblock(now);
        }
    }

    /// As [`transmit`](Self::transmit), for a queue pair with a reaction point. Requests and the
    /// responses of READs wait for the rate, and requests for the window; acknowledgements do not.
    #[cold]
    #[inline(never)]
    pub(super) fn transmit_paced<M: Memory>(
        &mut self,
        now: Instant,
        memory: &mut M,
        buf: &mut [u8],
        out: &mut Outbox,
    ) -> Option<PacketLens> {
        let Some(congestion) = self.congestion.as_mut().filter(|_| self.connection.link.is_none()) else {
            return self.transmit_next(now, memory, buf, out);
        };
        if !congestion.may_send(now) {
            let acknowledges = self.responder.has_replies() && !self.responder.sends_data();
            return acknowledges.then(|| self.transmit_reply(memory, buf, out)).flatten();
        }
        let window = congestion.window() / self.connection.mtu as u64;
        self.requester.limit_window(window, self.max_window());
        let (next, sends_data) = (self.requester.next(), self.responder.sends_data());
        let written = self.transmit_next(now, memory, buf, out)?;
        let requested = self.requester.next() > next;
        if let Some(congestion) = self.congestion.as_mut().filter(|_| requested || sends_data) {
            let sample = self.requester.sample(next);
            congestion.sent(now, written.len, sample.filter(|_| requested));
        }
        Some(written)
    }
}
