//! The schedule of an open loop: messages start at fixed intervals, independent of when earlier
//! ones complete.
//!
//! In a closed loop a stall of the peer is one sample (coordinated omission). In an open loop the
//! messages due during the stall are late, and their latency counts from when they were due:
//! message i at i ÷ rate after the start. A late one starts at once and does not delay the next.

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Pacer {
    start_ns: u64,
    interval_ns: f64,
}

impl Pacer {
    /// `per_s` messages per second from `start_ns` on.
    pub(crate) fn new(start_ns: u64, per_s: f64) -> Pacer {
        Pacer {
            start_ns,
            interval_ns: 1e9 / per_s,
        }
    }

    #[inline]
    pub(crate) fn due_ns(&self, index: u64) -> u64 {
        self.start_ns.saturating_add((index as f64 * self.interval_ns) as u64)
    }

    #[inline]
    pub(crate) fn due_by(&self, now_ns: u64) -> u64 {
        match now_ns.checked_sub(self.start_ns) {
            Some(elapsed) => (elapsed as f64 / self.interval_ns) as u64 + 1,
            None => 0,
        }
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
}
