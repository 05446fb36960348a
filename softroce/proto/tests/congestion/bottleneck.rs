//! A fluid bottleneck: flows at the rates of their controllers into one queue, which marks as RED.

use std::time::Duration;

use doorbell_roce_proto::Instant;
use doorbell_roce_proto::congestion::Controller;

const STEP: Duration = Duration::from_micros(5);
const PACKET: f64 = 1024.0;
const BASE_RTT: Duration = Duration::from_micros(20);
/// Of CNPs of one flow.
const CNP_INTERVAL: Duration = Duration::from_micros(50);
const K_MIN: f64 = 5_000.0;
const K_MAX: f64 = 200_000.0;
const P_MAX: f64 = 0.01;

pub(crate) struct Bottleneck {
    now: Instant,
    capacity: f64,
    queue: f64,
    random: u64,
    flows: Vec<Flow>,
}

struct Flow {
    controller: Box<dyn Controller>,
    last_cnp: Option<Instant>,
    /// Bytes that are not a whole packet yet.
    fraction: f64,
}

impl Bottleneck {
    pub(crate) fn new(capacity: u64, seed: u64, controllers: Vec<Box<dyn Controller>>) -> Self {
        Self {
            now: Instant::ZERO,
            capacity: capacity as f64,
            queue: 0.0,
            random: seed * 2 + 1,
            flows: controllers
                .into_iter()
                .map(|controller| Flow {
                    controller,
                    last_cnp: None,
                    fraction: 0.0,
                })
                .collect(),
        }
    }

    /// Runs the first `active` flows; the bytes/s of each, averaged.
    pub(crate) fn run(&mut self, time: Duration, active: usize) -> Vec<f64> {
        let steps = (time.as_nanos() / STEP.as_nanos()) as u32;
        let mut sent = vec![0.0; active];
        for _ in 0..steps {
            self.now = self.now + STEP;
            let rtt = BASE_RTT + Duration::from_secs_f64(self.queue / self.capacity);
            let marked = match self.queue {
                queue if queue <= K_MIN => 0.0,
                queue if queue <= K_MAX => (queue - K_MIN) / (K_MAX - K_MIN) * P_MAX,
                _ => 1.0,
            };
            let rates: Vec<f64> = self.flows[..active]
                .iter()
                .map(|flow| rate(&*flow.controller, self.capacity, rtt))
                .collect();
            for (index, rate) in rates.iter().enumerate() {
                let bytes = rate * STEP.as_secs_f64();
                sent[index] += bytes;
                self.queue += bytes;
                self.step_flow(index, bytes, marked, rtt);
            }
            self.queue = (self.queue - self.capacity * STEP.as_secs_f64()).max(0.0);
        }
        let seconds = time.as_secs_f64();
        sent.into_iter().map(|bytes| bytes / seconds).collect()
    }

    fn step_flow(&mut self, index: usize, bytes: f64, marked: f64, rtt: Duration) {
        let draw = self.draw();
        let now = self.now;
        let flow = &mut self.flows[index];
        if flow.controller.next_timer().is_some_and(|at| at <= now) {
            flow.controller.on_timer(now);
        }
        let whole = flow.fraction + bytes;
        let packets = (whole / PACKET).floor();
        flow.fraction = whole - packets * PACKET;
        flow.controller.on_sent(now, (packets * PACKET) as u64);
        flow.controller.on_ack(now, Some(rtt), (packets * PACKET) as u64);
        let any = 1.0 - (1.0 - marked).powf(packets);
        if draw < any && flow.last_cnp.is_none_or(|last| now - last >= CNP_INTERVAL) {
            flow.last_cnp = Some(now);
            flow.controller.on_cnp(now);
        }
    }

    /// xorshift64, in 0..1.
    fn draw(&mut self) -> f64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) as f64 / (1_u64 << 53) as f64
    }
}

fn rate(controller: &dyn Controller, line_rate: f64, rtt: Duration) -> f64 {
    let paced = controller.rate().map_or(line_rate, |rate| rate as f64);
    let windowed = controller
        .window()
        .map_or(line_rate, |window| window as f64 / rtt.as_secs_f64());
    paced.min(windowed)
}

/// Jain's index of fairness: 1 when all are equal, 1/n when one has all.
pub(crate) fn jain(shares: &[f64]) -> f64 {
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|share| share * share).sum();
    sum * sum / (shares.len() as f64 * squares)
}
