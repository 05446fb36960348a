//! The standard's small integers as newtypes, so that a QPN cannot be passed for a PSN.

use core::fmt;
use core::net::{IpAddr, Ipv6Addr};

/// A queue pair number: 24 bits (IBTA vol 1, 10.2.4). 0 and 1 are the special QPs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Qpn(u32);

impl Qpn {
    /// The low 24 bits of `value`.
    pub const fn new(value: u32) -> Self {
        Self(value & 0x00ff_ffff)
    }

    /// The number, below 2^24.
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Debug for Qpn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Qpn({:#08x})", self.0)
    }
}

impl fmt::Display for Qpn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#08x}", self.0)
    }
}

/// A packet sequence number (PSN): 24 bits that wrap (IBTA vol 1, 9.7.1).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Psn(u32);

impl Psn {
    /// The low 24 bits of `value`.
    pub const fn new(value: u32) -> Self {
        Self(value & 0x00ff_ffff)
    }

    /// The number, below 2^24.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The number `n` later, modulo 2^24.
    #[must_use]
    pub const fn add(self, n: u32) -> Self {
        Self::new(self.0.wrapping_add(n))
    }

    /// Signed distance from `base`, in −2^23 … 2^23 − 1.
    pub const fn since(self, base: Self) -> i32 {
        ((self.0.wrapping_sub(base.0) << 8) as i32) >> 8
    }
}

impl fmt::Debug for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Psn({:#08x})", self.0)
    }
}

/// A local key: identifies a memory region on its own device (IBTA vol 1, 10.6.3.1).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LKey(pub u32);

/// A remote key: identifies a memory region or window to a peer (IBTA vol 1, 10.6.3.2).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RKey(pub u32);

/// A path MTU: the largest payload of one packet (IBTA vol 1, 7.7.8). Ordered by size.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[repr(u8)]
pub enum Mtu {
    /// 256 bytes.
    Mtu256 = 1,
    /// 512 bytes.
    Mtu512 = 2,
    /// 1024 bytes.
    Mtu1024 = 3,
    /// 2048 bytes.
    Mtu2048 = 4,
    /// 4096 bytes.
    Mtu4096 = 5,
}

impl Mtu {
    /// The payload in bytes.
    pub const fn bytes(self) -> usize {
        128 << self as u8
    }

    /// From the encoding of `enum ibv_mtu` (1 = 256 … 5 = 4096).
    pub const fn from_code(code: u32) -> Option<Self> {
        Some(match code {
            1 => Self::Mtu256,
            2 => Self::Mtu512,
            3 => Self::Mtu1024,
            4 => Self::Mtu2048,
            5 => Self::Mtu4096,
            _ => return None,
        })
    }

    /// The largest path MTU for an interface's MTU, less the RoCEv2 headers; `None` below 256.
    pub const fn for_netdev(netdev_mtu: u32) -> Option<Self> {
        match netdev_mtu.saturating_sub(80) {
            4096.. => Some(Self::Mtu4096),
            2048.. => Some(Self::Mtu2048),
            1024.. => Some(Self::Mtu1024),
            512.. => Some(Self::Mtu512),
            256.. => Some(Self::Mtu256),
            _ => None,
        }
    }
}

/// A global identifier: an IPv6 address, or `::ffff:a.b.c.d` for IPv4 (IBTA annex A17).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// The address of this GID; IPv4 for an IPv4-mapped one.
    pub fn to_ip(self) -> IpAddr {
        let v6 = Ipv6Addr::from(self.0);
        v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4)
    }

    /// The link-local GID of an address: `fe80::/64` with, for IPv4, the EUI-64 of a locally
    /// administered MAC (02:db and the address); for IPv6 with its interface identifier.
    pub fn link_local(address: IpAddr) -> Self {
        let identifier = match address {
            IpAddr::V4(v4) => {
                let [a, b, c, d] = v4.octets();
                [0x00, 0xdb, a, 0xff, 0xfe, b, c, d]
            }
            IpAddr::V6(v6) => (v6.to_bits() as u64).to_be_bytes(),
        };
        let mut gid = [0; 16];
        gid[..2].copy_from_slice(&[0xfe, 0x80]);
        gid[8..].copy_from_slice(&identifier);
        Self(gid)
    }

    /// The address of a peer with this GID, link-local or not, for a device with the address
    /// `local`. `None` for one of the other family, and one that is not unicast.
    pub fn to_peer(self, local: IpAddr) -> Option<IpAddr> {
        self.to_destination(local).filter(|ip| !ip.is_multicast())
    }

    /// As [`to_peer`](Self::to_peer), but also the address of a multicast group.
    pub fn to_destination(self, local: IpAddr) -> Option<IpAddr> {
        let ip = match (local, self.0) {
            (IpAddr::V4(_), [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0x00, 0xdb, a, 0xff, 0xfe, b, c, d]) => [a, b, c, d].into(),
            (IpAddr::V6(local), [0xfe, 0x80, 0, 0, 0, 0, 0, 0, ..]) => {
                let identifier = u128::from_be_bytes(self.0) as u64;
                Ipv6Addr::from(local.to_bits() >> 64 << 64 | u128::from(identifier)).into()
            }
            _ => self.to_ip(),
        };
        let suits = ip.is_ipv4() == local.is_ipv4() && !ip.is_unspecified();
        suits.then_some(ip)
    }
}

impl From<IpAddr> for Gid {
    fn from(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(v4) => Self(v4.to_ipv6_mapped().octets()),
            IpAddr::V6(v6) => Self(v6.octets()),
        }
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gid({self})")
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ipv6Addr::from(self.0).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn psn_distance_wraps() {
        assert_eq!(Psn::new(2).since(Psn::new(0xff_fffe)), 4);
        assert_eq!(Psn::new(0xff_fffe).since(Psn::new(2)), -4);
        assert_eq!(Psn::new(0x80_0000).since(Psn::new(0)), -0x80_0000);
        assert_eq!(Psn::new(0xff_ffff).add(1), Psn::new(0));
    }

    #[test]
    fn mtu_of_an_interface() {
        assert_eq!(Mtu::for_netdev(1500), Some(Mtu::Mtu1024));
        assert_eq!(Mtu::for_netdev(65536), Some(Mtu::Mtu4096));
        assert_eq!(Mtu::for_netdev(4176), Some(Mtu::Mtu4096));
        assert_eq!(Mtu::for_netdev(4175), Some(Mtu::Mtu2048));
        assert_eq!(Mtu::for_netdev(300), None);
    }

    #[test]
    fn gid_and_address() {
        let v4: IpAddr = "10.9.0.1".parse().unwrap();
        assert_eq!(Gid::from(v4).to_ip(), v4);
        assert_eq!(Gid::from(v4).to_string(), "::ffff:10.9.0.1");
    }

    #[test]
    fn both_gids_of_a_peer_are_its_address() {
        let parse = |text: &str| text.parse::<IpAddr>().unwrap();
        let cases = [
            ("10.9.0.1", "10.9.0.2", "fe80::db:aff:fe09:2"),
            (
                "fd09:0:0:7::1",
                "fd09:0:0:7:1234:5678:9abc:def0",
                "fe80::1234:5678:9abc:def0",
            ),
            ("fe80::1", "fe80::2", "fe80::2"),
            ("::1", "::1", "fe80::1"),
        ];
        for (local, peer, link_local) in cases.map(|(local, peer, gid)| (parse(local), parse(peer), gid)) {
            assert_eq!(Gid::link_local(peer).to_string(), link_local);
            assert_eq!(Gid::link_local(peer).to_peer(local), Some(peer));
            assert_eq!(Gid::from(peer).to_peer(local), Some(peer));
        }
        // An adapter's, the other family, and no unicast addresses.
        for gid in [
            "fe80::1",
            "fd09::1",
            "::",
            "::ffff:0.0.0.0",
            "::ffff:224.0.0.1",
            "fe80::db:ff:fe00:0",
        ] {
            assert_eq!(Gid::from(parse(gid)).to_peer(parse("10.9.0.1")), None, "{gid}");
        }
        for gid in ["::ffff:10.9.0.1", "::", "ff02::1"] {
            assert_eq!(Gid::from(parse(gid)).to_peer(parse("fd09::1")), None, "{gid}");
        }
    }
}
