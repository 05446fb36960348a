//! From measurements to costs: pure functions, which a calibration calls at start-up and tests call with numbers of their own.
//!
//! Machines are shared, so single samples are far off, and only ever too long. A line α + bβ is fitted by medians: of the slopes between all pairs of sizes, and then of what is left at each size; each counts by how much it can
//! tell, which is the difference in bytes for a slope, and the shortness for a time without bytes. So half of the samples may be disturbed (Theil and Sen).

use crate::cost::{Compute, Link, MessageCost, Mover, payload};
use crate::types::Protocol;

/// A measurement.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sample {
    /// Bytes of payload.
    pub bytes: u64,
    /// How long it took, ns.
    pub ns: f64,
}

/// A line: so long without any bytes, and so much longer for each.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Line {
    /// ns.
    pub fixed_ns: f64,
    /// ns per byte.
    pub ns_per_byte: f64,
}

/// Fits a line; none for samples of fewer than two sizes. Neither number is negative.
#[must_use]
pub fn line(samples: &[Sample]) -> Option<Line> {
    let usable = samples.iter().filter(|sample| sample.ns.is_finite() && sample.ns > 0.0);
    let mut samples: Vec<Sample> = usable.copied().collect();
    samples.sort_by(|a, b| {
        (a.bytes, a.ns)
            .partial_cmp(&(b.bytes, b.ns))
            .unwrap_or(core::cmp::Ordering::Equal)
    });
    let sizes: Vec<Sample> = samples
        .chunk_by(|a, b| a.bytes == b.bytes)
        .map(|same| same[(same.len() - 1) / 2])
        .collect();
    let mut slopes = Vec::new();
    for (index, small) in sizes.iter().enumerate() {
        for large in &sizes[index + 1..] {
            let bytes = (large.bytes - small.bytes) as f64;
            slopes.push(((large.ns - small.ns) / bytes, bytes / (large.ns + small.ns)));
        }
    }
    let ns_per_byte = weighted_median(&mut slopes)?.max(0.0);
    let mut rests: Vec<(f64, f64)> = sizes
        .iter()
        .map(|size| (size.ns - size.bytes as f64 * ns_per_byte, 1.0 / (size.ns * size.ns)))
        .collect();
    let fixed_ns = weighted_median(&mut rests)?.max(0.0);
    Some(Line { fixed_ns, ns_per_byte })
}

/// The value below which half of the weight lies.
fn weighted_median(values: &mut [(f64, f64)]) -> Option<f64> {
    values.sort_by(|a, b| a.0.total_cmp(&b.0));
    let half = values.iter().map(|(_, weight)| weight).sum::<f64>() / 2.0;
    let mut below = 0.0;
    for &(value, weight) in values.iter() {
        below += weight;
        if below >= half {
            return Some(value);
        }
    }
    None
}

/// What was measured of one protocol.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Messages {
    /// Half round trips of a ping-pong.
    pub ping_pong: Vec<Sample>,
    /// Time for each of many messages sent one after another without waiting, small ones.
    pub stream: Vec<Sample>,
}

impl Messages {
    /// What a message costs. Without a stream the processors are taken to be busy for a quarter of α each.
    #[must_use]
    pub fn fit(&self) -> Option<MessageCost> {
        let Line { fixed_ns, ns_per_byte } = line(&self.ping_pong)?;
        let mut rates: Vec<(f64, f64)> = self
            .stream
            .iter()
            .map(|sample| (sample.ns - sample.bytes as f64 * ns_per_byte, 1.0))
            .collect();
        // The slower of the two ends is what the stream shows; neither can be busy for longer than its half of α.
        let busy = weighted_median(&mut rates).map_or(fixed_ns / 4.0, |ns| ns.clamp(0.0, fixed_ns / 2.0));
        Some(MessageCost {
            alpha_ns: fixed_ns,
            send_ns: busy,
            receive_ns: busy,
            beta_ns_per_byte: ns_per_byte,
        })
    }
}

/// What was measured of a link. A protocol that was not measured is derived from Simple.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Calibration {
    /// By [`Protocol::Simple`].
    pub simple: Messages,
    /// By [`Protocol::Ll`].
    pub ll: Messages,
    /// By [`Protocol::Ll128`].
    pub ll128: Messages,
}

impl Calibration {
    /// The link; none without two sizes of Simple.
    #[must_use]
    pub fn link(&self, mover: Mover) -> Option<Link> {
        let simple = self.simple.fit()?;
        let derived = |protocol| MessageCost {
            beta_ns_per_byte: simple.beta_ns_per_byte / payload(protocol),
            ..simple
        };
        Some(Link {
            mover,
            simple,
            ll: self.ll.fit().unwrap_or_else(|| derived(Protocol::Ll)),
            ll128: self.ll128.fit().unwrap_or_else(|| derived(Protocol::Ll128)),
        })
    }
}

/// What a rank's own work costs, from reductions and copies of several sizes; what was not measured stays as it is in `otherwise`.
#[must_use]
pub fn compute(reductions: &[Sample], copies: &[Sample], otherwise: Compute) -> Compute {
    let per_byte = |samples, default| line(samples).map_or(default, |line| line.ns_per_byte);
    Compute {
        gamma_ns_per_byte: per_byte(reductions, otherwise.gamma_ns_per_byte),
        copy_ns_per_byte: per_byte(copies, otherwise.copy_ns_per_byte),
        ..otherwise
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes() -> impl Iterator<Item = u64> {
        (3..=24).map(|bit| 1 << bit)
    }

    #[test]
    fn a_line_is_found_again() {
        let samples: Vec<Sample> = sizes()
            .map(|bytes| Sample {
                bytes,
                ns: 700.0 + 0.04 * bytes as f64,
            })
            .collect();
        let found = line(&samples).unwrap();
        assert!(
            (found.fixed_ns - 700.0).abs() < 1e-6 && (found.ns_per_byte - 0.04).abs() < 1e-9,
            "{found:?}"
        );
    }

    #[test]
    fn disturbed_samples_hardly_move_it() {
        // Every third sample is up to a hundred times too long, the others are by up to 10 %.
        let mut samples = Vec::new();
        for (index, bytes) in sizes().flat_map(|bytes| [bytes; 5]).enumerate() {
            let disturbed = match index % 3 {
                0 => [2.0, 10.0, 100.0][index / 3 % 3],
                other => 1.0 + 0.05 * f64::from(other as u32) * (index % 7) as f64 / 6.0,
            };
            samples.push(Sample {
                bytes,
                ns: (700.0 + 0.04 * bytes as f64) * disturbed,
            });
        }
        let found = line(&samples).unwrap();
        assert!((680.0..=800.0).contains(&found.fixed_ns), "{found:?}");
        assert!((0.038..=0.046).contains(&found.ns_per_byte), "{found:?}");
    }

    #[test]
    fn too_little_is_no_line_and_nonsense_is_no_panic() {
        let sample = |bytes, ns| Sample { bytes, ns };
        assert_eq!(line(&[]), None);
        assert_eq!(line(&[sample(8, 100.0), sample(8, 110.0)]), None);
        assert_eq!(line(&[sample(8, f64::NAN), sample(16, -1.0)]), None);
        let falling = line(&[sample(8, 1000.0), sample(1 << 20, 10.0)]).unwrap();
        assert!(falling.ns_per_byte == 0.0 && falling.fixed_ns > 0.0);
    }

    #[test]
    fn a_calibration_is_a_link() {
        let pings = |alpha: f64, beta: f64| {
            sizes()
                .map(|bytes| Sample {
                    bytes,
                    ns: alpha + beta * bytes as f64,
                })
                .collect()
        };
        let mut calibration = Calibration {
            simple: Messages {
                ping_pong: pings(1000.0, 0.05),
                stream: vec![Sample { bytes: 0, ns: 150.0 }],
            },
            ll: Messages {
                ping_pong: pings(500.0, 0.12),
                stream: Vec::new(),
            },
            ll128: Messages::default(),
        };
        let link = calibration.link(Mover::Receiver).unwrap();
        assert_eq!(
            (link.simple.send_ns.round(), link.simple.receive_ns.round()),
            (150.0, 150.0)
        );
        assert!((link.ll.alpha_ns - 500.0).abs() < 1e-6 && (link.ll.send_ns - 125.0).abs() < 1e-6);
        assert!((link.ll128.beta_ns_per_byte - 0.05 / 0.9375).abs() < 1e-9, "derived");
        calibration.simple.ping_pong.truncate(1);
        assert_eq!(calibration.link(Mover::Receiver), None);
        let reductions: Vec<Sample> = pings(50.0, 0.03);
        let found = compute(&reductions, &[], Compute::default());
        assert!((found.gamma_ns_per_byte - 0.03).abs() < 1e-9);
        assert_eq!(found.copy_ns_per_byte, Compute::default().copy_ns_per_byte);
    }
}
