//! What congestion control reads of the requester and sets.

use crate::qp::requester::Requester;

impl Requester {
    /// The number of the next packet to send.
    pub(crate) const fn next(&self) -> u64 {
        self.next
    }

    /// Times that lost packets were sent again.
    pub(crate) const fn recoveries(&self) -> u64 {
        self.recoveries
    }

    /// Limits the window to `packets`, at most `configured`. It admits another packet, which
    /// requests an ACK, if none is requested of those in flight: they would never make it larger.
    pub(crate) fn limit_window(&mut self, packets: u64, configured: u32) {
        let awaits_ack = self.ack_requested > self.una;
        let least = if awaits_ack { 1 } else { self.next - self.una + 1 };
        self.window = packets.max(least).min(u64::from(configured));
    }

    /// The packet just sent, which was `next` before, if an RTT can be measured with it: its ACK is
    /// requested, and answers no other transmission (Karn's algorithm) and no further packet.
    pub(crate) fn sample(&self, next: u64) -> Option<u64> {
        let fresh = self.next == self.max && self.next == next + 1 && self.recovering.is_none();
        (fresh && self.ack_requested == self.next).then_some(next)
    }
}
