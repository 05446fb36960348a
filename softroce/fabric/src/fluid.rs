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

    /// The queue in bytes that marks with this probability; `None` beyond `p_max`, where the model
    /// has no fixed point and the queue is at `k_max`.
    pub fn queue(&self, red: &Red) -> Option<f64> {
        let marking = self.marking();
        (marking <= red.p_max).then(|| red.k_min as f64 + marking / red.p_max * (red.k_max - red.k_min) as f64)
    }

    /// How the target rate changes when the current rate does not, at its fair share.
    fn drift(&self, p: f64) -> f64 {
        let rate = self.capacity / self.flows;
        let cnp = 1.0 - (1.0 - p).powf(self.tau * rate);
        let alpha = 1.0 - (1.0 - p).powf(self.tau_alpha * rate);
        let survive = |packets: f64| (1.0 - p).powf(packets);
        // Increases per second by the byte counter and by the timer.
        let by_bytes = rate * p / (survive(-self.counter) - 1.0);
        let by_timer = rate * p / (survive(-self.timer * rate) - 1.0);
        // The rate is constant: cuts equal half of the distance to the target per increase.
        let distance = rate * alpha * cnp / (self.tau * (by_bytes + by_timer));
        let additive = self.additive
            * (survive(self.fast_recovery * self.counter) * by_bytes
                + survive(self.fast_recovery * self.timer * rate) * by_timer);
        additive - distance * cnp / self.tau
    }
}
