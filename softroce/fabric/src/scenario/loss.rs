//! Goodput of one flow on a lossy link.

use super::{Control, Table, millis};
use crate::fabric::Fabric;
use crate::switch::SwitchConfig;
use crate::topology::{Topology, link};
use crate::traffic::FlowSpec;
use doorbell_roce_proto::Instant;

const GIGABITS: u64 = 40;
const SEEDS: u64 = 3;

/// A flow of 16 MiB.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Loss {
    /// Payload delivered in Gb/s; 0 when the queue pair failed or a second was too short.
    pub goodput: f64,
    /// Data that arrived per data delivered.
    pub overhead: f64,
}

/// 64 messages of 256 KiB with this window in packets, each lost with probability `loss`.
pub fn loss(loss: f64, window: u32, selective: bool, seed: u64) -> Loss {
    let switch = SwitchConfig {
        loss,
        ..SwitchConfig::default()
    };
    let mut config = Control::None.config(seed);
    config.host.endpoint.window = window;
    config.host.endpoint.selective_repeat = selective;
    // 1 ms.
    config.host.timeout = 8;
    let mut fabric = Fabric::new(&Topology::star(2, switch, link(GIGABITS, 2)), config);
    fabric.add(FlowSpec {
        messages: 64,
        message: 256 << 10,
        ..FlowSpec::endless(0, 1, Instant::ZERO)
    });
    fabric.run(millis(1000));
    let flow = &fabric.flows[0];
    let arrived: u64 = flow.arrived.iter().sum();
    Loss {
        goodput: flow
            .completion_time()
            .map_or(0.0, |time| flow.goodput() as f64 * 8.0 / 1e9 / time.as_secs_f64()),
        overhead: arrived as f64 / flow.goodput().max(1) as f64,
    }
}

pub(super) fn tables() -> Vec<Table> {
    const WINDOWS: [u32; 3] = [128, 512, 2048];
    let mut rows = Vec::new();
    for rate in [0.0, 0.0001, 0.001, 0.01, 0.05, 0.1] {
        let mut row = vec![format!("{}", rate * 100.0)];
        for selective in [false, true] {
            row.extend(WINDOWS.map(|window| {
                let runs = (1..=SEEDS).map(|seed| loss(rate, window, selective, seed).goodput);
                format!("{:.2}", runs.sum::<f64>() / SEEDS as f64)
            }));
        }
        rows.push(row);
    }
    vec![Table {
        title: format!(
            "Loss: goodput in Gb/s of 16 MiB at {GIGABITS} Gb/s, MTU 1024, local ACK timeout 1 ms, by window in packets; mean of {SEEDS} seeds"
        ),
        columns: vec![
            "loss, %",
            "go-back-N, 128",
            "512",
            "2048",
            "selective repeat, 128",
            "512",
            "2048",
        ],
        rows,
    }]
}
