//! What a test reports of each interval while it runs (`--interval`).

use serde::{Deserialize, Serialize};

/// What this end has done in an interval of a bandwidth test.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct BandwidthInterval {
    /// Its end, seconds after the start of the measurement.
    pub(crate) end_s: f64,
    /// Messages done.
    pub(crate) iterations: u64,
    pub(crate) bw_avg_bytes_per_s: f64,
    pub(crate) msg_rate_per_s: f64,
}

/// The messages that ended in an interval of a latency test.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct LatencyInterval {
    /// Its end, seconds after the start of the measurement.
    pub(crate) end_s: f64,
    /// Messages measured.
    pub(crate) iterations: u64,
    pub(crate) lat_p50_ns: f64,
    pub(crate) lat_avg_ns: f64,
    pub(crate) lat_p99_ns: f64,
    pub(crate) lat_max_ns: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Interval {
    Bandwidth(BandwidthInterval),
    Latency(LatencyInterval),
}
