//! Queue pair addresses, exchanged by the peers before connecting or sending datagrams.

use crate::types::{Gid, Lid, Mtu, Psn, QKey, Qpn};

/// One end of a connection, exchanged out of band; connect to the peer's (IBTA vol 1, 11.2.5.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(alias("dest_qp_num", "rq_psn"))]
pub struct Endpoint {
    /// The port's GID.
    pub gid: Gid,
    /// The port's LID; 0 on RoCE.
    pub lid: Lid,
    /// The queue pair's number.
    pub qpn: Qpn,
    /// The PSN of the first packet that it will send.
    pub psn: Psn,
    /// The largest path MTU that it supports.
    pub mtu: Mtu,
    /// The READs and atomics that it serves at once (responder resources).
    pub max_dest_rd_atomic: u8,
}

/// The error of decoding an [`Endpoint`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not an endpoint: {0}")]
pub struct ParseEndpointError(&'static str);

const ENDPOINT_BYTES: usize = 32;

const VERSION: u8 = 1;

/// The wire format of both kinds of endpoint.
struct WireEndpoint {
    kind_and_mtu: u8,
    lid: Lid,
    qpn: Qpn,
    psn_or_qkey: u32,
    rd_atomic: u8,
    gid: Gid,
}

impl WireEndpoint {
    fn to_bytes(&self) -> [u8; ENDPOINT_BYTES] {
        let mut bytes = [0; ENDPOINT_BYTES];
        bytes[0] = VERSION;
        bytes[1] = self.kind_and_mtu;
        bytes[2..4].copy_from_slice(&self.lid.0.to_be_bytes());
        bytes[4..8].copy_from_slice(&self.qpn.get().to_be_bytes());
        bytes[8..12].copy_from_slice(&self.psn_or_qkey.to_be_bytes());
        bytes[12] = self.rd_atomic;
        bytes[16..].copy_from_slice(&self.gid.0);
        bytes
    }

    fn from_bytes(bytes: &[u8; ENDPOINT_BYTES]) -> Result<Self, ParseEndpointError> {
        if bytes[0] != VERSION {
            return Err(ParseEndpointError(
                "its format is of another version: run the same release on both ends",
            ));
        }
        let number = |at: usize| u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let mut gid = [0; 16];
        gid.copy_from_slice(&bytes[16..]);
        Ok(Self {
            kind_and_mtu: bytes[1],
            lid: Lid(u16::from_be_bytes([bytes[2], bytes[3]])),
            qpn: Qpn::new(number(4)).ok_or(ParseEndpointError("its queue pair number has more than 24 bits"))?,
            psn_or_qkey: number(8),
            rd_atomic: bytes[12],
            gid: Gid(gid),
        })
    }
}

fn mtu_of(code: u8) -> Result<Mtu, ParseEndpointError> {
    Mtu::from_code(code.into()).ok_or(ParseEndpointError("its MTU is none of the standard's"))
}

impl Endpoint {
    /// Serialises it: version (1), MTU code, LID (2), queue pair number (4), PSN (4), rd_atomic,
    /// three zeros, GID (16); numbers big-endian.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; ENDPOINT_BYTES] {
        let Self {
            gid,
            lid,
            qpn,
            psn,
            mtu,
            max_dest_rd_atomic: rd_atomic,
        } = *self;
        let (second, number) = (mtu as u8, psn.get());
        WireEndpoint {
            kind_and_mtu: second,
            lid,
            qpn,
            psn_or_qkey: number,
            rd_atomic,
            gid,
        }
        .to_bytes()
    }

    /// Decodes the result of [`to_bytes`](Self::to_bytes).
    ///
    /// # Errors
    /// When the version differs, or a number is out of range.
    pub fn from_bytes(bytes: &[u8; ENDPOINT_BYTES]) -> Result<Self, ParseEndpointError> {
        let wire = WireEndpoint::from_bytes(bytes)?;
        Ok(Self {
            gid: wire.gid,
            lid: wire.lid,
            qpn: wire.qpn,
            psn: Psn::new(wire.psn_or_qkey).ok_or(ParseEndpointError("its PSN has more than 24 bits"))?,
            mtu: mtu_of(wire.kind_and_mtu)?,
            max_dest_rd_atomic: wire.rd_atomic,
        })
    }
}

/// The address of a UD queue pair, given to its senders out of band (IBTA vol 1, 9.8.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(alias("remote_qpn", "remote_qkey"))]
pub struct UdEndpoint {
    /// The port's GID.
    pub gid: Gid,
    /// The port's LID; 0 on RoCE.
    pub lid: Lid,
    /// The queue pair's number.
    pub qpn: Qpn,
    /// The Q_Key that datagrams must carry.
    pub qkey: QKey,
    /// The longest datagram that its port supports.
    pub mtu: Mtu,
}

/// Set in the second byte of a serialised [`UdEndpoint`], to distinguish the kinds.
const DATAGRAM: u8 = 0x80;

impl UdEndpoint {
    /// Serialises it: version (1), MTU code plus 128, LID (2), queue pair number (4), Q_Key (4),
    /// four zeros, GID (16); numbers big-endian.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; ENDPOINT_BYTES] {
        let Self {
            gid,
            lid,
            qpn,
            qkey,
            mtu,
        } = *self;
        WireEndpoint {
            kind_and_mtu: DATAGRAM | mtu as u8,
            lid,
            qpn,
            psn_or_qkey: qkey.0,
            rd_atomic: 0,
            gid,
        }
        .to_bytes()
    }

    /// Decodes the result of [`to_bytes`](Self::to_bytes).
    ///
    /// # Errors
    /// When the version differs, it is an [`Endpoint`], or a number is out of range.
    pub fn from_bytes(bytes: &[u8; ENDPOINT_BYTES]) -> Result<Self, ParseEndpointError> {
        let wire = WireEndpoint::from_bytes(bytes)?;
        if wire.kind_and_mtu & DATAGRAM == 0 {
            return Err(ParseEndpointError(
                "it is a connection's, and the queue pair here sends datagrams",
            ));
        }
        Ok(Self {
            gid: wire.gid,
            lid: wire.lid,
            qpn: wire.qpn,
            qkey: QKey(wire.psn_or_qkey),
            mtu: mtu_of(wire.kind_and_mtu & !DATAGRAM)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_goes_to_bytes_and_back() {
        let endpoint = Endpoint {
            gid: Gid([7; 16]),
            lid: Lid(0x1234),
            qpn: Qpn::truncated(0x00ab_cdef),
            psn: Psn::truncated(0x0065_4321),
            mtu: Mtu::B4096,
            max_dest_rd_atomic: 16,
        };
        assert_eq!(Endpoint::from_bytes(&endpoint.to_bytes()), Ok(endpoint));
    }

    #[test]
    fn an_endpoint_for_datagrams_goes_to_bytes_and_back_and_is_not_taken_for_a_connections() {
        let endpoint = UdEndpoint {
            gid: Gid([7; 16]),
            lid: Lid(0x1234),
            qpn: Qpn::truncated(0x00ab_cdef),
            qkey: QKey(0x8765_4321),
            mtu: Mtu::B2048,
        };
        let bytes = endpoint.to_bytes();
        assert_eq!(UdEndpoint::from_bytes(&bytes), Ok(endpoint));
        assert!(Endpoint::from_bytes(&bytes).is_err());
        for (at, value) in [(0, 2), (1, 4), (1, 0x86), (4, 1)] {
            let mut bad = bytes;
            bad[at] = value;
            assert!(UdEndpoint::from_bytes(&bad).is_err(), "byte {at} = {value}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let good = Endpoint {
            gid: Gid::default(),
            lid: Lid(0),
            qpn: Qpn::truncated(1),
            psn: Psn::truncated(0),
            mtu: Mtu::B1024,
            max_dest_rd_atomic: 1,
        }
        .to_bytes();
        for (at, value) in [(0, 2), (1, 0), (1, 6), (4, 1), (8, 0xff)] {
            let mut bad = good;
            bad[at] = value;
            assert!(Endpoint::from_bytes(&bad).is_err(), "byte {at} = {value}");
        }
    }
}
