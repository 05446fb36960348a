//! Packets, posts, time and changes of memory into an endpoint.
//!
//! Two queue pairs of the endpoint are connected to each other, so that genuine packets are in
//! flight, which the input delivers, repeats, changes, reorders or drops. The others' peers are the
//! input alone: it makes up their packets of any kind.

mod packets;
mod posts;

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use arbitrary::{Result, Unstructured};
use doorbell_roce_proto::congestion::{Algorithm, CongestionConfig, DcqcnConfig};
use doorbell_roce_proto::icrc::{self, Flow};
use doorbell_roce_proto::memory::{PdId, Placement, Sge};
use doorbell_roce_proto::qp::{LinkId, Modify, Path, QpInit, RemoteAccess, State};
use doorbell_roce_proto::wire::{Transport, UDP_PORT};
use doorbell_roce_proto::work::{Completion, CompletionOpcode, CqId, SrqId};
use doorbell_roce_proto::{
    Datagram, Endpoint, EndpointConfig, Ident, Instant, LinkPacket, Mtu, Psn, Qpn, RKey, SrqInit,
};

use crate::memory::{Regions, Rights};

const OURS: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 0, 1));
const THEIRS: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 0, 66));
const THEIR_QPN: Qpn = Qpn::new(0x66_6666);
const LINK: LinkId = LinkId(1);
const PD: PdId = PdId(1);
const MTU: Mtu = Mtu::Mtu256;
const QKEY: u32 = 0x1111;
/// Of the queue pairs: that with the shared receive queue, that for datagrams, that on the link.
const SHARED: usize = 3;
const UD: usize = 5;
const ON_LINK: usize = 6;
const FIRST_PSN: Psn = Psn::new(0xff_fffe);
const REGION: usize = 2048;
/// A region that no request names and no peer has a right to.
const UNTOUCHED: u8 = 0x5a;
/// Genuine packets kept for delivery; the oldest is dropped.
const FLIGHT: usize = 64;
/// Packets in answer to one step: more means that there is no end.
const MOST_PACKETS: usize = 1 << 14;

/// Steps of an endpoint.
pub fn endpoint(data: &[u8]) {
    let mut input = Unstructured::new(data);
    let mut world = World::new();
    while !input.is_empty() && world.step(&mut input).is_ok() {
        world.drain();
    }
    world.check();
}

/// What was posted to a queue and has not completed, oldest first.
type Outstanding = VecDeque<u64>;

struct Queues {
    qpn: Qpn,
    sends: Outstanding,
    receives: Outstanding,
}

struct World {
    endpoint: Endpoint,
    memory: Regions,
    regions: Vec<Sge>,
    untouched: Sge,
    window: RKey,
    qps: Vec<Queues>,
    srq: SrqId,
    shared: Outstanding,
    flight: VecDeque<Vec<u8>>,
    next_wr: u64,
    now: Instant,
}

fn init(transport: Transport, srq: Option<SrqId>) -> QpInit {
    QpInit {
        transport,
        pd: PD,
        send_cq: CqId(0),
        recv_cq: CqId(1),
        max_send_wr: 8,
        max_recv_wr: 8,
        max_send_sge: 3,
        max_recv_sge: 3,
        max_inline: 64,
        signal_all: false,
        srq,
        xrc_domain: None,
        ack_before_requests: false,
    }
}

/// All attributes; a transition takes those that it needs.
fn attributes(peer: (IpAddr, Qpn), link: Option<LinkId>) -> Modify {
    Modify {
        pkey_index: Some(0),
        port: Some(1),
        access: Some(RemoteAccess {
            read: true,
            write: true,
            atomic: true,
            ..RemoteAccess::default()
        }),
        path: Some(Path {
            link,
            ..Path::new(OURS, peer.0)
        }),
        path_mtu: Some(MTU),
        dest_qpn: Some(peer.1),
        rq_psn: Some(FIRST_PSN),
        max_dest_rd_atomic: Some(2),
        min_rnr_timer: Some(1),
        sq_psn: Some(FIRST_PSN),
        timeout: Some(8),
        retry_cnt: Some(3),
        rnr_retry: Some(3),
        max_rd_atomic: Some(2),
        qkey: Some(QKEY),
        ..Modify::default()
    }
}

/// The part of `all` that a transition to `state` takes (ibv_modify_qp(3)).
fn part(transport: Transport, state: State, all: Modify) -> Modify {
    let none = Modify {
        state: Some(state),
        ..Modify::default()
    };
    match (state, transport) {
        (State::Init, Transport::Ud) => Modify {
            pkey_index: all.pkey_index,
            port: all.port,
            qkey: all.qkey,
            ..none
        },
        (State::Init, _) => Modify {
            pkey_index: all.pkey_index,
            port: all.port,
            access: all.access,
            ..none
        },
        (State::Rtr, Transport::Ud) => none,
        (State::Rtr, _) => Modify {
            path: all.path,
            path_mtu: all.path_mtu,
            dest_qpn: all.dest_qpn,
            rq_psn: all.rq_psn,
            max_dest_rd_atomic: all.max_dest_rd_atomic.filter(|_| transport == Transport::Rc),
            min_rnr_timer: all.min_rnr_timer.filter(|_| transport == Transport::Rc),
            ..none
        },
        (State::Rts, Transport::Rc) => Modify {
            sq_psn: all.sq_psn,
            timeout: all.timeout,
            retry_cnt: all.retry_cnt,
            rnr_retry: all.rnr_retry,
            max_rd_atomic: all.max_rd_atomic,
            ..none
        },
        (State::Rts, _) => Modify {
            sq_psn: all.sq_psn,
            ..none
        },
        _ => none,
    }
}

impl World {
    fn new() -> Self {
        let mut endpoint = Endpoint::with_config(EndpointConfig {
            mtu: MTU,
            congestion: CongestionConfig {
                algorithm: Algorithm::Dcqcn(DcqcnConfig::default()),
                ..CongestionConfig::default()
            },
            ..EndpointConfig::default()
        });
        let mut memory = Regions::new(PD);
        let untouched = memory.register(vec![UNTOUCHED; 64], Rights::NONE);
        let all = memory.register(vec![1; REGION], Rights::ALL);
        let read = Rights {
            read: true,
            ..Rights::NONE
        };
        let read = memory.register(vec![2; REGION], read);
        let window = memory.window();
        let srq = endpoint.create_srq(SrqInit {
            pd: PD,
            max_wr: 8,
            max_sge: 3,
            xrc: None,
        });
        let mut world = Self {
            endpoint,
            memory,
            regions: vec![all, read],
            untouched,
            window,
            qps: Vec::new(),
            srq,
            shared: Outstanding::new(),
            flight: VecDeque::new(),
            next_wr: 0,
            now: Instant(1),
        };
        world.create_all();
        world
    }

    /// A pair connected to each other, and queue pairs of each transport with the input as peer.
    fn create_all(&mut self) {
        let kinds = [
            (Transport::Rc, None),
            (Transport::Rc, None),
            (Transport::Rc, None),
            (Transport::Rc, Some(self.srq)),
            (Transport::Uc, None),
            (Transport::Ud, None),
            (Transport::Rc, None),
        ];
        for (transport, srq) in kinds {
            let qpn = self.endpoint.create_qp(init(transport, srq));
            self.qps.push(Queues {
                qpn,
                sends: Outstanding::new(),
                receives: Outstanding::new(),
            });
        }
        for index in 0..self.qps.len() {
            self.connect(index);
        }
    }

    /// RESET → INIT → RTR → RTS; its outstanding requests are gone.
    fn connect(&mut self, index: usize) {
        let qpn = self.qps[index].qpn;
        let Some(transport) = self.endpoint.query_qp(qpn).map(|attributes| attributes.init.transport) else {
            return;
        };
        let all = self.attributes(index);
        for state in [State::Reset, State::Init, State::Rtr, State::Rts] {
            let modify = part(transport, state, all);
            let modified = self.endpoint.modify_qp(self.now, qpn, &modify);
            assert_eq!(modified, Ok(()), "{transport:?} to {state:?}");
            if state == State::Reset {
                self.forget(index);
            }
        }
    }

    fn attributes(&self, index: usize) -> Modify {
        let peer = match index {
            0 => (OURS, self.qps[1].qpn),
            1 => (OURS, self.qps[0].qpn),
            _ => (THEIRS, THEIR_QPN),
        };
        attributes(peer, (index == ON_LINK).then_some(LINK))
    }

    /// In RESET nothing is outstanding; receives of a shared queue that it had taken are gone, too.
    fn forget(&mut self, index: usize) {
        self.qps[index].sends.clear();
        self.qps[index].receives.clear();
    }

    fn step(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        match input.arbitrary::<u8>()? % 16 {
            0..3 => self.post_send(input),
            3 => self.post_receive(input),
            4..7 => self.deliver(input),
            7..11 => self.make_up(input),
            11 => self.noise(input),
            12 => self.pass_time(input),
            13 => self.modify(input),
            14 => self.change_memory(input),
            _ => self.reconnect(input),
        }
    }

    fn pick(&self, input: &mut Unstructured<'_>) -> Result<usize> {
        Ok(input.arbitrary::<u8>()? as usize % self.qps.len())
    }

    fn pass_time(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        let due = self.endpoint.poll_timeout();
        let later = self.now + Duration::from_micros(input.arbitrary::<u16>()?.into());
        self.now = due
            .filter(|_| input.arbitrary().unwrap_or(true))
            .map_or(later, |due| due.max(self.now));
        self.endpoint.handle_timeout(self.now);
        let next = self.endpoint.poll_timeout();
        assert!(
            next.is_none_or(|next| next > self.now),
            "a timer that has expired is still set"
        );
        Ok(())
    }

    fn change_memory(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        if self.regions.len() < 8 && input.arbitrary()? {
            let [local_write, read, write, atomic] = input.arbitrary()?;
            let rights = Rights {
                local_write,
                read,
                write,
                atomic,
                // Not of the input: the corpora keep their meaning.
                flush: Placement {
                    global: read,
                    persistent: write,
                },
            };
            self.regions.push(self.memory.register(vec![3; REGION], rights));
        } else {
            let region = *input.choose(&self.regions)?;
            self.memory.deregister(region);
        }
        Ok(())
    }

    fn reconnect(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        let index = self.pick(input)?;
        match input.arbitrary::<u8>()? % 4 {
            0 => {
                let qpn = self.qps[index].qpn;
                assert!(self.endpoint.destroy_qp(qpn));
                self.forget(index);
                let transport = *input.choose(&[Transport::Rc, Transport::Uc, Transport::Ud])?;
                let srq = input.arbitrary::<bool>()?.then_some(self.srq);
                self.qps[index].qpn = self.endpoint.create_qp(init(transport, srq));
            }
            1 if index == SHARED => {
                let limit = input.int_in_range(0..=8)?;
                let _ = self.endpoint.modify_srq(self.srq, None, Some(limit));
            }
            1 => self.send_mad(input)?,
            _ => self.connect(index),
        }
        Ok(())
    }

    /// Any transition, with the attributes that it needs or some of them.
    fn modify(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        const STATES: [State; 7] = [
            State::Reset,
            State::Init,
            State::Rtr,
            State::Rts,
            State::Sqd,
            State::Sqe,
            State::Err,
        ];
        let index = self.pick(input)?;
        let qpn = self.qps[index].qpn;
        let state = *input.choose(&STATES)?;
        let mut all = self.attributes(index);
        if input.arbitrary()? {
            all.rq_psn = Some(Psn::new(input.arbitrary()?));
            all.sq_psn = Some(Psn::new(input.arbitrary()?));
            all.timeout = Some(input.arbitrary()?);
            all.retry_cnt = Some(input.arbitrary()?);
            all.min_rnr_timer = Some(input.arbitrary()?);
            all.max_rd_atomic = Some(input.arbitrary()?);
        }
        let transport = self
            .endpoint
            .query_qp(qpn)
            .map_or(Transport::Rc, |attributes| attributes.init.transport);
        let modified = self.endpoint.modify_qp(self.now, qpn, &part(transport, state, all));
        if modified.is_ok() && state == State::Reset {
            self.forget(index);
        }
        Ok(())
    }

    /// Takes all output: packets to ourselves go into flight.
    fn drain(&mut self) {
        let mut buf = [0; 4096 + 128];
        self.complete();
        for sent in 0.. {
            assert!(sent < MOST_PACKETS, "one step causes packets without end");
            let Some(transmit) = self.endpoint.poll_transmit(self.now, &mut self.memory, &mut buf) else {
                break;
            };
            drop(self.memory.take_by_ref());
            if transmit.link.is_none() && transmit.dst == OURS {
                let mut packet = buf[..transmit.len].to_vec();
                seal(&mut packet, OURS);
                self.flight.push_back(packet);
                if self.flight.len() > FLIGHT {
                    self.flight.pop_front();
                }
            }
        }
        self.complete();
        while self.endpoint.poll_event().is_some() || self.endpoint.poll_revoked().is_some() {}
        while self.endpoint.poll_mad().is_some() {}
    }

    fn complete(&mut self) {
        while let Some((_, completion)) = self.endpoint.poll_completion() {
            self.completed(&completion);
        }
    }

    /// A request completes once, in order; those before a signaled one complete with it.
    fn completed(&mut self, completion: &Completion) {
        let Some(qp) = self.qps.iter_mut().find(|qp| qp.qpn == completion.qpn) else {
            panic!("a completion of no queue pair: {completion:?}");
        };
        let wr = completion.wr_id;
        let is_receive = matches!(
            completion.opcode,
            CompletionOpcode::Receive | CompletionOpcode::ReceiveWriteImm
        );
        if !is_receive {
            let before = qp.sends.iter().position(|other| *other == wr);
            let before = before.unwrap_or_else(|| panic!("a send that is not outstanding: {completion:?}"));
            qp.sends.drain(..=before);
        } else if qp.receives.front() == Some(&wr) {
            qp.receives.pop_front();
        } else {
            let at = self.shared.iter().position(|other| *other == wr);
            let at = at.unwrap_or_else(|| panic!("a receive that is not outstanding: {completion:?}"));
            self.shared.remove(at);
        }
    }

    fn check(&self) {
        for region in &self.regions {
            // Panics when a guard byte was written.
            self.memory.bytes(*region);
        }
        let untouched = self.memory.bytes(self.untouched);
        assert!(
            untouched.iter().all(|byte| *byte == UNTOUCHED),
            "memory without rights was written"
        );
    }

    fn datagram(&mut self, src: IpAddr, traffic_class: u8, payload: &[u8]) {
        let datagram = Datagram {
            src,
            dst: OURS,
            src_port: UDP_PORT,
            dst_port: UDP_PORT,
            ident: Ident::Known(0),
            traffic_class,
            payload,
        };
        self.endpoint.handle_datagram(self.now, &datagram, &mut self.memory);
    }

    fn link_packet(&mut self, headers: &[u8], payload: &[u8]) {
        self.memory.arrive(payload);
        let now = self.now;
        let packet = LinkPacket {
            link: LINK,
            address: OURS,
            headers,
            len: payload.len(),
        };
        self.endpoint.handle_link_packet(|| now, &packet, &mut self.memory);
    }
}

fn seal(packet: &mut [u8], src: IpAddr) {
    if packet.len() > icrc::LEN {
        Flow::new(src, OURS, UDP_PORT, UDP_PORT).seal(0, packet);
    }
}
