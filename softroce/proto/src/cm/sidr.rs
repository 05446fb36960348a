//! Service id resolution (SIDR) of datagram services: a request and a reply (IBTA vol 1, 12.11).

use super::Output;
use super::connection::{Connection, State};
use super::message::{Message, SidrRep, SidrReq};
use super::types::{CmEvent, SidrReply, SidrStatus};
use crate::wire::DEFAULT_PKEY;
use crate::{Instant, Qpn};

pub(super) fn refusal_message(req: &SidrReq, status: SidrStatus) -> Message {
    Message::SidrRep(SidrRep {
        request_id: req.request_id,
        status,
        qpn: Qpn::new(0),
        service: req.service,
        qkey: 0,
        private_data: Vec::new(),
    })
}

impl Connection {
    pub(super) fn send_sidr_req(&mut self, now: Instant, private_data: &[u8], out: &mut Output) {
        let message = Message::SidrReq(SidrReq {
            request_id: self.id.0,
            pkey: DEFAULT_PKEY,
            service: self.service,
            private_data: private_data.to_vec(),
        });
        self.send_request(now, &message, out);
    }

    pub(super) fn sidr_reply(&mut self, now: Instant, reply: &SidrReply, out: &mut Output) -> bool {
        if self.state != State::SidrReceived {
            return false;
        }
        let message = Message::SidrRep(SidrRep {
            request_id: self.remote_id,
            status: reply.status,
            qpn: reply.qpn,
            service: self.service,
            qkey: reply.qkey,
            private_data: reply.private_data.clone(),
        });
        self.reply_and_linger(now, &message, out);
        true
    }

    pub(super) fn sidr_rep(&mut self, rep: SidrRep, out: &mut Output) {
        if self.state != State::SidrSent {
            return;
        }
        self.close();
        let reply = SidrReply {
            status: rep.status,
            qpn: rep.qpn,
            qkey: rep.qkey,
            private_data: rep.private_data,
        };
        if !self.released {
            out.events.push_back(CmEvent::SidrReply {
                id: self.id,
                reply: Box::new(reply),
            });
        }
    }

    pub(super) fn release_sidr(&mut self, now: Instant, out: &mut Output) {
        if self.state == State::SidrReceived {
            let reply = SidrReply {
                status: SidrStatus::REJECTED,
                qpn: Qpn::new(0),
                qkey: 0,
                private_data: Vec::new(),
            };
            self.sidr_reply(now, &reply, out);
        } else {
            self.close();
        }
    }
}
