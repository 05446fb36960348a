//! Requests for a service that nobody offers yet: kept for a moment before they are refused.
//!
//! By the book such a request is refused at once (IBTA vol 1, 12.6.7.2, "invalid service ID"). But programs tell their peer to connect and listen right afterwards: `perftest -R` does, when
//! it connects its test's queue pairs, having ended its first listener. Listening is quicker than asking, so that goes well, until a process loses the processor in between: on one
//! host, where both ends are processes that compete for it with others, that is seldom only on an idle machine. And who is refused gives up, whereas who is not answered asks again. So the
//! process that finds nobody keeps the request, and looks whether somebody listens by now whenever a service has been added.

use std::collections::VecDeque;
use std::mem;
use std::time::Duration;

use doorbell_roce_proto::Instant;
use doorbell_roce_proto::cm::ServiceId;

use crate::lanes::Forwarded;

/// How long a request is kept: tens of time slices of a process that is about to listen, and less than its sender waits before it asks again (1 s here, 4 s in Linux).
const PATIENCE: Duration = Duration::from_millis(250);

/// How often the count of services is looked at meanwhile.
const LOOK: Duration = Duration::from_millis(1);

/// As many are kept; more are refused at once.
const ROOM: usize = 1024;

/// A request, as it came.
#[derive(Debug)]
pub(crate) struct Early {
    /// For which service.
    pub(crate) service: ServiceId,
    /// When it is refused.
    pub(crate) until: Instant,
    /// Where it came from.
    pub(crate) from: Forwarded,
    /// The packet; its ICRC is checked by whoever handles it.
    pub(crate) packet: Box<[u8]>,
}

/// Those that wait, the first to be refused in front.
#[derive(Debug)]
pub(crate) struct Waiting {
    requests: VecDeque<Early>,
    /// The count of services at the last look.
    added: u64,
    look_at: Instant,
}

impl Waiting {
    /// None of them.
    pub(crate) fn new() -> Self {
        Self {
            requests: VecDeque::new(),
            added: 0,
            look_at: Instant::ZERO,
        }
    }

    /// Keeps a request for a service that was looked for when the count of services was `added` or had just been. False when there is no room.
    pub(crate) fn keep(
        &mut self,
        now: Instant,
        (service, added): (ServiceId, u64),
        from: Forwarded,
        packet: &[u8],
    ) -> bool {
        if self.requests.len() == ROOM {
            return false;
        }
        if self.requests.is_empty() {
            (self.added, self.look_at) = (added, now + LOOK);
        }
        self.requests.push_back(Early {
            service,
            until: now + PATIENCE,
            from,
            packet: packet.into(),
        });
        true
    }

    /// When to [`take`](Self::take) next.
    pub(crate) fn due(&self) -> Option<Instant> {
        (!self.requests.is_empty()).then_some(self.look_at)
    }

    /// Those to look at again, in their order: all when services were added, otherwise those whose time has come.
    pub(crate) fn take(&mut self, now: Instant, added: u64) -> Vec<Early> {
        self.look_at = now + LOOK;
        let count = match mem::replace(&mut self.added, added) == added {
            true => self.requests.partition_point(|request| request.until <= now),
            false => self.requests.len(),
        };
        self.requests.drain(..count).collect()
    }

    /// Goes on waiting: what was taken before its time, in the order in which it was.
    pub(crate) fn put_back(&mut self, request: Early) {
        self.requests.push_back(request);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FROM: Forwarded = Forwarded {
        src: std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST),
        ports: (49152, 4791),
        segment: 0,
    };

    fn at(ms: u64) -> Instant {
        Instant(ms * 1_000_000)
    }

    fn services(requests: &[Early]) -> Vec<u64> {
        requests.iter().map(|request| request.service.0).collect()
    }

    #[test]
    fn looked_for_again_when_services_are_added_and_refused_in_the_end() {
        let mut waiting = Waiting::new();
        assert_eq!(waiting.due(), None);
        assert!(waiting.keep(at(0), (ServiceId(1), 7), FROM, b"one"));
        // The count has changed since the first one came, which is to be looked for again all the same.
        assert!(waiting.keep(at(100), (ServiceId(2), 8), FROM, b"two"));
        assert_eq!(waiting.due(), Some(at(1)));
        let taken = waiting.take(at(101), 8);
        assert_eq!(services(&taken), [1, 2]);
        assert_eq!(taken[0].until, at(0) + PATIENCE);
        taken.into_iter().for_each(|request| waiting.put_back(request));
        assert_eq!(waiting.due(), Some(at(102)));
        assert_eq!(services(&waiting.take(at(102), 8)), []);
        assert_eq!(services(&waiting.take(at(0) + PATIENCE, 8)), [1]);
        assert_eq!(services(&waiting.take(at(100) + PATIENCE, 8)), [2]);
        assert_eq!(waiting.due(), None);
    }

    #[test]
    fn no_more_than_there_is_room_for() {
        let mut waiting = Waiting::new();
        for n in 0..ROOM {
            assert!(waiting.keep(at(0), (ServiceId(n as u64), 0), FROM, b""));
        }
        assert!(!waiting.keep(at(0), (ServiceId(0), 0), FROM, b""));
        assert_eq!(waiting.take(at(1), 1).len(), ROOM);
        assert!(waiting.keep(at(1), (ServiceId(0), 1), FROM, b""));
    }
}
