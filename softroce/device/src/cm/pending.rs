//! Connection requests for a service without a listener, kept for a short time before they are
//! rejected (decision 028).
//!
//! IBTA vol 1, 12.6.7.2 rejects such a request at once, but programs announce a service to the peer
//! before they listen (`perftest -R`). A rejected peer fails, an unanswered one retransmits.

use std::collections::VecDeque;
use std::mem;
use std::time::Duration;

use doorbell_roce_proto::Instant;
use doorbell_roce_proto::cm::ServiceId;

use crate::links::shm::Forwarded;

/// How long a request is kept: tens of time slices, and less than its retransmission timeout (1 s
/// here, 4 s in Linux).
const HOLD_TIME: Duration = Duration::from_millis(250);

const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// The most pending requests; more are rejected at once.
const MAX_PENDING: usize = 1024;

#[derive(Debug)]
pub(crate) struct PendingRequest {
    pub(crate) service: ServiceId,
    pub(crate) until: Instant,
    pub(crate) from: Forwarded,
    /// The packet, with its ICRC unchecked.
    pub(crate) packet: Box<[u8]>,
}

#[derive(Debug)]
pub(crate) struct PendingRequests {
    requests: VecDeque<PendingRequest>,
    added: u64,
    poll_at: Instant,
}

impl PendingRequests {
    pub(crate) fn new() -> Self {
        Self {
            requests: VecDeque::new(),
            added: 0,
            poll_at: Instant::ZERO,
        }
    }

    /// Keeps a request for a service that was searched for when the count of services was `added`.
    /// False when there is no space.
    pub(crate) fn keep(
        &mut self,
        now: Instant,
        (service, added): (ServiceId, u64),
        from: Forwarded,
        packet: &[u8],
    ) -> bool {
        if self.requests.len() == MAX_PENDING {
            return false;
        }
        if self.requests.is_empty() {
            (self.added, self.poll_at) = (added, now + POLL_INTERVAL);
        }
        self.requests.push_back(PendingRequest {
            service,
            until: now + HOLD_TIME,
            from,
            packet: packet.into(),
        });
        true
    }

    /// When to [`take`](Self::take) next.
    pub(crate) fn due(&self) -> Option<Instant> {
        (!self.requests.is_empty()).then_some(self.poll_at)
    }

    /// The requests to retry, in order: all when services were added, otherwise the expired ones.
    pub(crate) fn take(&mut self, now: Instant, added: u64) -> Vec<PendingRequest> {
        self.poll_at = now + POLL_INTERVAL;
        let count = match mem::replace(&mut self.added, added) == added {
            true => self.requests.partition_point(|request| request.until <= now),
            false => self.requests.len(),
        };
        self.requests.drain(..count).collect()
    }

    /// Keeps a request on that was taken before its deadline; in the order of `take`.
    pub(crate) fn requeue(&mut self, request: PendingRequest) {
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
        traffic_class: 0,
    };

    fn at(ms: u64) -> Instant {
        Instant(ms * 1_000_000)
    }

    fn services(requests: &[PendingRequest]) -> Vec<u64> {
        requests.iter().map(|request| request.service.0).collect()
    }

    #[test]
    fn retried_when_services_are_added_and_rejected_at_the_deadline() {
        let mut pending = PendingRequests::new();
        assert_eq!(pending.due(), None);
        assert!(pending.keep(at(0), (ServiceId(1), 7), FROM, b"one"));
        // The count has changed since the first request, which must be retried all the same.
        assert!(pending.keep(at(100), (ServiceId(2), 8), FROM, b"two"));
        assert_eq!(pending.due(), Some(at(1)));
        let taken = pending.take(at(101), 8);
        assert_eq!(services(&taken), [1, 2]);
        assert_eq!(taken[0].until, at(0) + HOLD_TIME);
        taken.into_iter().for_each(|request| pending.requeue(request));
        assert_eq!(pending.due(), Some(at(102)));
        assert_eq!(services(&pending.take(at(102), 8)), []);
        assert_eq!(services(&pending.take(at(0) + HOLD_TIME, 8)), [1]);
        assert_eq!(services(&pending.take(at(100) + HOLD_TIME, 8)), [2]);
        assert_eq!(pending.due(), None);
    }

    #[test]
    fn at_most_max_pending() {
        let mut pending = PendingRequests::new();
        for n in 0..MAX_PENDING {
            assert!(pending.keep(at(0), (ServiceId(n as u64), 0), FROM, b""));
        }
        assert!(!pending.keep(at(0), (ServiceId(0), 0), FROM, b""));
        assert_eq!(pending.take(at(1), 1).len(), MAX_PENDING);
        assert!(pending.keep(at(1), (ServiceId(0), 1), FROM, b""));
    }
}
