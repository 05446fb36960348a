//! Newtypes of identifiers on the wire, so that none is passed where another is meant.

use core::fmt;
use std::net::{IpAddr, Ipv6Addr};

use doorbell_verbs_sys as sys;

/// A queue pair number: 24 bits (IBTA vol 1, 3.5.3).
#[doc(alias = "qp_num")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Qpn(u32);

/// A packet sequence number: 24 bits, modulo 2^24 (IBTA vol 1, 9.2.5).
#[doc(alias("rq_psn", "sq_psn"))]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Psn(u32);

macro_rules! bits24 {
    ($name:ident) => {
        impl $name {
            /// The number, or `None` if it needs more than 24 bits.
            #[must_use]
            pub const fn new(value: u32) -> Option<Self> {
                if value >> 24 == 0 { Some(Self(value)) } else { None }
            }

            /// The low 24 bits of `value`.
            #[must_use]
            pub const fn truncated(value: u32) -> Self {
                Self(value & 0x00ff_ffff)
            }

            /// The number, below 2^24.
            #[must_use]
            pub const fn get(self) -> u32 {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#08x}", self.0)
            }
        }
    };
}

bits24!(Qpn);
bits24!(Psn);

impl Qpn {
    /// The destination of datagrams to a multicast group (IBTA vol 1, 3.5.13).
    pub const MULTICAST: Self = Self(0x00ff_ffff);
}

/// A remote key: identifies a memory region to peers (IBTA vol 1, 10.6.3).
#[doc(alias = "rkey")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RKey(pub u32);

impl fmt::Display for RKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#010x}", self.0)
    }
}

/// A queue key: must match the destination's for a datagram to be received (IBTA vol 1, 10.2.5).
#[doc(alias = "qkey")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct QKey(pub u32);

impl QKey {
    /// The default of [`ud`](crate::QueuePairBuilder::ud), and of `ibv_ud_pingpong`.
    pub const DEFAULT: Self = Self(0x1111_1111);
    /// Of datagram services that the [connection manager](crate::cm) resolves, and of the groups
    /// that it joins.
    #[doc(alias = "RDMA_UDP_QKEY")]
    pub const RDMA_UDP: Self = Self(0x0123_4567);

    /// Whether its highest bit is set: only privileged processes may assign it to a queue pair
    /// (IBTA vol 1, 10.2.5), and in a send request it selects the sender's own Q_Key.
    #[must_use]
    pub const fn is_controlled(self) -> bool {
        self.0 >> 31 != 0
    }
}

impl fmt::Display for QKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#010x}", self.0)
    }
}

/// A local identifier: a port's address within an InfiniBand subnet; 0 on RoCE (IBTA vol 1, 4.1.3).
#[doc(alias("lid", "dlid"))]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Lid(pub u16);

impl fmt::Display for Lid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#06x}", self.0)
    }
}

/// A global identifier; on RoCEv2 the port's IP address (IBTA vol 1, 4.1.1 and annex A17).
#[doc(alias = "ibv_gid")]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// Whether this is an empty table entry, all zeros.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        self.0 == [0; 16]
    }

    /// The address this GID stands for: IPv4 for `::ffff:a.b.c.d`, else IPv6.
    #[must_use]
    pub fn to_ip(self) -> IpAddr {
        Ipv6Addr::from(self.0).to_canonical()
    }

    /// Whether it is link-local (`fe80::/64`).
    #[must_use]
    pub fn is_link_local(&self) -> bool {
        self.0[0] == 0xfe && self.0[1] & 0xc0 == 0x80
    }

    pub(crate) fn to_sys(self) -> sys::ibv_gid {
        sys::ibv_gid { raw: self.0 }
    }

    pub(crate) fn from_sys(gid: &sys::ibv_gid) -> Self {
        // SAFETY: every bit pattern is valid, and the library wrote all 16 bytes of the union.
        Self(unsafe { gid.raw })
    }
}

impl From<IpAddr> for Gid {
    fn from(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(v4) => Self(v4.to_ipv6_mapped().octets()),
            IpAddr::V6(v6) => Self(v6.octets()),
        }
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ipv6Addr::from(self.0).fmt(f)
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gid({self})")
    }
}

/// A path MTU: the payload bytes of one packet (IBTA vol 1, 9.7.1).
#[doc(alias = "ibv_mtu")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Mtu {
    /// 256 bytes.
    #[doc(alias = "IBV_MTU_256")]
    B256 = 1,
    /// 512 bytes.
    #[doc(alias = "IBV_MTU_512")]
    B512 = 2,
    /// 1024 bytes: what a 1500-byte Ethernet MTU allows.
    #[doc(alias = "IBV_MTU_1024")]
    B1024 = 3,
    /// 2048 bytes.
    #[doc(alias = "IBV_MTU_2048")]
    B2048 = 4,
    /// 4096 bytes: needs jumbo frames on Ethernet.
    #[doc(alias = "IBV_MTU_4096")]
    B4096 = 5,
}

impl Mtu {
    /// The MTU of that many bytes, or `None` if the standard has none.
    #[must_use]
    pub const fn from_bytes(bytes: u32) -> Option<Self> {
        match bytes {
            256 => Some(Self::B256),
            512 => Some(Self::B512),
            1024 => Some(Self::B1024),
            2048 => Some(Self::B2048),
            4096 => Some(Self::B4096),
            _ => None,
        }
    }

    /// Its size in bytes.
    #[must_use]
    pub const fn bytes(self) -> u32 {
        128 << self as u32
    }

    pub(crate) const fn from_code(code: u32) -> Option<Self> {
        match code {
            sys::IBV_MTU_256 => Some(Self::B256),
            sys::IBV_MTU_512 => Some(Self::B512),
            sys::IBV_MTU_1024 => Some(Self::B1024),
            sys::IBV_MTU_2048 => Some(Self::B2048),
            sys::IBV_MTU_4096 => Some(Self::B4096),
            _ => None,
        }
    }

    pub(crate) const fn code(self) -> sys::ibv_mtu {
        self as u32
    }
}

impl fmt::Display for Mtu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} B", self.bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_24_bits_are_checked() {
        assert_eq!(Qpn::new(0x00ff_ffff).map(Qpn::get), Some(0x00ff_ffff));
        assert_eq!(Qpn::new(0x0100_0000), None);
        assert_eq!(Psn::truncated(0x0123_4567).get(), 0x0023_4567);
    }

    #[test]
    fn a_gid_of_an_ipv4_address_is_mapped_and_back() {
        let ip: IpAddr = "10.9.0.1".parse().unwrap();
        let gid = Gid::from(ip);
        assert_eq!(gid.to_string(), "::ffff:10.9.0.1");
        assert_eq!(gid.to_ip(), ip);
        assert!(!gid.is_link_local());
        assert!(Gid::from("fe80::1".parse::<IpAddr>().unwrap()).is_link_local());
    }

    #[test]
    fn every_mtu_goes_to_bytes_and_code_and_back() {
        for (bytes, code) in [(256, 1), (512, 2), (1024, 3), (2048, 4), (4096, 5)] {
            let mtu = Mtu::from_bytes(bytes).unwrap();
            assert_eq!(mtu.bytes(), bytes);
            assert_eq!(Mtu::from_code(code), Some(mtu));
            assert_eq!(mtu.code(), code);
        }
        assert_eq!(Mtu::from_bytes(1500), None);
        assert_eq!(Mtu::from_code(6), None);
    }
}
