//! The network: nodes with an [`Endpoint`] each, links with bandwidth, latency and faults, and one
//! queue of events on a virtual clock. Everything is a function of the seeds.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::Duration;

use doorbell_fabric::events::EventQueue;
use doorbell_roce_proto::congestion::ecn;
use doorbell_roce_proto::icrc::Flow;
use doorbell_roce_proto::wire::UDP_PORT;
use doorbell_roce_proto::work::{Completion, CqId};
use doorbell_roce_proto::{AsyncEvent, Datagram, Endpoint, Ident, Instant, Transmit};
use doorbell_softroce::links::udp::fault::{FaultConfig, FaultModel};

use crate::memory::SimMemory;
use crate::monitor::Monitor;
use crate::trace::Trace;

/// Bytes of a packet on the link besides its UDP payload: Ethernet, IPv4 and UDP headers and FCS.
const FRAMING: u64 = 14 + 20 + 8 + 4;

/// The byte of a packet that routers may change, and the ICRC therefore omits.
const UNCOVERED: usize = 4;

/// Timeouts at one instant after which the endpoint counts as stuck.
const MAX_TIMEOUTS_PER_INSTANT: u32 = 1000;

/// IPv4 Identifications: the senders' values, and whether receivers see them. IPv6 has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Idents {
    /// They count, and receivers see them.
    Known,
    /// They are 0, as from a plain socket, and receivers do not see them.
    Zero,
    /// They count, as the kernel's do, and receivers do not see them.
    Counting,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct LinkConfig {
    pub(crate) bits_per_second: u64,
    pub(crate) latency: Duration,
    /// Data queued on the link before the node stops polling its endpoint.
    pub(crate) backlog: Duration,
    /// Faults of each node's packets; the node's number is added to the seed.
    pub(crate) faults: FaultConfig,
    pub(crate) idents: Idents,
    pub(crate) socket: Option<Socket>,
}

/// A receive buffer: read whole after a sleep that the first packet starts; the excess is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Socket {
    pub(crate) packets: usize,
    pub(crate) sleep: Duration,
}

pub(crate) struct Node {
    pub(crate) endpoint: Endpoint,
    pub(crate) memory: SimMemory,
    pub(crate) address: IpAddr,
    /// Completions not yet polled by the application.
    pub(crate) completions: VecDeque<(CqId, Completion)>,
    pub(crate) events: Vec<AsyncEvent>,
    free_at: Instant,
    blocked: bool,
    /// Packets in its socket until the owner wakes up.
    socket: Vec<Packet>,
    faults: FaultModel,
    ident: u16,
}

#[derive(Clone, Debug)]
pub(crate) struct Packet {
    pub(crate) src: IpAddr,
    pub(crate) dst: IpAddr,
    pub(crate) ident: u16,
    pub(crate) traffic_class: u8,
    pub(crate) payload: Vec<u8>,
    /// It was corrupted in bytes that the ICRC covers.
    pub(crate) damaged: bool,
}

enum Event {
    Arrive {
        node: usize,
        packet: Packet,
    },
    /// The owner of the socket wakes up and reads all packets.
    Empty {
        node: usize,
    },
    Unblock {
        node: usize,
    },
    Wake {
        token: usize,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Node(usize),
    /// A wake-up requested with this token is due.
    Wake(usize),
    Idle,
}

/// Whether a packet of a node is lost.
type Loss = Box<dyn FnMut(usize, &[u8]) -> bool>;

pub(crate) struct Network {
    pub(crate) now: Instant,
    pub(crate) nodes: Vec<Node>,
    pub(crate) monitor: Monitor,
    pub(crate) trace: Trace,
    /// Every packet sent and its node, when captured.
    pub(crate) capture: Option<Vec<(usize, Vec<u8>)>>,
    /// Losses besides those of the link's faults.
    pub(crate) lose: Option<Loss>,
    link: LinkConfig,
    events: EventQueue<Event>,
    timeouts: u32,
    buf: Vec<u8>,
}

impl Network {
    pub(crate) fn new(link: LinkConfig, trace: Trace) -> Self {
        Self {
            now: Instant::ZERO,
            nodes: Vec::new(),
            monitor: Monitor::default(),
            trace,
            capture: None,
            lose: None,
            link,
            events: EventQueue::default(),
            timeouts: 0,
            buf: vec![0; 4096 + 128],
        }
    }

    pub(crate) fn add(&mut self, endpoint: Endpoint, address: IpAddr) -> usize {
        let number = self.nodes.len();
        let faults = FaultConfig {
            seed: self.link.faults.seed.wrapping_add(number as u64),
            ..self.link.faults
        };
        self.nodes.push(Node {
            endpoint,
            memory: SimMemory::default(),
            address,
            completions: VecDeque::new(),
            events: Vec::new(),
            free_at: Instant::ZERO,
            blocked: false,
            socket: Vec::new(),
            faults: FaultModel::new(faults),
            ident: if self.link.idents == Idents::Zero {
                0
            } else {
                0x5a5a_u16.wrapping_mul(number as u16 + 1)
            },
        });
        number
    }

    /// Other faults of a node's packets from now on.
    pub(crate) fn set_faults(&mut self, node: usize, faults: FaultConfig) {
        self.nodes[node].faults = FaultModel::new(faults);
    }

    pub(crate) fn wake_at(&mut self, at: Instant, token: usize) {
        self.events.schedule(at, Event::Wake { token });
    }

    /// Processes the next event, at its time; fails when a rule of the wire is violated, or an
    /// endpoint does not get past its own timeout.
    pub(crate) fn step(&mut self) -> Result<Step, String> {
        let timeout = self
            .nodes
            .iter()
            .enumerate()
            .filter_map(|(node, n)| n.endpoint.poll_timeout().map(|at| (at, node)))
            .min();
        let event = self.events.next_at();
        match (timeout, event) {
            (None, None) => Ok(Step::Idle),
            (Some((at, node)), event) if event.is_none_or(|event| at <= event) => self.time_out(at, node),
            _ => self.happen(),
        }
    }

    fn time_out(&mut self, at: Instant, node: usize) -> Result<Step, String> {
        self.timeouts = if at > self.now { 0 } else { self.timeouts + 1 };
        if self.timeouts > MAX_TIMEOUTS_PER_INSTANT {
            return Err(format!("node {node} repeats a timeout at {:?}", self.now));
        }
        self.now = self.now.max(at);
        self.trace.timeout(self.now, node);
        self.nodes[node].endpoint.handle_timeout(self.now);
        self.service(node)?;
        Ok(Step::Node(node))
    }

    fn happen(&mut self) -> Result<Step, String> {
        let Some((at, event)) = self.events.pop() else {
            return Ok(Step::Idle);
        };
        if at > self.now {
            (self.now, self.timeouts) = (at, 0);
        }
        let node = match event {
            Event::Wake { token } => return Ok(Step::Wake(token)),
            Event::Unblock { node } => {
                self.nodes[node].blocked = false;
                node
            }
            Event::Arrive { node, packet } => match self.link.socket {
                None => {
                    self.arrive(node, &packet);
                    node
                }
                Some(socket) => {
                    self.enter(node, socket, packet);
                    return Ok(Step::Node(node));
                }
            },
            Event::Empty { node } => {
                for packet in std::mem::take(&mut self.nodes[node].socket) {
                    self.arrive(node, &packet);
                }
                node
            }
        };
        self.service(node)?;
        Ok(Step::Node(node))
    }

    fn enter(&mut self, node: usize, socket: Socket, packet: Packet) {
        let waiting = &mut self.nodes[node].socket;
        let first = waiting.is_empty();
        if waiting.len() < socket.packets {
            waiting.push(packet);
        }
        if first {
            self.events.schedule(self.now + socket.sleep, Event::Empty { node });
        }
    }

    fn arrive(&mut self, node: usize, packet: &Packet) {
        self.trace.arrival(self.now, node, packet);
        if !packet.damaged {
            self.monitor.delivered(node, &packet.payload);
        }
        let Node { endpoint, memory, .. } = &mut self.nodes[node];
        let datagram = Datagram {
            src: packet.src,
            dst: packet.dst,
            src_port: UDP_PORT,
            dst_port: UDP_PORT,
            ident: match self.link.idents {
                Idents::Known => Ident::Known(packet.ident),
                Idents::Zero | Idents::Counting => Ident::Unknown { segment: 0 },
            },
            traffic_class: packet.traffic_class,
            payload: &packet.payload,
        };
        endpoint.handle_datagram(self.now, &datagram, memory);
    }

    /// Polls a node's endpoint, after every change to it; fails when a packet violates a rule.
    pub(crate) fn service(&mut self, node: usize) -> Result<(), String> {
        while self.transmit(node)? {}
        let Node {
            endpoint,
            completions,
            events,
            ..
        } = &mut self.nodes[node];
        completions.extend(std::iter::from_fn(|| endpoint.poll_completion()));
        events.extend(std::iter::from_fn(|| endpoint.poll_event()));
        Ok(())
    }

    /// Sends one packet; false when there is none, or the link is full.
    fn transmit(&mut self, from: usize) -> Result<bool, String> {
        let node = &mut self.nodes[from];
        if node.blocked {
            return Ok(false);
        }
        if node.free_at.since(self.now) > self.link.backlog {
            node.blocked = true;
            let at = Instant(node.free_at.0 - self.link.backlog.as_nanos() as u64);
            self.events.schedule(at, Event::Unblock { node: from });
            return Ok(false);
        }
        let Some(transmit) = node.endpoint.poll_transmit(self.now, &mut node.memory, &mut self.buf) else {
            return Ok(false);
        };
        self.monitor.sent(from, transmit.qpn, &self.buf[..transmit.len])?;
        self.send(from, &transmit);
        Ok(true)
    }

    fn send(&mut self, from: usize, transmit: &Transmit) {
        let (dst, len) = (transmit.dst, transmit.len);
        let node = &mut self.nodes[from];
        let (src, ident) = (node.address, node.ident);
        node.ident = node.ident.wrapping_add(u16::from(self.link.idents != Idents::Zero));
        let packet = &mut self.buf[..len];
        Flow::new(src, dst, UDP_PORT, UDP_PORT).seal(ident, packet);
        let bits = 8 * (len as u64 + FRAMING);
        node.free_at =
            node.free_at.max(self.now) + Duration::from_nanos(bits * 1_000_000_000 / self.link.bits_per_second);
        let arrival = node.free_at + self.link.latency;
        let mut deliveries: Vec<_> = node.faults.decide(arrival, len).collect();
        let payload = packet.to_vec();
        if self.lose.as_mut().is_some_and(|lose| lose(from, &payload)) {
            deliveries.clear();
        }
        self.trace.departure(self.now, from, &payload, deliveries.len());
        if let Some(capture) = &mut self.capture {
            capture.push((from, payload.clone()));
        }
        let Some(to) = self.nodes.iter().position(|node| node.address == dst) else {
            return;
        };
        for delivery in deliveries {
            let mut payload = payload.clone();
            if let Some(corruption) = delivery.corruption {
                corruption.apply(&mut payload);
            }
            let packet = Packet {
                src,
                dst,
                ident,
                traffic_class: match delivery.marked {
                    true => ecn::mark(transmit.traffic_class),
                    false => transmit.traffic_class,
                },
                payload,
                damaged: delivery
                    .corruption
                    .is_some_and(|corruption| corruption.offset != UNCOVERED),
            };
            self.events.schedule(delivery.at, Event::Arrive { node: to, packet });
        }
    }
}
