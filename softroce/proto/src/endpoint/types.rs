//! What an endpoint takes and returns: packets and asynchronous events.

use core::net::IpAddr;

use crate::Qpn;
use crate::qp::{LinkId, Path};
use crate::wire::IpFields;
use crate::work::SrqId;

/// The IPv4 Identification of a received datagram, which the ICRC covers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ident {
    /// Its value.
    Known(u16),
    /// Not known to a UDP socket; the datagram is number `segment` of its coalesced (GRO) receive.
    Unknown {
        /// Index in the coalesced receive.
        segment: u16,
    },
}

/// A datagram received on the RoCEv2 port, with the fields of its IP and UDP headers.
#[derive(Clone, Copy, Debug)]
pub struct Datagram<'a> {
    /// Source address.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
    /// Source UDP port.
    pub src_port: u16,
    /// Destination UDP port.
    pub dst_port: u16,
    /// IPv4 Identification; ignored for IPv6.
    pub ident: Ident,
    /// IPv4 TOS or IPv6 traffic class; 0 if it is not known.
    pub traffic_class: u8,
    /// The UDP payload: BTH to ICRC, inclusive.
    pub payload: &'a [u8],
}

impl Datagram<'_> {
    pub(super) const fn ip(&self) -> IpFields {
        IpFields {
            src: self.src,
            dst: self.dst,
            traffic_class: self.traffic_class,
        }
    }
}

/// A packet received on a link: its headers; [`Memory`](crate::memory::Memory) has the payload.
#[derive(Clone, Copy, Debug)]
pub struct LinkPacket<'a> {
    /// The lossless link.
    pub link: LinkId,
    /// The IP address of both ends.
    pub address: IpAddr,
    /// BTH and extension headers, without pad and ICRC.
    pub headers: &'a [u8],
    /// Payload length in bytes.
    pub len: usize,
}

/// A packet to send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transmit {
    /// Source address.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
    /// IPv4 TOS or IPv6 traffic class.
    pub traffic_class: u8,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// Bytes in the buffer, including the 4 of the ICRC, which the link fills in.
    pub len: usize,
    /// The sending queue pair.
    pub qpn: Qpn,
    /// The link to send it on, `None` for UDP. On a link it has neither pad nor ICRC.
    pub link: Option<LinkId>,
    /// lossless link: length of the headers in front of the payload in the buffer.
    pub header_len: usize,
    /// lossless link: bytes of payload passed by reference ([`Memory`](crate::memory::Memory)).
    pub by_ref_len: u32,
    /// link: the referenced memory may change as soon as the completion is reported (UC, UD),
    /// so the payload must be copied before. Otherwise (RC) it is stable until acknowledged.
    pub copy_before_completion: bool,
    /// UDP: keeps its order relative to the queue pair's other packets even if it is an ACK. See
    /// [`ack_before_requests`](crate::qp::QpInit::ack_before_requests).
    pub in_order: bool,
}

impl Transmit {
    pub(crate) fn new(qpn: Qpn, path: &Path, len: usize) -> Self {
        Self {
            src: path.local,
            dst: path.remote,
            traffic_class: path.traffic_class,
            hop_limit: path.hop_limit,
            len,
            qpn,
            link: path.link,
            header_len: 0,
            by_ref_len: 0,
            copy_before_completion: false,
            in_order: false,
        }
    }
}

/// An asynchronous event of the device (ibv_get_async_event(3)).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AsyncEvent {
    /// IBV_EVENT_QP_FATAL: entered the error state for a reason that no completion reports.
    QpFatal(Qpn),
    /// IBV_EVENT_QP_REQ_ERR: the peer sent a malformed request.
    QpRequestError(Qpn),
    /// IBV_EVENT_QP_ACCESS_ERR: the peer's request was refused access.
    QpAccessError(Qpn),
    /// IBV_EVENT_COMM_EST: the first message arrived in RTR.
    CommunicationEstablished(Qpn),
    /// IBV_EVENT_SQ_DRAINED.
    SendQueueDrained(Qpn),
    /// IBV_EVENT_QP_LAST_WQE_REACHED: in ERR, it consumes no more of its shared receive queue.
    LastWqeReached(Qpn),
    /// IBV_EVENT_SRQ_LIMIT_REACHED: fewer receives than the limit, which is now disarmed.
    SrqLimitReached(SrqId),
}
