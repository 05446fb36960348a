//! Statistics of a run.

use std::time::Duration;

use crate::fabric::Fabric;

/// Jain's index of fairness: 1 when all shares are equal, 1/n when one has all.
pub fn jain(shares: &[f64]) -> f64 {
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|share| share * share).sum();
    if squares == 0.0 {
        return 1.0;
    }
    sum * sum / (shares.len() as f64 * squares)
}

/// The value below which a fraction of the values lies; by the nearest rank. 0 without values.
pub fn percentile<T: Copy + Ord + Default>(values: &[T], fraction: f64) -> T {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let rank = (fraction * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied().unwrap_or_default()
}

/// The mean; 0 without values.
pub fn mean(values: &[u64]) -> f64 {
    values.iter().sum::<u64>() as f64 / values.len().max(1) as f64
}

impl Fabric {
    /// Gb/s of payload that arrived of each flow between two times, in whole intervals.
    pub fn rates(&self, from: Duration, until: Duration, bin: Duration) -> Vec<f64> {
        let index = |at: Duration| (at.as_nanos() / bin.as_nanos().max(1)) as usize;
        let (from, until) = (index(from), index(until).max(index(from) + 1));
        let seconds = bin.as_secs_f64() * (until - from) as f64;
        self.flows
            .iter()
            .map(|flow| {
                let bytes: u64 = flow.arrived.iter().take(until).skip(from).sum();
                bytes as f64 * 8.0 / 1e9 / seconds
            })
            .collect()
    }

    /// Flow completion times: median and 99th percentile. `None` when a flow has not ended.
    pub(crate) fn completion_times(&self) -> Option<[Duration; 2]> {
        let times: Vec<Duration> = self
            .flows
            .iter()
            .map(|flow| flow.completion_time())
            .collect::<Option<_>>()?;
        Some([0.5, 0.99].map(|fraction| percentile(&times, fraction)))
    }

    /// Packets that switches dropped.
    pub fn dropped(&self) -> u64 {
        self.switches
            .iter()
            .flat_map(|switch| &switch.ports)
            .map(|port| port.stats.dropped)
            .sum()
    }

    /// PAUSE frames, to hosts and switches.
    pub fn pauses(&self) -> u64 {
        let hosts = self.hosts.iter().map(|host| host.port.stats.pauses);
        let switches = self.switches.iter().flat_map(|switch| &switch.ports);
        hosts.chain(switches.map(|port| port.stats.pauses)).sum()
    }
}
