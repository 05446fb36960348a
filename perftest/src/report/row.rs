//! The rows of a report: the result of one message size, with its parameters.
//!
//! A row has its own parameters (queue pairs, depth, inline), because the rows of a sweep differ in
//! them. Every formula is in docs/METRICS.md; the units are in the names. What a test may lack
//! is an `Option`, and left out of the JSON.

use serde::{Deserialize, Serialize};

use super::{BandwidthInterval, LatencyInterval};
use crate::stats::{Bandwidth, CpuUse, LatencySummary, Spread};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum Row {
    Bandwidth(BandwidthRow),
    Latency(LatencyRow),
}

impl Row {
    /// The main figure, in a few words.
    pub(crate) fn figure(&self) -> String {
        match self {
            Row::Bandwidth(row) => format!("{:.3} GB/s", row.bw_avg_bytes_per_s / 1e9),
            Row::Latency(row) => format!("p50 {:.2} us", row.lat_p50_ns / 1e3),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowParams {
    pub(crate) bytes: u64,
    pub(crate) qps: u32,
    /// tx depth: requests in flight per queue pair.
    pub(crate) tx_depth: u32,
    /// Messages of up to so many bytes were sent inline.
    pub(crate) inline_bytes: u32,
    pub(crate) post_list: u32,
}

/// The result of one size of a bandwidth test.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
// fields: the keys of the JSON object
pub(crate) struct BandwidthRow {
    pub(crate) bytes: u64,
    pub(crate) qps: u32,
    /// tx depth: the most requests in flight per queue pair.
    pub(crate) tx_depth: u32,
    /// Messages of up to so many bytes are sent inline; 0 where none are.
    pub(crate) inline_bytes: u32,
    pub(crate) post_list: u32,
    /// Messages measured, over all queue pairs and repeats.
    pub(crate) iterations: u64,
    /// Best stretch of any repeat, bytes per second.
    pub(crate) bw_peak_bytes_per_s: f64,
    /// Whole measurement, the mean over repeats, bytes per second.
    pub(crate) bw_avg_bytes_per_s: f64,
    /// The same in messages per second.
    pub(crate) msg_rate_per_s: f64,
    pub(crate) repeats: u32,
    /// Each repeat's average, bytes per second.
    pub(crate) bw_samples_bytes_per_s: Vec<f64>,
    /// Half width of the 95 % confidence interval of their mean, bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bw_ci95_bytes_per_s: Option<f64>,
    /// CPU time of this end in user mode over elapsed time.
    pub(crate) cpu_user_cores: f64,
    /// CPU time of this end in the kernel over elapsed time.
    pub(crate) cpu_system_cores: f64,
    /// Rate limit in messages per second, over all queue pairs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) paced_rate_per_s: Option<f64>,
    /// Bandwidth of copies of the same size between the two GPUs, bytes per second, where both
    /// ends' messages lie in GPU memory that this process sees.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) raw_copy_bytes_per_s: Option<f64>,
    /// Messages that have not arrived, warm-up included, on a transport that may lose them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) lost_messages: Option<u64>,
    /// With `--interval`, what this end did in each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) intervals: Vec<BandwidthInterval>,
}

impl BandwidthRow {
    /// The row of these repeats, in the order they ran; `None` without one.
    pub(crate) fn new(shape: RowParams, repeats: &[Bandwidth], cpu: CpuUse) -> Option<BandwidthRow> {
        let bytes = shape.bytes as f64;
        let samples: Vec<f64> = repeats.iter().map(|repeat| repeat.average_per_s * bytes).collect();
        let rates: Vec<f64> = repeats.iter().map(|repeat| repeat.average_per_s).collect();
        let (spread, rate) = (Spread::of(&samples)?, Spread::of(&rates)?);
        let peak = repeats.iter().map(|repeat| repeat.peak_per_s).fold(0.0, f64::max);
        Some(BandwidthRow {
            bytes: shape.bytes,
            qps: shape.qps,
            tx_depth: shape.tx_depth,
            inline_bytes: shape.inline_bytes,
            post_list: shape.post_list,
            iterations: repeats.iter().map(|repeat| repeat.messages).sum(),
            bw_peak_bytes_per_s: peak * bytes,
            bw_avg_bytes_per_s: spread.mean,
            msg_rate_per_s: rate.mean,
            repeats: u32::try_from(repeats.len()).unwrap_or(u32::MAX),
            bw_samples_bytes_per_s: samples,
            bw_ci95_bytes_per_s: spread.ci95,
            cpu_user_cores: cpu.user_cores,
            cpu_system_cores: cpu.system_cores,
            paced_rate_per_s: None,
            raw_copy_bytes_per_s: None,
            lost_messages: None,
            intervals: Vec::new(),
        })
    }
}

/// Whether coordinated omission is corrected: the treatment of messages that were due while an
/// earlier one stalled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum CoordinatedOmission {
    /// Open loop: messages start on a schedule, and their latency counts from there, so a stall
    /// counts in each of them.
    Corrected,
    /// Closed loop: a message starts when the previous one is done, so a stall counts once.
    ClosedLoop,
}

/// The percentiles of a row, by their usual names.
pub(crate) const PERCENTILES: [(&str, f64); 5] = [
    ("p50", 0.5),
    ("p90", 0.9),
    ("p99", 0.99),
    ("p99.9", 0.999),
    ("p99.99", 0.9999),
];

/// The result of one size of a latency test, over all repeats.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
// fields: the keys of the JSON object
pub(crate) struct LatencyRow {
    pub(crate) bytes: u64,
    pub(crate) qps: u32,
    /// The most requests in flight.
    pub(crate) tx_depth: u32,
    /// Messages of up to so many bytes are sent inline; 0 where none are.
    pub(crate) inline_bytes: u32,
    pub(crate) iterations: u64,
    pub(crate) lat_min_ns: f64,
    pub(crate) lat_p50_ns: f64,
    pub(crate) lat_avg_ns: f64,
    pub(crate) lat_stddev_ns: f64,
    pub(crate) lat_p90_ns: f64,
    pub(crate) lat_p99_ns: f64,
    pub(crate) lat_p999_ns: f64,
    pub(crate) lat_p9999_ns: f64,
    pub(crate) lat_max_ns: f64,
    pub(crate) repeats: u32,
    /// Each repeat's median, ns.
    pub(crate) lat_samples_ns: Vec<f64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) lat_p99_samples_ns: Vec<f64>,
    /// Half width of the 95 % confidence interval of the mean of the medians, ns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) lat_ci95_ns: Option<f64>,
    /// CPU time of this end in user mode over elapsed time.
    pub(crate) cpu_user_cores: f64,
    /// CPU time of this end in the kernel over elapsed time.
    pub(crate) cpu_system_cores: f64,
    /// Whether a stall counts once or in every message that it delayed.
    pub(crate) coordinated_omission: CoordinatedOmission,
    /// Rate limit in messages per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) paced_rate_per_s: Option<f64>,
    /// The distribution: fractions of the messages, each with the time in ns that they did not
    /// exceed; the last fraction is 1.
    pub(crate) lat_cdf: Vec<(f64, f64)>,
    /// With `--interval`, the messages of each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) intervals: Vec<LatencyInterval>,
}

impl LatencyRow {
    /// The row of all messages, with the results of each repeat; `None` without one.
    pub(crate) fn new(
        shape: RowParams,
        figures: LatencySummary,
        repeats: &[LatencySummary],
        cpu: CpuUse,
    ) -> Option<LatencyRow> {
        let medians: Vec<f64> = repeats.iter().map(|repeat| repeat.p50).collect();
        let spread = Spread::of(&medians)?;
        Some(LatencyRow {
            bytes: shape.bytes,
            qps: shape.qps,
            tx_depth: shape.tx_depth,
            inline_bytes: shape.inline_bytes,
            iterations: figures.count,
            lat_min_ns: figures.min,
            lat_p50_ns: figures.p50,
            lat_avg_ns: figures.avg,
            lat_stddev_ns: figures.stddev,
            lat_p90_ns: figures.p90,
            lat_p99_ns: figures.p99,
            lat_p999_ns: figures.p999,
            lat_p9999_ns: figures.p9999,
            lat_max_ns: figures.max,
            repeats: u32::try_from(repeats.len()).unwrap_or(u32::MAX),
            lat_samples_ns: medians,
            lat_p99_samples_ns: repeats.iter().map(|repeat| repeat.p99).collect(),
            lat_ci95_ns: spread.ci95,
            cpu_user_cores: cpu.user_cores,
            cpu_system_cores: cpu.system_cores,
            coordinated_omission: CoordinatedOmission::ClosedLoop,
            paced_rate_per_s: None,
            lat_cdf: figures.cdf,
            intervals: Vec::new(),
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::stats::{Latency, Trip};

    const SHAPE: RowParams = RowParams {
        bytes: 8 << 20,
        qps: 1,
        tx_depth: 128,
        inline_bytes: 0,
        post_list: 1,
    };

    pub(crate) fn bandwidth() -> BandwidthRow {
        let figures = Bandwidth {
            messages: 5000,
            average_per_s: 0.5e6,
            peak_per_s: 0.5e6,
        };
        BandwidthRow {
            bw_peak_bytes_per_s: 2.0 * 1048576.0,
            bw_avg_bytes_per_s: 1.5 * 1048576.0,
            ..BandwidthRow::new(SHAPE, &[figures], CpuUse::default()).unwrap()
        }
    }

    pub(crate) fn latency() -> LatencyRow {
        let mut latency = Latency::new(Trip::Half);
        (1..=1000).for_each(|ns| latency.record(2000 + ns));
        let figures = latency.figures().unwrap();
        LatencyRow::new(SHAPE, figures.clone(), &[figures], CpuUse::default()).unwrap()
    }

    #[test]
    fn repeats_are_averaged_and_the_peak_is_the_best() {
        let repeats =
            [(100, 1.0, 5.0), (200, 2.0, 4.0), (300, 3.0, 3.0)].map(|(messages, average_per_s, peak_per_s)| {
                Bandwidth {
                    messages,
                    average_per_s,
                    peak_per_s,
                }
            });
        let row = BandwidthRow::new(RowParams { bytes: 10, ..SHAPE }, &repeats, CpuUse::default()).unwrap();
        assert_eq!((row.iterations, row.repeats, row.msg_rate_per_s), (600, 3, 2.0));
        assert_eq!((row.bw_avg_bytes_per_s, row.bw_peak_bytes_per_s), (20.0, 50.0));
        assert_eq!(row.bw_samples_bytes_per_s, [10.0, 20.0, 30.0]);
        assert!((row.bw_ci95_bytes_per_s.unwrap() - 24.841).abs() < 0.005);
        assert_eq!(BandwidthRow::new(SHAPE, &[], CpuUse::default()), None);
    }
}
