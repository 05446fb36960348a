//! Hosts in software, whose thread sleeps until a packet wakes it: the evidence by which a
//! controller is chosen for such a device.

use std::time::Duration;

use super::{Control, Table, kilobytes, millis};
use crate::fabric::Fabric;
use crate::measure::{jain, mean, percentile};
use crate::port::Node;
use crate::switch::{Red, SwitchConfig};
use crate::topology::{Topology, link};
use crate::traffic::FlowSpec;
use doorbell_roce_proto::{Instant, Mtu};

const SENDERS: usize = 8;
const GIGABITS: u64 = 10;

/// What an incast of such hosts comes to, from 20 to 100 ms.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sleepers {
    /// Payload that arrived in Gb/s.
    pub rate: f64,
    /// Fairness.
    pub jain: f64,
    /// The queue in bytes: mean and 99th percentile.
    pub queue: [f64; 2],
    /// Packets dropped.
    pub drops: u64,
}

/// 8 senders to one receiver at 10 Gb/s; `marks`: whether the switch marks.
pub fn sleepers([wake_up, busy_poll]: [Duration; 2], control: Control, marks: bool, seed: u64) -> Sleepers {
    let switch = SwitchConfig {
        buffer: 2_000_000,
        red: marks.then_some(Red::DCQCN),
        ..SwitchConfig::default()
    };
    let mut config = control.config(seed);
    config.host.wake_up = wake_up;
    config.host.busy_poll = busy_poll;
    config.host.mtu = Mtu::Mtu4096;
    // The device's window and burst.
    config.host.endpoint.window = 1024;
    config.host.endpoint.congestion.burst = 64 << 10;
    let star = Topology::star(SENDERS + 1, switch, link(GIGABITS, 2));
    let mut fabric = Fabric::new(&star, config);
    for src in 1..=SENDERS {
        fabric.add(FlowSpec::endless(src, 0, Instant::ZERO));
    }
    fabric.run(millis(20));
    let drops = fabric.dropped();
    fabric.watch(0, Node::Host(0));
    fabric.run(millis(100));
    let rates = fabric.rates(Duration::from_millis(20), Duration::from_millis(100), config.bin);
    let queue = &fabric.watched[0].queue;
    Sleepers {
        rate: rates.iter().sum(),
        jain: jain(&rates),
        queue: [mean(queue), percentile(queue, 0.99) as f64],
        drops: fabric.dropped() - drops,
    }
}

pub(super) fn tables() -> Vec<Table> {
    let mut rows = Vec::new();
    for marks in [true, false] {
        for [wake_up, busy_poll] in [[0, 0], [50, 200], [1000, 200], [50, 0], [200, 0]] {
            for control in Control::ALL {
                let run = sleepers([wake_up, busy_poll].map(Duration::from_micros), control, marks, 1);
                rows.push(vec![
                    if marks { "marks" } else { "none" }.into(),
                    wake_up.to_string(),
                    busy_poll.to_string(),
                    control.to_string(),
                    format!("{:.2}", run.rate),
                    format!("{:.3}", run.jain),
                    kilobytes(run.queue[0]),
                    kilobytes(run.queue[1]),
                    run.drops.to_string(),
                ]);
            }
        }
    }
    vec![Table {
        title: format!(
            "Sleeping hosts: {SENDERS} senders at {GIGABITS} Gb/s, buffer of 2 MB, drop tail; a packet waits up to the wake-up time for a thread; 20 to 100 ms"
        ),
        columns: vec![
            "switches",
            "wake-up, µs",
            "busy-poll, µs",
            "control",
            "payload, Gb/s",
            "Jain",
            "queue, KB",
            "p99, KB",
            "drops",
        ],
        rows,
    }]
}
