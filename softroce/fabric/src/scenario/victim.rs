//! The victim of an incast: a flow from a leaf with senders of the incast to a host that nothing
//! else sends to. PFC pauses the links that it shares with them.

use std::time::Duration;

use super::{Control, Table, millis};
use crate::fabric::Fabric;
use crate::switch::{Pfc, SwitchConfig};
use crate::topology::{Topology, link};
use crate::traffic::FlowSpec;
use doorbell_roce_proto::Instant;

const HOSTS_PER_LEAF: usize = 5;
const SEEDS: u64 = 3;

/// Rates in Gb/s of payload, from 20 to 40 ms.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Victim {
    /// Of the victim.
    pub victim: f64,
    /// Of all senders of the incast together.
    pub incast: f64,
    /// PAUSE frames to switches: congestion that has spread.
    pub spread: u64,
    /// Packets dropped.
    pub drops: u64,
}

/// Four senders at the victim's leaf and `more` at a third one; leaf 1 has the receiver.
pub fn victim(more: usize, control: Control, pfc: bool, seed: u64) -> Victim {
    let switch = SwitchConfig {
        buffer: 2_000_000,
        pfc: pfc.then(Pfc::default),
        ..SwitchConfig::default()
    };
    let clos = Topology::clos(3, 2, HOSTS_PER_LEAF, switch, link(40, 1));
    let config = control.config(seed);
    let mut fabric = Fabric::new(&clos, config);
    let (receiver, third) = (HOSTS_PER_LEAF, 2 * HOSTS_PER_LEAF);
    let senders = (0..4).chain(third + 1..third + 1 + more);
    for src in senders {
        fabric.add(FlowSpec::endless(src, receiver, Instant::ZERO));
    }
    let victim = fabric.add(FlowSpec::endless(4, third, Instant::ZERO));
    fabric.run(millis(40));
    let rates = fabric.rates(Duration::from_millis(5), Duration::from_millis(40), config.bin);
    let spread = fabric.switches.iter().flat_map(|switch| &switch.ports);
    Victim {
        victim: rates[victim],
        incast: rates[..victim].iter().sum(),
        spread: spread.map(|port| port.stats.pauses).sum(),
        drops: fabric.dropped(),
    }
}

pub(super) fn tables() -> Vec<Table> {
    let mut rows = Vec::new();
    for pfc in [true, false] {
        for control in Control::ALL {
            for more in [0, 4] {
                let runs: Vec<Victim> = (1..=SEEDS).map(|seed| victim(more, control, pfc, seed)).collect();
                let mean = |of: fn(&Victim) -> f64| runs.iter().map(of).sum::<f64>() / SEEDS as f64;
                let least = runs.iter().map(|run| run.victim).fold(f64::INFINITY, f64::min);
                rows.push(vec![
                    if pfc { "PFC" } else { "drop tail" }.into(),
                    control.to_string(),
                    (4 + more).to_string(),
                    format!("{:.1}", mean(|run| run.victim)),
                    format!("{least:.1}"),
                    format!("{:.1}", mean(|run| run.incast)),
                    format!("{:.0}", mean(|run| run.spread as f64)),
                    format!("{:.0}", mean(|run| run.drops as f64)),
                ]);
            }
        }
    }
    vec![Table {
        title: format!(
            "Victim flow: 3 leaves of {HOSTS_PER_LEAF} hosts, 2 spines, 40 Gb/s; an incast to one host, 4 of its senders at the victim's leaf; 20 to 40 ms, {SEEDS} seeds of ECMP"
        ),
        columns: vec![
            "switches",
            "control",
            "senders",
            "victim, Gb/s",
            "least, Gb/s",
            "incast, Gb/s",
            "pauses of switches",
            "drops",
        ],
        rows,
    }]
}
