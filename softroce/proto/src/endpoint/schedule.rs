//! The turns of the queue pairs that have something to send.

use std::collections::VecDeque;

/// Packets that one queue pair sends before the next one's turn: enough for a GSO run. A longer
/// packet, of a link, counts as one for each [`PACKET`] bytes: behind a burst wait the ACKs of the
/// other queue pairs.
const MAX_BURST: u32 = 16;
const PACKET: usize = 4096;

#[derive(Debug)]
pub(super) struct SendSchedule {
    pub(super) queue: VecDeque<u32>,
    /// By slot: whether it is queued.
    pub(super) queued: Vec<bool>,
    /// Packets that the front queue pair may still send in this burst.
    pub(super) burst_left: u32,
}

impl SendSchedule {
    pub(super) const fn new() -> Self {
        Self {
            queue: VecDeque::new(),
            queued: Vec::new(),
            burst_left: MAX_BURST,
        }
    }

    pub(super) fn add(&mut self, index: u32) {
        if let Some(queued) = self.queued.get_mut(index as usize)
            && !*queued
        {
            *queued = true;
            self.queue.push_back(index);
        }
    }

    /// Whether the front queue pair has sent packets of its burst.
    pub(super) const fn has_begun_burst(&self) -> bool {
        self.burst_left < MAX_BURST
    }

    /// The front queue pair has sent a packet.
    pub(super) fn sent(&mut self, len: usize) {
        self.burst_left = self.burst_left.saturating_sub((len / PACKET).max(1) as u32);
    }

    pub(super) fn end_burst(&mut self, requeue: bool) {
        self.burst_left = MAX_BURST;
        if let Some(index) = self.queue.pop_front() {
            self.queued[index as usize] = false;
            if requeue {
                self.add(index);
            }
        }
    }
}
