//! The 40 bytes in front of a received datagram: in place of InfiniBand's global route header
//! (GRH), the IP header under RoCEv2 (IBTA annex A17.4.5.2).
//!
//! ```text
//! IPv6:  0..40 the header
//! IPv4:  0..20 zero, 20..40 the header
//! ```
//!
//! A UDP socket strips the IP header: it is rebuilt, with flow label and Identification 0, TTL 64,
//! and a correct IPv4 checksum, which distinguishes IPv4 from IPv6. The kernel would report the TTL
//! (`IP_RECVTTL`), by a control message per receive of the device: queue pairs without a GRH would
//! pay for it, too.

use crate::work::IpVersion;
use core::net::IpAddr;

/// Length of the GRH in front of every received datagram.
pub const GRH_LEN: usize = 40;

const UDP: u8 = 17;
const UDP_HEADER: usize = 8;
const IPV4_HEADER: usize = 20;
/// The usual TTL or hop limit.
pub const HOP_LIMIT: u8 = 64;

/// The fields of a received datagram's IP header that are known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IpFields {
    /// Source address.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
    /// IPv4 TOS or IPv6 traffic class; 0 if it is not known.
    pub traffic_class: u8,
}

/// The IP header of a datagram with `payload_len` bytes of UDP payload, and its version.
pub fn ip_header(fields: IpFields, payload_len: usize) -> (IpVersion, [u8; GRH_LEN]) {
    let IpFields {
        src,
        dst,
        traffic_class,
    } = fields;
    let mut grh = [0; GRH_LEN];
    // A datagram is shorter than 2^16 bytes, headers included.
    let udp_len = (UDP_HEADER + payload_len) as u16;
    match (src.to_canonical(), dst.to_canonical()) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            let ip = &mut grh[GRH_LEN - IPV4_HEADER..];
            (ip[0], ip[1]) = (0x45, traffic_class);
            ip[2..4].copy_from_slice(&udp_len.wrapping_add(IPV4_HEADER as u16).to_be_bytes());
            // Don't fragment.
            ip[6] = 0x40;
            ip[8] = HOP_LIMIT;
            ip[9] = UDP;
            ip[12..16].copy_from_slice(&src.octets());
            ip[16..20].copy_from_slice(&dst.octets());
            let checksum = checksum(ip);
            ip[10..12].copy_from_slice(&checksum.to_be_bytes());
            (IpVersion::V4, grh)
        }
        (src, dst) => {
            (grh[0], grh[1]) = (0x60 | traffic_class >> 4, traffic_class << 4);
            grh[4..6].copy_from_slice(&udp_len.to_be_bytes());
            grh[6] = UDP;
            grh[7] = HOP_LIMIT;
            grh[8..24].copy_from_slice(&crate::Gid::from(src).0);
            grh[24..40].copy_from_slice(&crate::Gid::from(dst).0);
            (IpVersion::V6, grh)
        }
    }
}

/// Source and destination of such a header: IPv4 if its checksum is correct, else IPv6 or `None`.
pub fn ip_header_addresses(grh: &[u8; GRH_LEN]) -> Option<(IpAddr, IpAddr)> {
    let ip = &grh[GRH_LEN - IPV4_HEADER..];
    if ip[0] == 0x45 && checksum(ip) == 0 {
        let address = |at: usize| IpAddr::from([ip[at], ip[at + 1], ip[at + 2], ip[at + 3]]);
        return Some((address(12), address(16)));
    }
    let (source, destination) = grh[8..].split_first_chunk::<16>()?;
    let destination: [u8; 16] = destination.try_into().ok()?;
    (grh[0] >> 4 == 6).then(|| (IpAddr::from(*source), IpAddr::from(destination)))
}

/// The Internet checksum (RFC 1071) of a header whose checksum field is zero.
fn checksum(header: &[u8]) -> u16 {
    let sum: u32 = header
        .chunks_exact(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
        .sum();
    // At most ten words: two folds leave no carry.
    let folded = (sum & 0xffff) + (sum >> 16);
    !((folded & 0xffff) + (folded >> 16)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(src: &str, dst: &str) -> IpFields {
        IpFields {
            src: src.parse().unwrap(),
            dst: dst.parse().unwrap(),
            traffic_class: 0xb9,
        }
    }

    #[test]
    fn ipv4_behind_twenty_zeros() {
        let (_, grh) = ip_header(fields("10.9.0.2", "10.9.0.1"), 100);
        assert_eq!(grh[..20], [0; 20]);
        assert_eq!(grh[20..30], [0x45, 0xb9, 0, 128, 0, 0, 0x40, 0, 64, 17]);
        assert_eq!(grh[32..], [10, 9, 0, 2, 10, 9, 0, 1]);
        // The sum over a header including its checksum is all ones.
        assert_eq!(checksum(&grh[20..]), 0);
        assert_ne!(grh[30..32], [0, 0]);
        let ends = ("10.9.0.2".parse().unwrap(), "10.9.0.1".parse().unwrap());
        assert_eq!(ip_header_addresses(&grh), Some(ends));
        let mut wrong = grh;
        wrong[30] ^= 1;
        assert_eq!(ip_header_addresses(&wrong), None);
    }

    #[test]
    fn ipv6_fills_it() {
        let (_, grh) = ip_header(fields("fd09::2", "fd09::1"), 100);
        assert_eq!(grh[..8], [0x6b, 0x90, 0, 0, 0, 108, 17, 64]);
        assert_eq!((grh[8], grh[9], grh[23]), (0xfd, 0x09, 2));
        assert_eq!((grh[24], grh[25], grh[39]), (0xfd, 0x09, 1));
        let ends = ("fd09::2".parse().unwrap(), "fd09::1".parse().unwrap());
        assert_eq!(ip_header_addresses(&grh), Some(ends));
    }
}
