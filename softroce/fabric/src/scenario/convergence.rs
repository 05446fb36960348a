//! Flows that join one by one: rate of each and queue over time.

use std::time::Duration;

use super::{Control, Table, kilobytes, millis};
use crate::fabric::Fabric;
use crate::measure::{jain, mean};
use crate::port::Node;
use crate::switch::SwitchConfig;
use crate::topology::{Topology, link};
use crate::traffic::FlowSpec;

const FLOWS: usize = 4;
/// Time from one flow to the next, in ms.
const APART: u64 = 20;
/// Of the rows, in ms.
const INTERVAL: u64 = 5;

/// An interval of 5 ms.
#[derive(Clone, PartialEq, Debug)]
pub struct Interval {
    /// Its end in ms.
    pub end: u64,
    /// Gb/s of payload of each flow that has started.
    pub rates: Vec<f64>,
    /// Their fairness.
    pub jain: f64,
    /// Mean of the queue in bytes.
    pub queue: f64,
}

/// Four flows to one host at 40 Gb/s, each 20 ms after the one before.
pub fn convergence(control: Control, seed: u64) -> Vec<Interval> {
    let config = control.config(seed);
    let star = Topology::star(FLOWS + 1, SwitchConfig::default(), link(40, 1));
    let mut fabric = Fabric::new(&star, config);
    for flow in 0..FLOWS {
        fabric.add(FlowSpec::endless(flow + 1, 0, millis(flow as u64 * APART)));
    }
    fabric.watch(0, Node::Host(0));
    let end = FLOWS as u64 * APART;
    fabric.run(millis(end));
    let samples = (INTERVAL * 1_000_000 / config.sample.as_nanos() as u64) as usize;
    (0..end / INTERVAL)
        .zip(fabric.watched[0].queue.chunks(samples))
        .map(|(number, queue)| {
            let [from, until] = [number, number + 1].map(|at| Duration::from_millis(at * INTERVAL));
            let started = (number * INTERVAL / APART) as usize + 1;
            let rates = fabric.rates(from, until, config.bin)[..started].to_vec();
            Interval {
                end: (number + 1) * INTERVAL,
                jain: jain(&rates),
                rates,
                queue: mean(queue),
            }
        })
        .collect()
}

pub(super) fn tables() -> Vec<Table> {
    [Control::Dcqcn, Control::Delay]
        .map(|control| Table {
            title: format!("Convergence: {control}, {FLOWS} flows at 40 Gb/s, one more every {APART} ms"),
            columns: vec![
                "until, ms",
                "flow 1, Gb/s",
                "flow 2, Gb/s",
                "flow 3, Gb/s",
                "flow 4, Gb/s",
                "Jain",
                "queue, KB",
            ],
            rows: convergence(control, 1).iter().map(row).collect(),
        })
        .into()
}

fn row(interval: &Interval) -> Vec<String> {
    let mut row = vec![interval.end.to_string()];
    let rate = |flow: usize| {
        interval
            .rates
            .get(flow)
            .map_or(String::new(), |rate| format!("{rate:.1}"))
    };
    row.extend((0..FLOWS).map(rate));
    row.extend([format!("{:.3}", interval.jain), kilobytes(interval.queue)]);
    row
}
