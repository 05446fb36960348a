//! Congestion control: the rate at which a queue pair sends over UDP (IBTA annex A17.9).
//!
//! The notification point (NP) is the receiver: for a packet that a switch marked (CE), it returns
//! a CNP. The reaction point (RP) is the sender: `Congestion` of a queue pair hands CNPs, RTTs
//! and losses to its [`Controller`], and paces packets by the rate that it returns.
//!
//! A lossless link has neither. Without an algorithm a queue pair has no `Congestion`, and a
//! packet costs one test where it is sent and one where it is received (decision 109).

mod dcqcn;
mod delay;
pub mod ecn;
pub(crate) mod notifier;
mod pacer;

use core::fmt::Debug;
use core::time::Duration;

use crate::Instant;
pub use dcqcn::{Dcqcn, DcqcnConfig};
pub use delay::{Delay, DelayConfig};
use pacer::Pacer;

/// A rate controller: one per queue pair.
///
/// Before each call but the getters, the engine calls [`on_timer`](Self::on_timer) if a timer has
/// expired. Calls are in the order of `now`, never before an earlier one.
pub trait Controller: Debug + Send {
    /// A CNP arrived. The engine passes at most one per [`CongestionConfig::cnp_spacing`].
    fn on_cnp(&mut self, now: Instant);

    /// An ACK advanced the oldest unacknowledged packet by `bytes` of payload (whole packets are
    /// counted at the path MTU). `rtt`: from a packet with AckReq, sent once, to its ACK.
    fn on_ack(&mut self, now: Instant, rtt: Option<Duration>, bytes: u64);

    /// Packets were lost: the local ACK timeout expired, or a PSN sequence error NAK arrived. Once
    /// per recovery.
    fn on_loss(&mut self, now: Instant);

    /// A packet of `bytes`, headers included, was sent.
    fn on_sent(&mut self, now: Instant, bytes: u64);

    /// The rate in bytes/s; `None`: the line rate, without pacing. The engine keeps it at or above
    /// [`CongestionConfig::min_rate`].
    fn rate(&self) -> Option<u64>;

    /// The maximum of unacknowledged payload in bytes, `None` without limit. The engine admits one
    /// packet whatever it is: a smaller window is a [`rate`](Self::rate).
    fn window(&self) -> Option<u64> {
        None
    }

    /// When [`on_timer`](Self::on_timer) is due; `None` at the line rate, when no timer can change
    /// the rate. An idle queue pair is not woken for it.
    fn next_timer(&self) -> Option<Instant>;

    /// Timers have expired, perhaps long ago: `now` may be many periods after
    /// [`next_timer`](Self::next_timer), which is after `now` when this returns. Its cost does not
    /// depend on how many (an idle queue pair sends again after hours).
    fn on_timer(&mut self, now: Instant);
}

/// The algorithm of a device's queue pairs.
#[derive(Clone, Copy, Debug, Default)]
pub enum Algorithm {
    /// No reaction to congestion, packets are not ECN-capable.
    #[default]
    None,
    /// DCQCN: a rate by the CNPs for what switches mark.
    Dcqcn(DcqcnConfig),
    /// A window by the round-trip time.
    Delay(DelayConfig),
    /// A controller made by this function.
    Custom(fn(&CongestionConfig) -> Box<dyn Controller>),
}

/// Configuration of congestion control.
#[derive(Clone, Copy, Debug)]
pub struct CongestionConfig {
    /// The algorithm of the reaction point.
    pub algorithm: Algorithm,
    /// The line rate in bytes/s: the maximum of a controller, and where it begins.
    pub line_rate: u64,
    /// The minimum rate in bytes/s, whatever the controller returns.
    pub min_rate: u64,
    /// RP: the minimum time between two CNPs that are passed to the controller; others are ignored.
    pub cnp_spacing: Duration,
    /// NP: the minimum time between two CNPs of a queue pair.
    pub cnp_interval: Duration,
    /// Bytes that a paced queue pair may send at once: a timer of an operating system is late, and
    /// a GSO run wants several packets.
    pub burst: u32,
}

impl Default for CongestionConfig {
    fn default() -> Self {
        Self {
            algorithm: Algorithm::None,
            // 100 Gb/s and 100 Mb/s.
            line_rate: 12_500_000_000,
            min_rate: 12_500_000,
            cnp_spacing: Duration::from_micros(4),
            cnp_interval: Duration::from_micros(50),
            burst: 64 << 10,
        }
    }
}

impl CongestionConfig {
    /// Whether its queue pairs react to congestion, and send ECN-capable packets.
    pub const fn reacts(&self) -> bool {
        !matches!(self.algorithm, Algorithm::None)
    }

    fn controller(&self) -> Option<Box<dyn Controller>> {
        match self.algorithm {
            Algorithm::None => None,
            Algorithm::Dcqcn(config) => Some(Box::new(Dcqcn::new(self, config))),
            Algorithm::Delay(config) => Some(Box::new(Delay::new(self, config))),
            Algorithm::Custom(make) => Some(make(self)),
        }
    }
}

/// The reaction point of a queue pair: its controller, and what the controller needs and decides.
#[derive(Debug)]
pub(crate) struct Congestion {
    controller: Box<dyn Controller>,
    pacer: Pacer,
    config: CongestionConfig,
    last_cnp: Option<Instant>,
    /// The packet whose RTT is measured, and when it was sent: one at a time.
    sample: Option<(u64, Instant)>,
    /// Recoveries of the requester that the controller knows of.
    recoveries: u64,
    /// Something is to be sent, at this time at the earliest.
    blocked_until: Option<Instant>,
}

impl Congestion {
    /// `None` without an algorithm.
    pub(crate) fn new(config: &CongestionConfig) -> Option<Box<Self>> {
        Some(Box::new(Self {
            controller: config.controller()?,
            pacer: Pacer::new(config.burst),
            config: *config,
            last_cnp: None,
            sample: None,
            recoveries: 0,
            blocked_until: None,
        }))
    }

    /// A new connection begins at the line rate.
    pub(crate) fn reset(&mut self) {
        if let Some(fresh) = Self::new(&self.config) {
            *self = *fresh;
        }
    }

    /// Runs expired timers, and earns credit at the rate that was in force.
    fn advance(&mut self, now: Instant) {
        if let Some(rate) = self.rate() {
            self.pacer.refill(now, rate);
        }
        if self.controller.next_timer().is_some_and(|at| at <= now) {
            self.controller.on_timer(now);
        }
    }

    /// The rate in bytes/s, `None` without pacing.
    pub(crate) fn rate(&self) -> Option<u64> {
        Some(self.controller.rate()?.max(self.config.min_rate).max(1))
    }

    /// The maximum of unacknowledged payload in bytes.
    pub(crate) fn window(&self) -> u64 {
        self.controller.window().unwrap_or(u64::MAX)
    }

    /// False when too soon after the last: a storm of CNPs is no more than its first.
    pub(crate) fn handle_cnp(&mut self, now: Instant) -> bool {
        if self
            .last_cnp
            .is_some_and(|last| now.since(last) < self.config.cnp_spacing)
        {
            return false;
        }
        self.last_cnp = Some(now);
        self.advance(now);
        self.controller.on_cnp(now);
        true
    }

    /// Packets before `una` are acknowledged, of them `bytes` anew; `recoveries`: of the requester.
    pub(crate) fn handle_progress(&mut self, now: Instant, una: u64, bytes: u64, recoveries: u64) {
        let lost = recoveries != self.recoveries;
        if bytes == 0 && !lost {
            return;
        }
        self.advance(now);
        if lost {
            self.recoveries = recoveries;
            self.sample = None;
            self.controller.on_loss(now);
        }
        if bytes > 0 {
            let rtt = match self.sample {
                Some((number, sent)) if number < una => {
                    self.sample = None;
                    Some(now.since(sent))
                }
                _ => None,
            };
            self.controller.on_ack(now, rtt, bytes);
        }
    }

    /// Whether a packet of data may be sent now; if not, [`deadline`](Self::deadline) is when that
    /// may change.
    pub(crate) fn may_send(&mut self, now: Instant) -> bool {
        self.advance(now);
        self.blocked_until = match self.rate() {
            Some(rate) if !self.pacer.may_send() => {
                let ready = self.pacer.ready_at(rate);
                Some(self.controller.next_timer().map_or(ready, |timer| timer.min(ready)))
            }
            _ => None,
        };
        self.blocked_until.is_none()
    }

    /// A packet of `bytes`, headers included, was sent. `sample`: its number if its ACK, which it
    /// requests, will answer no other transmission.
    pub(crate) fn sent(&mut self, now: Instant, bytes: usize, sample: Option<u64>) {
        if self.rate().is_some() {
            self.pacer.sent(bytes);
        }
        if self.sample.is_none() {
            self.sample = sample.map(|number| (number, now));
        }
        self.controller.on_sent(now, bytes as u64);
    }

    /// When a packet that waits for the rate may be sent.
    pub(crate) const fn deadline(&self) -> Option<Instant> {
        self.blocked_until
    }

    /// The deadline has passed.
    pub(crate) fn unblock(&mut self, now: Instant) {
        self.blocked_until = self.blocked_until.filter(|at| *at > now);
    }
}
