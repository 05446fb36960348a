//! Throughput over loss and window: how much of a link a stream of WRITEs fills, as a reviewed snapshot.
//!
//! Go-back-N sends everything again from the packet that was lost, so a wide window costs more the more is lost; a narrow one does not fill the link. The clock
//! is virtual and the losses are seeded: the table changes only with the engine.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use doorbell_roce_proto::memory::{PdId, Sge};
use doorbell_roce_proto::qp::{Modify, Path, QpInit, RemoteAccess, State};
use doorbell_roce_proto::work::{CqId, Operation, Payload, SendRequest, Status};
use doorbell_roce_proto::{Endpoint, EndpointConfig, Mtu, Psn, Qpn};
use doorbell_softroce::link::fault::FaultConfig;

use crate::memory::{RegionId, Rights};
use crate::net::{Idents, LinkConfig, Network, Step};
use crate::trace::Trace;

const WINDOWS: [u32; 5] = [8, 32, 128, 512, 1024];
const LOSSES: [f64; 6] = [0.0, 0.001, 0.01, 0.05, 0.1, 0.2];
const BITS_PER_SECOND: u64 = 100_000_000_000;
const LATENCY: Duration = Duration::from_micros(5);
const MESSAGE: usize = 64 << 10;
const MESSAGES: usize = 256;
/// Enough messages outstanding for the widest window.
const DEPTH: usize = 64;
const MTU: Mtu = Mtu::Mtu4096;
const PD: PdId = PdId(0);
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

/// The fraction of the link that payload takes, from the first packet to the last completion; 0 where the queue pair fails.
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
    };
    let mut net = Network::new(link, Trace::default());
    let qpns = connect(&mut net, window);
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

fn connect(net: &mut Network, window: u32) -> [Qpn; 2] {
    let addresses = [1, 2].map(|host| IpAddr::from(Ipv4Addr::new(10, 9, 0, host)));
    let qpns = addresses.map(|address| {
        let node = net.add(Endpoint::with_config(EndpointConfig { seed: 1, window }), address);
        net.nodes[node].endpoint.create_qp(QpInit {
            pd: PD,
            send_cq: CqId(0),
            recv_cq: CqId(0),
            max_send_wr: DEPTH as u32,
            max_recv_wr: 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
            signal_all: true,
        })
    });
    let none = Modify::default();
    for i in 0..2 {
        let path = Path {
            local: addresses[i],
            remote: addresses[1 - i],
            traffic_class: 0,
            hop_limit: 64,
        };
        let access = RemoteAccess {
            write: true,
            ..RemoteAccess::default()
        };
        for modify in [
            Modify {
                state: Some(State::Init),
                pkey_index: Some(0),
                port: Some(1),
                access: Some(access),
                ..none
            },
            Modify {
                state: Some(State::Rtr),
                path: Some(path),
                path_mtu: Some(MTU),
                dest_qpn: Some(qpns[1 - i]),
                rq_psn: Some(Psn::new(0)),
                max_dest_rd_atomic: Some(1),
                min_rnr_timer: Some(1),
                ..none
            },
            Modify {
                state: Some(State::Rts),
                sq_psn: Some(Psn::new(0)),
                // 1 ms: over the round trip that the widest window fills.
                timeout: Some(8),
                retry_cnt: Some(7),
                rnr_retry: Some(7),
                max_rd_atomic: Some(1),
                ..none
            },
        ] {
            net.nodes[i]
                .endpoint
                .modify_qp(net.now, qpns[i], &modify)
                .expect("the table allows it");
        }
    }
    qpns
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
        signalled: true,
        fence: false,
        solicited: false,
    };
    net.nodes[0]
        .endpoint
        .post_send(net.now, qpn, &request)
        .expect("the queue has room");
}
