//! Traffic class and hop limit of address vectors, as a peer's kernel sees them on packets.

#[path = "common/address.rs"]
mod address;
#[path = "common/namespace.rs"]
mod namespace;
#[path = "common/observer.rs"]
mod observer;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use address::own_address;
use doorbell_roce_proto::qp::{Modify, Path, State};
use doorbell_roce_proto::wire::Transport;
use doorbell_roce_proto::work::{Destination, Operation, Payload, SendRequest};
use doorbell_roce_proto::{Mtu, Psn, Qpn};
use doorbell_softroce::clock::TimestampClocks;
use doorbell_softroce::{CqConfig, Device, DeviceConfig, EventOwner, EventQueue, LinkChoice, Pd, Qp, QpConfig};
use observer::Observer;

const QKEY: u32 = 0x1111;

/// Traffic classes and hop limits. DSCP 46 (EF) with ECT(1); DSCP 24 (CS3); the defaults.
const FIELDS: [(u8, u8); 4] = [(46 << 2 | 1, 7), (24 << 2, 64), (0, 255), (0, 64)];

#[test]
fn ipv4_packets_have_the_fields_of_their_address_vector() {
    packets_have_the_fields_of_their_address_vector(own_address(), own_address());
}

#[test]
fn ipv6_packets_have_the_fields_of_their_address_vector() {
    namespace::run_inside("ipv6_packets");
}

#[test]
#[ignore = "started by ipv6_packets_have_the_fields_of_their_address_vector"]
fn ipv6_packets() {
    let addresses = [
        "link set lo up",
        "address add fd00::1 dev lo",
        "address add fd00::2 dev lo",
    ];
    if namespace::configure(&addresses) {
        let [local, remote] = ["fd00::1", "fd00::2"].map(|ip| ip.parse().unwrap());
        packets_have_the_fields_of_their_address_vector(local, remote);
    }
}

/// From RC queue pairs, each with fields of its own, and from one UD queue pair.
fn packets_have_the_fields_of_their_address_vector(local: IpAddr, remote: IpAddr) {
    let device = Device::open(&DeviceConfig {
        address: Some(local),
        link: LinkChoice::Udp,
        ..DeviceConfig::new("soft0")
    })
    .unwrap();
    let peer = Observer::bind(SocketAddr::new(remote, device.info().address.port()));
    let pd = device.protection_domain().unwrap();
    let path = |(traffic_class, hop_limit)| Path {
        traffic_class,
        hop_limit,
        ..Path::new(local, remote)
    };
    let mut expected = BTreeMap::new();
    let mut peer_qpns = (0x100..).map(Qpn::new);
    let mut connected = Vec::new();
    for fields in FIELDS {
        let number = peer_qpns.next().unwrap();
        let qp = queue_pair(&device, &pd, Transport::Rc);
        connect(&qp, device.info().mtu, path(fields), number);
        qp.post_send(|posting| posting.send(&hello())).unwrap();
        expected.insert(number.get(), fields);
        connected.push(qp);
    }
    let datagrams = queue_pair(&device, &pd, Transport::Ud);
    start(&datagrams);
    let sent = datagrams.post_send(|posting| {
        FIELDS.into_iter().try_for_each(|fields| {
            let qpn = peer_qpns.next().unwrap();
            expected.insert(qpn.get(), fields);
            let path = path(fields);
            posting.send_datagram(&hello(), &Destination { path, qpn, qkey: QKEY })
        })
    });
    sent.unwrap();
    let found: BTreeMap<_, _> = expected
        .iter()
        .map(|_| {
            let packet = peer.observe();
            // The destination of the BTH.
            let qpn = u32::from_be_bytes([0, packet.bytes[5], packet.bytes[6], packet.bytes[7]]);
            (qpn, (packet.traffic_class, packet.hop_limit))
        })
        .collect();
    assert_eq!(found, expected);
}

fn hello() -> SendRequest<'static> {
    SendRequest {
        wr_id: 0,
        operation: Operation::Send { imm: None },
        payload: Payload::Inline(b"hello"),
        signaled: false,
        fence: false,
        solicited: false,
    }
}

fn queue_pair(device: &Arc<Device>, pd: &Pd, transport: Transport) -> Qp {
    let owner = EventOwner {
        queue: Arc::new(EventQueue::new().unwrap()),
        token: 0,
    };
    let config = CqConfig {
        entries: 16,
        notify: None,
        timestamps: TimestampClocks::default(),
    };
    let cq = device.completion_queue(config, owner.clone()).unwrap();
    let config = QpConfig {
        transport,
        send_cq: cq.clone(),
        recv_cq: cq,
        max_send_wr: 8,
        max_recv_wr: 1,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline: 16,
        signal_all: false,
        srq: None,
    };
    pd.queue_pair(&config, owner).unwrap()
}

/// To RTS. No ACK comes, and no local ACK timeout: each packet is sent once.
fn connect(qp: &Qp, mtu: Mtu, path: Path, peer: Qpn) {
    let none = Modify::default();
    for modify in [
        Modify {
            state: Some(State::Init),
            pkey_index: Some(0),
            port: Some(1),
            access: Some(Default::default()),
            ..none
        },
        Modify {
            state: Some(State::Rtr),
            path: Some(path),
            path_mtu: Some(mtu),
            dest_qpn: Some(peer),
            rq_psn: Some(Psn::new(0)),
            max_dest_rd_atomic: Some(1),
            min_rnr_timer: Some(1),
            ..none
        },
        Modify {
            state: Some(State::Rts),
            timeout: Some(0),
            retry_cnt: Some(0),
            rnr_retry: Some(0),
            sq_psn: Some(Psn::new(0)),
            max_rd_atomic: Some(1),
            ..none
        },
    ] {
        qp.modify(&modify).unwrap();
    }
}

/// A UD queue pair to RTS.
fn start(qp: &Qp) {
    let none = Modify::default();
    for modify in [
        Modify {
            state: Some(State::Init),
            pkey_index: Some(0),
            port: Some(1),
            qkey: Some(QKEY),
            ..none
        },
        Modify {
            state: Some(State::Rtr),
            ..none
        },
        Modify {
            state: Some(State::Rts),
            sq_psn: Some(Psn::new(0)),
            ..none
        },
    ] {
        qp.modify(&modify).unwrap();
    }
}
