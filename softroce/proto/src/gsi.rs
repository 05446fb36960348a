//! Queue pair 1, the general services interface: management datagrams from and to other managers (IBTA vol 1, 3.9.3 and 9.8.4). It is no queue pair of the table: it has no queues, its
//! owner takes what came and hands over what is to go.
//!
//! Only whole datagrams of the class of communication management are taken, and as many as there is room for: everything else leaves a count, as on any queue pair.

use core::net::IpAddr;
use std::collections::VecDeque;

use crate::cm::mad::{MAD_LEN, Mad};
use crate::counters::Counters;
use crate::endpoint::Datagram;
use crate::qp::Path;
use crate::wire::{self, Bth, Deth, Extension, Opcode, Packet};
use crate::{Psn, Qpn};

/// Queue pair 1.
pub(crate) const GSI: Qpn = Qpn::new(1);

/// Its Q_Key, the same everywhere (IBTA vol 1, 3.5.3).
const QKEY: u32 = 0x8001_0000;

/// Management datagrams that wait, in each direction.
const QUEUE_DEPTH: usize = 1024;

/// A management datagram that arrived.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReceivedMad {
    /// Where from: its sender's queue pair 1 is there.
    pub from: IpAddr,
    /// The datagram.
    pub mad: Box<Mad>,
}

/// The management datagram in a RoCEv2 packet that is to go to queue pair 1; `None` for every other packet. Nothing else of it is looked at.
pub fn mad_of(packet: &[u8]) -> Option<&Mad> {
    let (headers, rest) = packet.split_first_chunk::<{ Bth::LEN + Deth::LEN }>()?;
    let is_mad = Bth::dest_qp_of(headers)? == GSI && headers[0] == Opcode::ud_send(false).code();
    rest.first_chunk().filter(|_| is_mad)
}

/// What waits at queue pair 1.
#[derive(Debug, Default)]
pub(crate) struct Gsi {
    received: VecDeque<ReceivedMad>,
    sending: VecDeque<(Path, Box<Mad>)>,
    psn: u32,
}

impl Gsi {
    /// Whether a packet is for it, apart from its ICRC.
    pub(crate) fn accepts(packet: &Packet<'_>, counters: &mut Counters) -> bool {
        let Extension::Deth(deth) = packet.extension else {
            counters.malformed += 1;
            return false;
        };
        if deth.qkey != QKEY {
            counters.qkey_violations += 1;
            return false;
        }
        if packet.payload.len() != MAD_LEN {
            counters.malformed += 1;
            return false;
        }
        true
    }

    /// Takes a packet that is.
    pub(crate) fn handle(&mut self, packet: &Packet<'_>, datagram: &Datagram<'_>, counters: &mut Counters) {
        let Ok(mad) = <&Mad>::try_from(packet.payload) else {
            return;
        };
        if self.received.len() == QUEUE_DEPTH {
            counters.dropped_messages += 1;
            return;
        }
        self.received.push_back(ReceivedMad {
            from: datagram.src.to_canonical(),
            mad: Box::new(*mad),
        });
    }

    pub(crate) fn poll(&mut self) -> Option<ReceivedMad> {
        self.received.pop_front()
    }

    /// Queues a datagram; false when there is no room.
    pub(crate) fn send(&mut self, path: Path, mad: Box<Mad>) -> bool {
        let free = self.sending.len() < QUEUE_DEPTH;
        if free {
            self.sending.push_back((path, mad));
        }
        free
    }

    pub(crate) fn has_more(&self) -> bool {
        !self.sending.is_empty()
    }

    /// Writes the next packet; its length and where it goes.
    pub(crate) fn transmit(&mut self, buf: &mut [u8]) -> Option<(usize, Path)> {
        let (path, mad) = self.sending.pop_front()?;
        let opcode = Opcode::ud_send(false);
        let bth = Bth::new(opcode, GSI, Psn::new(self.psn));
        self.psn = self.psn.wrapping_add(1);
        let deth = Deth {
            qkey: QKEY,
            src_qp: GSI,
        };
        let start = wire::write(buf, &bth, &Extension::Deth(deth), MAD_LEN).ok()?;
        buf.get_mut(start..start + MAD_LEN)?.copy_from_slice(&mad[..]);
        Some((wire::packet_len(opcode, MAD_LEN), path))
    }
}
