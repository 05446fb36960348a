//! The notification point: CNPs for marked packets, at most one in an interval per queue pair.

use core::time::Duration;
use std::collections::VecDeque;

use crate::congestion::ecn;
use crate::counters::Counters;
use crate::endpoint::Transmit;
use crate::qp::{Path, QueuePair};
use crate::wire::{Bth, Cnp, Operation};
use crate::{Instant, Qpn};

/// Maximum CNPs that wait to be sent. When there are more, the next mark tries again.
const QUEUE_DEPTH: usize = 256;

/// A CNP to be sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Notification {
    pub(crate) path: Path,
    /// The queue pair that received the mark, and its peer, which is to slow down.
    pub(crate) from: Qpn,
    pub(crate) to: Qpn,
}

#[derive(Debug)]
pub(crate) struct Notifier {
    interval: Duration,
    sending: VecDeque<Notification>,
}

impl Notifier {
    pub(crate) const fn new(interval: Duration) -> Self {
        Self {
            interval,
            sending: VecDeque::new(),
        }
    }

    /// `qp` has received a valid packet that was marked. An acknowledgement has no data to slow
    /// down, and a UD queue pair no peer.
    pub(crate) fn handle_mark(&mut self, now: Instant, qp: &mut QueuePair, bth: &Bth, counters: &mut Counters) {
        counters.marked_packets += 1;
        let acknowledges = matches!(
            bth.opcode.operation(),
            Operation::Acknowledge | Operation::AtomicAcknowledge
        );
        if acknowledges || self.sending.len() == QUEUE_DEPTH {
            return;
        }
        self.sending.extend(qp.take_notification(now, self.interval));
    }

    pub(crate) fn has_more(&self) -> bool {
        !self.sending.is_empty()
    }

    /// Writes the next CNP, which is not ECN-capable.
    pub(crate) fn transmit(&mut self, buf: &mut [u8]) -> Option<Transmit> {
        let Notification { path, from, to } = self.sending.pop_front()?;
        let len = Cnp { dest_qp: to }.write(buf)?;
        Some(Transmit {
            traffic_class: ecn::not_capable(path.traffic_class),
            ..Transmit::new(from, &path, len)
        })
    }
}
