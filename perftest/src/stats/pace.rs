//! A timetable: messages start when it says, and not when the one before is done.
//!
//! A test that sends its next message when the last one is answered stops asking while the other end stalls, so a stall of which many users would have suffered is one sample. With a timetable
//! the messages that should have started meanwhile are late, and their time counts from when they were due. Message i is due i ÷ rate after the start; a late one starts at once, and the next
//! is not moved by it.

/// When messages are due.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Pacer {
    start_ns: u64,
    interval_ns: f64,
}

impl Pacer {
    /// So many messages per second from `start_ns` on.
    pub(crate) fn new(start_ns: u64, per_s: f64) -> Pacer {
        Pacer {
            start_ns,
            interval_ns: 1e9 / per_s,
        }
    }

    /// When message `index` is due, counted from 0.
    #[inline]
    pub(crate) fn due_ns(&self, index: u64) -> u64 {
        self.start_ns.saturating_add((index as f64 * self.interval_ns) as u64)
    }

    /// How many messages are due by now.
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
    fn a_timetable_holds_over_days() {
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
    fn what_is_late_moves_nothing_after_it() {
        let pacer = Pacer::new(0, 1000.0);
        assert_eq!(pacer.due_by(10_000_000), 11);
        assert_eq!(pacer.due_ns(11), 11_000_000);
    }
}
