//! An endpoint with one queue pair, connected to a requester whose packets the test makes up.

use std::net::{IpAddr, Ipv4Addr};

use doorbell_roce_proto::icrc::{self, Flow};
use doorbell_roce_proto::memory::{PdId, Sge};
use doorbell_roce_proto::qp::{Modify, Path, QpInit, RemoteAccess, State};
use doorbell_roce_proto::wire::{self, Bth, Extension, Opcode, Transport, UDP_PORT, XrcEth};
use doorbell_roce_proto::work::{Completion, CqId, ReceiveRequest};
use doorbell_roce_proto::{AsyncEvent, Datagram, Endpoint, Ident, Instant, Mtu, Psn, Qpn, RKey};

use crate::memory::{RegionId, Rights, SimMemory};

pub(super) const VICTIM: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 0, 1));
pub(super) const ATTACKER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 0, 66));
pub(super) const BASE: u64 = 0x7000_0000;
pub(super) const LEN: usize = 8192;
pub(super) const MTU: Mtu = Mtu::Mtu1024;
pub(super) const FIRST_PSN: Psn = Psn::new(0xff_fffe);
pub(super) const ATTACKER_QPN: Qpn = Qpn::new(0x66_6666);
const PD: PdId = PdId(1);

pub(super) struct Victim {
    pub(super) endpoint: Endpoint,
    pub(super) memory: SimMemory,
    /// With all rights.
    pub(super) region: RegionId,
    pub(super) qpn: Qpn,
    pub(super) completions: Vec<(CqId, Completion)>,
    pub(super) events: Vec<AsyncEvent>,
    /// Packets it sent: destination and packet, without a valid ICRC.
    pub(super) sent: Vec<(IpAddr, Vec<u8>)>,
    pub(super) now: Instant,
    buf: Vec<u8>,
}

pub(super) fn init(pd: PdId) -> QpInit {
    QpInit {
        transport: Transport::Rc,
        pd,
        send_cq: CqId(0),
        recv_cq: CqId(1),
        max_send_wr: 8,
        max_recv_wr: 8,
        max_send_sge: 2,
        max_recv_sge: 2,
        max_inline: 64,
        signal_all: true,
        srq: None,
        xrc_domain: None,
        ack_before_requests: false,
    }
}

/// RESET → INIT → RTR → RTS with a peer.
pub(super) fn connect(local: IpAddr, remote: IpAddr, peer: Qpn, max_dest_rd_atomic: u8) -> [Modify; 3] {
    let none = Modify::default();
    [
        Modify {
            state: Some(State::Init),
            pkey_index: Some(0),
            port: Some(1),
            access: Some(RemoteAccess {
                read: true,
                write: true,
                atomic: true,
                ..RemoteAccess::default()
            }),
            ..none
        },
        Modify {
            state: Some(State::Rtr),
            path: Some(Path::new(local, remote)),
            path_mtu: Some(MTU),
            dest_qpn: Some(peer),
            rq_psn: Some(FIRST_PSN),
            max_dest_rd_atomic: Some(max_dest_rd_atomic),
            min_rnr_timer: Some(1),
            ..none
        },
        Modify {
            state: Some(State::Rts),
            sq_psn: Some(FIRST_PSN),
            timeout: Some(14),
            retry_cnt: Some(7),
            rnr_retry: Some(7),
            max_rd_atomic: Some(4),
            ..none
        },
    ]
}

impl Victim {
    pub(super) fn new(seed: u64) -> Self {
        let mut endpoint = Endpoint::new(seed);
        let mut memory = SimMemory::default();
        let region = memory.register(
            PD,
            BASE,
            Rights {
                local_write: true,
                read: true,
                write: true,
                atomic: true,
            },
            vec![0xee; LEN],
        );
        let qpn = endpoint.create_qp(init(PD));
        let mut victim = Self {
            endpoint,
            memory,
            region,
            qpn,
            completions: Vec::new(),
            events: Vec::new(),
            sent: Vec::new(),
            now: Instant::ZERO,
            buf: vec![0; 4096 + 128],
        };
        victim.reconnect();
        victim
    }

    /// Reconnects the queue pair to the attacker, with one receive of 4000 bytes.
    pub(super) fn reconnect(&mut self) {
        let reset = Modify {
            state: Some(State::Reset),
            ..Modify::default()
        };
        self.endpoint
            .modify_qp(self.now, self.qpn, &reset)
            .expect("every state may go to RESET");
        for modify in connect(VICTIM, ATTACKER, ATTACKER_QPN, 2) {
            self.endpoint
                .modify_qp(self.now, self.qpn, &modify)
                .expect("the table allows it");
        }
        let sges = [Sge {
            addr: BASE,
            len: 4000,
            lkey: self.memory.lkey(self.region),
        }];
        self.endpoint
            .post_receive(self.qpn, &ReceiveRequest { wr_id: 70, sges: &sges })
            .expect("the queue is empty");
    }

    pub(super) fn rkey(&self) -> RKey {
        self.memory.rkey(self.region)
    }

    /// Passes it a UDP payload with addresses, without polling its output.
    pub(super) fn deliver(&mut self, src: IpAddr, dst: IpAddr, ident: u16, payload: &[u8]) {
        let datagram = Datagram {
            src,
            dst,
            src_port: UDP_PORT,
            dst_port: UDP_PORT,
            ident: Ident::Known(ident),
            traffic_class: 0,
            payload,
        };
        self.endpoint.handle_datagram(self.now, &datagram, &mut self.memory);
    }

    /// Polls up to `most` packets, and all completions and events.
    pub(super) fn drain(&mut self, most: usize) {
        for _ in 0..most {
            let Some(transmit) = self.endpoint.poll_transmit(self.now, &mut self.memory, &mut self.buf) else {
                break;
            };
            self.sent.push((transmit.dst, self.buf[..transmit.len].to_vec()));
        }
        self.completions
            .extend(std::iter::from_fn(|| self.endpoint.poll_completion()));
        self.events.extend(std::iter::from_fn(|| self.endpoint.poll_event()));
    }

    pub(super) fn attack(&mut self, packet: &[u8]) {
        self.deliver(ATTACKER, VICTIM, 0, packet);
    }
}

/// A whole packet with its ICRC, from the attacker to `qpn` of the victim.
pub(super) fn packet(opcode: Opcode, qpn: Qpn, psn: Psn, extension: &Extension, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; wire::packet_len(opcode, payload.len())];
    let bth = Bth {
        ack_req: true,
        xrc: opcode.has_xrc_eth().then_some(XrcEth { srq: 0 }),
        ..Bth::new(opcode, qpn, psn)
    };
    let start = wire::write(&mut bytes, &bth, extension, payload.len()).expect("the opcode has these headers");
    bytes[start..start + payload.len()].copy_from_slice(payload);
    seal(&mut bytes, ATTACKER, VICTIM, 0);
    bytes
}

pub(super) fn seal(packet: &mut [u8], src: IpAddr, dst: IpAddr, ident: u16) {
    if packet.len() > icrc::LEN {
        Flow::new(src, dst, UDP_PORT, UDP_PORT).seal(ident, packet);
    }
}
