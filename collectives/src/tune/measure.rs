//! Measuring: which sizes a calibration asks for, and what this rank's own work costs.

use std::hint::black_box;
use std::time::{Duration, Instant};

use super::fit::{self, Calibration, Sample};
use crate::cost::Compute;
use crate::kernel::Function;
use crate::plan::Form;
use crate::protocol::Lines;
use crate::types::{DataType, Protocol, ReduceOp};

/// Sizes of messages that are timed: the shortest, for α, and some long enough that β is most of their time.
const MESSAGES: [u64; 6] = [8, 512, 4 << 10, 16 << 10, 128 << 10, 1 << 20];
/// How often each.
const ROUNDS: usize = 9;
/// Elements of an f32 reduction that are timed: from the second cache to the third.
const ELEMENTS: [usize; 3] = [4 << 10, 16 << 10, 64 << 10];

impl Calibration {
    /// Times messages: `half_round_trip` sends one of a length there and back again, and says half of how long that took. All ranks that take part are to see the same lengths in the same order, and do.
    ///
    /// # Errors
    /// Those of `half_round_trip`.
    pub fn measure<E>(mut half_round_trip: impl FnMut(Protocol, u64) -> Result<Duration, E>) -> Result<Self, E> {
        let mut calibration = Self::default();
        for (protocol, messages) in [
            (Protocol::Simple, &mut calibration.simple),
            (Protocol::Ll, &mut calibration.ll),
            (Protocol::Ll128, &mut calibration.ll128),
        ] {
            let ring = |lines: Lines| (lines.slots() as usize * lines.room()) as u64;
            let longest = protocol.lines().map_or(u64::MAX, ring);
            for bytes in MESSAGES.into_iter().filter(|&bytes| bytes <= longest) {
                // The first one of a length finds nothing in the caches.
                half_round_trip(protocol, bytes)?;
                for _ in 0..ROUNDS {
                    let ns = half_round_trip(protocol, bytes)?.as_nanos() as f64;
                    messages.ping_pong.push(Sample { bytes, ns });
                }
            }
        }
        Ok(calibration)
    }
}

/// Times reductions and copies of this rank: takes about a millisecond.
#[must_use]
pub fn measure_compute() -> Compute {
    let Ok(function) = Function::new(DataType::F32, ReduceOp::Sum, 2) else {
        return Compute::default();
    };
    let (mut reductions, mut copies) = (Vec::new(), Vec::new());
    for elements in ELEMENTS {
        let (with, mut into) = (vec![1.0f32; elements], vec![0.0f32; elements]);
        let bytes = (elements * size_of::<f32>()) as u64;
        for _ in 0..=ROUNDS {
            let began = Instant::now();
            let target = into.as_mut_ptr().cast::<u8>();
            // SAFETY: both buffers have `elements` of f32, which is the element and the partial form alike; `into` is one of the sources exactly, and nobody else has either.
            unsafe {
                function.reduce(
                    &[(Form::Element, target), (Form::Element, with.as_ptr().cast())],
                    (Form::Element, target),
                    elements,
                )
            };
            black_box(&mut into);
            reductions.push(Sample {
                bytes,
                ns: began.elapsed().as_nanos() as f64,
            });
            let began = Instant::now();
            into.copy_from_slice(black_box(&with));
            black_box(&mut into);
            copies.push(Sample {
                bytes,
                ns: began.elapsed().as_nanos() as f64,
            });
        }
    }
    fit::compute(&reductions, &copies, Compute::default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::Mover;

    #[test]
    fn a_calibration_finds_what_it_times() {
        let mut asked = Vec::new();
        let calibration = Calibration::measure(|protocol, bytes| {
            asked.push((protocol, bytes));
            let alpha = if protocol == Protocol::Simple { 900.0 } else { 400.0 };
            Ok::<_, ()>(Duration::from_nanos((alpha + 0.25 * bytes as f64) as u64))
        });
        let link = calibration.unwrap().link(Mover::Receiver).unwrap();
        for (cost, alpha) in [(link.simple, 900.0), (link.ll, 400.0), (link.ll128, 400.0)] {
            assert!(
                (cost.alpha_ns - alpha).abs() < 5.0 && (cost.beta_ns_per_byte - 0.25).abs() < 0.01,
                "{cost:?}"
            );
        }
        assert!(
            asked
                .iter()
                .all(|&(protocol, bytes)| protocol == Protocol::Simple || bytes <= 64 << 10)
        );
        assert_eq!(Calibration::measure(|_, _| Err::<Duration, _>("gone")), Err("gone"));
    }

    #[test]
    fn work_of_this_machine_takes_some_time() {
        let compute = measure_compute();
        for ns in [compute.gamma_ns_per_byte, compute.copy_ns_per_byte] {
            assert!(ns.is_finite() && ns >= 0.0);
        }
        assert_eq!(compute.begin_ns, Compute::default().begin_ns);
    }
}
