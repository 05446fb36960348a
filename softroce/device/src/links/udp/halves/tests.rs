#[path = "../../../../tests/common/observer.rs"]
mod observer;

use super::*;
use crate::links::udp::{Envelope, RxBatch, TxBatch, UdpDestination};
use observer::Observer;

/// Writes the Identification and a sum of the rest in place of the ICRC.
fn seal(packet: &mut [u8], envelope: &Envelope) {
    let (body, check) = packet.split_last_chunk_mut::<4>().unwrap();
    let sum = body
        .iter()
        .fold(0u16, |sum, &byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
    check[..2].copy_from_slice(&envelope.ident.to_be_bytes());
    check[2..].copy_from_slice(&sum.to_be_bytes());
}

fn open_any(ip: &str) -> Link {
    Link::udp(SocketAddr::new(ip.parse().unwrap(), 0)).unwrap()
}

fn push(batch: &mut TxBatch, len: usize, fill: u8, dst: impl Into<UdpDestination>) {
    let mut slot = batch.slot().unwrap();
    slot[..len].fill(fill);
    slot.send(len, dst);
}

/// Sends packets of `sizes`, filled with their number, and checks that each arrives once, in order,
/// sealed for the Identification of its segment; returns the number of messages.
fn exchange(from: &mut Link, to: &mut Link, sizes: &[usize]) -> usize {
    let mut batch = TxBatch::new(from.local, seal);
    for (number, &len) in sizes.iter().enumerate() {
        push(&mut batch, len, number as u8, to.local);
    }
    from.tx.transmit(&mut batch, Instant::ZERO).unwrap();
    assert!(batch.is_empty());
    let mut incoming = RxBatch::new(to.local);
    let (mut messages, mut number) = (0, 0);
    while number < sizes.len() {
        to.wait_readable();
        let count = to.rx.receive(&mut incoming).unwrap();
        assert!(count > 0, "{number} of {} packets came", sizes.len());
        messages += count;
        for datagram in incoming.datagrams() {
            assert_eq!((datagram.src, datagram.dst), (from.local, to.local));
            let mut expected = vec![number as u8; sizes[number]];
            let envelope = Envelope {
                src: from.local,
                dst: to.local.into(),
                ident: datagram.segment,
            };
            seal(&mut expected, &envelope);
            assert_eq!(datagram.bytes, expected, "packet {number}");
            number += 1;
        }
    }
    assert_eq!(to.rx.receive(&mut incoming).unwrap(), 0);
    assert!(incoming.is_empty());
    messages
}

const MIXED: [usize; 12] = [4128, 4112, 4112, 4112, 1000, 44, 44, 44, 45, 4224, 20, 16];

#[test]
fn mixed_sizes_cross_the_loopback_in_order_over_ipv4() {
    let (mut a, mut b) = (open_any("127.0.0.1"), open_any("127.0.0.2"));
    exchange(&mut a, &mut b, &MIXED);
    exchange(&mut b, &mut a, &MIXED);
    exchange(&mut a, &mut b, &[4112; 60]);
    exchange(&mut a, &mut b, &[44; 1000]);
}

#[test]
fn mixed_sizes_cross_the_loopback_in_order_over_ipv6() {
    let (mut a, mut b) = (open_any("::1"), open_any("::1"));
    exchange(&mut a, &mut b, &MIXED);
    exchange(&mut b, &mut a, &MIXED);
    exchange(&mut a, &mut b, &[4112; 60]);
}

#[test]
fn more_runs_than_one_call_takes_all_go() {
    let (mut a, mut b) = (open_any("127.0.0.1"), open_any("127.0.0.1"));
    let sizes: Vec<usize> = (0..100).map(|n| 50 + n * 8).collect();
    exchange(&mut a, &mut b, &sizes);
}

#[test]
fn a_kernel_that_refuses_gso_gets_single_datagrams() {
    let mut peer = open_any("127.0.0.1");
    let bound = CloseOnFork::create(|| UdpSocket::bind("127.0.0.1:0")).unwrap();
    let socket = Arc::new(Socket::new(bound).unwrap());
    // GSO on a socket without checksums is EINVAL, as from a kernel without UDP_SEGMENT.
    sys::set_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_NO_CHECK, 1).unwrap();
    let mut tx = UdpTx {
        socket: Arc::clone(&socket),
        gso: true,
        refused: Refusals::default(),
    };
    let mut batch = TxBatch::new(socket.local_addr().unwrap(), seal);
    for round in 0..2 {
        for fill in 0..3 {
            push(&mut batch, 100, fill, peer.local);
        }
        tx.transmit(&mut batch, Instant::ZERO).unwrap();
        assert!(batch.is_empty() && !tx.gso, "round {round}");
        let mut incoming = RxBatch::new(peer.local);
        let mut fills = Vec::new();
        while fills.len() < 3 {
            peer.wait_readable();
            assert!(peer.rx.receive(&mut incoming).unwrap() > 0, "{fills:?}");
            for datagram in incoming.datagrams() {
                assert_eq!(datagram.bytes[96..98], [0, 0], "sealed for Identification 0");
                fills.push(datagram.bytes[0]);
            }
        }
        assert_eq!(fills, [0, 1, 2]);
    }
}

/// Also with several segments in a run.
#[test]
fn each_packet_of_a_batch_has_its_traffic_class_and_hop_limit() {
    for ip in ["127.0.0.1", "::1"] {
        let mut link = open_any(ip);
        let peer = Observer::bind(SocketAddr::new(ip.parse().unwrap(), 0));
        let mut batch = TxBatch::new(link.local, seal);
        // DSCP 46 (EF) with ECT(1); DSCP 24 (CS3).
        let fields = [(0, 64), (46 << 2 | 1, 64), (24 << 2, 3), (0, 255), (46 << 2 | 1, 64)];
        let fields = fields.iter().flat_map(|fields| [fields; 3]);
        for (fill, &(traffic_class, hop_limit)) in (0..).zip(fields.clone()) {
            let to = UdpDestination {
                addr: peer.0.local_addr().unwrap(),
                traffic_class,
                hop_limit,
            };
            push(&mut batch, 100, fill, to);
        }
        assert_eq!(batch.runs().count(), 5);
        link.tx.transmit(&mut batch, Instant::ZERO).unwrap();
        for (fill, fields) in (0..).zip(fields) {
            let packet = peer.observe();
            assert_eq!((packet.bytes.len(), packet.bytes[0]), (100, fill), "{ip}");
            assert_eq!((packet.traffic_class, packet.hop_limit), *fields, "{ip}, packet {fill}");
        }
    }
}

/// Runs of several segments as well, which arrive coalesced (GRO) where the kernel does that.
#[test]
fn a_received_packet_has_the_traffic_class_that_was_sent() {
    for ip in ["127.0.0.1", "::1"] {
        let (mut link, mut peer) = (open_any(ip), open_any(ip));
        let mut batch = TxBatch::new(link.local, seal);
        // CE, no ECN, ECT(0) with DSCP 46, CE.
        let classes = [0b11, 0, 46 << 2 | 0b10, 0b11].map(|class| [class; 5]);
        for (fill, &traffic_class) in (0..).zip(classes.as_flattened()) {
            let to = UdpDestination {
                traffic_class,
                ..peer.local.into()
            };
            push(&mut batch, 100, fill, to);
        }
        assert_eq!(batch.runs().count(), classes.len());
        link.tx.transmit(&mut batch, Instant::ZERO).unwrap();
        let (mut incoming, mut received) = (RxBatch::new(peer.local), Vec::new());
        while received.len() < 20 {
            peer.wait_readable();
            assert!(peer.rx.receive(&mut incoming).unwrap() > 0);
            received.extend(incoming.datagrams().map(|datagram| datagram.traffic_class));
        }
        assert_eq!(received, classes.as_flattened(), "{ip}");
    }
}

#[test]
fn a_refused_datagram_is_lost_and_the_others_go() {
    let (mut a, b) = (open_any("127.0.0.1"), open_any("127.0.0.1"));
    let mut rx = b.rx;
    let mut batch = TxBatch::new(a.local, seal);
    push(&mut batch, 100, 1, b.local);
    // Broadcast without SO_BROADCAST is EACCES; loopback has no route to 192.0.2.1 (RFC 5737).
    push(&mut batch, 100, 2, SocketAddr::from(([255, 255, 255, 255], 4791)));
    push(&mut batch, 100, 3, SocketAddr::from(([192, 0, 2, 1], 4791)));
    push(&mut batch, 100, 4, b.local);
    a.tx.transmit(&mut batch, Instant::ZERO).unwrap();
    assert!(batch.is_empty());
    let mut incoming = RxBatch::new(b.local);
    assert!(rx.receive(&mut incoming).unwrap() > 0);
    let mut fills: Vec<u8> = incoming.datagrams().map(|datagram| datagram.bytes[0]).collect();
    if fills.len() == 1 {
        rx.receive(&mut incoming).unwrap();
        fills.extend(incoming.datagrams().map(|datagram| datagram.bytes[0]));
    }
    assert_eq!(fills, [1, 4]);
}

#[test]
fn the_interface_mtu_is_that_of_loopback() {
    let expected: u32 = std::fs::read_to_string("/sys/class/net/lo/mtu")
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    for ip in ["127.0.0.1", "127.3.2.1", "::1"] {
        assert_eq!(open_any(ip).mtu, expected, "{ip}");
    }
}

#[test]
fn bind_errors_name_the_address_and_the_port() {
    let held = open_any("127.0.0.1");
    let port = held.local.port();
    let error = Link::udp(held.local).err().unwrap();
    assert!(matches!(error, BindError::AddressInUse { addr } if addr == held.local));
    assert!(error.to_string().starts_with(&format!("127.0.0.1:{port} is in use")));
    assert!(error.to_string().contains(&format!("UDP port {port}")));
    // TEST-NET-3 of RFC 5737: no machine has it.
    let error = Link::udp(SocketAddr::from(([203, 0, 113, 9], 4791))).err().unwrap();
    assert!(matches!(error, BindError::AddressNotAvailable { .. }));
    assert_eq!(
        error.to_string(),
        "203.0.113.9:4791 cannot be bound: no interface here has the address 203.0.113.9"
    );
    for addr in ["0.0.0.0:0", "[::]:0", "255.255.255.255:0", "224.0.0.1:0", "[ff02::1]:0"] {
        let error = Link::udp(addr.parse().unwrap()).err().unwrap();
        assert!(matches!(error, BindError::NotUnicast { .. }), "{addr}: {error}");
    }
}

#[test]
fn permission_denied_has_its_own_error() {
    let addr = SocketAddr::from(([127, 0, 0, 1], 80));
    let error = BindError::new(addr, io::ErrorKind::PermissionDenied.into());
    assert_eq!(
        error.to_string(),
        "127.0.0.1:80 cannot be bound: not permitted to hold UDP port 80 here"
    );
}

#[test]
fn causes_are_said_once() {
    let addr = SocketAddr::from(([127, 0, 0, 1], 4791));
    let error = crate::OpenError::Bind {
        device: "soft0".to_owned(),
        error: BindError::new(addr, io::Error::other("no more")),
    };
    assert_eq!(
        error.to_string(),
        "cannot open soft0: 127.0.0.1:4791 cannot be bound: no more"
    );
    assert!(std::error::Error::source(&error).is_none());
}

#[test]
fn a_mapped_address_is_ipv4() {
    let link = Link::udp("[::ffff:127.0.0.1]:0".parse().unwrap()).unwrap();
    assert!(link.local.is_ipv4());
}

#[test]
fn faults_apply_to_real_sockets() {
    let faults = "corrupt=1,duplicate=1".parse().unwrap();
    let (a, mut b) = (open_any("127.0.0.1"), open_any("127.0.0.1"));
    let mut a = a.with_faults(faults, 0);
    let mut batch = TxBatch::new(a.local, seal);
    for _ in 0..8 {
        push(&mut batch, 100, 9, b.local);
    }
    a.tx.transmit(&mut batch, Instant::ZERO).unwrap();
    let mut incoming = RxBatch::new(b.local);
    let mut changed = Vec::new();
    while changed.len() < 16 {
        b.wait_readable();
        assert!(b.rx.receive(&mut incoming).unwrap() > 0, "{changed:?}");
        for datagram in incoming.datagrams() {
            let mut expected = [9; 100];
            let envelope = Envelope {
                src: datagram.src,
                dst: datagram.dst.into(),
                ident: datagram.segment,
            };
            seal(&mut expected, &envelope);
            changed.push(
                datagram
                    .bytes
                    .iter()
                    .zip(&expected)
                    .filter(|(got, expected)| got != expected)
                    .count(),
            );
        }
    }
    // Each packet with one changed byte, then its intact duplicate.
    assert_eq!(changed, [1, 0].repeat(8));
}
