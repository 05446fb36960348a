//! Piggybacked ACKs: an acknowledgement and another packet of the same queue pair in one record.
//!
//! The reply to a message needs both, and a second record costs a cache line and a poll of the
//! peer. An ACK differs from the headers behind it in opcode, PSN and AETH alone:
//!
//! ```text
//! opcode of an acknowledgement | PSN, 3 bytes | AETH, 4 bytes | headers of the packet
//! ```
//! So the headers of a short message, its payload and the ACK fit in one cache line with the
//! record's control words. A separate ACK is its 16 bytes of headers; no piggybacked record is as
//! short.

use doorbell_roce_proto::Qpn;
use doorbell_roce_proto::wire::{Aeth, Bth, MAX_HEADER_LEN, Opcode, header_len};

/// Bytes of the headers of an ACK.
const ALONE: usize = header_len(Opcode::RcAcknowledge);
/// Bytes of an ACK in front of other headers.
const SHORT: usize = 4 + Aeth::LEN;
/// Offsets in a BTH of the flags that depend on the payload, of the ACK request, and of the PSN.
const FLAGS: usize = 1;
const ACK_REQUEST: usize = 8;
const PSN: usize = 9;
/// MigReq of the state "migrated", in which all queue pairs are.
const MIGRATED: u8 = 0x40;

/// An ACK or NAK that waits for a packet to piggyback on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Acknowledgement {
    headers: [u8; ALONE],
    qpn: Qpn,
}

impl Acknowledgement {
    /// `Some` if these are the headers of an ACK.
    pub(super) fn of(headers: &[u8], qpn: Qpn) -> Option<Self> {
        let headers = <[u8; ALONE]>::try_from(headers).ok()?;
        (headers[0] == Opcode::RcAcknowledge.code()).then_some(Self { headers, qpn })
    }

    pub(super) fn headers(&self) -> &[u8] {
        &self.headers
    }

    /// The queue pair that sends it.
    pub(super) fn qpn(&self) -> Qpn {
        self.qpn
    }

    /// The headers of another packet of the queue pair with this ACK in front.
    pub(super) fn in_front_of<'a>(&self, headers: &[u8], joined: &'a mut [u8; Joined::MAX]) -> &'a [u8] {
        let end = SHORT + headers.len();
        joined[0] = self.headers[0];
        joined[1..SHORT].copy_from_slice(&self.headers[PSN..]);
        joined[SHORT..end].copy_from_slice(headers);
        &joined[..end]
    }
}

/// The headers of a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Joined<'a> {
    /// Those of a piggybacked ACK.
    pub(crate) acknowledgement: Option<[u8; ALONE]>,
    /// Those of the packet.
    pub(crate) packet: &'a [u8],
}

impl<'a> Joined<'a> {
    /// The most bytes.
    pub(super) const MAX: usize = SHORT + MAX_HEADER_LEN;

    /// Splits the headers of a record, whatever their content.
    pub(crate) fn split(headers: &'a [u8]) -> Self {
        let alone = Self {
            acknowledgement: None,
            packet: headers,
        };
        if headers.len() == ALONE || headers.first() != Some(&Opcode::RcAcknowledge.code()) {
            return alone;
        }
        let Some((short, packet)) = headers.split_at_checked(SHORT) else {
            return alone;
        };
        let Some(bth) = packet.first_chunk::<{ Bth::LEN }>() else {
            return alone;
        };
        let mut acknowledgement = [0; ALONE];
        acknowledgement[..Bth::LEN].copy_from_slice(bth);
        acknowledgement[0] = short[0];
        acknowledgement[FLAGS] = MIGRATED;
        acknowledgement[ACK_REQUEST] = 0;
        acknowledgement[PSN..].copy_from_slice(&short[1..]);
        Self {
            acknowledgement: Some(acknowledgement),
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
        let write = |opcode, psn, asks, extension| {
            let mut buf = [0; MAX_HEADER_LEN];
            let mut bth = Bth::new(opcode, Qpn::new(0x12_3456), Psn::new(psn));
            (bth.ack_req, bth.solicited) = (asks, asks);
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
    fn an_acknowledgement_comes_along() {
        let (acknowledgement, send) = headers();
        let qpn = Qpn::new(5);
        assert!(Acknowledgement::of(&send, qpn).is_none());
        let held = Acknowledgement::of(&acknowledgement, qpn).unwrap();
        let mut joined = [0; Joined::MAX];
        let both = held.in_front_of(&send, &mut joined).to_vec();
        let split = Joined::split(&both);
        assert_eq!(
            split.acknowledgement.map(|headers| headers.to_vec()),
            Some(acknowledgement.clone())
        );
        assert_eq!(split.packet, send);
        for alone in [&acknowledgement, &send] {
            let split = Joined::split(alone);
            assert_eq!((split.acknowledgement, split.packet), (None, &alone[..]));
        }
        for cut in 0..both.len() {
            let split = Joined::split(&both[..cut]);
            assert!(split.acknowledgement.is_some() || split.packet.len() == cut);
        }
    }
}
