//! The parking lot: one flow over several bottlenecks, at each another flow. Max-min fair is half
//! of each link to both.

use std::time::Duration;

use super::{Control, Table, millis};
use crate::fabric::Fabric;
use crate::switch::{Pfc, SwitchConfig};
use crate::topology::{Topology, link};
use crate::traffic::FlowSpec;
use doorbell_roce_proto::Instant;

/// Rates in Gb/s of payload, from 20 to 60 ms.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ParkingLot {
    /// Of the flow over all hops.
    pub long: f64,
    /// Mean of the others.
    pub short: f64,
    /// Packets dropped.
    pub drops: u64,
}

/// A lot of `hops`.
pub fn parking_lot(hops: usize, control: Control, pfc: bool, seed: u64) -> ParkingLot {
    let switch = SwitchConfig {
        buffer: 2_000_000,
        pfc: pfc.then(Pfc::default),
        ..SwitchConfig::default()
    };
    let config = control.config(seed);
    let mut fabric = Fabric::new(&Topology::parking_lot(hops, switch, link(40, 1)), config);
    fabric.add(FlowSpec::endless(0, 1, Instant::ZERO));
    for hop in 0..hops {
        fabric.add(FlowSpec::endless(2 + 2 * hop, 3 + 2 * hop, Instant::ZERO));
    }
    fabric.run(millis(60));
    let rates = fabric.rates(Duration::from_millis(20), Duration::from_millis(60), config.bin);
    ParkingLot {
        long: rates[0],
        short: rates[1..].iter().sum::<f64>() / hops as f64,
        drops: fabric.dropped(),
    }
}

pub(super) fn tables() -> Vec<Table> {
    let mut rows = Vec::new();
    for pfc in [true, false] {
        for control in Control::ALL {
            for hops in [2, 3, 4] {
                let lot = parking_lot(hops, control, pfc, 1);
                rows.push(vec![
                    if pfc { "PFC" } else { "drop tail" }.into(),
                    control.to_string(),
                    hops.to_string(),
                    format!("{:.1}", lot.long),
                    format!("{:.1}", lot.short),
                    lot.drops.to_string(),
                ]);
            }
        }
    }
    vec![Table {
        title: "Parking lot: 40 Gb/s, 20 to 60 ms; max-min fair is 18.8 Gb/s of payload each".into(),
        columns: vec![
            "switches",
            "control",
            "hops",
            "long flow, Gb/s",
            "short flows, Gb/s",
            "drops",
        ],
        rows,
    }]
}
