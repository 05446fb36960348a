//! Two nodes and one connection, for tests of other subjects.

use std::net::{IpAddr, Ipv4Addr};

use doorbell_roce_proto::memory::PdId;
use doorbell_roce_proto::qp::{Modify, Path, QpInit, RemoteAccess, State};
use doorbell_roce_proto::wire::Transport;
use doorbell_roce_proto::work::CqId;
use doorbell_roce_proto::{Endpoint, EndpointConfig, Mtu, Psn, Qpn};

use crate::net::Network;

pub(crate) const PD: PdId = PdId(0);
/// Requests outstanding at most.
pub(crate) const DEPTH: usize = 64;

#[derive(Clone, Copy, Debug)]
pub(crate) struct PairConfig {
    pub(crate) window: u32,
    pub(crate) mtu: Mtu,
    pub(crate) timeout: u8,
    pub(crate) tail_loss_probes: bool,
    pub(crate) selective_repeat: bool,
}

/// Two connected nodes in RTS, with all rights, all requests signaled and maximum retries.
pub(crate) fn connect(net: &mut Network, config: PairConfig) -> [Qpn; 2] {
    let endpoint = EndpointConfig {
        window: config.window,
        tail_loss_probes: config.tail_loss_probes,
        selective_repeat: config.selective_repeat,
        ..EndpointConfig::default()
    };
    connect_with(net, endpoint, config.mtu, config.timeout)
}

/// As [`connect`], with another configuration of the endpoints.
pub(crate) fn connect_with(net: &mut Network, config: EndpointConfig, mtu: Mtu, timeout: u8) -> [Qpn; 2] {
    let addresses = [1, 2].map(|host| IpAddr::from(Ipv4Addr::new(10, 9, 0, host)));
    let qpns = addresses.map(|address| {
        let node = net.add(
            Endpoint::with_config(EndpointConfig {
                key: 1.into(),
                ..config
            }),
            address,
        );
        net.nodes[node].endpoint.create_qp(QpInit {
            transport: Transport::Rc,
            pd: PD,
            send_cq: CqId(0),
            recv_cq: CqId(0),
            max_send_wr: DEPTH as u32,
            max_recv_wr: 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
            signal_all: true,
            srq: None,
            xrc_domain: None,
            ack_before_requests: false,
        })
    });
    let none = Modify::default();
    for i in 0..2 {
        let path = Path::new(addresses[i], addresses[1 - i]);
        let access = RemoteAccess {
            read: true,
            write: true,
            atomic: true,
            ..RemoteAccess::default()
        };
        for modify in [
            Modify {
                state: Some(State::Init),
                pkey_index: Some(0),
                port: Some(1),
                access: Some(access),
                ..none
            },
            Modify {
                state: Some(State::Rtr),
                path: Some(path),
                path_mtu: Some(mtu),
                dest_qpn: Some(qpns[1 - i]),
                rq_psn: Some(Psn::new(0)),
                max_dest_rd_atomic: Some(1),
                min_rnr_timer: Some(1),
                ..none
            },
            Modify {
                state: Some(State::Rts),
                sq_psn: Some(Psn::new(0)),
                timeout: Some(timeout),
                retry_cnt: Some(7),
                rnr_retry: Some(7),
                max_rd_atomic: Some(1),
                ..none
            },
        ] {
            net.nodes[i]
                .endpoint
                .modify_qp(net.now, qpns[i], &modify)
                .expect("the table allows it");
        }
    }
    qpns
}
