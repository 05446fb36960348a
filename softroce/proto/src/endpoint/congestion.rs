//! Packets of no work queue: management datagrams, and congestion notification.

use crate::endpoint::{Datagram, Endpoint, Transmit};
use crate::gsi::GSI;
use crate::ident::Verdict;
use crate::wire::Cnp;
use crate::{Instant, Qpn};

impl Endpoint {
    /// Whether a management datagram or a CNP is to be sent: before what queue pairs send.
    #[inline]
    pub(super) fn has_unqueued(&self) -> bool {
        self.gsi.has_more() || self.notifier.has_more()
    }

    pub(super) fn transmit_unqueued(&mut self, buf: &mut [u8]) -> Option<Transmit> {
        self.last_sent = None;
        let transmit = if let Some(cnp) = self.notifier.transmit(buf) {
            self.out.counters.cnps_sent += 1;
            cnp
        } else {
            let (len, path) = self.gsi.transmit(buf)?;
            Transmit::new(GSI, &path, len)
        };
        self.out.counters.sent(transmit.len);
        Some(transmit)
    }

    /// Handles a CNP, which must come from the queue pair's peer as any packet: an address and port
    /// that are forged slow it down to the minimum rate, no further.
    pub(super) fn handle_cnp(&mut self, now: Instant, datagram: &Datagram<'_>) {
        let counters = &mut self.out.counters;
        let Some(cnp) = Cnp::parse(datagram.payload) else {
            counters.malformed += 1;
            return;
        };
        let Some((index, qp)) = self.qps.find_mut(cnp.dest_qp).filter(|(_, qp)| qp.receives()) else {
            counters.no_qp += 1;
            return;
        };
        if !qp.transport().is_connected() || !qp.is_from_peer(datagram) {
            counters.wrong_peer += 1;
            return;
        }
        if self.idents.check(now, datagram) != Verdict::Valid {
            counters.icrc_errors += 1;
            return;
        }
        if qp.handle_cnp(now) {
            counters.cnps_handled += 1;
            self.reschedule(index);
        } else {
            counters.cnps_ignored += 1;
        }
    }

    /// The rate in bytes/s at which a queue pair sends, `None` without a limit.
    pub fn rate(&self, qpn: Qpn) -> Option<u64> {
        self.qps.get(self.qps.find(qpn)?)?.rate()
    }
}
