//! DCQCN at its fixed point: N flows of one switch to one host at 40 Gb/s, with the parameters of
//! its paper, beside what the fluid model of its authors predicts and beside the controller alone
//! at a constant probability of marks.

use std::time::Duration;

use super::{Control, Table, kilobytes, millis};
use crate::fluid::Model;
use crate::measure::{jain, mean, percentile};
use crate::open_loop::{Notification, OpenLoop};
use crate::port::Node;
use crate::switch::{Red, SwitchConfig};
use crate::topology::{Topology, link};
use crate::traffic::FlowSpec;
use crate::{fabric::Fabric, packet::FRAMING};
use doorbell_roce_proto::Instant;

const GIGABITS: u64 = 40;
/// Payload, BTH and ICRC of a packet.
const PACED: u64 = 1024 + 16;

/// A measured and the predicted fixed point.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct FixedPoint {
    /// Mean of the queue in bytes.
    pub queue: f64,
    /// 10th and 90th percentile of the queue in bytes.
    pub range: [u64; 2],
    /// Fraction of packets that were marked.
    pub marked: f64,
    /// Utilization of the bottleneck.
    pub utilization: f64,
    /// Jain's index of the rates.
    pub jain: f64,
    /// The model's queue in bytes; `None` beyond `p_max`.
    pub model_queue: Option<f64>,
    /// The model's marking probability.
    pub model_marked: f64,
}

/// The queue in bytes that marks as many packets as the controller needs for its share, when marks
/// are independent; `None` beyond `p_max`.
pub fn open_loop(flows: usize, notification: Notification) -> Option<f64> {
    let line_rate = GIGABITS * 1_000_000_000 / 8 * PACED / (PACED + FRAMING);
    let sender = OpenLoop {
        notification,
        line_rate,
        packet: PACED,
    };
    Red::DCQCN.queue(sender.marking(line_rate as f64 / flows as f64, 1))
}

/// The fluid model of these flows.
pub fn model(flows: usize) -> Model {
    Model::paper(flows, GIGABITS * 1_000_000_000, PACED + FRAMING, PACED)
}

/// `flows` for `time` after 20 ms, with this propagation delay of each link in µs.
pub fn fixed_point(flows: usize, delay: u64, time: Duration, seed: u64) -> FixedPoint {
    let switch = SwitchConfig::default();
    let config = Control::Dcqcn.config(seed);
    let star = Topology::star(flows + 1, switch, link(GIGABITS, delay));
    let mut fabric = Fabric::new(&star, config);
    for src in 1..=flows {
        fabric.add(FlowSpec::endless(src, 0, Instant::ZERO));
    }
    let from = millis(20);
    fabric.run(from);
    let before = fabric.switches[0].ports[0].stats;
    fabric.watch(0, Node::Host(0));
    let until = from + time;
    fabric.run(until);
    let after = fabric.switches[0].ports[0].stats;
    let rates = fabric.rates(from.since(Instant::ZERO), until.since(Instant::ZERO), config.bin);
    let queue = &fabric.watched[0].queue;
    let bits = (after.sent - before.sent) as f64 * 8.0;
    let model = model(flows);
    FixedPoint {
        queue: mean(queue),
        range: [0.1, 0.9].map(|fraction| percentile(queue, fraction)),
        marked: (after.marked - before.marked) as f64 / (after.capable - before.capable) as f64,
        utilization: bits / time.as_secs_f64() / (GIGABITS as f64 * 1e9),
        jain: jain(&rates),
        model_queue: model.queue(&Red::DCQCN),
        model_marked: model.marking(),
    }
}

pub(super) fn tables() -> Vec<Table> {
    let columns = vec![
        "flows",
        "queue, KB",
        "controller alone, KB",
        "difference, %",
        "by the paper's NP, KB",
        "model, KB",
        "difference, %",
        "p10, KB",
        "p90, KB",
        "marked, %",
        "model, %",
        "utilization, %",
        "Jain",
    ];
    [1, 20]
        .map(|delay| Table {
            title: format!(
                "DCQCN's fixed point: {GIGABITS} Gb/s, links of {delay} µs, Kmin 5 KB, Kmax 200 KB, Pmax 1 %, 100 ms after 20 ms"
            ),
            columns: columns.clone(),
            rows: [2, 4, 8, 10, 20, 64].map(|flows| row(flows, delay)).into(),
        })
        .into()
}

fn row(flows: usize, delay: u64) -> Vec<String> {
    let point = fixed_point(flows, delay, Duration::from_millis(100), 1);
    let bytes = |queue: Option<f64>| queue.map_or("beyond Kmax".into(), kilobytes);
    let beside = |reference: Option<f64>| {
        let difference = |reference: f64| format!("{:+.0}", 100.0 * (point.queue / reference - 1.0));
        [bytes(reference), reference.map_or(String::new(), difference)]
    };
    let mut row = vec![flows.to_string(), kilobytes(point.queue)];
    row.extend(beside(open_loop(flows, Notification::Forgets)));
    row.push(bytes(open_loop(flows, Notification::Remembers)));
    row.extend(beside(point.model_queue));
    row.extend([
        kilobytes(point.range[0] as f64),
        kilobytes(point.range[1] as f64),
        format!("{:.3}", 100.0 * point.marked),
        format!("{:.3}", 100.0 * point.model_marked),
        format!("{:.1}", 100.0 * point.utilization),
        format!("{:.3}", point.jain),
    ]);
    row
}
