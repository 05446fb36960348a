//! The fluid model of DCQCN that its authors published (Zhu et al., SIGCOMM 2015, section 5.1; Zhu,
//! Ghobadi, Misra, Padhye, ECN or Delay, CoNEXT 2016, section 3.1), at its unique fixed point
//! (theorem 1 there): N flows of equal rate through one marked queue.

use crate::switch::Red;

/// Parameters of the model, in packets and seconds.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Model {
    /// Flows.
    pub flows: f64,
    /// Capacity of the bottleneck in packets/s.
    pub capacity: f64,
    /// The interval of CNPs.
    pub tau: f64,
    /// The timer of alpha.
    pub tau_alpha: f64,
    /// The timer of increases.
    pub timer: f64,
    /// The byte counter in packets.
    pub counter: f64,
    /// `R_AI` in packets/s.
    pub additive: f64,
    /// `F`.
    pub fast_recovery: f64,
}

impl Model {
    /// The paper's parameters for flows at a bottleneck of this many bits/s. `packet`: bytes on the
    /// link; `paced`: those that the controller counts.
    pub fn paper(flows: usize, bits: u64, packet: u64, paced: u64) -> Self {
        Self {
            flows: flows as f64,
            capacity: bits as f64 / 8.0 / packet as f64,
            tau: 50e-6,
            tau_alpha: 55e-6,
            timer: 55e-6,
            counter: 10e6 / paced as f64,
            additive: 40e6 / 8.0 / paced as f64,
            fast_recovery: 5.0,
        }
    }

    /// The probability of marks at which rates are constant; the model has one.
    pub fn marking(&self) -> f64 {
        let (mut low, mut high) = (1e-9, 0.5);
        for _ in 0..200 {
            let middle = (low + high) / 2.0;
            if self.drift(middle) > 0.0 {
                low = middle;
            } else {
                high = middle;
            }
        }
        low
    }

    /// The queue in bytes; `None` beyond `p_max`, where the model has no fixed point and the queue
    /// is at `k_max`.
    pub fn queue(&self, red: &Red) -> Option<f64> {
        red.queue(self.marking())
    }

    /// The queue in bytes from `from` to `until` seconds, in steps of 1 µs: flows start at the full
    /// rate, and what they do is by the marks and rates of `delay` seconds before. `packet`: bytes
    /// on the link.
    pub fn run(&self, red: &Red, packet: f64, delay: f64, [from, until]: [f64; 2]) -> Vec<f64> {
        const STEP: f64 = 1e-6;
        let lag = (delay / STEP) as usize;
        let (mut past, mut samples): (Vec<(f64, f64)>, Vec<f64>) = Default::default();
        let (mut rate, mut target, mut alpha, mut queue) = (self.capacity, self.capacity, 1.0, 0.0);
        for step in 0..(until / STEP) as usize {
            // A probability of 1 has no logarithm.
            past.push((red.probability((queue * packet) as u64).min(1.0 - 1e-9), rate));
            let (marking, then) = if step < lag { (0.0, rate) } else { past[step - lag] };
            let terms = self.terms(marking, then);
            let distance = target - rate;
            let change = distance / 2.0 * (terms.by_bytes + terms.by_timer) - rate * alpha / 2.0 * terms.cnps;
            target += (terms.additive - distance * terms.cnps) * STEP;
            alpha += GAIN / self.tau_alpha * (terms.alpha - alpha) * STEP;
            queue = (queue + (self.flows * rate - self.capacity) * STEP).max(0.0);
            (rate, target) = ((rate + change * STEP).min(self.capacity), target.min(self.capacity));
            if step as f64 * STEP >= from {
                samples.push(queue * packet);
            }
        }
        samples
    }

    /// How the target rate changes when the current rate does not, at its fair share.
    fn drift(&self, p: f64) -> f64 {
        let rate = self.capacity / self.flows;
        let terms = self.terms(p, rate);
        // The rate is constant: cuts equal half of the distance to the target per increase.
        let distance = rate * terms.alpha * terms.cnps / (terms.by_bytes + terms.by_timer);
        terms.additive - distance * terms.cnps
    }

    /// What happens at a probability of marks and a rate, both of a feedback delay ago.
    fn terms(&self, p: f64, rate: f64) -> Terms {
        // Of no mark among as many packets.
        let survive = |packets: f64| ((-p).ln_1p() * packets).exp();
        // How often that many packets pass without a mark, per second.
        let passes = |packets: f64| {
            let gap = (-(-p).ln_1p() * packets).exp_m1();
            if p > 0.0 { rate * p / gap } else { rate / packets }
        };
        let (counter, timer) = (self.counter, self.timer * rate);
        let (by_bytes, by_timer) = (passes(counter), passes(timer));
        Terms {
            cnps: (1.0 - survive(self.tau * rate)) / self.tau,
            alpha: 1.0 - survive(self.tau_alpha * rate),
            by_bytes,
            by_timer,
            additive: self.additive
                * (survive(self.fast_recovery * counter) * by_bytes + survive(self.fast_recovery * timer) * by_timer),
        }
    }
}

/// `g`.
const GAIN: f64 = 1.0 / 256.0;

/// The terms of the equations.
struct Terms {
    /// CNPs per second.
    cnps: f64,
    /// What alpha tends to.
    alpha: f64,
    /// Increases per second by the byte counter.
    by_bytes: f64,
    /// Increases per second by the timer.
    by_timer: f64,
    /// What additive increases add to the target rate, in packets/s².
    additive: f64,
}
