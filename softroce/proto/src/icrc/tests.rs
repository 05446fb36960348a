//! The ICRC against captured packets, and against a bit-by-bit reference.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use proptest::prelude::*;

use super::{Flow, solve_ident};

/// Annex A17.3.3 literally: `ip_packet` from the IP header up to, but without, the ICRC.
fn reference(ip_packet: &[u8]) -> u32 {
    let mut bytes = vec![0xff; 8];
    bytes.extend_from_slice(ip_packet);
    let ip = &mut bytes[8..];
    let udp_at = if ip[0] >> 4 == 4 {
        ip[1] = 0xff;
        ip[8] = 0xff;
        ip[10..12].fill(0xff);
        20
    } else {
        ip[0] |= 0x0f;
        ip[1..4].fill(0xff);
        ip[7] = 0xff;
        40
    };
    ip[udp_at + 6..udp_at + 8].fill(0xff);
    if let Some(byte) = ip.get_mut(udp_at + 8 + 4) {
        *byte = 0xff;
    }
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
        }
    }
    !crc
}

fn ip_packet(src: IpAddr, dst: IpAddr, ports: (u16, u16), ident: u16, noise: u8, ib: &[u8]) -> Vec<u8> {
    let udp_len = u16::try_from(8 + ib.len() + 4).unwrap();
    let mut packet = Vec::new();
    match (src, dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            packet.extend([0x45, noise]);
            packet.extend((udp_len + 20).to_be_bytes());
            packet.extend(ident.to_be_bytes());
            packet.extend([0x40, 0, noise, 17, noise, noise]);
            packet.extend(src.octets());
            packet.extend(dst.octets());
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            packet.extend([0x60 | noise & 0x0f, noise, noise, noise]);
            packet.extend(udp_len.to_be_bytes());
            packet.extend([17, noise]);
            packet.extend(src.octets());
            packet.extend(dst.octets());
        }
        _ => unreachable!("one family per packet"),
    }
    packet.extend(ports.0.to_be_bytes());
    packet.extend(ports.1.to_be_bytes());
    packet.extend(udp_len.to_be_bytes());
    packet.extend([noise, noise]);
    packet.extend(ib);
    packet
}

fn unhex(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
    digits
        .chunks(2)
        .map(|pair| u8::from_str_radix(core::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

fn check_captured(hex: &str) {
    let packet = unhex(hex);
    let address = |at: usize| IpAddr::from(<[u8; 4]>::try_from(&packet[at..at + 4]).unwrap());
    let half = |at: usize| u16::from_be_bytes([packet[at], packet[at + 1]]);
    let flow = Flow::new(address(12), address(16), half(20), half(22));
    let mut ib = packet[28..].to_vec();
    assert!(
        flow.verify(half(4), &ib),
        "computed {:08x}",
        flow.compute(half(4), &ib[..ib.len() - 4]).swap_bytes()
    );
    assert_eq!(
        reference(&packet[..packet.len() - 4]).to_le_bytes(),
        packet[packet.len() - 4..]
    );
    // Every bit is covered, except those of BTH byte 4.
    for bit in 0..ib.len() * 8 {
        ib[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(flow.verify(half(4), &ib), bit / 8 == 4, "bit {bit}");
        ib[bit / 8] ^= 1 << (bit % 8);
    }
}

/// A congestion notification of a ConnectX-4 Lx, from scapy's tests.
#[test]
fn connectx_congestion_notification() {
    check_captured(
        "45c2 003c 718c 4000 4011 9161 0a00 1101 0a00 1201 0000 12b7 0028 0000 8100 ffff 4000 0118 0000 0000
         0000 0000 0000 0000 0000 0000 0000 0000 82fd 002a",
    );
}

/// A UC SEND Only of 18 bytes (pad 2) captured from hardware, from scapy's tests.
#[test]
fn captured_uc_send() {
    check_captured(
        "4501 0040 0478 4000 4011 b4d5 c0a8 0007 c0a8 0007 c000 12b7 002c aca2 2460 ffff 0000 00d3 00cf 1710
         4630 818b e289 35d9 0e9a 9550 5401 be88 5e50 0000 78f3 53f3",
    );
}

fn addresses() -> impl Strategy<Value = (IpAddr, IpAddr)> {
    prop_oneof![
        any::<(Ipv4Addr, Ipv4Addr)>().prop_map(|(a, b)| (a.into(), b.into())),
        any::<(Ipv6Addr, Ipv6Addr)>()
            .prop_filter("mapped addresses are IPv4", |(a, b)| a.to_ipv4_mapped().is_none()
                && b.to_ipv4_mapped().is_none())
            .prop_map(|(a, b)| (a.into(), b.into())),
    ]
}

proptest! {
    #[test]
    fn agrees_with_the_reference(
        (src, dst) in addresses(),
        ports: (u16, u16),
        ident: u16,
        noise: u8,
        ib in prop_oneof![prop::collection::vec(any::<u8>(), 12..200), prop::collection::vec(any::<u8>(), 12..5000)],
    ) {
        let flow = Flow::new(src, dst, ports.0, ports.1);
        let expected = reference(&ip_packet(src, dst, ports, ident, noise, &ib));
        prop_assert_eq!(flow.compute(ident, &ib), expected);

        let mut sealed = ib.clone();
        sealed.extend([0; 4]);
        flow.seal(ident, &mut sealed);
        prop_assert_eq!(&sealed[..ib.len()], &ib[..]);
        prop_assert_eq!(&sealed[ib.len()..], &expected.to_le_bytes());
        prop_assert!(flow.verify(ident, &sealed));
    }

    #[test]
    fn mapped_addresses_are_ipv4(src: Ipv4Addr, dst: Ipv4Addr, ports: (u16, u16)) {
        let plain = Flow::new(src.into(), dst.into(), ports.0, ports.1);
        let mapped = Flow::new(src.to_ipv6_mapped().into(), dst.to_ipv6_mapped().into(), ports.0, ports.1);
        prop_assert_eq!(plain, mapped);
        prop_assert!(plain.is_ipv4());
    }

    #[test]
    fn identification_is_solved(sent: u16, assumed: u16, ib in prop::collection::vec(any::<u8>(), 12..6000)) {
        let flow = Flow::new(Ipv4Addr::LOCALHOST.into(), Ipv4Addr::LOCALHOST.into(), 7, 4791);
        let syndrome = flow.compute(sent, &ib) ^ flow.compute(assumed, &ib);
        prop_assert_eq!(solve_ident(syndrome, ib.len()), Some(sent ^ assumed));
    }
}

/// Every length and the whole range of Identifications, which property tests only sample.
#[test]
fn identification_is_solved_at_every_length() {
    let flow = Flow::new(Ipv4Addr::LOCALHOST.into(), Ipv4Addr::LOCALHOST.into(), 7, 4791);
    let ib = vec![0x5a; 65535 - 20 - 8 - 4];
    for len in (12..4200).chain(65400..=ib.len()) {
        let ident = (len as u16).wrapping_mul(40503) | 1;
        let syndrome = flow.compute(ident, &ib[..len]) ^ flow.compute(0, &ib[..len]);
        assert_eq!(solve_ident(syndrome, len), Some(ident), "length {len}");
    }
}

/// Damage has a solution in one case of 2^16.
#[test]
fn damage_is_rarely_an_identification() {
    let solved = (0..1u32 << 20)
        .filter(|n| solve_ident(n.wrapping_mul(2_654_435_761) ^ 0x1234_5678, 1040).is_some())
        .count();
    assert!((4..=40).contains(&solved), "{solved} of 2^20, 16 expected");
}

#[test]
fn short_packets_have_no_icrc() {
    let flow = Flow::new(Ipv6Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into(), 7, 4791);
    for len in 0..4 {
        let mut bytes = vec![7; len];
        flow.seal(0, &mut bytes);
        assert_eq!(bytes, vec![7; len]);
        assert!(!flow.verify(0, &bytes));
    }
    // Too short for a BTH: must not panic.
    for len in 4..16 {
        let mut bytes = vec![7; len];
        flow.seal(0, &mut bytes);
        assert!(flow.verify(0, &bytes));
    }
}
