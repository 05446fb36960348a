//! A cache of [`Flow`]s, to hash the addresses of a flow once and not per packet.

use core::net::IpAddr;

use super::Flow;

const SLOTS: usize = 64;

/// Both addresses as IPv6, and both ports: integers compare faster than addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Key {
    src: u128,
    dst: u128,
    ports: u32,
}

/// A direct-mapped cache of flows in 4 KiB; an evicted one is recomputed.
#[derive(Clone, Debug)]
pub struct FlowCache {
    slots: Box<[Option<(Key, Flow)>; SLOTS]>,
}

impl Default for FlowCache {
    fn default() -> Self {
        Self {
            slots: Box::new([const { None }; SLOTS]),
        }
    }
}

impl FlowCache {
    /// The flow between these addresses and UDP ports, as [`Flow::new`].
    pub fn flow(&mut self, src: IpAddr, dst: IpAddr, src_port: u16, dst_port: u16) -> Flow {
        let key = Key {
            src: bits(src),
            dst: bits(dst),
            ports: u32::from(src_port) << 16 | u32::from(dst_port),
        };
        let folded = fold(key.src) ^ fold(key.dst).rotate_left(32) ^ u64::from(key.ports);
        let slot = &mut self.slots[mix(folded) as usize % SLOTS];
        match slot {
            Some((cached, flow)) if *cached == key => *flow,
            _ => slot.insert((key, Flow::new(src, dst, src_port, dst_port))).1,
        }
    }
}

const fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => 0xffff << 32 | v4.to_bits() as u128,
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

const fn fold(bits: u128) -> u64 {
    (bits >> 64) as u64 ^ bits as u64
}

/// Spreads a key over the low bits of a hash (multiplicative hashing by 2⁶⁴/φ).
pub(crate) const fn mix(key: u64) -> u64 {
    key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32
}
