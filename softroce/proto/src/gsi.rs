//! Queue pair 1, the general services interface (GSI): management datagrams (MADs) of connection
//! management (IBTA vol 1, 3.9.3 and 9.8.4), up to a fixed queue depth; anything else is counted
//! and dropped. It is not in the queue pair table and has no work queues.

use core::net::IpAddr;
use std::collections::VecDeque;

use crate::cm::mad::{MAD_LEN, Mad};
use crate::counters::Counters;
use crate::endpoint::Datagram;
use crate::qp::Path;
use crate::wire::{self, Bth, Deth, Extension, Opcode, Packet};
use crate::{Psn, Qpn};

pub(crate) const GSI: Qpn = Qpn::new(1);

/// Its well-known Q_Key (IBTA vol 1, 3.5.3).
const QKEY: u32 = 0x8001_0000;

/// Maximum queued management datagrams in each direction.
const QUEUE_DEPTH: usize = 1024;

/// A received management datagram.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReceivedMad {
    /// The sender's address; it was sent from queue pair 1 there.
    pub from: IpAddr,
    /// The datagram.
    pub mad: Box<Mad>,
}

/// The management datagram in a RoCEv2 packet to queue pair 1; `None` for any other packet.
pub fn mad_of(packet: &[u8]) -> Option<&Mad> {
    let (headers, rest) = packet.split_first_chunk::<{ Bth::LEN + Deth::LEN }>()?;
    let is_mad = Bth::dest_qp_of(headers)? == GSI && headers[0] == Opcode::ud_send(false).code();
    rest.first_chunk().filter(|_| is_mad)
}

#[derive(Debug, Default)]
pub(crate) struct Gsi {
    received: VecDeque<ReceivedMad>,
    sending: VecDeque<(Path, Box<Mad>)>,
    psn: u32,
}

impl Gsi {
    /// Whether a packet is a valid MAD, apart from its ICRC.
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
