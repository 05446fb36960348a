//! Tail-loss probes (decision 110, after RFC 8985, 7.2 and 7.3): when everything is sent and no
//! response comes for a few round trips, the requester resends the oldest unacknowledged packet and
//! the newest one, both with AckReq, long before the local ACK timeout.
//!
//! To any responder both are duplicate requests or expected ones (IBTA vol 1, 9.7.4):
//!
//! - the ACK was lost: it acknowledges the duplicate with its newest PSN;
//! - the packet, or the NAK that reported its loss, was lost: it executes the oldest, which permits
//!   it another NAK, and sends that when the newest arrives;
//! - an RNR NAK or the response of a READ or atomic was lost: it repeats that.
//!
//! Retry counts are left alone: they are of the queue pair's own timeout.

use core::mem;
use core::time::Duration;

use crate::Instant;
use crate::memory::Memory;
use crate::outbox::Outbox;
use crate::qp::Connection;
use crate::qp::packet::PacketLens;
use crate::qp::requester::{Requester, Timer};
use crate::work::Status;

/// The probe timeout before the first round trip was measured: over that of most paths.
const INITIAL_TIMEOUT: Duration = Duration::from_millis(20);

/// The lower bound of the probe timeout: over the wake-up of a peer's progress thread that sleeps.
/// It exceeds any delay of an ACK too.
const MIN_TIMEOUT: Duration = Duration::from_micros(250);

/// Doublings after which a probe timeout exceeds every local ACK timeout.
const MAX_BACKOFF: u32 = 31;

#[derive(Debug, Default)]
pub(super) struct Probe {
    /// False on a lossless link.
    enabled: bool,
    round_trip: Option<RoundTrip>,
    /// The packet number that acknowledges the timed packet, and when that was sent.
    sample: Option<(u64, Instant)>,
    /// Doublings of the timeout: probes since there was progress without any. Progress after one
    /// may be the late response to the first transmission (Karn's algorithm, RFC 6298, section 3).
    backoff: u32,
    last_sent: Instant,
    /// The requests left could not be sent at the last attempt: not for want of space on the link.
    waiting: bool,
    deadline: Option<Instant>,
    step: Step,
    /// Probes since the last progress.
    unanswered: u32,
    /// When the last probe was sent.
    probed_at: Instant,
    /// The last probe was not sent because of the time.
    repeated: bool,
}

/// The packet of the probe to be sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Step {
    #[default]
    None,
    Oldest,
    Newest,
}

/// Smoothed round trip time and its mean deviation (RFC 6298, section 2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct RoundTrip {
    smoothed: Duration,
    deviation: Duration,
    /// The shortest one: nothing is answered sooner.
    least: Duration,
}

impl RoundTrip {
    fn add(before: Option<Self>, sample: Duration) -> Self {
        match before {
            None => Self {
                smoothed: sample,
                deviation: sample / 2,
                least: sample,
            },
            Some(before) => Self {
                smoothed: before.smoothed * 7 / 8 + sample / 8,
                deviation: before.deviation * 3 / 4 + before.smoothed.abs_diff(sample) / 4,
                least: before.least.min(sample),
            },
        }
    }

    fn timeout(self) -> Duration {
        self.smoothed + 4 * self.deviation
    }

    fn is_likely(self, sample: Duration) -> bool {
        (self.least..=self.timeout()).contains(&sample)
    }
}

impl Probe {
    pub(super) fn set_enabled(&mut self, enabled: bool) {
        self.enabled = enabled;
    }

    pub(super) fn reset(&mut self) {
        *self = Self {
            enabled: self.enabled,
            ..Self::default()
        };
    }

    pub(super) const fn is_enabled(&self) -> bool {
        self.enabled
    }

    pub(super) const fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Whether a packet of a probe is to be sent.
    pub(super) fn is_pending(&self) -> bool {
        self.step != Step::None
    }

    /// With backoff.
    fn timeout(&self) -> Duration {
        let base = self
            .round_trip
            .map_or(INITIAL_TIMEOUT, |measured| measured.timeout().max(MIN_TIMEOUT));
        base.saturating_mul(1 << self.backoff.min(MAX_BACKOFF))
    }

    /// Packets are in flight. None is sent at or after the local ACK timeout, which resends all.
    pub(super) fn arm(&mut self, now: Instant, ack_timeout: Duration) {
        let timeout = self.timeout();
        self.deadline = (self.enabled && timeout < ack_timeout).then(|| now + timeout);
    }

    /// Nothing is in flight, or the responder has sent an RNR NAK.
    pub(super) fn disarm(&mut self) {
        self.deadline = None;
        self.step = Step::None;
    }

    /// A packet was sent; `sample`: the packet number that its first response acknowledges, if it
    /// was sent for the first time and has a response.
    pub(super) fn sent(&mut self, now: Instant, sample: Option<u64>) {
        if !self.enabled {
            return;
        }
        self.last_sent = now;
        self.waiting = false;
        if self.sample.is_none() {
            self.sample = sample.map(|number| (number, now));
        }
    }

    /// What is left to be sent must wait.
    pub(super) fn wait(&mut self) {
        self.waiting = true;
    }

    /// Packets are retransmitted: the response to the timed one may be to either.
    pub(super) fn discard_sample(&mut self) {
        self.sample = None;
    }

    /// All packets before `una` are acknowledged, perhaps in answer to a probe. Where losses leave
    /// few packets that were sent once, probes measure the round trip, unless the response comes
    /// sooner than any before, to the first transmission, or later than expected.
    pub(super) fn progress(&mut self, now: Instant, una: u64) -> bool {
        let probed = mem::take(&mut self.unanswered) > 0;
        let since = now - self.probed_at;
        if !probed {
            self.backoff = 0;
        } else if let Some(measured) = self.round_trip.filter(|measured| measured.is_likely(since)) {
            self.round_trip = Some(RoundTrip::add(Some(measured), since));
        }
        self.step = Step::None;
        if let Some((number, at)) = self.sample
            && una >= number
        {
            self.round_trip = Some(RoundTrip::add(self.round_trip, now - at));
            self.sample = None;
        }
        probed
    }

    /// A probe was answered, and packets are left: the responder may have sent its NAK, and wait
    /// for the packet that is the oldest now. One more probe follows at once.
    pub(super) fn repeat(&mut self) {
        if !mem::replace(&mut self.repeated, true) {
            self.step = Step::Oldest;
            self.unanswered += 1;
        }
    }

    /// Whether an RNR NAK may answer a probe, once for each.
    pub(super) fn take_answer(&mut self) -> bool {
        let answered = self.unanswered > 0;
        self.unanswered = self.unanswered.saturating_sub(1);
        answered
    }

    /// Whether a probe is due, and has begun; not while there are packets to be sent, as their
    /// responses serve.
    fn begin(&mut self, now: Instant, ack_timeout: Duration, sends: bool) -> bool {
        let due = self.last_sent + self.timeout();
        if due > now {
            self.deadline = Some(due);
            return false;
        }
        if !sends {
            self.step = Step::Oldest;
            self.backoff += 1;
            self.unanswered += 1;
            self.repeated = false;
            self.sample = None;
        }
        self.arm(now, ack_timeout);
        !sends
    }
}

impl Requester {
    pub(super) fn handle_probe_timeout(&mut self, now: Instant) {
        if self.probe.deadline.is_none_or(|at| at > now) {
            return;
        }
        let (Timer::LocalAck(_), Some(ack_timeout)) = (self.timer, self.limits.timeout) else {
            return self.probe.disarm();
        };
        let resends = self.next < self.max || !self.holes.is_empty();
        let sends = resends || self.cursor < self.queue.tail && !self.probe.waiting;
        let begun = self.probe.begin(now, ack_timeout, sends);
        if begun {
            // A packet that was resent may be lost again.
            self.holes.clear();
        }
    }

    /// Writes the next packet of a probe.
    ///
    /// # Errors
    /// The status with which the oldest request fails.
    pub(super) fn transmit_probe<M: Memory>(
        &mut self,
        now: Instant,
        connection: &Connection,
        memory: &mut M,
        buf: &mut [u8],
        out: &mut Outbox,
    ) -> Result<Option<PacketLens>, Status> {
        while let Some((request, number)) = self.next_of_probe() {
            let sent = self.resend(now, (request, number), true, connection, memory, buf, out)?;
            if sent.is_some() {
                if number == self.una {
                    self.probe.probed_at = now;
                    out.counters.tail_loss_probes += 1;
                }
                return Ok(sent);
            }
        }
        Ok(None)
    }

    /// The request and number of the next packet of a probe. The newest would be a second request
    /// of data, if it is a READ or atomic: the answer to the oldest then serves alone.
    fn next_of_probe(&mut self) -> Option<(u64, u64)> {
        if self.next < self.max || self.una == self.max {
            self.probe.step = Step::None;
        }
        let newest = self.max.saturating_sub(1);
        let number = match self.probe.step {
            Step::None => return None,
            Step::Oldest => self.una,
            Step::Newest => newest,
        };
        self.probe.step = match self.probe.step {
            Step::Oldest if self.una < newest => Step::Newest,
            _ => Step::None,
        };
        let is_newest = number != self.una;
        self.find_request(number)
            .filter(|&request| !is_newest || !self.queue.get(request).awaits_data())
            .map(|request| (request, number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ACK_TIMEOUT: Duration = Duration::from_secs(4);

    fn at(micros: u64) -> Instant {
        Instant(micros * 1000)
    }

    fn measured(micros: u64) -> Probe {
        let mut probe = Probe::default();
        probe.set_enabled(true);
        probe.sent(at(0), Some(1));
        probe.progress(at(micros), 1);
        probe
    }

    #[test]
    fn timeout_follows_the_measured_round_trip() {
        let mut probe = measured(1000);
        assert_eq!(probe.timeout(), Duration::from_millis(3));
        for round in 1..100 {
            probe.sent(at(round * 10_000), Some(round + 1));
            probe.progress(at(round * 10_000 + 1000), round + 1);
        }
        let after = probe.timeout();
        assert!((1000..1100).contains(&after.as_micros()), "{after:?}");
        assert_eq!(measured(1).timeout(), MIN_TIMEOUT);
    }

    #[test]
    fn backoff_ends_at_the_ack_timeout_and_with_progress_without_a_probe() {
        let mut probe = measured(1);
        probe.sent(at(0), Some(2));
        probe.arm(at(0), ACK_TIMEOUT);
        let mut probes = 0;
        while let Some(due) = probe.deadline() {
            assert!(due - at(0) < 2 * ACK_TIMEOUT);
            probes += u32::from(probe.begin(due, ACK_TIMEOUT, false));
        }
        assert_eq!(probes, 14);
        // The answer is to the packet or to a probe.
        probe.progress(at(9_000_000), 2);
        probe.arm(at(9_000_000), ACK_TIMEOUT);
        assert_eq!(probe.deadline(), None);
        probe.sent(at(9_000_000), Some(3));
        probe.progress(at(9_000_100), 3);
        probe.arm(at(9_000_100), ACK_TIMEOUT);
        assert!(probe.deadline().is_some());
    }

    #[test]
    fn no_probe_while_packets_are_sent() {
        let mut probe = measured(1);
        probe.arm(at(0), ACK_TIMEOUT);
        probe.sent(at(200), None);
        assert!(!probe.begin(at(250), ACK_TIMEOUT, false));
        assert_eq!(probe.deadline(), Some(at(450)));
        assert!(!probe.begin(at(450), ACK_TIMEOUT, true));
        assert!(probe.begin(at(700), ACK_TIMEOUT, false));
    }
}
