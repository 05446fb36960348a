//! DCQCN between two engines: a network that marks packets slows the sender down to a rate at which
//! it need not, nothing is lost by it, and without marks the sender is back at the line rate.

use std::time::Duration;

use doorbell_roce_proto::congestion::{Algorithm, CongestionConfig, DcqcnConfig};
use doorbell_roce_proto::memory::Sge;
use doorbell_roce_proto::work::{Operation, Payload, SendRequest, Status};
use doorbell_roce_proto::{EndpointConfig, Mtu, Qpn};
use doorbell_softroce::links::udp::fault::FaultConfig;

use crate::memory::Rights;
use crate::net::{Idents, LinkConfig, Network, Step};
use crate::pair::{DEPTH, PD, connect_with};
use crate::trace::Trace;

const LEN: usize = 256 << 10;
const BASE: u64 = 0x1000_0000;
/// 10 Gb/s.
const LINE_RATE: u64 = 1_250_000_000;

struct Flow {
    net: Network,
    qpns: [Qpn; 2],
    sge: Sge,
    request: Operation,
}

impl Flow {
    fn new(congestion: CongestionConfig) -> Self {
        let link = LinkConfig {
            bits_per_second: 8 * LINE_RATE,
            latency: Duration::from_micros(2),
            backlog: Duration::from_micros(10),
            faults: FaultConfig::default(),
            idents: Idents::Zero,
            socket: None,
        };
        let mut net = Network::new(link, Trace::default());
        let config = EndpointConfig {
            congestion,
            ..EndpointConfig::default()
        };
        let qpns = connect_with(&mut net, config, Mtu::Mtu1024, 14);
        let bytes: Vec<u8> = (0..LEN).map(|i| (i / 1024 * 31 + i) as u8).collect();
        let near = net.nodes[0].memory.register(PD, BASE, Rights::LOCAL, bytes);
        let rights = Rights {
            write: true,
            ..Rights::LOCAL
        };
        let far = net.nodes[1].memory.register(PD, BASE, rights, vec![0; LEN]);
        let sge = Sge {
            addr: BASE,
            len: LEN as u32,
            lkey: net.nodes[0].memory.lkey(near),
        };
        let request = Operation::Write {
            addr: BASE,
            rkey: net.nodes[1].memory.rkey(far),
            imm: None,
        };
        Self {
            net,
            qpns,
            sge,
            request,
        }
    }

    /// The time that `count` WRITEs take, in the round of which a packet is marked by chance.
    fn write(&mut self, count: usize, mark: f64) -> Duration {
        self.net.set_faults(
            0,
            FaultConfig {
                mark,
                seed: 7,
                ..FaultConfig::default()
            },
        );
        let start = self.net.now;
        for wr_id in 0..count {
            let request = SendRequest {
                wr_id: wr_id as u64,
                operation: self.request,
                payload: Payload::Gather(&[self.sge]),
                signaled: true,
                fence: false,
                solicited: false,
            };
            let node = &mut self.net.nodes[0];
            node.endpoint
                .post_send(self.net.now, self.qpns[0], &request)
                .expect("the queue has space");
        }
        self.net.service(0).expect("the wire's rules hold");
        while self.net.nodes[0].completions.len() < count {
            let step = self.net.step().expect("the wire's rules hold");
            assert_ne!(step, Step::Idle, "the sender waits for nothing");
            let rate = self.net.nodes[0].endpoint.rate(self.qpns[0]);
            assert!(
                rate.is_none_or(|rate| (MIN_RATE..=LINE_RATE).contains(&rate)),
                "{rate:?}"
            );
        }
        for (_, completion) in self.net.nodes[0].completions.drain(..) {
            assert_eq!(completion.status, Status::Success);
        }
        self.net.now - start
    }
}

const MIN_RATE: u64 = LINE_RATE / 100;

#[test]
fn marks_slow_the_sender_and_their_absence_lets_it_recover() {
    let mut flow = Flow::new(CongestionConfig {
        algorithm: Algorithm::Dcqcn(DcqcnConfig::default()),
        line_rate: LINE_RATE,
        min_rate: MIN_RATE,
        ..CongestionConfig::default()
    });
    let mut off = Flow::new(CongestionConfig::default());
    let unpaced = off.write(DEPTH, 0.0);
    // Without marks the controller changes nothing, to the nanosecond.
    assert_eq!(flow.write(DEPTH, 0.0), unpaced);
    let marked = flow.write(DEPTH, 0.02);
    assert!(marked > unpaced * 2, "{marked:?} and {unpaced:?}");
    let [sender, receiver] = [0, 1].map(|node| *flow.net.nodes[node].endpoint.counters());
    assert_eq!((sender.retransmits, sender.timeouts), (0, 0));
    assert_eq!(sender.cnps_handled + sender.cnps_ignored, receiver.cnps_sent);
    assert!(receiver.cnps_sent > 10 && receiver.cnps_sent < receiver.marked_packets);
    let interval = CongestionConfig::default().cnp_interval;
    assert!(receiver.cnps_sent <= (marked.as_nanos() / interval.as_nanos()) as u64 + 1);
    // The rate returns: of these rounds the last ones are as fast as without marks.
    let rounds = std::iter::from_fn(|| Some(flow.write(DEPTH, 0.0)));
    let recovered = rounds.take(20).position(|time| time == unpaced);
    assert!(recovered.is_some(), "the rate does not return to the line's");
    assert_eq!(flow.net.nodes[0].endpoint.rate(flow.qpns[0]), None);
    // A sender without an algorithm is not ECN-capable: nothing is marked.
    assert_eq!(off.write(DEPTH, 0.02), unpaced);
    assert_eq!(off.net.nodes[1].endpoint.counters().marked_packets, 0);
}
