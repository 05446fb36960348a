//! Pacing: a token bucket whose credit may be negative by one packet.

use core::time::Duration;

use crate::Instant;

/// Credit is counted in 10⁻⁹ bytes, which makes rate (bytes/s) × time (ns) exact.
const NANO: i64 = 1_000_000_000;

#[derive(Clone, Copy, Debug)]
pub(super) struct Pacer {
    credit: i64,
    max: i64,
    at: Instant,
    /// The credit ran out, and has not reached [`quantum`](Self::quantum) again.
    blocked: bool,
}

impl Pacer {
    /// May send `burst` bytes at once.
    pub(super) const fn new(burst: u32) -> Self {
        let max = burst as i64 * NANO;
        Self {
            credit: max,
            max,
            at: Instant::ZERO,
            blocked: false,
        }
    }

    /// The credit with which sending resumes: a wake-up sends several packets, as one GSO run.
    const fn quantum(&self) -> i64 {
        self.max / 4
    }

    /// Adds what `rate`, in bytes/s, has earned since the last call. Call it before that changes.
    pub(super) fn refill(&mut self, now: Instant, rate: u64) {
        let elapsed = now.since(self.at).as_nanos().min(u128::from(u64::MAX)) as u64;
        let earned = i64::try_from(rate.saturating_mul(elapsed)).unwrap_or(i64::MAX);
        // What the last nanosecond has earned too much is not lost.
        let max = self.max.max(i64::try_from(rate).unwrap_or(i64::MAX));
        self.credit = self.credit.saturating_add(earned).min(max);
        self.at = self.at.max(now);
    }

    /// A packet may be sent while the credit is not negative: its own bytes are owed.
    pub(super) const fn may_send(&mut self) -> bool {
        let least = if self.blocked { self.quantum() } else { 0 };
        self.blocked = self.credit < least;
        !self.blocked
    }

    pub(super) fn sent(&mut self, bytes: usize) {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        self.credit = self.credit.saturating_sub(bytes.saturating_mul(NANO));
    }

    /// When [`may_send`](Self::may_send), which was false, becomes true at `rate`, in bytes/s.
    pub(super) fn ready_at(&self, rate: u64) -> Instant {
        let owed = self.quantum().saturating_sub(self.credit).max(0).unsigned_abs();
        self.at + Duration::from_nanos(owed.div_ceil(rate.max(1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends packets of `len` as they are allowed until `end`; returns the bytes.
    fn bytes_until(pacer: &mut Pacer, rate: u64, len: usize, end: u64) -> u64 {
        let (mut now, mut bytes) = (Instant::ZERO, 0);
        loop {
            pacer.refill(now, rate);
            while pacer.may_send() {
                pacer.sent(len);
                bytes += len as u64;
            }
            let ready = pacer.ready_at(rate);
            assert!(ready > now);
            now = ready;
            if now.0 > end {
                return bytes;
            }
        }
    }

    #[test]
    fn the_rate_is_exact_over_time() {
        for rate in [12_500_000, 1_250_000_000, 999_999_937] {
            for burst in [0, 64 << 10] {
                let sent = bytes_until(&mut Pacer::new(burst), rate, 4158, 1_000_000_000);
                let bound = 2 * 4158 + u64::from(burst);
                assert!(sent.abs_diff(rate) <= bound, "{sent} at {rate}");
            }
        }
    }

    #[test]
    fn an_idle_pacer_earns_no_more_than_its_burst() {
        let mut pacer = Pacer::new(64 << 10);
        pacer.refill(Instant(u64::MAX), 1_000_000_000);
        let mut packets = 0;
        while pacer.may_send() {
            pacer.sent(4096);
            packets += 1;
        }
        assert_eq!(packets, 17);
        assert!(pacer.ready_at(0) >= Instant(u64::MAX));
    }
}
