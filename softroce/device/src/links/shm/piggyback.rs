//! Piggybacked ACKs: an acknowledgement and another packet of the same queue pair in one record.
//!
//! A second record costs a cache line and a poll. An ACK differs in opcode, PSN and AETH alone:
//!
//! ```text
//! opcode of an acknowledgement | PSN, 3 bytes | AETH, 4 bytes | headers of the packet
//! ```
//! So the headers of a short message, its payload and the ACK fit in one cache line. A separate ACK
//! is 16 bytes of headers, shorter than any piggybacked record.

use doorbell_roce_proto::Qpn;
use doorbell_roce_proto::wire::{Aeth, Bth, MAX_HEADER_LEN, Opcode, header_len};

const ACK_LEN: usize = header_len(Opcode::RcAcknowledge);
const PREFIX_LEN: usize = 4 + Aeth::LEN;
/// Offsets in a BTH of the flags that depend on the payload, of the ACK request, and of the PSN.
const FLAGS: usize = 1;
const ACK_REQUEST: usize = 8;
const PSN: usize = 9;
/// MigReq of the state "migrated", in which all queue pairs are.
const MIGRATED: u8 = 0x40;

/// An ACK or NAK that waits for a packet to piggyback on.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingAck {
    headers: [u8; ACK_LEN],
    qpn: Qpn,
}

impl PendingAck {
    pub(super) fn of(headers: &[u8], qpn: Qpn) -> Option<Self> {
        let headers = <[u8; ACK_LEN]>::try_from(headers).ok()?;
        (headers[0] == Opcode::RcAcknowledge.code()).then_some(Self { headers, qpn })
    }

    pub(super) fn headers(&self) -> &[u8] {
        &self.headers
    }

    pub(super) fn qpn(&self) -> Qpn {
        self.qpn
    }

    /// The headers of another packet of the queue pair with this ACK in front.
    pub(super) fn prepended_to<'a>(&self, headers: &[u8], combined: &'a mut [u8; RecordHeaders::MAX]) -> &'a [u8] {
        let end = PREFIX_LEN + headers.len();
        combined[0] = self.headers[0];
        combined[1..PREFIX_LEN].copy_from_slice(&self.headers[PSN..]);
        combined[PREFIX_LEN..end].copy_from_slice(headers);
        &combined[..end]
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RecordHeaders<'a> {
    pub(crate) piggybacked_ack: Option<[u8; ACK_LEN]>,
    pub(crate) packet: &'a [u8],
}

impl<'a> RecordHeaders<'a> {
    pub(super) const MAX: usize = PREFIX_LEN + MAX_HEADER_LEN;

    /// Splits the headers of a record, whatever their content.
    pub(crate) fn split(headers: &'a [u8]) -> Self {
        let plain = Self {
            piggybacked_ack: None,
            packet: headers,
        };
        if headers.len() == ACK_LEN || headers.first() != Some(&Opcode::RcAcknowledge.code()) {
            return plain;
        }
        let Some((prefix, packet)) = headers.split_at_checked(PREFIX_LEN) else {
            return plain;
        };
        let Some(bth) = packet.first_chunk::<{ Bth::LEN }>() else {
            return plain;
        };
        let mut ack = [0; ACK_LEN];
        ack[..Bth::LEN].copy_from_slice(bth);
        ack[0] = prefix[0];
        ack[FLAGS] = MIGRATED;
        ack[ACK_REQUEST] = 0;
        ack[PSN..].copy_from_slice(&prefix[1..]);
        Self {
            piggybacked_ack: Some(ack),
            packet,
        }
    }
}

#[cfg(test)]
mod tests {
    use doorbell_roce_proto::Psn;
    use doorbell_roce_proto::wire::{self, Credits, Extension, Syndrome};

    use super::*;

    /// The headers of an ACK, and of a SEND with the AckReq and solicited bits.
    fn headers() -> (Vec<u8>, Vec<u8>) {
        let write = |opcode, psn, requests, extension| {
            let mut buf = [0; MAX_HEADER_LEN];
            let mut bth = Bth::new(opcode, Qpn::new(0x12_3456), Psn::new(psn));
            (bth.ack_req, bth.solicited) = (requests, requests);
            let len = wire::write_headers(&mut buf, &bth, &extension).unwrap();
            buf[..len].to_vec()
        };
        let syndrome = Syndrome::Ack(Credits::UNLIMITED);
        let aeth = Extension::Aeth(Aeth {
            syndrome,
            msn: 0xab_cdef,
        });
        (
            write(Opcode::RcAcknowledge, 0xfe_dcba, false, aeth),
            write(Opcode::RcSendOnly, 7, true, Extension::Bare),
        )
    }

    #[test]
    fn an_ack_piggybacks() {
        let (ack, send) = headers();
        let qpn = Qpn::new(5);
        assert!(PendingAck::of(&send, qpn).is_none());
        let pending = PendingAck::of(&ack, qpn).unwrap();
        let mut combined = [0; RecordHeaders::MAX];
        let both = pending.prepended_to(&send, &mut combined).to_vec();
        let split = RecordHeaders::split(&both);
        assert_eq!(split.piggybacked_ack.map(|headers| headers.to_vec()), Some(ack.clone()));
        assert_eq!(split.packet, send);
        for plain in [&ack, &send] {
            let split = RecordHeaders::split(plain);
            assert_eq!((split.piggybacked_ack, split.packet), (None, &plain[..]));
        }
        for cut in 0..both.len() {
            let split = RecordHeaders::split(&both[..cut]);
            assert!(split.piggybacked_ack.is_some() || split.packet.len() == cut);
        }
    }
}
