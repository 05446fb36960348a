//! Queue pairs of UC and UD: without responses, a request completes when its last packet is given
//! to the link, and packets that cannot be received are dropped silently (IBTA vol 1, 9.8).

use super::QueuePair;
use crate::AsyncEvent;
use crate::memory::Memory;
use crate::outbox::Outbox;
use crate::qp::State;
use crate::qp::packet::{InboundPacket, PacketLens};
use crate::qp::responder::LocalFault;
use crate::wire::{IpFields, Transport};
use crate::work::Status;

impl QueuePair {
    pub(super) fn handle_unreliable<M: Memory>(
        &mut self,
        packet: &InboundPacket<'_>,
        memory: &mut M,
        out: &mut Outbox,
    ) {
        match self.responder.handle_unreliable(packet, &self.connection, memory, out) {
            Ok(true) if !self.established => {
                self.established = true;
                out.event(AsyncEvent::CommunicationEstablished(self.connection.qpn));
            }
            Ok(_) => {}
            Err(LocalFault) => self.enter_error(out),
        }
    }

    /// From any sender.
    pub(super) fn handle_datagram<M: Memory>(
        &mut self,
        packet: &InboundPacket<'_>,
        ip: IpFields,
        memory: &mut M,
        out: &mut Outbox,
    ) {
        let qkey = self.set.qkey.unwrap_or(0);
        let handled = self
            .responder
            .handle_datagram(packet, ip, qkey, &self.connection, memory, out);
        if handled == Err(LocalFault) {
            self.enter_error(out);
        }
    }

    pub(super) fn transmit_unreliable<M: Memory>(
        &mut self,
        memory: &mut M,
        buf: &mut [u8],
        out: &mut Outbox,
    ) -> Option<PacketLens> {
        let draining = match self.state {
            State::Rts => false,
            State::Sqd => true,
            _ => return None,
        };
        let written = if self.init.transport == Transport::Ud {
            let qkey = self.set.qkey.unwrap_or(0);
            let written = self
                .requester
                .transmit_datagram(&self.connection, qkey, draining, memory, buf, out);
            written.map(|written| {
                written.map(|(written, path)| {
                    self.datagram_path = Some(path);
                    written
                })
            })
        } else {
            self.requester
                .transmit_unreliable(&self.connection, draining, memory, buf, out)
        };
        match written {
            Ok(written) => {
                self.burst.requests_sent |= written.is_some();
                self.check_drained(out);
                written
            }
            Err(status) => {
                self.fail_sending(status, out);
                None
            }
        }
    }

    /// Completes the oldest request with `status`, flushes later ones (IBTA vol 1, 10.3.1.6: SQE).
    fn fail_sending(&mut self, status: Status, out: &mut Outbox) {
        self.requester.fail(status, &self.connection, out);
        self.requester.flush(&self.connection, out);
        self.draining = false;
        self.state = State::Sqe;
    }
}
