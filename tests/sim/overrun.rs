//! A READ longer than the requester's socket buffer. The responder has no window, so the requester
//! reads in parts; what even its window loses is requested again.

use std::time::Duration;

use doorbell_roce_proto::memory::Sge;
use doorbell_roce_proto::work::{Operation, Payload, SendRequest, Status};
use doorbell_roce_proto::{Counters, EndpointConfig, Mtu};
use doorbell_softroce::links::udp::fault::FaultConfig;

use crate::memory::Rights;
use crate::net::{Idents, LinkConfig, Network, Socket, Step};
use crate::pair::{PD, PairConfig, connect};
use crate::trace::Trace;

const LEN: usize = 1 << 20;
const BASE: u64 = 0x1000_0000;
/// 67 ms, the most common setting.
const TIMEOUT: u8 = 14;

/// An owner that sleeps longer than the responses take.
const SLEEP: Duration = Duration::from_millis(2);

/// Packets of 1 KiB that Linux' default socket buffer holds.
const LINUX_DEFAULT: usize = 185;

#[test]
fn a_read_longer_than_the_socket_buffer_overruns_nothing() {
    for idents in [Idents::Known, Idents::Zero, Idents::Counting] {
        let counters = read(idents, LINUX_DEFAULT);
        assert_eq!((counters.retransmits, counters.timeouts), (0, 0), "{idents:?}");
        assert_eq!(counters.rx_packets, LEN as u64 / 1024, "{idents:?}");
    }
}

#[test]
fn a_window_longer_than_the_socket_buffer_loses_nothing_for_good() {
    for idents in [Idents::Known, Idents::Zero, Idents::Counting] {
        let counters = read(idents, EndpointConfig::DEFAULT_WINDOW as usize / 3);
        assert!(counters.retransmits > 0, "{idents:?}: nothing was lost");
    }
}

fn read(idents: Idents, packets: usize) -> Counters {
    let link = LinkConfig {
        bits_per_second: 10_000_000_000,
        latency: Duration::from_micros(50),
        backlog: Duration::from_micros(10),
        faults: FaultConfig::default(),
        idents,
        socket: Some(Socket { packets, sleep: SLEEP }),
    };
    let mut net = Network::new(link, Trace::default());
    let config = PairConfig {
        window: EndpointConfig::DEFAULT_WINDOW,
        mtu: Mtu::Mtu1024,
        timeout: TIMEOUT,
        tail_loss_probes: true,
        selective_repeat: false,
    };
    let qpns = connect(&mut net, config);
    let near = net.nodes[0].memory.register(PD, BASE, Rights::LOCAL, vec![0; LEN]);
    let bytes: Vec<u8> = (0..LEN).map(|i| (i / 1024 * 31 + i) as u8).collect();
    let far = net.nodes[1].memory.register(
        PD,
        BASE,
        Rights {
            read: true,
            ..Rights::LOCAL
        },
        bytes,
    );
    let sges = [Sge {
        addr: BASE,
        len: LEN as u32,
        lkey: net.nodes[0].memory.lkey(near),
    }];
    let request = SendRequest {
        wr_id: 0,
        operation: Operation::Read {
            addr: BASE,
            rkey: net.nodes[1].memory.rkey(far),
        },
        payload: Payload::Gather(&sges),
        signaled: true,
        fence: false,
        solicited: false,
    };
    net.nodes[0]
        .endpoint
        .post_send(net.now, qpns[0], &request)
        .expect("the queue is empty");
    net.service(0).expect("the wire's rules hold");
    while net.step().expect("the wire's rules hold") != Step::Idle {}
    let statuses: Vec<_> = net.nodes[0]
        .completions
        .iter()
        .map(|(_, completion)| completion.status)
        .collect();
    assert_eq!(statuses, [Status::Success], "{idents:?}");
    assert!(
        net.nodes[0].memory.region(near).bytes == net.nodes[1].memory.region(far).bytes,
        "{idents:?}"
    );
    *net.nodes[0].endpoint.counters()
}
