//! The invariant CRC (ICRC): the last 4 bytes of every packet, least significant first (IBTA annex
//! A17.3.3, vol 1, 7.8.1).
//!
//! It is the CRC-32 of Ethernet over 8 bytes of ones, the IP header, the UDP header, and the packet
//! from the BTH on, with ones for what routers may change: IPv4 TOS, TTL and header checksum, IPv6
//! traffic class, flow label and hop limit, the UDP checksum, and byte 4 of the BTH.
//!
//! The kernel builds the IP header; [`Flow`] computes its part of the CRC once per flow, with zeros
//! for lengths, Identification and BTH. These are added by tables, as the CRC is linear: crc(a ⊕ b)
//! = crc(a) ⊕ crc(b) ⊕ crc(0) for equal lengths. So the carry-less multiplication, which works in
//! blocks, starts at the payload, which at full MTU is whole blocks.

mod flows;
mod gf2;
#[cfg(test)]
mod tests;

use core::net::IpAddr;

use crc32fast::Hasher;

/// The CRC-32 of Ethernet (IEEE 802.3), with which the ICRC is computed.
pub use crc32fast::hash as crc32;
pub use flows::FlowCache;
pub(crate) use flows::mix;
use gf2::FieldTable;
pub use gf2::solve_ident;

/// The length of the ICRC in bytes.
pub const LEN: usize = 4;

/// Ones in front of the IP header, in place of InfiniBand's local route header.
const MASKED_LRH: [u8; 8] = [0xff; 8];
const IPV4_LEN: usize = 20;
const IPV6_LEN: usize = 40;
const UDP_LEN: usize = 8;
const UDP_PROTOCOL: u8 = 17;
/// IPv4 flags "don't fragment", as RoCEv2 devices set it, and fragment offset 0.
const DONT_FRAGMENT: u16 = 0x4000;
/// The byte of the BTH with the congestion bits.
const MASKED_BTH_BYTE: usize = 4;
const BTH_LEN: usize = 12;

// Each table by the number of bytes from its field to the end of the BTH.
static IPV4_TOTAL_LEN: FieldTable = FieldTable::new(BTH_LEN + UDP_LEN + IPV4_LEN - 4);
static IPV4_IDENT: FieldTable = FieldTable::new(BTH_LEN + IDENT_TO_BTH);
static IPV6_PAYLOAD_LEN: FieldTable = FieldTable::new(BTH_LEN + UDP_LEN + IPV6_LEN - 6);
static UDP_TOTAL_LEN: FieldTable = FieldTable::new(BTH_LEN + UDP_LEN - 6);
static BTH: [FieldTable; BTH_LEN / 2] = [
    FieldTable::new(10),
    FieldTable::new(8),
    FieldTable::new(6),
    FieldTable::new(4),
    FieldTable::new(2),
    FieldTable::new(0),
];

const IDENT_TO_BTH: usize = UDP_LEN + IPV4_LEN - 6;

/// The addresses and ports of a flow, for computing ICRCs; over IPv6 Identifications are ignored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Flow {
    /// The CRC register after the masked headers and BTH, with all variable fields zero.
    register: u32,
    is_ipv4: bool,
}

impl Flow {
    /// A flow between these addresses and UDP ports. IPv4-mapped IPv6 addresses count as IPv4. With
    /// one address of each family, which is no valid packet, the IPv4 address is mapped.
    pub fn new(src: IpAddr, dst: IpAddr, src_port: u16, dst_port: u16) -> Self {
        let mut udp = [0xff; UDP_LEN];
        udp[0..2].copy_from_slice(&src_port.to_be_bytes());
        udp[2..4].copy_from_slice(&dst_port.to_be_bytes());
        udp[4..6].fill(0);
        let mut hasher = Hasher::new();
        hasher.update(&MASKED_LRH);
        let is_ipv4 = match (src.to_canonical(), dst.to_canonical()) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                let mut ip = [0xff; IPV4_LEN];
                ip[0] = 0x45;
                ip[2..6].fill(0);
                ip[6..8].copy_from_slice(&DONT_FRAGMENT.to_be_bytes());
                ip[9] = UDP_PROTOCOL;
                ip[12..16].copy_from_slice(&src.octets());
                ip[16..20].copy_from_slice(&dst.octets());
                hasher.update(&ip);
                true
            }
            (src, dst) => {
                let mut ip = [0xff; IPV6_LEN];
                ip[0] = 0x6f;
                ip[4..6].fill(0);
                ip[6] = UDP_PROTOCOL;
                ip[8..24].copy_from_slice(&ipv6_octets(src));
                ip[24..40].copy_from_slice(&ipv6_octets(dst));
                hasher.update(&ip);
                false
            }
        };
        hasher.update(&udp);
        let mut bth = [0; BTH_LEN];
        bth[MASKED_BTH_BYTE] = 0xff;
        hasher.update(&bth);
        Self {
            register: hasher.finalize(),
            is_ipv4,
        }
    }

    /// Whether packets are IPv4 and so have an Identification.
    pub const fn is_ipv4(&self) -> bool {
        self.is_ipv4
    }

    /// The ICRC of a packet without its ICRC; one too short for a BTH is zero-padded.
    pub fn compute(&self, ident: u16, packet: &[u8]) -> u32 {
        let register = self.after_headers(ident, packet.len());
        let (change, rest) = match packet.split_first_chunk::<BTH_LEN>() {
            Some((bth, rest)) => (change_by(bth), rest),
            None => (change_by(&padded(packet)), &[][..]),
        };
        let mut hasher = Hasher::new_with_initial(register ^ change);
        hasher.update(rest);
        hasher.finalize()
    }

    /// Writes the ICRC into the last 4 bytes, if any, of a packet from the BTH on.
    pub fn seal(&self, ident: u16, packet: &mut [u8]) {
        if let Some((packet, icrc)) = packet.split_last_chunk_mut::<LEN>() {
            *icrc = self.compute(ident, packet).to_le_bytes();
        }
    }

    /// Whether the last 4 bytes of a packet from the BTH on are its ICRC.
    pub fn verify(&self, ident: u16, packet: &[u8]) -> bool {
        self.syndrome(ident, packet) == Some(0)
    }

    /// The computed ICRC ⊕ the received one: 0 if intact, `None` if too short to have one.
    pub(crate) fn syndrome(&self, ident: u16, packet: &[u8]) -> Option<u32> {
        let (packet, icrc) = packet.split_last_chunk::<LEN>()?;
        Some(self.compute(ident, packet) ^ u32::from_le_bytes(*icrc))
    }

    /// Of the masked headers and a zero BTH, the first of `len` bytes; impossible lengths wrap.
    fn after_headers(&self, ident: u16, len: usize) -> u32 {
        let udp_len = (len + LEN + UDP_LEN) as u16;
        let mut register = self.register ^ UDP_TOTAL_LEN.change(udp_len);
        if self.is_ipv4 {
            register ^= IPV4_TOTAL_LEN.change(udp_len.wrapping_add(IPV4_LEN as u16));
            if ident != 0 {
                register ^= IPV4_IDENT.change(ident);
            }
        } else {
            register ^= IPV6_PAYLOAD_LEN.change(udp_len);
        }
        register
    }
}

/// The change of the CRC by a BTH, relative to a zero one.
fn change_by(bth: &[u8; BTH_LEN]) -> u32 {
    let mut change = 0;
    for (pair, table) in BTH.iter().enumerate() {
        let [high, low] = [bth[2 * pair], bth[2 * pair + 1]];
        let high = if 2 * pair == MASKED_BTH_BYTE { 0 } else { high };
        change ^= table.change(u16::from_be_bytes([high, low]));
    }
    change
}

#[cold]
fn padded(short: &[u8]) -> [u8; BTH_LEN] {
    let mut bth = [0; BTH_LEN];
    for (to, from) in bth.iter_mut().zip(short) {
        *to = *from;
    }
    bth
}

fn ipv6_octets(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}
