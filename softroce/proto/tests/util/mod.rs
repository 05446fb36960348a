//! Two endpoints in one thread, stepped until idle; the test decides the fate of each packet.
#![allow(dead_code, reason = "each test binary uses its part of this module")]

mod connect;
pub(crate) mod memory;
mod requests;
mod transmit;

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::Duration;

use doorbell_roce_proto::congestion::CongestionConfig;
use doorbell_roce_proto::icrc::Flow;
use doorbell_roce_proto::memory::{PdId, Sge};
use doorbell_roce_proto::qp::{LinkId, Path, QpInit, RemoteAccess};
use doorbell_roce_proto::wire::{
    self, Bth, Cnp, Extension, MAX_HEADER_LEN, Opcode, Packet, Syndrome, Transport, packet_len,
};
use doorbell_roce_proto::work::{
    Completion, CompletionOpcode, CqId, Destination, PostError, ReceiveRequest, Remote, SendRequest, SrqId, Status,
    XrcDomain,
};
use doorbell_roce_proto::{
    AsyncEvent, Counters, Datagram, Endpoint, EndpointConfig, Ident, Instant, LinkCapabilities, LinkPacket, Mtu, Psn,
    Qpn, SrqInit, Transmit,
};

use memory::{EVERYWHERE, Regions, Rights};
#[allow(unused_imports, reason = "each test binary uses its part of them")]
pub(crate) use requests::{
    atomic_on, atomic_write_to, fail_sending, flush_of, pattern, read_from, request, send, write_operation, write_to,
};

pub(crate) const PD: PdId = PdId(7);
pub(crate) const SEND_CQ: CqId = CqId(1);
pub(crate) const RECV_CQ: CqId = CqId(2);
pub(crate) const XRC_DOMAIN: XrcDomain = XrcDomain(3);
pub(crate) const QKEY: u32 = 0x1122_3344;
const PORT: u16 = 4791;

/// True in the test binary `link`, which includes the others' tests.
pub(crate) fn over_link() -> bool {
    module_path!().starts_with("link::")
}

/// On a lossless link, longer payloads go by reference.
pub(crate) const LINK_INLINE: usize = 100;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fate {
    Deliver,
    Drop,
    Duplicate,
    /// Delayed behind this many later packets.
    Delay(usize),
    /// Delivered with Congestion Experienced, if it is ECN-capable.
    Mark,
}

#[derive(Clone, Debug)]
pub(crate) struct Sent {
    pub(crate) from: usize,
    pub(crate) traffic_class: u8,
    pub(crate) bytes: Vec<u8>,
}

impl Sent {
    pub(crate) fn packet(&self) -> Packet<'_> {
        Packet::parse(&self.bytes).unwrap()
    }

    pub(crate) fn is_cnp(&self) -> bool {
        Cnp::parse(&self.bytes).is_some()
    }

    pub(crate) fn opcode(&self) -> Opcode {
        self.packet().bth.opcode
    }
}

pub(crate) struct Node {
    pub(crate) endpoint: Endpoint,
    pub(crate) memory: Regions,
    pub(crate) address: IpAddr,
    pub(crate) qpn: Qpn,
    /// The queue pair that [`Pair::swap`] exchanges with `qpn`, if any.
    pub(crate) second: Option<Qpn>,
    pub(crate) srq: Option<SrqId>,
    pub(crate) completions: Vec<(CqId, Completion)>,
    pub(crate) events: Vec<AsyncEvent>,
}

#[derive(Clone, Copy, Debug)]
// fields: one per independent attribute of a test
pub(crate) struct Setup {
    pub(crate) mtu: Mtu,
    pub(crate) window: u32,
    pub(crate) psns: [u32; 2],
    pub(crate) rd_atomic: u8,
    pub(crate) dest_rd_atomic: u8,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) rnr_timer: u8,
    pub(crate) access: RemoteAccess,
    pub(crate) signal_all: bool,
    pub(crate) v6: bool,
    pub(crate) sqd_notify: bool,
    /// Packets delivered before both nodes may send again.
    pub(crate) batch: usize,
    pub(crate) transport: Transport,
    /// The second node's queue pairs use a shared receive queue.
    pub(crate) srq: Option<SrqInit>,
    /// `None` is the path MTU, so that tests are independent of the link.
    pub(crate) link_mtu: Option<usize>,
    pub(crate) fast_path: bool,
    pub(crate) ack_before_requests: bool,
    /// Requests and receives per queue.
    pub(crate) max_wr: u32,
    pub(crate) max_inline: u32,
    pub(crate) congestion: CongestionConfig,
    /// False, so that a lost tail waits for the local ACK timeout, as on an adapter.
    pub(crate) tail_loss_probes: bool,
    pub(crate) selective_repeat: [bool; 2],
    /// UDP source ports; those from 49152 on are adapters'.
    pub(crate) ports: [u16; 2],
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            mtu: Mtu::Mtu256,
            window: EndpointConfig::DEFAULT_WINDOW,
            psns: [100, 9000],
            rd_atomic: 4,
            dest_rd_atomic: 4,
            timeout: 10,
            retry_cnt: 7,
            rnr_retry: 7,
            rnr_timer: 1,
            access: RemoteAccess {
                read: true,
                write: true,
                atomic: true,
                flush: EVERYWHERE,
            },
            signal_all: false,
            v6: false,
            sqd_notify: true,
            batch: 64,
            transport: Transport::Rc,
            srq: None,
            link_mtu: None,
            fast_path: true,
            ack_before_requests: false,
            max_wr: 64,
            max_inline: 600,
            congestion: CongestionConfig::default(),
            tail_loss_probes: false,
            selective_repeat: [false; 2],
            ports: [PORT; 2],
        }
    }
}

pub(crate) struct Pair {
    pub(crate) nodes: [Node; 2],
    pub(crate) now: Instant,
    pub(crate) setup: Setup,
    /// Every packet sent, including lost ones.
    pub(crate) log: Vec<Sent>,
    /// Packets in flight, each with the number of deliveries that it waits for.
    flight: VecDeque<(usize, Sent)>,
    delivered: usize,
    pub(crate) fast_path_hits: usize,
}

pub(crate) fn qp_init(signal_all: bool) -> QpInit {
    QpInit {
        transport: Transport::Rc,
        pd: PD,
        send_cq: SEND_CQ,
        recv_cq: RECV_CQ,
        max_send_wr: 64,
        max_recv_wr: 64,
        max_send_sge: 4,
        max_recv_sge: 4,
        max_inline: 600,
        signal_all,
        srq: None,
        xrc_domain: None,
        ack_before_requests: false,
    }
}

/// The second node's queue pairs are XRC targets, or use its shared receive queue.
fn receives_from(setup: &Setup, at: usize, srq: Option<SrqId>) -> (Option<SrqId>, Option<XrcDomain>) {
    match setup.transport {
        Transport::Xrc => (None, (at == 1).then_some(XRC_DOMAIN)),
        _ => (srq, None),
    }
}

impl Pair {
    pub(crate) fn connected(setup: Setup) -> Self {
        let mut pair = Self::in_rtr(setup);
        pair.enter_rts(0);
        pair.enter_rts(1);
        pair
    }

    pub(crate) fn in_rtr(setup: Setup) -> Self {
        let mut addresses: [IpAddr; 2] = if setup.v6 {
            ["fd09::1".parse().unwrap(), "fd09::2".parse().unwrap()]
        } else {
            ["10.9.0.1".parse().unwrap(), "10.9.0.2".parse().unwrap()]
        };
        if over_link() {
            addresses[1] = addresses[0];
        }
        let node = |at: usize| {
            let mut endpoint = Endpoint::with_config(EndpointConfig {
                key: (at as u64 + 1).into(),
                window: setup.window,
                mtu: setup.mtu,
                link: LinkCapabilities {
                    window: setup.window,
                    mtu: setup.link_mtu.unwrap_or(setup.mtu.bytes()),
                    inline_limit: LINK_INLINE,
                },
                congestion: setup.congestion,
                tail_loss_probes: setup.tail_loss_probes,
                selective_repeat: setup.selective_repeat[at],
            });
            let srq = setup.srq.filter(|_| at == 1).map(|init| endpoint.create_srq(init));
            let (own_srq, xrc_domain) = receives_from(&setup, at, srq);
            let qpn = endpoint.create_qp(QpInit {
                transport: setup.transport,
                srq: own_srq,
                xrc_domain,
                ack_before_requests: setup.ack_before_requests,
                max_send_wr: setup.max_wr,
                max_recv_wr: setup.max_wr,
                max_inline: setup.max_inline,
                ..qp_init(setup.signal_all)
            });
            Node {
                endpoint,
                memory: Regions::new(PD),
                address: addresses[at],
                qpn,
                second: None,
                srq,
                completions: Vec::new(),
                events: Vec::new(),
            }
        };
        let mut pair = Self {
            nodes: [node(0), node(1)],
            now: Instant(1000),
            setup,
            log: Vec::new(),
            flight: VecDeque::new(),
            delivered: 0,
            fast_path_hits: 0,
        };
        pair.enter_rtr();
        pair
    }

    fn enter_rtr(&mut self) {
        for at in 0..2 {
            let modify = self.init_modify();
            self.modify(at, &modify);
            let modify = self.rtr_modify(at);
            self.modify(at, &modify);
        }
    }

    /// Connects a second queue pair of each node, and makes it the current one.
    pub(crate) fn connect_second(&mut self) {
        let setup = self.setup;
        for (at, node) in self.nodes.iter_mut().enumerate() {
            node.second = Some(node.qpn);
            let (srq, xrc_domain) = receives_from(&setup, at, node.srq);
            node.qpn = node.endpoint.create_qp(QpInit {
                transport: setup.transport,
                srq,
                xrc_domain,
                ack_before_requests: setup.ack_before_requests,
                max_send_wr: setup.max_wr,
                max_recv_wr: setup.max_wr,
                max_inline: setup.max_inline,
                ..qp_init(setup.signal_all)
            });
        }
        self.enter_rtr();
        self.enter_rts(0);
        self.enter_rts(1);
    }

    pub(crate) fn swap(&mut self) {
        for node in &mut self.nodes {
            let second = node.second.replace(node.qpn);
            node.qpn = second.expect("connect_second was called");
        }
    }

    pub(crate) fn receive_shared(&mut self, wr_id: u64, sges: &[Sge]) -> Result<(), PostError> {
        let node = &mut self.nodes[1];
        let srq = node.srq.expect("the setup has a shared receive queue");
        node.endpoint.post_shared_receive(srq, &ReceiveRequest { wr_id, sges })
    }

    /// Registers `bytes` at a node with all rights; returns the whole region as an SGE.
    pub(crate) fn region(&mut self, at: usize, bytes: Vec<u8>) -> Sge {
        self.nodes[at].memory.register(bytes, Rights::ALL)
    }

    pub(crate) fn post(&mut self, at: usize, request: &SendRequest<'_>) {
        let node = &mut self.nodes[at];
        node.endpoint.post_send(self.now, node.qpn, request).unwrap();
    }

    pub(crate) fn destination(&self, at: usize) -> Destination {
        let (node, peer) = (&self.nodes[at], &self.nodes[1 - at]);
        Destination {
            path: Path {
                traffic_class: 3,
                hop_limit: 9,
                link: link_to(1 - at),
                ..Path::new(node.address, peer.address)
            },
            qpn: peer.qpn,
            qkey: QKEY,
        }
    }

    pub(crate) fn post_datagram(&mut self, at: usize, request: &SendRequest<'_>, to: &Destination) {
        let node = &mut self.nodes[at];
        node.endpoint.post_datagram(self.now, node.qpn, request, to).unwrap();
    }

    /// By XRC, to a shared receive queue of the other node.
    pub(crate) fn post_to_srq(&mut self, request: &SendRequest<'_>, srq: SrqId) -> Result<(), PostError> {
        let node = &mut self.nodes[0];
        node.endpoint.post_to(node.qpn, request, &Remote::Srq(srq.number()))
    }

    pub(crate) fn counters(&self, at: usize) -> Counters {
        *self.nodes[at].endpoint.counters()
    }

    pub(crate) fn receive(&mut self, at: usize, wr_id: u64, sges: &[Sge]) {
        let node = &mut self.nodes[at];
        node.endpoint
            .post_receive(node.qpn, &ReceiveRequest { wr_id, sges })
            .unwrap();
    }

    pub(crate) fn run(&mut self) {
        self.run_with(|_, _| Fate::Deliver);
    }

    /// At most 120 s of virtual time; `fate` gets each packet and its number in the log.
    pub(crate) fn run_with(&mut self, mut fate: impl FnMut(usize, &Sent) -> Fate) {
        let end = self.now + Duration::from_secs(120);
        loop {
            self.exchange(&mut fate);
            let next = self.nodes.iter().filter_map(|node| node.endpoint.poll_timeout()).min();
            match next {
                Some(at) if at <= end => self.now = at.max(self.now),
                Some(at) => panic!("still waiting at {at:?}"),
                None => return,
            }
            let now = self.now;
            self.nodes.iter_mut().for_each(|node| node.endpoint.handle_timeout(now));
        }
    }

    /// Exchanges packets until there are none, without advancing the time.
    pub(crate) fn exchange(&mut self, fate: &mut impl FnMut(usize, &Sent) -> Fate) {
        loop {
            let mut moved = self.transmit(0, fate);
            moved |= self.transmit(1, fate);
            let mut batch = self.setup.batch;
            while batch > 0
                && let Some(due) = self.flight.iter().position(|(due, _)| *due <= self.delivered)
                && let Some((_, sent)) = self.flight.remove(due)
            {
                self.deliver(&sent);
                self.delivered += 1;
                moved = true;
                batch -= 1;
            }
            if !moved {
                let Some((due, _)) = self.flight.front() else {
                    return;
                };
                // No later packet will come: deliver it now.
                self.delivered = *due;
            }
        }
    }

    /// Polls the next packet of a node, which is lost unless the caller delivers it.
    pub(crate) fn transmit_one(&mut self, at: usize) -> Option<Sent> {
        let mut buf = [0xee; 4096 + 128];
        if let Some(sent) = self.transmit_middle(at, &mut buf) {
            return Some(sent);
        }
        let node = &mut self.nodes[at];
        let transmit = node.endpoint.poll_transmit(self.now, &mut node.memory, &mut buf);
        drain(node);
        let transmit = transmit?;
        assert_eq!(transmit.src, node.address);
        assert!(transmit.qpn == node.qpn || Some(transmit.qpn) == node.second);
        assert_eq!(transmit.link, link_to(1 - at));
        let mut bytes = buf[..transmit.len].to_vec();
        let referred = node.memory.take_by_ref();
        if over_link() {
            bytes = on_the_wire(&transmit, &bytes, referred);
        }
        Flow::new(transmit.src, transmit.dst, self.setup.ports[at], PORT).seal(0, &mut bytes);
        let sent = Sent {
            from: at,
            traffic_class: transmit.traffic_class,
            bytes,
        };
        assert!(sent.is_cnp() || sent.packet().payload.len() <= self.setup.link_mtu.unwrap_or(self.setup.mtu.bytes()));
        self.log.push(sent.clone());
        Some(sent)
    }

    fn transmit_middle(&mut self, at: usize, buf: &mut [u8]) -> Option<Sent> {
        let node = self.nodes.get_mut(at).filter(|_| self.setup.fast_path)?;
        let len = node.endpoint.poll_transmit_middle(self.now, &mut node.memory, buf)?;
        let mut bytes = buf[..len].to_vec();
        let (src, dst) = (node.address, self.nodes[1 - at].address);
        Flow::new(src, dst, self.setup.ports[at], PORT).seal(0, &mut bytes);
        let before = self.log.iter().rfind(|before| before.from == at).unwrap();
        let sent = Sent {
            from: at,
            traffic_class: before.traffic_class,
            bytes,
        };
        assert_eq!(sent.packet().bth.dest_qp, before.packet().bth.dest_qp);
        assert!(!sent.opcode().position().starts() && !sent.opcode().position().ends());
        self.log.push(sent.clone());
        Some(sent)
    }

    pub(crate) fn deliver(&mut self, sent: &Sent) {
        let (src, to) = (self.nodes[sent.from].address, 1 - sent.from);
        let node = &mut self.nodes[to];
        if let Some(link) = link_to(sent.from) {
            let packet = sent.packet();
            let mut headers = [0; MAX_HEADER_LEN];
            let end = wire::write_headers(&mut headers, &packet.bth, &packet.extension).unwrap();
            node.memory.arrive(packet.payload);
            let packet = LinkPacket {
                link,
                address: node.address,
                headers: &headers[..end],
                len: packet.payload.len(),
            };
            let now = self.now;
            let short = self.setup.fast_path && node.endpoint.handle_write_fast(&packet, &mut node.memory);
            self.fast_path_hits += usize::from(short);
            if !short {
                node.endpoint.handle_link_packet(|| now, &packet, &mut node.memory);
            }
            drain(node);
            return;
        }
        let datagram = Datagram {
            src,
            dst: node.address,
            src_port: self.setup.ports[sent.from],
            dst_port: PORT,
            ident: Ident::Known(0),
            traffic_class: sent.traffic_class,
            payload: &sent.bytes,
        };
        node.endpoint.handle_datagram(self.now, &datagram, &mut node.memory);
        drain(node);
    }

    /// With the ICRC of bytes that the test changed.
    pub(crate) fn deliver_sealed(&mut self, sent: &mut Sent) {
        let (from, to) = (self.nodes[sent.from].address, self.nodes[1 - sent.from].address);
        Flow::new(from, to, self.setup.ports[sent.from], PORT).seal(0, &mut sent.bytes);
        self.deliver(sent);
    }

    pub(crate) fn forge(&mut self, to: usize, opcode: Opcode, psn: u32, extension: &Extension, payload: &[u8]) {
        let mut bth = Bth::new(opcode, self.nodes[to].qpn, Psn::new(psn));
        bth.ack_req = true;
        let mut bytes = vec![0; packet_len(opcode, payload.len())];
        let start = wire::write(&mut bytes, &bth, extension, payload.len()).unwrap();
        bytes[start..start + payload.len()].copy_from_slice(payload);
        let from = 1 - to;
        Flow::new(
            self.nodes[from].address,
            self.nodes[to].address,
            self.setup.ports[from],
            PORT,
        )
        .seal(0, &mut bytes);
        self.deliver(&Sent {
            from,
            traffic_class: 0,
            bytes,
        });
    }

    pub(crate) fn syndromes(&self, at: usize) -> Vec<Syndrome> {
        let sent = self
            .log
            .iter()
            .filter(|sent| sent.from == at && sent.opcode() == Opcode::RcAcknowledge);
        sent.map(|sent| sent.packet().extension.aeth().unwrap().syndrome)
            .collect()
    }

    pub(crate) fn expected_psn(&self, at: usize) -> u32 {
        let node = &self.nodes[at];
        node.endpoint.query_qp(node.qpn).unwrap().set.rq_psn.unwrap().get()
    }

    pub(crate) fn completed(&self, at: usize, cq: CqId) -> Vec<(u64, Status)> {
        let of_cq = self.nodes[at].completions.iter().filter(|(of, _)| *of == cq);
        of_cq
            .map(|(_, completion)| (completion.wr_id, completion.status))
            .collect()
    }

    pub(crate) fn opcodes(&self, at: usize) -> Vec<Opcode> {
        self.log
            .iter()
            .filter(|sent| sent.from == at)
            .map(Sent::opcode)
            .collect()
    }

    pub(crate) fn bytes(&self, at: usize, sge: Sge) -> &[u8] {
        self.nodes[at].memory.bytes(sge)
    }
}

pub(crate) fn link_to(at: usize) -> Option<LinkId> {
    over_link().then_some(LinkId(at as u32))
}

fn on_the_wire(transmit: &Transmit, written: &[u8], by_ref: Vec<u8>) -> Vec<u8> {
    let (headers, here) = written.split_at(transmit.header_len);
    assert_eq!(by_ref.len(), transmit.by_ref_len as usize);
    assert!(here.is_empty() || by_ref.is_empty());
    let payload = [here, &by_ref].concat();
    let (bth, extension) = wire::parse_headers(headers, payload.len()).unwrap();
    let mut bytes = vec![0; packet_len(bth.opcode, payload.len())];
    let start = wire::write(&mut bytes, &bth, &extension, payload.len()).unwrap();
    bytes[start..start + payload.len()].copy_from_slice(&payload);
    bytes
}

pub(crate) fn drain(node: &mut Node) {
    node.completions
        .extend(std::iter::from_fn(|| node.endpoint.poll_completion()));
    node.events.extend(std::iter::from_fn(|| node.endpoint.poll_event()));
}

pub(crate) fn receive_of(completion: &Completion) -> (CompletionOpcode, u32, Option<u32>) {
    (completion.opcode, completion.byte_len, completion.imm)
}

pub(crate) fn with_regions(setup: Setup, len: usize) -> (Pair, Sge, Sge) {
    let mut pair = Pair::connected(setup);
    let local = pair.region(0, pattern(len, 1));
    let remote = pair.region(1, pattern(len, 2));
    (pair, local, remote)
}

pub(crate) fn drop_all(_: usize, _: &Sent) -> Fate {
    Fate::Drop
}

pub(crate) fn success(wr_ids: impl IntoIterator<Item = u64>) -> Vec<(u64, Status)> {
    wr_ids.into_iter().map(|wr_id| (wr_id, Status::Success)).collect()
}
