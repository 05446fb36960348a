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
use crate::pair::{DEPTH, PD, PairConfig, connect};
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
    throughput("throughput", "by go-back-N", false);
}

/// The window is at most the 256 packets that a responder keeps.
#[test]
fn throughput_by_selective_repeat() {
    throughput("throughput_selective", "by selective repeat", true);
}

fn throughput(name: &str, recovery: &str, selective_repeat: bool) {
    let mut table = String::from("loss \\ window");
    for window in WINDOWS {
        let _ = write!(table, "{window:>8}");
    }
    for loss in LOSSES {
        let _ = write!(table, "\n{:>11.1} %", loss * 100.0);
        for window in WINDOWS {
            let sum: f64 = (0..SEEDS)
                .map(|seed| goodput(loss, window, seed, selective_repeat))
                .sum();
            let _ = write!(table, "{:>7.1}%", 100.0 * sum / SEEDS as f64);
        }
    }
    let about = format!(
        "Payload as a fraction of the rate of a {} Gb/s link with {} µs one way, {} MiB of WRITEs of {} KiB, MTU {}, mean of {SEEDS} seeds, {recovery}",
        BITS_PER_SECOND / 1_000_000_000,
        LATENCY.as_micros(),
        (MESSAGE * MESSAGES) >> 20,
        MESSAGE >> 10,
        MTU.bytes(),
    );
    insta::with_settings!({ description => about, omit_expression => true, prepend_module_to_snapshot => false }, {
        insta::assert_snapshot!(name, table);
    });
}

/// The time that requests take, in milliseconds, by loss and local ACK timeout, without tail-loss
/// probes and with them. In a stream most losses show in a NAK; of messages one by one, none does.
#[test]
fn completion_time_by_loss_and_timeout() {
    let mut table = String::from("loss    timeout   stream  with probes   one by one  with probes");
    for loss in [0.0, 0.001, 0.01, 0.05] {
        for timeout in [14, 20] {
            let _ = write!(table, "\n{:>3.1} % {timeout:>9}", loss * 100.0);
            for (depth, message, widths) in [(DEPTH, MESSAGE, [9, 13]), (1, 4096, [13, 13])] {
                for (tail_loss_probes, width) in [false, true].into_iter().zip(widths) {
                    let work = |seed| Work {
                        loss,
                        seed,
                        depth,
                        message,
                        pair: PairConfig {
                            window: 128,
                            mtu: MTU,
                            timeout,
                            tail_loss_probes,
                            selective_repeat: false,
                        },
                    };
                    let times = (0..SEEDS).map(|seed| work(seed).duration().expect("every message arrives"));
                    let mean = times.sum::<Duration>() / SEEDS as u32;
                    let _ = write!(table, "{:>width$.1}", mean.as_secs_f64() * 1e3);
                }
            }
        }
    }
    let about = format!(
        "Milliseconds for {MESSAGES} WRITEs of 64 KiB, {DEPTH} posted at a time, and for {MESSAGES} of 4 KiB one by one; {} Gb/s, {} µs one way, MTU {}, window 128, mean of {SEEDS} seeds",
        BITS_PER_SECOND / 1_000_000_000,
        LATENCY.as_micros(),
        MTU.bytes(),
    );
    insta::with_settings!({ description => about, omit_expression => true, prepend_module_to_snapshot => false }, {
        insta::assert_snapshot!("completion_time", table);
    });
}

/// As a fraction of the link rate; 0 where the queue pair fails.
fn goodput(loss: f64, window: u32, seed: u64, selective_repeat: bool) -> f64 {
    let work = Work {
        loss,
        seed,
        depth: DEPTH,
        message: MESSAGE,
        pair: PairConfig {
            window,
            mtu: MTU,
            timeout: TIMEOUT,
            tail_loss_probes: true,
            selective_repeat,
        },
    };
    work.duration().map_or(0.0, |took| {
        (MESSAGES * MESSAGE * 8) as f64 / took.as_secs_f64() / BITS_PER_SECOND as f64
    })
}

/// A stream of WRITEs over a lossy link.
struct Work {
    loss: f64,
    seed: u64,
    /// Requests posted at a time.
    depth: usize,
    /// Bytes of each.
    message: usize,
    pair: PairConfig,
}

impl Work {
    /// The virtual time until all are complete; `None` where the queue pair fails.
    fn duration(&self) -> Option<Duration> {
        let faults = FaultConfig {
            drop: self.loss,
            seed: self.seed,
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
        let qpns = connect(&mut net, self.pair);
        let regions = [0, 1].map(|node| {
            let rights = Rights {
                write: node == 1,
                ..Rights::LOCAL
            };
            net.nodes[node]
                .memory
                .register(PD, 0x1000_0000, rights, vec![node as u8; self.message])
        });
        let (mut posted, mut done) = (0, 0);
        loop {
            while posted < MESSAGES && posted - done < self.depth {
                post(&mut net, qpns[0], regions, self.message);
                posted += 1;
            }
            net.service(0).expect("the wire's rules hold");
            if done == MESSAGES {
                return Some(Duration::from_nanos(net.now.0));
            }
            if net.step().expect("the wire's rules hold") == Step::Idle {
                return None;
            }
            let completions = net.nodes[0].completions.drain(..);
            done += completions
                .filter(|(_, completion)| completion.status == Status::Success)
                .count();
        }
    }
}

fn post(net: &mut Network, qpn: Qpn, [source, target]: [RegionId; 2], len: usize) {
    let (near, far) = (&net.nodes[0].memory, &net.nodes[1].memory);
    let sges = [Sge {
        addr: near.region(source).base,
        len: len as u32,
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
