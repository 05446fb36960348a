//! Flows: messages from one host to another on a queue pair of their own.

use std::time::Duration;

use doorbell_roce_proto::{Instant, Qpn};

/// A flow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FlowSpec {
    /// The sending host.
    pub src: usize,
    /// The receiving host.
    pub dst: usize,
    /// When its first message is posted.
    pub start: Instant,
    /// Messages; `u64::MAX` never ends.
    pub messages: u64,
    /// Bytes of a message.
    pub message: u32,
}

impl FlowSpec {
    /// A flow that sends until the simulation ends.
    pub fn endless(src: usize, dst: usize, start: Instant) -> Self {
        Self {
            src,
            dst,
            start,
            messages: u64::MAX,
            message: 1 << 20,
        }
    }

    /// A flow of one message.
    pub fn message(src: usize, dst: usize, start: Instant, bytes: u32) -> Self {
        Self {
            messages: 1,
            message: bytes,
            ..Self::endless(src, dst, start)
        }
    }
}

/// The progress of a flow.
#[derive(Clone, Debug)]
pub struct Flow {
    /// What it sends.
    pub spec: FlowSpec,
    /// Queue pairs of sender and receiver.
    pub(crate) qpns: [Qpn; 2],
    /// Message *k* is posted when this flow has delivered its message *k* - 1.
    pub(crate) after: Option<usize>,
    pub(crate) posted: u64,
    /// Messages that the sender knows to be delivered.
    pub completed: u64,
    /// Messages delivered.
    pub delivered: u64,
    /// The last completion of all messages.
    pub finished: Option<Instant>,
    /// Its queue pair failed.
    pub failed: bool,
    /// Payload bytes that arrived in each interval of [`Config::bin`](crate::fabric::Config::bin),
    /// retransmissions included.
    pub arrived: Vec<u64>,
}

impl Flow {
    pub(crate) fn new(spec: FlowSpec, qpns: [Qpn; 2]) -> Self {
        Self {
            spec,
            qpns,
            after: None,
            posted: 0,
            completed: 0,
            delivered: 0,
            finished: None,
            failed: false,
            arrived: Vec::new(),
        }
    }

    /// Flow completion time.
    pub fn completion_time(&self) -> Option<Duration> {
        self.finished.map(|at| at - self.spec.start)
    }

    /// Bytes delivered in order, of whole messages.
    pub fn goodput(&self) -> u64 {
        self.completed * u64::from(self.spec.message)
    }

    pub(crate) fn arrive(&mut self, now: Instant, bin: Duration, bytes: u64) {
        let index = (now.0 / bin.as_nanos().max(1) as u64) as usize;
        if self.arrived.len() <= index {
            self.arrived.resize(index + 1, 0);
        }
        self.arrived[index] += bytes;
    }
}
