//! Transmission in tests: polled from the endpoint, or on the fast path while posting.

use doorbell_roce_proto::Transmit;
use doorbell_roce_proto::congestion::ecn;
use doorbell_roce_proto::icrc::Flow;
use doorbell_roce_proto::work::{PostError, SendRequest};

use super::{Fate, PORT, Pair, Sent, drain, on_the_wire};

impl Pair {
    pub(crate) fn transmit(&mut self, at: usize, fate: &mut impl FnMut(usize, &Sent) -> Fate) -> bool {
        let mut moved = false;
        while let Some(sent) = self.transmit_one(at) {
            moved = true;
            self.leave(sent, fate);
        }
        moved
    }

    fn leave(&mut self, sent: Sent, fate: &mut impl FnMut(usize, &Sent) -> Fate) {
        match fate(self.log.len() - 1, &sent) {
            Fate::Deliver => self.flight.push_back((self.delivered, sent)),
            Fate::Drop => {}
            Fate::Mark => {
                let traffic_class = ecn::mark(sent.traffic_class);
                self.flight.push_back((self.delivered, Sent { traffic_class, ..sent }));
            }
            Fate::Duplicate => {
                self.flight.push_back((self.delivered, sent.clone()));
                self.flight.push_back((self.delivered, sent));
            }
            Fate::Delay(behind) => self.flight.push_back((self.delivered + behind, sent)),
        }
    }

    /// `Ok(true)` when it took the fast path, which the setup must enable.
    pub(crate) fn post_now(
        &mut self,
        at: usize,
        request: &SendRequest<'_>,
        fate: &mut impl FnMut(usize, &Sent) -> Fate,
    ) -> Result<bool, PostError> {
        let (now, node) = (self.now, &mut self.nodes[at]);
        let mut buf = [0xee; 4096 + 128];
        let short = if self.setup.fast_path {
            let memory = &mut node.memory;
            node.endpoint
                .post_send_fast(|_| now, node.qpn, request, memory, &mut buf)
        } else {
            None
        };
        let Some(short) = short else {
            let posted = node.endpoint.post_send(now, node.qpn, request);
            drain(node);
            self.transmit(at, fate);
            return posted.map(|()| false);
        };
        let acknowledgement = short.ack.iter().map(|headers| (&headers[..], headers.len()));
        let packets: Vec<_> = acknowledgement.chain([(&buf[..short.len], short.header_len)]).collect();
        for (packet, headers) in packets {
            let address = self.nodes[at].address;
            let transmit = Transmit {
                src: address,
                dst: address,
                traffic_class: 0,
                hop_limit: 0,
                len: packet.len(),
                qpn: self.nodes[at].qpn,
                link: Some(short.link),
                header_len: headers,
                by_ref_len: 0,
                copy_before_completion: false,
                in_order: false,
            };
            let mut bytes = on_the_wire(&transmit, packet, Vec::new());
            Flow::new(address, address, PORT, PORT).seal(0, &mut bytes);
            let sent = Sent {
                from: at,
                traffic_class: transmit.traffic_class,
                bytes,
            };
            self.log.push(sent.clone());
            self.leave(sent, fate);
        }
        assert!(self.transmit_one(at).is_none(), "something was left to be sent");
        Ok(true)
    }

    pub(crate) fn arrive(&mut self) {
        while let Some((_, sent)) = self.flight.pop_front() {
            self.deliver(&sent);
            self.delivered += 1;
        }
    }
}
