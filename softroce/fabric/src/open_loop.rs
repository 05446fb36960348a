//! The rate controller of the engine without a network: each packet is marked with one probability,
//! nothing queues and nothing is late. What is left are the algorithm and its notification point,
//! so that a simulated queue that differs from the fluid model's can be traced to one of them.

use std::time::Duration;

use doorbell_roce_proto::Instant;
use doorbell_roce_proto::congestion::{CongestionConfig, Controller, Dcqcn, DcqcnConfig};

/// What a notification point does with a mark within the interval after a CNP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Notification {
    /// Nothing, as the engine's: the first mark after the interval is answered.
    Forgets,
    /// It is answered at the end of the interval, as the paper has it (SIGCOMM 2015, section 3.1).
    Remembers,
}

/// A sender whose packets are marked.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct OpenLoop {
    /// Of the receiver.
    pub notification: Notification,
    /// The line rate in bytes/s, of what the controller counts.
    pub line_rate: u64,
    /// Bytes of a packet that the controller counts.
    pub packet: u64,
}

/// The virtual time of a run; the first tenth is not measured.
const TIME: u64 = 4_000_000_000;

/// Halvings of the interval in which a probability is searched.
const HALVINGS: usize = 14;

impl OpenLoop {
    /// The probability of marks at which the mean rate is `rate`, in bytes/s: the counterpart of
    /// the fluid model's fixed point.
    pub fn marking(&self, rate: f64, seed: u64) -> f64 {
        let (mut low, mut high) = (1e-4_f64, 0.05_f64);
        for _ in 0..HALVINGS {
            let middle = (low * high).sqrt();
            if self.rate(middle, seed) > rate {
                low = middle;
            } else {
                high = middle;
            }
        }
        low
    }

    /// The mean rate in bytes/s with marks of this probability.
    fn rate(&self, probability: f64, seed: u64) -> f64 {
        let config = CongestionConfig {
            line_rate: self.line_rate,
            ..CongestionConfig::default()
        };
        let mut sender = Sender {
            controller: Dcqcn::new(&config, DcqcnConfig::default()),
            point: Point::new(self.notification, config.cnp_interval),
            random: fastrand::Rng::with_seed(seed),
            now: Instant::ZERO,
            unmarked: 0.0,
        };
        sender.draw(probability, self.packet);
        let mut sent = 0.0;
        while sender.now.0 < TIME {
            let bytes = sender.step(self.line_rate, probability, self.packet);
            if sender.now.0 > TIME / 10 {
                sent += bytes;
            }
        }
        sent / (TIME as f64 * 0.9 / 1e9)
    }
}

/// A notification point.
struct Point {
    kind: Notification,
    interval: Duration,
    last: Option<Instant>,
    pending: bool,
}

impl Point {
    const fn new(kind: Notification, interval: Duration) -> Self {
        Self {
            kind,
            interval,
            last: None,
            pending: false,
        }
    }

    /// Whether a CNP for a mark at `now` is due.
    fn mark(&mut self, now: Instant) -> bool {
        let due = self.last.is_none_or(|last| now.since(last) >= self.interval);
        if due {
            self.last = Some(now);
        } else {
            self.pending |= self.kind == Notification::Remembers;
        }
        due
    }

    fn deadline(&self) -> Option<Instant> {
        self.last.filter(|_| self.pending).map(|last| last + self.interval)
    }
}

struct Sender {
    controller: Dcqcn,
    point: Point,
    random: fastrand::Rng,
    now: Instant,
    /// Bytes to the next mark.
    unmarked: f64,
}

impl Sender {
    /// The packets up to the next mark are of a geometric distribution.
    fn draw(&mut self, probability: f64, packet: u64) {
        let packets = ((1.0 - self.random.f64()).ln() / (-probability).ln_1p())
            .ceil()
            .max(1.0);
        self.unmarked = packets * packet as f64;
    }

    /// Goes on to the next mark, timer or end of an interval; returns the bytes sent until then.
    fn step(&mut self, line_rate: u64, probability: f64, packet: u64) -> f64 {
        let rate = self.controller.rate().unwrap_or(line_rate) as f64;
        let marked = self.now + Duration::from_nanos((self.unmarked * 1e9 / rate).ceil() as u64);
        let (timer, pending) = (self.controller.next_timer(), self.point.deadline());
        let next = timer.into_iter().chain(pending).fold(marked, Instant::min);
        let bytes = (rate * next.since(self.now).as_secs_f64()).min(self.unmarked);
        (self.now, self.unmarked) = (next, self.unmarked - bytes);
        self.controller.on_sent(next, bytes as u64);
        if timer.is_some_and(|at| at <= next) {
            self.controller.on_timer(next);
        }
        if pending.is_some_and(|at| at <= next) {
            self.point.pending = false;
            self.point.last = Some(next);
            self.controller.on_cnp(next);
        }
        if next == marked {
            self.draw(probability, packet);
            if self.point.mark(next) {
                self.controller.on_cnp(next);
            }
        }
        bytes
    }
}
