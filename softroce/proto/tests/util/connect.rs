//! State transitions of a pair's queue pairs.

use doorbell_roce_proto::Psn;
use doorbell_roce_proto::qp::{Modify, Path, State};
use doorbell_roce_proto::wire::Transport;

use super::{Pair, QKEY, link_to};

impl Pair {
    pub(crate) fn init_modify(&self) -> Modify {
        Modify {
            state: Some(State::Init),
            pkey_index: Some(0),
            port: Some(1),
            access: (self.setup.transport != Transport::Ud).then_some(self.setup.access),
            qkey: (self.setup.transport == Transport::Ud).then_some(QKEY),
            ..Modify::default()
        }
    }

    /// Both ends of RC request and respond; of XRC the first one requests, the second one responds.
    fn has_role(&self, at: usize, role: usize) -> bool {
        match self.setup.transport {
            Transport::Rc => true,
            Transport::Xrc => at == role,
            Transport::Uc | Transport::Ud => false,
        }
    }

    pub(crate) fn rtr_modify(&self, at: usize) -> Modify {
        let peer = &self.nodes[1 - at];
        let responds = self.has_role(at, 1);
        if self.setup.transport == Transport::Ud {
            return Modify {
                state: Some(State::Rtr),
                ..Modify::default()
            };
        }
        Modify {
            state: Some(State::Rtr),
            path: Some(Path {
                link: link_to(1 - at),
                ..Path::new(self.nodes[at].address, peer.address)
            }),
            path_mtu: Some(self.setup.mtu),
            dest_qpn: Some(peer.qpn),
            rq_psn: Some(Psn::new(self.setup.psns[1 - at])),
            max_dest_rd_atomic: responds.then_some(self.setup.dest_rd_atomic),
            min_rnr_timer: responds.then_some(self.setup.rnr_timer),
            ..Modify::default()
        }
    }

    pub(crate) fn rts_modify(&self, at: usize) -> Modify {
        let (reliable, requests) = (self.setup.transport.is_reliable(), self.has_role(at, 0));
        Modify {
            state: Some(State::Rts),
            sq_psn: Some(Psn::new(self.setup.psns[at])),
            timeout: reliable.then_some(self.setup.timeout),
            retry_cnt: requests.then_some(self.setup.retry_cnt),
            rnr_retry: requests.then_some(self.setup.rnr_retry),
            max_rd_atomic: requests.then_some(self.setup.rd_atomic),
            ..Modify::default()
        }
    }

    pub(crate) fn enter_rts(&mut self, at: usize) {
        let modify = self.rts_modify(at);
        self.modify(at, &modify);
    }

    pub(crate) fn modify(&mut self, at: usize, modify: &Modify) {
        let node = &mut self.nodes[at];
        node.endpoint.modify_qp(self.now, node.qpn, modify).unwrap();
    }

    pub(crate) fn enter(&mut self, at: usize, state: State) {
        let notify = (state == State::Sqd).then_some(self.setup.sqd_notify);
        self.modify(
            at,
            &Modify {
                state: Some(state),
                sqd_async_notify: notify,
                ..Modify::default()
            },
        );
    }

    pub(crate) fn state(&self, at: usize) -> State {
        self.nodes[at].endpoint.query_qp(self.nodes[at].qpn).unwrap().state
    }
}
