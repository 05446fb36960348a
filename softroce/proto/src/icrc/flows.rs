//! A cache of [`Flow`]s, so that a packet does not pay for hashing addresses that the last one had too.

use core::net::IpAddr;

use super::Flow;

/// Slots of the cache, a power of two.
const SLOTS: usize = 64;

type Key = (IpAddr, IpAddr, u16, u16);

/// The flows seen last, one per slot: 4 KiB that never grow. A flow that lost its slot costs its computation again, nothing more.
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
    /// The flow between these addresses and UDP ports: what [`Flow::new`] gives.
    pub fn flow(&mut self, src: IpAddr, dst: IpAddr, src_port: u16, dst_port: u16) -> Flow {
        let key = (src, dst, src_port, dst_port);
        let ports = u64::from(src_port) << 16 | u64::from(dst_port);
        let slot = &mut self.slots[mix(fold(src) ^ fold(dst).rotate_left(32) ^ ports) as usize % SLOTS];
        match slot {
            Some((cached, flow)) if *cached == key => *flow,
            _ => slot.insert((key, Flow::new(src, dst, src_port, dst_port))).1,
        }
    }
}

fn fold(address: IpAddr) -> u64 {
    match address {
        IpAddr::V4(v4) => u64::from(v4.to_bits()),
        IpAddr::V6(v6) => (v6.to_bits() >> 64) as u64 ^ v6.to_bits() as u64,
    }
}

/// Spreads a key over the low bits of a hash (multiplicative hashing by 2⁶⁴/φ).
pub(crate) const fn mix(key: u64) -> u64 {
    key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32
}
