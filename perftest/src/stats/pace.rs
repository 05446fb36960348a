//! The schedule of an open loop: messages start at fixed intervals, independent of when earlier
//! ones complete.
//!
//! In a closed loop a stall of the peer is one sample (coordinated omission). In an open loop the
//! messages due during the stall are late, and their latency counts from when they were due:
//! message i at i ÷ rate after the start. A late one starts at once and does not delay the next.

use std::time::Duration;

pub(crate) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Pacer {
    start_ns: u64,
    /// From one burst to the next.
    interval_ns: f64,
    /// Messages per burst.
    burst: u64,
}

impl Pacer {
    /// `per_s` messages per second from `start_ns` on.
    pub(crate) fn new(start_ns: u64, per_s: f64) -> Pacer {
        Pacer::in_bursts(start_ns, per_s, 1)
    }

    /// As many messages per second in bursts of `burst` messages (at least one).
    pub(crate) fn in_bursts(start_ns: u64, per_s: f64, burst: u32) -> Pacer {
        let burst = u64::from(burst.max(1));
        Pacer {
            start_ns,
            interval_ns: 1e9 * burst as f64 / per_s.max(f64::MIN_POSITIVE),
            burst,
        }
    }

    /// When burst `index` is due.
    #[inline]
    pub(crate) fn due_ns(&self, index: u64) -> u64 {
        self.start_ns.saturating_add((index as f64 * self.interval_ns) as u64)
    }

    /// The bursts that are due.
    #[inline]
    pub(crate) fn due_by(&self, now_ns: u64) -> u64 {
        match now_ns.checked_sub(self.start_ns) {
            Some(elapsed) => ((elapsed as f64 / self.interval_ns) as u64).saturating_add(1),
            None => 0,
        }
    }

    /// The messages of queue pair `qp_index` of `qps` when `due` bursts are due, dealt round-robin.
    #[inline]
    pub(crate) fn share(&self, due: u64, qp_index: usize, qps: usize) -> u64 {
        let (qp_index, qps) = (qp_index as u64, qps as u64);
        due.saturating_sub(qp_index).div_ceil(qps).saturating_mul(self.burst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schedule_is_exact_over_days() {
        let pacer = Pacer::new(500, 3e6);
        assert_eq!(
            (pacer.due_ns(0), pacer.due_ns(3), pacer.due_ns(3_000_000)),
            (500, 1500, 1_000_000_500)
        );
        let days = 3_000_000 * 86_400 * 2;
        assert_eq!(pacer.due_ns(days), 500 + 2 * 86_400 * 1_000_000_000);
        for (now, due) in [(499, 0), (500, 1), (1499, 3), (1500, 4)] {
            assert_eq!(pacer.due_by(now), due, "{now}");
        }
    }

    #[test]
    fn a_late_message_does_not_delay_later_ones() {
        let pacer = Pacer::new(0, 1000.0);
        assert_eq!(pacer.due_by(10_000_000), 11);
        assert_eq!(pacer.due_ns(11), 11_000_000);
    }

    #[test]
    fn bursts_are_due_at_even_intervals_and_dealt_round_robin() {
        let pacer = Pacer::in_bursts(500, 1000.0, 10);
        for (ms, due) in [(0, 10), (9, 10), (10, 20), (19, 20), (25, 30), (1000, 1010)] {
            let bursts = pacer.due_by(500 + ms * 1_000_000);
            assert_eq!(pacer.share(bursts, 0, 1), due, "{ms}");
            for qps in 1..5 {
                let each: Vec<u64> = (0..qps).map(|qp| pacer.share(bursts, qp, qps)).collect();
                assert_eq!(each.iter().sum::<u64>(), due);
                assert!(
                    each.is_sorted_by(|a, b| a >= b) && each[0] - each[qps - 1] <= 10,
                    "{each:?}"
                );
            }
        }
    }
}
