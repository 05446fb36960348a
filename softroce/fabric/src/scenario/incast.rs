//! N senders to one receiver at one switch.

use std::time::Duration;

use super::{Control, Table, kilobytes, micros, millis};
use crate::fabric::Fabric;
use crate::measure::{jain, mean, percentile};
use crate::port::Node;
use crate::switch::{Pfc, SwitchConfig};
use crate::topology::{Topology, link};
use crate::traffic::FlowSpec;
use doorbell_roce_proto::Instant;

const GIGABITS: u64 = 40;
const BUFFER: u64 = 2_000_000;
/// What each sender sends for the completion times.
const MESSAGES: u64 = 8;
const MESSAGE: u32 = 128 << 10;

/// What an incast comes to.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Incast {
    /// Endless flows: payload that arrived, Gb/s, from 10 ms on.
    pub rate: f64,
    /// Their fairness.
    pub jain: f64,
    /// Their queue in bytes: mean, 99th percentile.
    pub queue: [f64; 2],
    /// Packets dropped, and PAUSE frames, from 10 ms on.
    pub drops: u64,
    /// PAUSE frames from 10 ms on.
    pub pauses: u64,
    /// Of [`completion`].
    pub completion: Option<[Duration; 2]>,
}

/// `senders` to one receiver; endless flows are measured for `time`.
pub fn incast(senders: usize, control: Control, pfc: bool, time: Duration, seed: u64) -> Incast {
    let config = control.config(seed);
    let mut fabric = Fabric::new(&star(senders, pfc), config);
    for src in 1..=senders {
        fabric.add(FlowSpec::endless(src, 0, Instant::ZERO));
    }
    let from = millis(10);
    fabric.run(from);
    let (drops, pauses) = (fabric.dropped(), fabric.pauses());
    fabric.watch(0, Node::Host(0));
    let until = from + time;
    fabric.run(until);
    let rates = fabric.rates(from.since(Instant::ZERO), until.since(Instant::ZERO), config.bin);
    let queue = &fabric.watched[0].queue;
    Incast {
        rate: rates.iter().sum(),
        jain: jain(&rates),
        queue: [mean(queue), percentile(queue, 0.99) as f64],
        drops: fabric.dropped() - drops,
        pauses: fabric.pauses() - pauses,
        completion: completion(senders, control, pfc, seed),
    }
}

/// Completion times of flows of 1 MiB that start together: median and 99th percentile; `None` when
/// some did not end within a second.
pub fn completion(senders: usize, control: Control, pfc: bool, seed: u64) -> Option<[Duration; 2]> {
    let mut fabric = Fabric::new(&star(senders, pfc), control.config(seed));
    for src in 1..=senders {
        fabric.add(FlowSpec {
            messages: MESSAGES,
            message: MESSAGE,
            ..FlowSpec::endless(src, 0, Instant::ZERO)
        });
    }
    fabric.run(millis(1000));
    fabric.completion_times()
}

fn star(senders: usize, pfc: bool) -> Topology {
    let switch = SwitchConfig {
        buffer: BUFFER,
        pfc: pfc.then(Pfc::default),
        ..SwitchConfig::default()
    };
    Topology::star(senders + 1, switch, link(GIGABITS, 1))
}

pub(super) fn tables() -> Vec<Table> {
    [false, true]
        .map(|pfc| Table {
            title: format!(
                "Incast: {GIGABITS} Gb/s, buffer of {} MB, {}; 40 ms after 10 ms, and {MESSAGES} messages of {} KiB of each sender",
                BUFFER / 1_000_000,
                if pfc { "PFC" } else { "no PFC: drop tail, go-back-N" },
                MESSAGE >> 10,
            ),
            columns: vec![
                "senders",
                "control",
                "payload, Gb/s",
                "Jain",
                "queue, KB",
                "p99, KB",
                "drops",
                "pauses",
                "completion p50, µs",
                "p99, µs",
            ],
            rows: [2, 8, 16, 32, 64]
                .iter()
                .flat_map(|senders| Control::ALL.map(|control| row(*senders, control, pfc)))
                .collect(),
        })
        .into()
}

fn row(senders: usize, control: Control, pfc: bool) -> Vec<String> {
    let incast = incast(senders, control, pfc, Duration::from_millis(40), 1);
    let completion = |index: usize| incast.completion.map_or("no end".into(), |times| micros(times[index]));
    vec![
        senders.to_string(),
        control.to_string(),
        format!("{:.1}", incast.rate),
        format!("{:.3}", incast.jain),
        kilobytes(incast.queue[0]),
        kilobytes(incast.queue[1]),
        incast.drops.to_string(),
        incast.pauses.to_string(),
        completion(0),
        completion(1),
    ]
}
