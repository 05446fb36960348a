//! A host: an endpoint of the protocol engine behind one port.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use doorbell_roce_proto::congestion::ecn;
use doorbell_roce_proto::icrc::Flow;
use doorbell_roce_proto::memory::{PdId, Sge};
use doorbell_roce_proto::qp::{Modify, Path, QpInit, RemoteAccess, State};
use doorbell_roce_proto::wire::{Cnp, Transport, UDP_PORT};
use doorbell_roce_proto::work::{Completion, CqId, Operation, Payload, ReceiveRequest, SendRequest};
use doorbell_roce_proto::{Datagram, Endpoint, EndpointConfig, Ident, Instant, LKey, Mtu, Psn, Qpn, RKey};

use crate::memory::NoContent;
use crate::packet::{Class, Ecn, Packet};
use crate::port::Port;

const PD: PdId = PdId(0);
/// Messages posted at most.
pub(crate) const DEPTH: u64 = 16;
const ECT: u8 = 0b10;

/// Configuration of all hosts.
#[derive(Clone, Copy, Debug)]
pub struct HostConfig {
    /// The engine's; `key` is replaced, and a line rate of 0 by that of the host's link.
    pub endpoint: EndpointConfig,
    /// Path MTU.
    pub mtu: Mtu,
    /// The local ACK timeout as of ibv_modify_qp(3): 4.096 µs * 2^`timeout`.
    pub timeout: u8,
    /// A packet that arrives while the thread sleeps waits up to this long until it runs; those
    /// after it wait with it.
    pub wake_up: Duration,
    /// The thread busy-polls for this long after the last packet, then sleeps.
    pub busy_poll: Duration,
}

impl Default for HostConfig {
    /// As a NIC: no window to speak of, 1 KiB packets.
    fn default() -> Self {
        let mut endpoint = EndpointConfig {
            window: 16_384,
            ..EndpointConfig::default()
        };
        endpoint.congestion.line_rate = 0;
        endpoint.congestion.burst = 0;
        Self {
            endpoint,
            mtu: Mtu::Mtu1024,
            timeout: 14,
            wake_up: Duration::ZERO,
            busy_poll: Duration::ZERO,
        }
    }
}

/// A host.
#[derive(Debug)]
pub struct Host {
    /// Its protocol engine.
    pub endpoint: Endpoint,
    /// Its port.
    pub port: Port,
    /// When a timer of the endpoint is scheduled.
    pub(crate) timer: Option<Instant>,
    /// Packets that wait for a thread.
    pub(crate) waiting: Vec<Packet>,
    /// The last packet sent or handled.
    active: Instant,
    config: HostConfig,
    number: usize,
    ident: u16,
    /// Flows by QPN.
    flows: HashMap<u32, usize>,
    buf: Vec<u8>,
}

impl Host {
    pub(crate) fn new(number: usize, mut config: HostConfig, port: Port) -> Self {
        let endpoint = &mut config.endpoint;
        endpoint.key = (number as u64 + 1).into();
        let line_rate = &mut endpoint.congestion.line_rate;
        if *line_rate == 0 {
            *line_rate = port.link.rate / 8;
        }
        Self {
            endpoint: Endpoint::with_config(config.endpoint),
            port,
            timer: None,
            waiting: Vec::new(),
            active: Instant::ZERO,
            config,
            number,
            ident: 0,
            flows: HashMap::new(),
            buf: vec![0; 4096 + 128],
        }
    }

    pub(crate) fn create_qp(&mut self, flow: usize) -> Qpn {
        let qpn = self.endpoint.create_qp(QpInit {
            transport: Transport::Rc,
            pd: PD,
            send_cq: CqId(0),
            recv_cq: CqId(1),
            max_send_wr: DEPTH as u32,
            max_recv_wr: 2 * DEPTH as u32,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
            signal_all: true,
            srq: None,
            xrc_domain: None,
            ack_before_requests: false,
        });
        self.flows.insert(qpn.get(), flow);
        qpn
    }

    /// Connects a queue pair, with receives posted.
    pub(crate) fn connect(&mut self, now: Instant, qpn: Qpn, peer: usize, peer_qpn: Qpn) {
        let none = Modify::default();
        let steps = [
            Modify {
                state: Some(State::Init),
                pkey_index: Some(0),
                port: Some(1),
                access: Some(RemoteAccess {
                    write: true,
                    ..RemoteAccess::default()
                }),
                ..none
            },
            Modify {
                state: Some(State::Rtr),
                path: Some(Path::new(address(self.number), address(peer))),
                path_mtu: Some(self.config.mtu),
                dest_qpn: Some(peer_qpn),
                rq_psn: Some(Psn::new(0)),
                max_dest_rd_atomic: Some(1),
                min_rnr_timer: Some(1),
                ..none
            },
            Modify {
                state: Some(State::Rts),
                sq_psn: Some(Psn::new(0)),
                timeout: Some(self.config.timeout),
                retry_cnt: Some(7),
                rnr_retry: Some(7),
                max_rd_atomic: Some(1),
                ..none
            },
        ];
        for modify in steps {
            let changed = self.endpoint.modify_qp(now, qpn, &modify);
            debug_assert!(changed.is_ok(), "{changed:?}");
        }
        (0..2 * DEPTH).for_each(|_| self.receive(qpn));
    }

    pub(crate) fn receive(&mut self, qpn: Qpn) {
        let posted = self.endpoint.post_receive(qpn, &ReceiveRequest { wr_id: 0, sges: &[] });
        debug_assert!(posted.is_ok(), "{posted:?}");
    }

    /// Posts a WRITE with immediate.
    pub(crate) fn send(&mut self, now: Instant, qpn: Qpn, bytes: u32) {
        let sges = [Sge {
            addr: 0,
            len: bytes,
            lkey: LKey(1),
        }];
        let request = SendRequest {
            wr_id: 0,
            operation: Operation::Write {
                addr: 0,
                rkey: RKey(1),
                imm: Some(0),
            },
            payload: Payload::Gather(&sges),
            signaled: true,
            fence: false,
            solicited: false,
        };
        let posted = self.endpoint.post_send(now, qpn, &request);
        debug_assert!(posted.is_ok(), "{posted:?}");
    }

    /// The next packet, for a port that may send.
    pub(crate) fn transmit(&mut self, now: Instant) -> Option<Packet> {
        let transmit = self.endpoint.poll_transmit(now, &mut NoContent, &mut self.buf)?;
        self.active = now;
        let payload = &mut self.buf[..transmit.len];
        let src_port = source_port(self.number, transmit.qpn);
        let ident = self.ident;
        self.ident = self.ident.wrapping_add(1);
        Flow::new(transmit.src, transmit.dst, src_port, UDP_PORT).seal(ident, payload);
        let is_cnp = Cnp::parse(payload).is_some();
        Some(Packet {
            src: self.number,
            dst: host_of(transmit.dst),
            src_port,
            class: if is_cnp { Class::Control } else { Class::Data },
            ecn: if transmit.traffic_class & ECT == 0 {
                Ecn::NotCapable
            } else {
                Ecn::Capable
            },
            payload: payload.to_vec(),
            ident,
            ingress: 0,
        })
    }

    pub(crate) fn arrive(&mut self, now: Instant, packet: &Packet) {
        self.active = now;
        let traffic_class = match packet.ecn {
            Ecn::NotCapable => 0,
            Ecn::Capable => ECT,
            Ecn::Marked => ecn::mark(ECT),
        };
        let datagram = Datagram {
            src: address(packet.src),
            dst: address(packet.dst),
            src_port: packet.src_port,
            dst_port: UDP_PORT,
            ident: Ident::Known(packet.ident),
            traffic_class,
            payload: &packet.payload,
        };
        self.endpoint.handle_datagram(now, &datagram, &mut NoContent);
    }

    /// The next completion, with its flow and whether it is of a receive.
    pub(crate) fn poll_completion(&mut self) -> Option<(usize, bool, Completion)> {
        let (cq, completion) = self.endpoint.poll_completion()?;
        let flow = *self.flows.get(&completion.qpn.get())?;
        Some((flow, cq == CqId(1), completion))
    }

    pub(crate) fn flow_of(&self, qpn: u32) -> Option<usize> {
        self.flows.get(&qpn).copied()
    }

    /// How long a packet that arrives now waits for the thread to run.
    pub(crate) fn wake_up(&self, now: Instant, draw: f64) -> Duration {
        if now - self.active <= self.config.busy_poll {
            return Duration::ZERO;
        }
        self.config.wake_up.mul_f64(draw)
    }
}

fn address(host: usize) -> IpAddr {
    let [.., high, low] = (host as u32).to_be_bytes();
    Ipv4Addr::new(10, 0, high, low).into()
}

fn host_of(address: IpAddr) -> usize {
    match address {
        IpAddr::V4(address) => {
            let [.., high, low] = address.octets();
            usize::from(high) << 8 | usize::from(low)
        }
        IpAddr::V6(_) => usize::MAX,
    }
}

/// Of a queue pair's own socket, so that ECMP spreads a host's flows.
fn source_port(host: usize, qpn: Qpn) -> u16 {
    let mixed = crate::fabric::mix(u64::from(qpn.get()) << 32 | host as u64);
    0x8000 | (mixed & 0x3fff) as u16
}
