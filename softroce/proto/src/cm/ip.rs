//! IP addressing of the CM: service ids from ports of a port space, and the IP CM header in the
//! private data of a REQ (IBTA vol 1, annex A11).
//!
//! ```text
//!  0      version (0)             2..4   source port              20..36  destination address
//!  1      IP version · 16         4..20  source address           an IPv4 address is in the last 4 of its 16 bytes
//! ```

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::ServiceId;

pub(crate) const IP_HEADER_LEN: usize = 36;

/// A port space: services with ports of their own (`enum rdma_port_space`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u16)]
pub enum PortSpace {
    /// Reliable connections (RDMA_PS_TCP).
    Tcp = 0x0106,
    /// Datagrams (RDMA_PS_UDP).
    Udp = 0x0111,
}

impl ServiceId {
    /// The service id of a port.
    pub const fn of_port(space: PortSpace, port: u16) -> Self {
        Self((space as u64) << 16 | port as u64)
    }

    /// The port of such a service id.
    pub const fn port(self) -> Option<(PortSpace, u16)> {
        let space = match self.0 >> 16 {
            0x0106 => PortSpace::Tcp,
            0x0111 => PortSpace::Udp,
            _ => return None,
        };
        Some((space, self.0 as u16))
    }
}

/// The IP CM header: addresses of the active and the passive side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IpHeader {
    /// The active side.
    pub source: SocketAddr,
    /// The passive side, of the same family. Its port is in the service id.
    pub destination: IpAddr,
}

impl IpHeader {
    /// Parses the header at the front of private data; returns it and the rest.
    pub fn split(private_data: &[u8]) -> Option<(Self, &[u8])> {
        let (header, rest) = private_data.split_first_chunk::<IP_HEADER_LEN>()?;
        if header[0] != 0 {
            return None;
        }
        let port = u16::from_be_bytes([header[2], header[3]]);
        let source: [u8; 16] = *header[4..].first_chunk()?;
        let destination: [u8; 16] = *header[20..].first_chunk()?;
        let address: fn([u8; 16]) -> IpAddr = match header[1] >> 4 {
            4 => |bytes| Ipv4Addr::new(bytes[12], bytes[13], bytes[14], bytes[15]).into(),
            6 => |bytes| Ipv6Addr::from(bytes).into(),
            _ => return None,
        };
        let header = Self {
            source: SocketAddr::new(address(source), port),
            destination: address(destination),
        };
        Some((header, rest))
    }

    /// In wire format.
    pub fn to_bytes(&self) -> [u8; IP_HEADER_LEN] {
        let mut header = [0; IP_HEADER_LEN];
        header[1] = match self.destination {
            IpAddr::V4(_) => 0x40,
            IpAddr::V6(_) => 0x60,
        };
        header[2..4].copy_from_slice(&self.source.port().to_be_bytes());
        for (at, address) in [(4, self.source.ip()), (20, self.destination)] {
            match address {
                IpAddr::V4(v4) => header[at + 12..at + 16].copy_from_slice(&v4.octets()),
                IpAddr::V6(v6) => header[at..at + 16].copy_from_slice(&v6.octets()),
            }
        }
        header
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_of_ports() {
        let service = ServiceId::of_port(PortSpace::Tcp, 7471);
        assert_eq!(service.0, 0x0000_0000_0106_1d2f);
        assert_eq!(service.port(), Some((PortSpace::Tcp, 7471)));
        assert_eq!(ServiceId::of_port(PortSpace::Udp, 1).0, 0x0111_0001);
        assert_eq!(ServiceId(0x1_0106_0001).port(), None);
    }

    #[test]
    fn headers_of_both_families() {
        for (source, destination) in [("10.9.0.2:40000", "10.9.0.1"), ("[fd09::2]:40000", "fd09::1")] {
            let header = IpHeader {
                source: source.parse().unwrap(),
                destination: destination.parse().unwrap(),
            };
            let mut data = header.to_bytes().to_vec();
            data.extend(b"more");
            assert_eq!(IpHeader::split(&data), Some((header, b"more".as_slice())));
            data[0] = 0x10;
            assert_eq!(IpHeader::split(&data), None, "another version");
        }
        assert_eq!(IpHeader::split(&[0; 35]), None);
        assert_eq!(IpHeader::split(&[0; 40]), None, "no IP version");
    }
}
