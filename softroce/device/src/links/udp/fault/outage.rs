//! The outage of a port, on the device's clock.

use std::io;
use std::time::Duration;

use super::Outage;
use crate::clock::ticks;
use crate::links::udp::{Receive, RxBatch};

/// When the port is down; by default never.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutageClock {
    /// In [`ticks`].
    begins: u64,
    ends: u64,
}

impl Default for OutageClock {
    fn default() -> Self {
        Self {
            begins: u64::MAX,
            ends: u64::MAX,
        }
    }
}

impl OutageClock {
    /// The outage of a port whose times count from `start`, in [`ticks`].
    pub(crate) fn new(outage: Option<Outage>, start: u64) -> Self {
        let after = |from: u64, time: Duration| from.saturating_add(time.as_nanos() as u64);
        outage.map_or_else(Self::default, |outage| {
            let begins = after(start, outage.at);
            let ends = outage.lasts.map_or(u64::MAX, |lasts| after(begins, lasts));
            Self { begins, ends }
        })
    }

    /// Whether the port is down now. Reads no clock without an outage.
    pub(crate) fn is_down(&self) -> bool {
        self.begins != u64::MAX && self.is_down_at(ticks())
    }

    fn is_down_at(&self, now: u64) -> bool {
        (self.begins..self.ends).contains(&now)
    }

    /// How long it is until that changes.
    pub(crate) fn next_change(&self) -> Option<Duration> {
        (self.begins != u64::MAX)
            .then(|| self.next_change_at(ticks()))
            .flatten()
    }

    fn next_change_at(&self, now: u64) -> Option<Duration> {
        let mut changes = [self.begins, self.ends].into_iter();
        let next = changes.find(|&change| change > now && change != u64::MAX);
        next.map(|next| Duration::from_nanos(next - now))
    }
}

/// A receiving half that loses what arrives during the outage.
pub(in crate::links::udp) struct OutageRx {
    pub(in crate::links::udp) inner: Box<dyn Receive>,
    pub(in crate::links::udp) outage: OutageClock,
}

impl Receive for OutageRx {
    fn receive(&mut self, batch: &mut RxBatch) -> io::Result<usize> {
        let messages = self.inner.receive(batch)?;
        if messages > 0 && self.outage.is_down() {
            batch.clear();
        }
        Ok(messages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_begins_and_ends() {
        let of = |text: &str| {
            let config: super::super::FaultConfig = text.parse().unwrap();
            OutageClock::new(config.down, 1_000)
        };
        let once = of("down=2us+1us");
        let at = |now| {
            (
                once.is_down_at(now),
                once.next_change_at(now).map(|time| time.as_nanos()),
            )
        };
        assert_eq!(at(1_000), (false, Some(2_000)));
        assert_eq!(at(3_000), (true, Some(1_000)));
        assert_eq!(at(4_000), (false, None));
        let for_ever = of("down=0");
        assert_eq!(
            (for_ever.is_down_at(u64::MAX - 1), for_ever.next_change_at(1_000)),
            (true, None)
        );
        let never = of("");
        assert_eq!((never.is_down_at(1_000), never.next_change_at(0)), (false, None));
    }
}
