//! Link utilization of a stream of WRITEs by loss and window, as a reviewed snapshot. Go-back-N
//! costs more, the wider the window and the higher the loss. The clock is virtual and losses are
//! seeded: the table changes only with the engine.

use std::fmt::Write as _;
use std::time::Duration;

use doorbell_roce_proto::memory::Sge;
use doorbell_roce_proto::work::{Operation, Payload, SendRequest, Status};
use doorbell_roce_proto::{Mtu, Qpn};
use doorbell_softroce::links::udp::fault::FaultConfig;

use crate::memory::{RegionId, Rights};
use crate::net::{Idents, LinkConfig, Network, Step};
use crate::pair::{DEPTH, PD, connect};
use crate::trace::Trace;

const WINDOWS: [u32; 5] = [8, 32, 128, 512, 1024];
const LOSSES: [f64; 6] = [0.0, 0.001, 0.01, 0.05, 0.1, 0.2];
const BITS_PER_SECOND: u64 = 100_000_000_000;
const LATENCY: Duration = Duration::from_micros(5);
const MESSAGE: usize = 64 << 10;
const MESSAGES: usize = 256;
const MTU: Mtu = Mtu::Mtu4096;
/// 1 ms: over the round trip that the widest window fills.
const TIMEOUT: u8 = 8;
const SEEDS: u64 = 3;

#[test]
fn throughput_by_loss_and_window() {
    let mut table = String::from("loss \\ window");
    for window in WINDOWS {
        let _ = write!(table, "{window:>8}");
    }
    for loss in LOSSES {
        let _ = write!(table, "\n{:>11.1} %", loss * 100.0);
        for window in WINDOWS {
            let sum: f64 = (0..SEEDS).map(|seed| goodput(loss, window, seed)).sum();
            let _ = write!(table, "{:>7.1}%", 100.0 * sum / SEEDS as f64);
        }
    }
    let about = format!(
        "Payload as a fraction of the rate of a {} Gb/s link with {} µs one way, {} MiB of WRITEs of {} KiB, MTU {}, mean of {SEEDS} seeds",
        BITS_PER_SECOND / 1_000_000_000,
        LATENCY.as_micros(),
        (MESSAGE * MESSAGES) >> 20,
        MESSAGE >> 10,
        MTU.bytes(),
    );
    insta::with_settings!({ description => about, omit_expression => true, prepend_module_to_snapshot => false }, {
        insta::assert_snapshot!("throughput", table);
    });
}

/// As a fraction of the link rate; 0 where the queue pair fails.
fn goodput(loss: f64, window: u32, seed: u64) -> f64 {
    let faults = FaultConfig {
        drop: loss,
        seed,
        ..FaultConfig::default()
    };
    let link = LinkConfig {
        bits_per_second: BITS_PER_SECOND,
        latency: LATENCY,
        backlog: Duration::from_micros(1),
        faults,
        idents: Idents::Zero,
        socket: None,
    };
    let mut net = Network::new(link, Trace::default());
    let qpns = connect(&mut net, window, MTU, TIMEOUT);
    let regions = [0, 1].map(|node| {
        let rights = Rights {
            write: node == 1,
            ..Rights::LOCAL
        };
        net.nodes[node]
            .memory
            .register(PD, 0x1000_0000, rights, vec![node as u8; MESSAGE])
    });
    let (mut posted, mut done) = (0, 0);
    loop {
        while posted < MESSAGES && posted - done < DEPTH {
            post(&mut net, qpns[0], regions);
            posted += 1;
        }
        net.service(0).expect("the wire's rules hold");
        if done == MESSAGES {
            let seconds = net.now.0 as f64 / 1e9;
            return (MESSAGES * MESSAGE * 8) as f64 / seconds / BITS_PER_SECOND as f64;
        }
        if net.step().expect("the wire's rules hold") == Step::Idle {
            return 0.0;
        }
        let completions = net.nodes[0].completions.drain(..);
        done += completions
            .filter(|(_, completion)| completion.status == Status::Success)
            .count();
    }
}

fn post(net: &mut Network, qpn: Qpn, [source, target]: [RegionId; 2]) {
    let (near, far) = (&net.nodes[0].memory, &net.nodes[1].memory);
    let sges = [Sge {
        addr: near.region(source).base,
        len: MESSAGE as u32,
        lkey: near.lkey(source),
    }];
    let operation = Operation::Write {
        addr: far.region(target).base,
        rkey: far.rkey(target),
        imm: None,
    };
    let payload = Payload::Gather(&sges);
    let request = SendRequest {
        wr_id: 0,
        operation,
        payload,
        signaled: true,
        fence: false,
        solicited: false,
    };
    net.nodes[0]
        .endpoint
        .post_send(net.now, qpn, &request)
        .expect("the queue has room");
}
