//! Multicast datagrams: to every queue pair attached to the group, each with the checks of any
//! other datagram (IBTA vol 1, 10.5).

mod util;

use std::net::{IpAddr, Ipv4Addr};

use doorbell_roce_proto::icrc::Flow;
use doorbell_roce_proto::memory::Sge;
use doorbell_roce_proto::qp::Path;
use doorbell_roce_proto::wire::{GRH_LEN, Transport, ip_header_addresses};
use doorbell_roce_proto::work::Destination;
use doorbell_roce_proto::{AttachError, Datagram, Endpoint, Ident, MULTICAST_QPN, Qpn};

use util::{Pair, QKEY, RECV_CQ, Setup, qp_init, send, success};

const PORT: u16 = 4791;

fn group(last: u8) -> IpAddr {
    IpAddr::from([239, 1, 2, last])
}

/// Two queue pairs of UD on each side, and a region of each side.
fn connected() -> (Pair, Sge, Sge) {
    let setup = Setup {
        transport: Transport::Ud,
        ..Setup::default()
    };
    let (mut pair, local, remote) = util::with_regions(setup, 1000);
    pair.connect_second();
    (pair, local, remote)
}

/// The packet of a datagram of 8 bytes to a group, sealed for the address that it is sent to.
fn packet(pair: &mut Pair, local: Sge, to: Destination) -> Vec<u8> {
    pair.post_datagram(0, &send(1, &[Sge { len: 8, ..local }]), &to);
    pair.transmit_one(0).expect("a packet").bytes
}

fn to_group(pair: &Pair, group: IpAddr) -> Destination {
    Destination {
        path: Path::new(pair.nodes[0].address, group),
        qpn: MULTICAST_QPN,
        qkey: QKEY,
    }
}

fn deliver(pair: &mut Pair, dst: IpAddr, payload: &[u8]) -> Vec<u64> {
    let src = pair.nodes[0].address;
    let node = &mut pair.nodes[1];
    let datagram = Datagram {
        src,
        dst,
        src_port: PORT,
        dst_port: PORT,
        ident: Ident::Known(0),
        traffic_class: 0,
        payload,
    };
    node.endpoint.handle_datagram(pair.now, &datagram, &mut node.memory);
    pair.exchange(&mut |_, _| util::Fate::Deliver);
    let done = pair.completed(1, RECV_CQ);
    assert_eq!(done, success(done.iter().map(|(wr_id, _)| *wr_id)));
    pair.nodes[1].completions.clear();
    done.into_iter().map(|(wr_id, _)| wr_id).collect()
}

/// The current queue pair's receive is 5, that of the other one 6.
fn post_both(pair: &mut Pair, remote: Sge) {
    pair.receive(1, 5, &[Sge { len: 100, ..remote }]);
    pair.swap();
    let second = Sge {
        addr: remote.addr + 100,
        len: 100,
        ..remote
    };
    pair.receive(1, 6, &[second]);
    pair.swap();
}

fn both(pair: &Pair) -> [Qpn; 2] {
    [
        pair.nodes[1].qpn,
        pair.nodes[1].second.expect("connect_second was called"),
    ]
}

#[test]
fn each_attached_queue_pair_receives_a_copy() {
    let (mut pair, local, remote) = connected();
    let [first, second] = both(&pair);
    let to = to_group(&pair, group(1));
    post_both(&mut pair, remote);
    let bytes = packet(&mut pair, local, to);
    assert_eq!(deliver(&mut pair, group(1), &bytes), [], "not attached");
    for qpn in [first, second] {
        pair.nodes[1].endpoint.attach_multicast(group(1), qpn, None).unwrap();
    }
    // IPv4-mapped as in a GID, and a second time, without effect.
    let mapped = Ipv4Addr::new(239, 1, 2, 1).to_ipv6_mapped();
    pair.nodes[1]
        .endpoint
        .attach_multicast(mapped.into(), first, None)
        .unwrap();
    assert_eq!(deliver(&mut pair, group(1), &bytes), [5, 6]);
    let received = pair.bytes(1, remote).to_vec();
    for part in [&received[..100], &received[100..200]] {
        let (header, payload) = part.split_first_chunk::<GRH_LEN>().unwrap();
        let ends = (pair.nodes[0].address, group(1));
        assert_eq!(ip_header_addresses(header), Some(ends));
        assert_eq!(payload[..8], pair.bytes(0, local)[..8]);
    }
    // One without a receive does not keep the packet from the other, and one that is detached or
    // destroyed gets none.
    pair.receive(1, 7, &[remote]);
    assert_eq!(deliver(&mut pair, group(1), &bytes), [7]);
    assert_eq!(pair.counters(1).dropped_messages, 1);
    assert!(pair.nodes[1].endpoint.detach_multicast(group(1), first));
    assert!(!pair.nodes[1].endpoint.detach_multicast(group(1), first));
    post_both(&mut pair, remote);
    assert_eq!(deliver(&mut pair, group(1), &bytes), [6]);
    assert!(pair.nodes[1].endpoint.destroy_qp(second));
    assert!(!pair.nodes[1].endpoint.has_multicast_group(group(1)));
}

#[test]
fn a_packet_is_checked_as_any_other() {
    let (mut pair, local, remote) = connected();
    let first = both(&pair)[0];
    pair.nodes[1].endpoint.attach_multicast(group(1), first, None).unwrap();
    post_both(&mut pair, remote);
    let to = to_group(&pair, group(1));
    let good = packet(&mut pair, local, to);

    let mut damaged = good.clone();
    damaged[30] ^= 1;
    assert_eq!(deliver(&mut pair, group(1), &damaged), []);
    assert_eq!(pair.counters(1).icrc_errors, 1);
    // The ICRC covers the group's address.
    pair.nodes[1].endpoint.attach_multicast(group(2), first, None).unwrap();
    assert_eq!(deliver(&mut pair, group(2), &good), []);
    assert_eq!(pair.counters(1).icrc_errors, 2);

    let foreign = packet(&mut pair, local, Destination { qkey: QKEY + 1, ..to });
    assert_eq!(deliver(&mut pair, group(1), &foreign), []);
    assert_eq!(pair.counters(1).qkey_violations, 1);

    // A queue pair behind a multicast address, and the multicast number behind a unicast one.
    let direct = packet(&mut pair, local, Destination { qpn: first, ..to });
    assert_eq!(deliver(&mut pair, group(1), &direct), []);
    assert_eq!(pair.counters(1).no_qp, 1);
    let here = pair.nodes[1].address;
    let mut unicast = good.clone();
    Flow::new(pair.nodes[0].address, here, PORT, PORT).seal(0, &mut unicast);
    assert_eq!(deliver(&mut pair, here, &unicast), []);
    assert_eq!(pair.counters(1).no_qp, 2);

    // Of RC, to the multicast number.
    let mut connected = good.clone();
    connected[0] = 4;
    assert_eq!(deliver(&mut pair, group(1), &connected), []);
    assert_eq!(pair.counters(1).malformed, 1);
    assert_eq!(deliver(&mut pair, group(1), &good), [5]);
}

/// IBV_QP_CREATE_BLOCK_SELF_MCAST_LB: its number at its address.
#[test]
fn a_queue_pair_that_blocks_its_own_packets_receives_those_of_others() {
    let (mut pair, local, remote) = connected();
    let [first, second] = both(&pair);
    let (peer, own) = (pair.nodes[0].address, pair.nodes[1].address);
    let to = to_group(&pair, group(1));
    let bytes = packet(&mut pair, local, to);
    post_both(&mut pair, remote);
    let sender = pair.nodes[0].qpn;
    // The peer's queue pair has this number at another address.
    let endpoint = &mut pair.nodes[1].endpoint;
    endpoint.attach_multicast(group(1), first, Some(own)).unwrap();
    assert_eq!(deliver(&mut pair, group(1), &bytes), [5]);
    // As if the packet was its own.
    let mut own_packet = bytes.clone();
    own_packet[17..20].copy_from_slice(&second.get().to_be_bytes()[1..]);
    Flow::new(peer, group(1), PORT, PORT).seal(0, &mut own_packet);
    assert_ne!(sender, second);
    let endpoint = &mut pair.nodes[1].endpoint;
    assert!(endpoint.detach_multicast(group(1), first));
    endpoint.attach_multicast(group(1), second, Some(peer)).unwrap();
    assert_eq!(deliver(&mut pair, group(1), &own_packet), []);
    assert_eq!(deliver(&mut pair, group(1), &bytes), [6]);
}

#[test]
fn groups_and_attachments_are_bounded() {
    let mut endpoint = Endpoint::new(1);
    let mut create = |transport| {
        endpoint.create_qp(doorbell_roce_proto::qp::QpInit {
            transport,
            ..qp_init(false)
        })
    };
    let rc = create(Transport::Rc);
    let datagram: Vec<Qpn> = (0..=Endpoint::MAX_MULTICAST_QPS)
        .map(|_| create(Transport::Ud))
        .collect();
    let unknown = Qpn::new(0x00ff_fffe);
    for (group, qpn, error) in [
        (group(1), rc, AttachError::NotDatagram),
        (group(1), unknown, AttachError::NotDatagram),
        ("10.9.0.1".parse().unwrap(), datagram[0], AttachError::NotMulticast),
        ("fd09::1".parse().unwrap(), datagram[0], AttachError::NotMulticast),
    ] {
        assert_eq!(endpoint.attach_multicast(group, qpn, None), Err(error));
    }
    let attached = datagram
        .iter()
        .map_while(|qpn| endpoint.attach_multicast(group(1), *qpn, None).ok())
        .count();
    assert_eq!(attached, Endpoint::MAX_MULTICAST_QPS);
    let last = *datagram.last().unwrap();
    let groups = (0..=Endpoint::MAX_MULTICAST_GROUPS as u16)
        .map(|at| IpAddr::from((0xff0e_u128 << 112 | u128::from(at)).to_be_bytes()));
    let joined = groups.map_while(|group| endpoint.attach_multicast(group, last, None).ok());
    assert_eq!(joined.count(), Endpoint::MAX_MULTICAST_GROUPS - 1);
    assert_eq!(
        endpoint.attach_multicast(group(2), last, None),
        Err(AttachError::Exhausted)
    );
    // A group that is left makes place for another.
    assert!(
        datagram
            .iter()
            .all(|&qpn| qpn == last || endpoint.detach_multicast(group(1), qpn))
    );
    assert_eq!(endpoint.attach_multicast(group(2), last, None), Ok(()));
}
