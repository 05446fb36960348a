//! All-reduce rings across an oversubscribed Clos: neighbors of a ring are at different leaves, as
//! when a scheduler spreads a job, so that every step crosses the spines.

use std::time::Duration;

use super::{Control, Table, micros, millis};
use crate::fabric::Fabric;
use crate::measure::percentile;
use crate::switch::{Pfc, SwitchConfig};
use crate::topology::{Topology, link};
use crate::traffic::FlowSpec;
use doorbell_roce_proto::Instant;

const LEAVES: usize = 4;
const SPINES: usize = 2;
const HOSTS_PER_LEAF: usize = 4;
const RANKS: usize = LEAVES * HOSTS_PER_LEAF;
const SEEDS: u64 = 3;
const BITS: f64 = 40e9;

/// An all-reduce.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Ring {
    /// Until the last rank has all; `None` when not within a second.
    pub time: Option<Duration>,
    /// Packets dropped.
    pub drops: u64,
    /// PAUSE frames.
    pub pauses: u64,
}

/// One all-reduce of `bytes` by a ring of all hosts: `2 (n - 1)` steps of `bytes / n`.
pub fn ring(bytes: u32, control: Control, pfc: bool, seed: u64) -> Ring {
    let switch = SwitchConfig {
        buffer: 2_000_000,
        pfc: pfc.then(Pfc::default),
        ..SwitchConfig::default()
    };
    let clos = Topology::clos(LEAVES, SPINES, HOSTS_PER_LEAF, switch, link(40, 1));
    let mut fabric = Fabric::new(&clos, control.config(seed));
    let host = |rank: usize| rank % LEAVES * HOSTS_PER_LEAF + rank / LEAVES % HOSTS_PER_LEAF;
    for rank in 0..RANKS {
        fabric.add(FlowSpec {
            messages: 2 * (RANKS as u64 - 1),
            message: bytes / RANKS as u32,
            ..FlowSpec::endless(host(rank), host((rank + 1) % RANKS), Instant::ZERO)
        });
    }
    (0..RANKS).for_each(|rank| fabric.order(rank, (rank + 1) % RANKS));
    let done = fabric.run(millis(1000));
    let last = fabric.flows.iter().filter_map(|flow| flow.completion_time()).max();
    Ring {
        time: last.filter(|_| done && fabric.flows.iter().all(|flow| !flow.failed)),
        drops: fabric.dropped(),
        pauses: fabric.pauses(),
    }
}

pub(super) fn tables() -> Vec<Table> {
    let bytes = 8 << 20;
    let steps = 2.0 * (RANKS as f64 - 1.0) / RANKS as f64;
    // Four flows of a leaf share two uplinks, spread evenly.
    let ideal = steps * f64::from(bytes) * 8.0 / (BITS * SPINES as f64 / HOSTS_PER_LEAF as f64);
    let mut rows = Vec::new();
    for pfc in [true, false] {
        for control in Control::ALL {
            let runs: Vec<Ring> = (1..=SEEDS).map(|seed| ring(bytes, control, pfc, seed)).collect();
            let times: Vec<Duration> = runs.iter().filter_map(|run| run.time).collect();
            let ended = times.len() == runs.len();
            let cell = |fraction: f64| {
                if ended {
                    micros(percentile(&times, fraction))
                } else {
                    "no end".into()
                }
            };
            rows.push(vec![
                if pfc { "PFC" } else { "drop tail" }.into(),
                control.to_string(),
                cell(0.5),
                cell(1.0),
                runs.iter().map(|run| run.drops).sum::<u64>().to_string(),
                runs.iter().map(|run| run.pauses).sum::<u64>().to_string(),
            ]);
        }
    }
    vec![Table {
        title: format!(
            "All-reduce of {} MiB by a ring of {RANKS} hosts, {LEAVES} leaves, {SPINES} spines, 40 Gb/s (2:1), every step across the spines; {SEEDS} seeds of ECMP; evenly spread it would take {:.0} µs",
            bytes >> 20,
            ideal * 1e6
        ),
        columns: vec!["switches", "control", "median, µs", "slowest, µs", "drops", "pauses"],
        rows,
    }]
}
