//! Datagrams that the UDP port holder forwards: their header in the record on the shm ring.

use std::net::{IpAddr, Ipv6Addr};

use doorbell_roce_proto::{Datagram, Ident};

use crate::links::udp;

/// A datagram's IP and UDP headers, without the destination address, which both processes share.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Forwarded {
    pub(crate) src: IpAddr,
    pub(crate) ports: (u16, u16),
    /// Its index in a coalesced (GRO) receive.
    pub(crate) segment: u16,
    pub(crate) traffic_class: u8,
}

impl Forwarded {
    pub(crate) const LEN: usize = 23;

    pub(crate) fn encode(&self) -> [u8; Self::LEN] {
        let address = match self.src {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        let mut bytes = [0; Self::LEN];
        bytes[..16].copy_from_slice(&address.octets());
        bytes[16..18].copy_from_slice(&self.ports.0.to_be_bytes());
        bytes[18..20].copy_from_slice(&self.ports.1.to_be_bytes());
        bytes[20..22].copy_from_slice(&self.segment.to_be_bytes());
        bytes[22] = self.traffic_class;
        bytes
    }

    pub(crate) fn of(datagram: &udp::Datagram<'_>) -> Self {
        Self {
            src: datagram.src.ip(),
            ports: (datagram.src.port(), datagram.dst.port()),
            segment: datagram.segment,
            traffic_class: datagram.traffic_class,
        }
    }

    pub(crate) fn datagram<'a>(&self, dst: IpAddr, payload: &'a [u8]) -> Datagram<'a> {
        Datagram {
            src: self.src,
            dst,
            src_port: self.ports.0,
            dst_port: self.ports.1,
            ident: Ident::Unknown { segment: self.segment },
            traffic_class: self.traffic_class,
            payload,
        }
    }

    /// `None` for another length.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::LEN] = bytes.try_into().ok()?;
        let (address, rest) = bytes.split_first_chunk::<16>()?;
        let number = |at: usize| u16::from_be_bytes([rest[at], rest[at + 1]]);
        Some(Self {
            src: IpAddr::V6(Ipv6Addr::from(*address)).to_canonical(),
            ports: (number(0), number(2)),
            segment: number(4),
            traffic_class: rest[6],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        for src in ["10.9.0.2", "fd09::2"] {
            let forwarded = Forwarded {
                src: src.parse().unwrap(),
                ports: (49153, 4791),
                segment: 3,
                traffic_class: 0x63,
            };
            assert_eq!(Forwarded::decode(&forwarded.encode()), Some(forwarded));
        }
        assert_eq!(Forwarded::decode(&[0; 22]), None);
    }
}
