//! Messages of the CM as bytes (IBTA vol 1, 12.6 and 12.11). [`Message::parse`] and
//! [`Message::to_mad`] are inverse, but for reserved fields: ignored, and written as zero.
//!
//! Every message starts with its sender's communication id (in SIDR the request id), followed,
//! except in requests, by the receiver's.

use super::mad::{Header, MESSAGE_LEN, Mad};
use super::path::PathRecord;
use super::{Ece, RejectReason, ServiceId, SidrStatus};
use crate::{Psn, Qpn};

type Bytes = [u8; MESSAGE_LEN];

/// Maximum private data of each message in bytes (IBTA vol 1, 12.6).
pub mod private_data_len {
    /// REQ.
    pub const REQ: usize = 92;
    /// MRA.
    pub const MRA: usize = 222;
    /// REJ.
    pub const REJ: usize = 148;
    /// REP.
    pub const REP: usize = 196;
    /// RTU and DREP.
    pub const RTU: usize = 224;
    /// DREQ.
    pub const DREQ: usize = 220;
    /// SIDR_REQ.
    pub const SIDR_REQ: usize = 216;
    /// SIDR_REP.
    pub const SIDR_REP: usize = 136;
    pub(crate) const ADDITIONAL_REJ_INFO: usize = 72;
}

/// The message that a REJ or MRA refers to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum MessageKind {
    Request = 0,
    Reply = 1,
    Other = 2,
}

/// REQ: requests a connection (12.6.5).
#[derive(Clone, PartialEq, Eq, Debug)]
// fields: the fields of the message
pub(super) struct Req {
    pub(super) local_id: u32,
    pub(super) service: ServiceId,
    pub(super) guid: u64,
    pub(super) qkey: u32,
    pub(super) qpn: Qpn,
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    /// Remote and local CM response timeouts, codes of 5 bits.
    pub(super) remote_timeout: u8,
    pub(super) local_timeout: u8,
    /// 2 bits.
    pub(super) transport: u8,
    pub(super) flow_control: bool,
    pub(super) psn: Psn,
    /// 3 bits each.
    pub(super) retry_count: u8,
    pub(super) rnr_retry_count: u8,
    pub(super) pkey: u16,
    /// 4 bits each.
    pub(super) mtu: u8,
    pub(super) max_retries: u8,
    pub(super) srq: bool,
    /// 3 bits; the transport if `transport` is 3.
    pub(super) extended_transport: u8,
    pub(super) primary: PathRecord,
    pub(super) ece: Ece,
    pub(super) private_data: Vec<u8>,
}

/// MRA (message receipt acknowledgement): the reply will take longer (12.6.6).
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Mra {
    pub(super) local_id: u32,
    pub(super) remote_id: u32,
    pub(super) message: MessageKind,
    /// Service timeout: a code of 5 bits.
    pub(super) timeout: u8,
}

/// REJ: rejects a message or ends a connection (12.6.7).
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Rej {
    pub(super) local_id: u32,
    pub(super) remote_id: u32,
    pub(super) message: MessageKind,
    pub(super) reason: RejectReason,
    /// Additional reject information; at most 72 bytes.
    pub(super) info: Vec<u8>,
    pub(super) private_data: Vec<u8>,
}

/// REP: accepts a request (12.6.8).
#[derive(Clone, PartialEq, Eq, Debug)]
// fields: the fields of the message
pub(super) struct Rep {
    pub(super) local_id: u32,
    pub(super) remote_id: u32,
    pub(super) qkey: u32,
    pub(super) qpn: Qpn,
    pub(super) psn: Psn,
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    /// 5 bits.
    pub(super) ack_delay: u8,
    pub(super) flow_control: bool,
    /// 3 bits.
    pub(super) rnr_retry_count: u8,
    pub(super) srq: bool,
    pub(super) guid: u64,
    pub(super) ece: Ece,
    pub(super) private_data: Vec<u8>,
}

/// RTU (12.6.9) and DREP (12.6.11): ids and private data only.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct IdsOnly {
    pub(super) local_id: u32,
    pub(super) remote_id: u32,
    pub(super) private_data: Vec<u8>,
}

/// DREQ: requests a disconnect (12.6.10).
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Dreq {
    pub(super) local_id: u32,
    pub(super) remote_id: u32,
    /// The receiver's queue pair.
    pub(super) qpn: Qpn,
    pub(super) private_data: Vec<u8>,
}

/// SIDR_REQ (12.11.1).
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct SidrReq {
    pub(super) request_id: u32,
    pub(super) pkey: u16,
    pub(super) service: ServiceId,
    pub(super) private_data: Vec<u8>,
}

/// SIDR_REP (12.11.2).
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct SidrRep {
    pub(super) request_id: u32,
    pub(super) status: SidrStatus,
    pub(super) qpn: Qpn,
    pub(super) service: ServiceId,
    pub(super) qkey: u32,
    pub(super) private_data: Vec<u8>,
}

/// LAP: offers an alternate path (12.8.1). Only the ids, which the APR needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Lap {
    pub(super) local_id: u32,
    pub(super) remote_id: u32,
}

/// APR: the reply to a LAP (12.8.2), always "no alternate paths".
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Apr {
    pub(super) local_id: u32,
    pub(super) remote_id: u32,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Message {
    Req(Box<Req>),
    Mra(Mra),
    Rej(Rej),
    Rep(Rep),
    Rtu(IdsOnly),
    Dreq(Dreq),
    Drep(IdsOnly),
    SidrReq(SidrReq),
    SidrRep(SidrRep),
    Lap(Lap),
    Apr(Apr),
}

/// Attribute ids of the class (IBTA vol 1, 16.7.3).
mod attribute {
    pub(super) const REQ: u16 = 0x10;
    pub(super) const MRA: u16 = 0x11;
    pub(super) const REJ: u16 = 0x12;
    pub(super) const REP: u16 = 0x13;
    pub(super) const RTU: u16 = 0x14;
    pub(super) const DREQ: u16 = 0x15;
    pub(super) const DREP: u16 = 0x16;
    pub(super) const SIDR_REQ: u16 = 0x17;
    pub(super) const SIDR_REP: u16 = 0x18;
    pub(super) const LAP: u16 = 0x19;
    pub(super) const APR: u16 = 0x1a;
}

/// AP status: the receiver has no alternate paths (IBTA vol 1, 12.8.2.1).
const NO_ALTERNATE_PATHS: u8 = 2;

impl Message {
    /// Parses a datagram into transaction id and message; `None` for any other.
    pub(super) fn parse(mad: &Mad) -> Option<(u64, Self)> {
        let (header, bytes) = Header::split(mad)?;
        let message = match header.attribute {
            attribute::REQ => Self::Req(Box::new(Req::read(bytes, header.modifier))),
            attribute::MRA => Self::Mra(Mra::read(bytes)),
            attribute::REJ => Self::Rej(Rej::read(bytes)),
            attribute::REP => Self::Rep(Rep::read(bytes, header.modifier)),
            attribute::RTU => Self::Rtu(IdsOnly::read(bytes)),
            attribute::DREQ => Self::Dreq(Dreq::read(bytes)),
            attribute::DREP => Self::Drep(IdsOnly::read(bytes)),
            attribute::SIDR_REQ => Self::SidrReq(SidrReq::read(bytes)),
            attribute::SIDR_REP => Self::SidrRep(SidrRep::read(bytes)),
            attribute::LAP => Self::Lap(Lap {
                local_id: be32(bytes, 0),
                remote_id: be32(bytes, 4),
            }),
            attribute::APR => Self::Apr(Apr {
                local_id: be32(bytes, 0),
                remote_id: be32(bytes, 4),
            }),
            _ => return None,
        };
        Some((header.transaction, message))
    }

    pub(super) fn to_mad(&self, transaction: u64) -> Mad {
        let (attribute, write): (u16, &dyn Fn(&mut Bytes)) = match self {
            Self::Req(req) => (attribute::REQ, &|to| req.write(to)),
            Self::Mra(mra) => (attribute::MRA, &|to| mra.write(to)),
            Self::Rej(rej) => (attribute::REJ, &|to| rej.write(to)),
            Self::Rep(rep) => (attribute::REP, &|to| rep.write(to)),
            Self::Rtu(rtu) => (attribute::RTU, &|to| rtu.write(to)),
            Self::Dreq(dreq) => (attribute::DREQ, &|to| dreq.write(to)),
            Self::Drep(drep) => (attribute::DREP, &|to| drep.write(to)),
            Self::SidrReq(req) => (attribute::SIDR_REQ, &|to| req.write(to)),
            Self::SidrRep(rep) => (attribute::SIDR_REP, &|to| rep.write(to)),
            Self::Lap(lap) => (attribute::LAP, &|to| ids(to, lap.local_id, lap.remote_id)),
            Self::Apr(apr) => (attribute::APR, &|to| {
                ids(to, apr.local_id, apr.remote_id);
                to[9] = NO_ALTERNATE_PATHS;
            }),
        };
        let modifier = match self {
            Self::Req(req) => req.ece.options,
            Self::Rep(rep) => rep.ece.options,
            _ => 0,
        };
        let header = Header {
            transaction,
            attribute,
            modifier,
        };
        header.datagram(|to| write(to))
    }
}

impl Req {
    fn read(from: &Bytes, modifier: u32) -> Self {
        Self {
            local_id: be32(from, 0),
            service: ServiceId(be64(from, 8)),
            guid: be64(from, 16),
            qkey: be32(from, 28),
            qpn: Qpn::new(be32(from, 32) >> 8),
            responder_resources: from[35],
            initiator_depth: from[39],
            remote_timeout: from[43] >> 3,
            transport: from[43] >> 1 & 3,
            flow_control: from[43] & 1 != 0,
            psn: Psn::new(be32(from, 44) >> 8),
            local_timeout: from[47] >> 3,
            retry_count: from[47] & 7,
            pkey: be16(from, 48),
            mtu: from[50] >> 4,
            rnr_retry_count: from[50] & 7,
            max_retries: from[51] >> 4,
            srq: from[51] & 8 != 0,
            extended_transport: from[51] & 7,
            primary: PathRecord::read(from, 52),
            ece: Ece::read([from[5], from[6], from[7]], modifier),
            private_data: tail(from, 140),
        }
    }

    fn write(&self, to: &mut Bytes) {
        put(to, 0, self.local_id.to_be_bytes());
        put(to, 5, self.ece.vendor());
        put(to, 8, self.service.0.to_be_bytes());
        put(to, 16, self.guid.to_be_bytes());
        put(to, 28, self.qkey.to_be_bytes());
        put(to, 32, high(self.qpn.get(), self.responder_resources));
        put(to, 36, high(0, self.initiator_depth));
        to[43] = self.remote_timeout << 3 | (self.transport & 3) << 1 | u8::from(self.flow_control);
        put(
            to,
            44,
            high(self.psn.get(), self.local_timeout << 3 | self.retry_count & 7),
        );
        put(to, 48, self.pkey.to_be_bytes());
        to[50] = self.mtu << 4 | self.rnr_retry_count & 7;
        to[51] = self.max_retries << 4 | u8::from(self.srq) << 3 | self.extended_transport & 7;
        self.primary.write(to, 52);
        put_tail(to, 140, &self.private_data);
    }
}

impl Ece {
    /// From the vendor id's bytes and the attribute modifier.
    fn read([high, middle, low]: [u8; 3], modifier: u32) -> Self {
        Self {
            vendor_id: u32::from_be_bytes([0, high, middle, low]),
            options: modifier,
        }
    }

    /// The vendor id's bytes.
    fn vendor(self) -> [u8; 3] {
        let [_, high, middle, low] = self.vendor_id.to_be_bytes();
        [high, middle, low]
    }
}

impl MessageKind {
    fn read(byte: u8) -> Self {
        match byte >> 6 {
            0 => Self::Request,
            1 => Self::Reply,
            _ => Self::Other,
        }
    }

    fn byte(self) -> u8 {
        (self as u8) << 6
    }
}

impl Mra {
    fn read(from: &Bytes) -> Self {
        Self {
            local_id: be32(from, 0),
            remote_id: be32(from, 4),
            message: MessageKind::read(from[8]),
            timeout: from[9] >> 3,
        }
    }

    fn write(&self, to: &mut Bytes) {
        ids(to, self.local_id, self.remote_id);
        to[8] = self.message.byte();
        to[9] = self.timeout << 3;
    }
}

impl Rej {
    fn read(from: &Bytes) -> Self {
        let info = usize::from(from[9] >> 1).min(private_data_len::ADDITIONAL_REJ_INFO);
        Self {
            local_id: be32(from, 0),
            remote_id: be32(from, 4),
            message: MessageKind::read(from[8]),
            reason: RejectReason(be16(from, 10)),
            info: from[12..12 + info].to_vec(),
            private_data: tail(from, 84),
        }
    }

    fn write(&self, to: &mut Bytes) {
        ids(to, self.local_id, self.remote_id);
        let info = self.info.len().min(private_data_len::ADDITIONAL_REJ_INFO);
        to[8] = self.message.byte();
        // At most 72.
        to[9] = (info as u8) << 1;
        put(to, 10, self.reason.0.to_be_bytes());
        to[12..12 + info].copy_from_slice(&self.info[..info]);
        put_tail(to, 84, &self.private_data);
    }
}

impl Rep {
    fn read(from: &Bytes, modifier: u32) -> Self {
        Self {
            local_id: be32(from, 0),
            remote_id: be32(from, 4),
            qkey: be32(from, 8),
            qpn: Qpn::new(be32(from, 12) >> 8),
            psn: Psn::new(be32(from, 20) >> 8),
            responder_resources: from[24],
            initiator_depth: from[25],
            ack_delay: from[26] >> 3,
            flow_control: from[26] & 1 != 0,
            rnr_retry_count: from[27] >> 5,
            srq: from[27] & 0x10 != 0,
            guid: be64(from, 28),
            ece: Ece::read([from[15], from[19], from[23]], modifier),
            private_data: tail(from, 36),
        }
    }

    fn write(&self, to: &mut Bytes) {
        ids(to, self.local_id, self.remote_id);
        let [vendor_high, vendor_middle, vendor_low] = self.ece.vendor();
        put(to, 8, self.qkey.to_be_bytes());
        put(to, 12, high(self.qpn.get(), vendor_high));
        to[19] = vendor_middle;
        put(to, 20, high(self.psn.get(), vendor_low));
        to[24] = self.responder_resources;
        to[25] = self.initiator_depth;
        to[26] = self.ack_delay << 3 | u8::from(self.flow_control);
        to[27] = self.rnr_retry_count << 5 | u8::from(self.srq) << 4;
        put(to, 28, self.guid.to_be_bytes());
        put_tail(to, 36, &self.private_data);
    }
}

impl IdsOnly {
    fn read(from: &Bytes) -> Self {
        Self {
            local_id: be32(from, 0),
            remote_id: be32(from, 4),
            private_data: tail(from, 8),
        }
    }

    fn write(&self, to: &mut Bytes) {
        ids(to, self.local_id, self.remote_id);
        put_tail(to, 8, &self.private_data);
    }
}

impl Dreq {
    fn read(from: &Bytes) -> Self {
        Self {
            local_id: be32(from, 0),
            remote_id: be32(from, 4),
            qpn: Qpn::new(be32(from, 8) >> 8),
            private_data: tail(from, 12),
        }
    }

    fn write(&self, to: &mut Bytes) {
        ids(to, self.local_id, self.remote_id);
        put(to, 8, high(self.qpn.get(), 0));
        put_tail(to, 12, &self.private_data);
    }
}

impl SidrReq {
    fn read(from: &Bytes) -> Self {
        Self {
            request_id: be32(from, 0),
            pkey: be16(from, 4),
            service: ServiceId(be64(from, 8)),
            private_data: tail(from, 16),
        }
    }

    fn write(&self, to: &mut Bytes) {
        put(to, 0, self.request_id.to_be_bytes());
        put(to, 4, self.pkey.to_be_bytes());
        put(to, 8, self.service.0.to_be_bytes());
        put_tail(to, 16, &self.private_data);
    }
}

impl SidrRep {
    fn read(from: &Bytes) -> Self {
        Self {
            request_id: be32(from, 0),
            status: SidrStatus(from[4]),
            qpn: Qpn::new(be32(from, 8) >> 8),
            service: ServiceId(be64(from, 12)),
            qkey: be32(from, 20),
            private_data: tail(from, 96),
        }
    }

    fn write(&self, to: &mut Bytes) {
        put(to, 0, self.request_id.to_be_bytes());
        to[4] = self.status.0;
        put(to, 8, high(self.qpn.get(), 0));
        put(to, 12, self.service.0.to_be_bytes());
        put(to, 20, self.qkey.to_be_bytes());
        put_tail(to, 96, &self.private_data);
    }
}

/// 24 bits, and 8 below them.
fn high(bits: u32, low: u8) -> [u8; 4] {
    (bits << 8 | u32::from(low)).to_be_bytes()
}

fn ids(to: &mut Bytes, local: u32, remote: u32) {
    put(to, 0, local.to_be_bytes());
    put(to, 4, remote.to_be_bytes());
}

pub(super) fn be16(from: &Bytes, at: usize) -> u16 {
    u16::from_be_bytes([from[at], from[at + 1]])
}

pub(super) fn be32(from: &Bytes, at: usize) -> u32 {
    u32::from(be16(from, at)) << 16 | u32::from(be16(from, at + 2))
}

fn be64(from: &Bytes, at: usize) -> u64 {
    u64::from(be32(from, at)) << 32 | u64::from(be32(from, at + 4))
}

pub(super) fn put<const N: usize>(to: &mut Bytes, at: usize, bytes: [u8; N]) {
    to[at..at + N].copy_from_slice(&bytes);
}

/// Private data: the rest of the message.
fn tail(from: &Bytes, at: usize) -> Vec<u8> {
    from[at..].to_vec()
}

/// Truncates to the space of the message: commands refuse more private data than that.
fn put_tail(to: &mut Bytes, at: usize, data: &[u8]) {
    for (to, from) in to[at..].iter_mut().zip(data.iter()) {
        *to = *from;
    }
}

#[cfg(test)]
mod tests;
