//! The events of a fabric on one virtual clock.

use std::time::Duration;

use doorbell_roce_proto::Instant;
use doorbell_roce_proto::work::Status;

use crate::events::EventQueue;
use crate::host::{DEPTH, Host, HostConfig};
use crate::packet::Packet;
use crate::port::{Node, Port};
use crate::switch::{PauseFrame, Switch};
use crate::topology::Topology;
use crate::traffic::{Flow, FlowSpec};

/// Timeouts of one endpoint at one instant after which it counts as stuck.
const MAX_TIMEOUTS_PER_INSTANT: u32 = 1000;

/// UDP payload of a packet of data without its payload: BTH, RETH or less, and ICRC.
const HEADERS: u64 = 12 + 4;

/// Configuration of a run.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Of marking, of wake-ups and of ECMP.
    pub seed: u64,
    /// Hosts.
    pub host: HostConfig,
    /// The interval over which arrivals of a flow are summed.
    pub bin: Duration,
    /// The interval at which the watched queues are sampled.
    pub sample: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            seed: 1,
            host: HostConfig::default(),
            bin: Duration::from_micros(100),
            sample: Duration::from_micros(1),
        }
    }
}

enum Event {
    Arrive {
        node: Node,
        port: usize,
        packet: Packet,
    },
    /// The port has sent its packet.
    Free {
        node: Node,
        port: usize,
    },
    /// A PFC frame arrived for the port's egress.
    Pause {
        node: Node,
        port: usize,
        stop: bool,
    },
    /// A timer of the host's endpoint.
    Timer {
        host: usize,
    },
    /// A thread of the host runs.
    WakeUp {
        host: usize,
    },
    Start {
        flow: usize,
    },
    Sample,
}

/// The queue of a port over time.
#[derive(Clone, Debug)]
pub struct Watched {
    /// The switch and its port.
    pub port: (usize, usize),
    /// Bytes of data in the queue at each sample.
    pub queue: Vec<u64>,
}

/// A fabric.
// fields: clock and nodes, then what is measured, then what drives them
pub struct Fabric {
    /// The virtual clock.
    pub now: Instant,
    /// Hosts.
    pub hosts: Vec<Host>,
    /// Switches.
    pub switches: Vec<Switch>,
    /// Flows.
    pub flows: Vec<Flow>,
    /// Sampled queues.
    pub watched: Vec<Watched>,
    config: Config,
    /// By host and switch.
    routes: Vec<Vec<Vec<usize>>>,
    /// By flow: those whose messages wait for it.
    followers: Vec<Vec<usize>>,
    events: EventQueue<Event>,
    random: fastrand::Rng,
    timeouts: u32,
    unfinished: usize,
}

impl Fabric {
    /// A fabric without flows.
    pub fn new(topology: &Topology, config: Config) -> Self {
        let mut switches: Vec<Switch> = topology.switches.iter().map(|config| Switch::new(*config)).collect();
        let mut hosts: Vec<Option<Host>> = (0..topology.hosts).map(|_| None).collect();
        let mut peers = vec![Vec::new(); switches.len()];
        for (a, b, link) in &topology.links {
            let next = |node: &Node| match node {
                Node::Host(_) => 0,
                Node::Switch(switch) => switches[*switch].ports.len(),
            };
            let (port_a, port_b) = (next(a), next(b));
            for (node, peer) in [(a, (*b, port_b)), (b, (*a, port_a))] {
                let port = Port::new(*link, peer);
                match node {
                    Node::Host(host) => hosts[*host] = Some(Host::new(*host, config.host, port)),
                    Node::Switch(switch) => {
                        switches[*switch].add_port(port);
                        peers[*switch].push(peer.0);
                    }
                }
            }
        }
        Self {
            now: Instant::ZERO,
            hosts: hosts.into_iter().flatten().collect(),
            switches,
            flows: Vec::new(),
            watched: Vec::new(),
            config,
            routes: topology.routes(&peers),
            followers: Vec::new(),
            events: EventQueue::default(),
            random: fastrand::Rng::with_seed(config.seed),
            timeouts: 0,
            unfinished: 0,
        }
    }

    /// Adds a flow.
    pub fn add(&mut self, spec: FlowSpec) -> usize {
        let flow = self.flows.len();
        let src = self.hosts[spec.src].create_qp(flow);
        let dst = self.hosts[spec.dst].create_qp(flow);
        self.hosts[spec.src].connect(self.now, src, spec.dst, dst);
        self.hosts[spec.dst].connect(self.now, dst, spec.src, src);
        self.flows.push(Flow::new(spec, [src, dst]));
        self.followers.push(Vec::new());
        self.unfinished += usize::from(spec.messages < u64::MAX);
        self.events.schedule(spec.start, Event::Start { flow });
        flow
    }

    /// `flow` posts message *k* when `earlier` has delivered *k* - 1: the steps of a ring. Neither
    /// has started.
    pub fn order(&mut self, earlier: usize, flow: usize) {
        self.flows[flow].after = Some(earlier);
        self.followers[earlier].push(flow);
    }

    /// Samples the queue of a switch's port to this host or switch.
    pub fn watch(&mut self, switch: usize, to: Node) {
        if let Some(port) = self.switches[switch].ports.iter().position(|port| port.peer.0 == to) {
            if self.watched.is_empty() {
                self.events.schedule(self.now, Event::Sample);
            }
            self.watched.push(Watched {
                port: (switch, port),
                queue: Vec::new(),
            });
        }
    }

    /// Runs until this time, or until all flows that end have ended; whether they have.
    ///
    /// # Panics
    /// When an endpoint does not get past its own timeout.
    pub fn run(&mut self, until: Instant) -> bool {
        let endless = self.flows.iter().all(|flow| flow.spec.messages == u64::MAX);
        while endless || self.unfinished > 0 {
            let due = self.events.next_at().is_some_and(|at| at <= until);
            let Some((at, event)) = due.then(|| self.events.pop()).flatten() else {
                self.now = self.now.max(until);
                return false;
            };
            if at > self.now {
                (self.now, self.timeouts) = (at, 0);
            }
            self.happen(event);
        }
        true
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Arrive {
                node: Node::Host(host),
                packet,
                ..
            } => self.receive(host, packet),
            Event::Arrive {
                node: Node::Switch(switch),
                port,
                packet,
            } => self.forward(switch, port, packet),
            Event::Free { node, port } => {
                self.port(node, port).busy = false;
                self.send(node, port);
            }
            Event::Pause { node, port, stop } => {
                let now = self.now;
                self.port(node, port).pause(now, stop);
                self.send(node, port);
            }
            Event::Timer { host } => self.time_out(host),
            Event::WakeUp { host } => {
                for packet in std::mem::take(&mut self.hosts[host].waiting) {
                    self.arrive(host, &packet);
                }
                self.service(host);
            }
            Event::Start { flow } => {
                let src = self.flows[flow].spec.src;
                self.post(flow);
                self.service(src);
            }
            Event::Sample => self.sample(),
        }
    }

    fn port(&mut self, node: Node, port: usize) -> &mut Port {
        match node {
            Node::Host(host) => &mut self.hosts[host].port,
            Node::Switch(switch) => &mut self.switches[switch].ports[port],
        }
    }

    fn sample(&mut self) {
        for watched in &mut self.watched {
            let (switch, port) = watched.port;
            watched.queue.push(self.switches[switch].ports[port].queued());
        }
        self.events.schedule(self.now + self.config.sample, Event::Sample);
    }

    /// The next packet of an idle port.
    fn send(&mut self, node: Node, port: usize) {
        match node {
            Node::Host(host) => self.service(host),
            Node::Switch(switch) => {
                if self.switches[switch].ports[port].busy {
                    return;
                }
                let draw = self.random.f64();
                if let Some((packet, frame)) = self.switches[switch].depart(port, draw) {
                    self.transmit(node, port, packet);
                    self.send_pause(switch, frame);
                }
            }
        }
    }

    fn transmit(&mut self, node: Node, port: usize, packet: Packet) {
        let now = self.now;
        let egress = self.port(node, port);
        egress.busy = true;
        egress.stats.sent += packet.bytes();
        let free = now + egress.link.time(packet.bytes());
        let (at, peer) = (free + egress.link.delay, egress.peer);
        self.events.schedule(free, Event::Free { node, port });
        self.events.schedule(
            at,
            Event::Arrive {
                node: peer.0,
                port: peer.1,
                packet,
            },
        );
    }

    fn send_pause(&mut self, switch: usize, frame: Option<PauseFrame>) {
        if let Some(PauseFrame { port, stop }) = frame {
            let egress = &self.switches[switch].ports[port];
            let (at, (node, port)) = (self.now + egress.link.delay, egress.peer);
            self.events.schedule(at, Event::Pause { node, port, stop });
        }
    }

    fn forward(&mut self, switch: usize, ingress: usize, mut packet: Packet) {
        let ports = &self.routes[packet.dst][switch];
        let hash = mix((packet.src as u64) << 48 | (packet.dst as u64) << 32 | u64::from(packet.src_port));
        let hash = mix(hash ^ self.config.seed ^ (switch as u64) << 20);
        let Some(egress) = ports.get((hash % ports.len().max(1) as u64) as usize).copied() else {
            return;
        };
        packet.ingress = ingress;
        let draw = self.random.f64();
        let frame = self.switches[switch].admit(egress, packet, draw);
        self.send_pause(switch, frame);
        self.send(Node::Switch(switch), egress);
    }

    fn receive(&mut self, host: usize, packet: Packet) {
        let draw = self.random.f64();
        let node = &mut self.hosts[host];
        let wake_up = node.wake_up(self.now, draw);
        if wake_up.is_zero() && node.waiting.is_empty() {
            self.arrive(host, &packet);
            self.service(host);
            return;
        }
        node.waiting.push(packet);
        if node.waiting.len() == 1 {
            self.events.schedule(self.now + wake_up, Event::WakeUp { host });
        }
    }

    fn arrive(&mut self, host: usize, packet: &Packet) {
        if let Some(flow) = self.hosts[host].flow_of(packet.dest_qpn())
            && self.flows[flow].spec.dst == host
        {
            let bytes = (packet.payload.len() as u64).saturating_sub(HEADERS);
            self.flows[flow].arrive(self.now, self.config.bin, bytes);
        }
        self.hosts[host].arrive(self.now, packet);
    }

    fn time_out(&mut self, host: usize) {
        let now = self.now;
        let node = &mut self.hosts[host];
        if node.timer == Some(now) {
            node.timer = None;
        }
        if node.endpoint.poll_timeout().is_none_or(|at| at > now) {
            return self.schedule_timer(host);
        }
        self.timeouts += 1;
        assert!(
            self.timeouts <= MAX_TIMEOUTS_PER_INSTANT,
            "host {host} repeats a timeout at {now:?}"
        );
        node.endpoint.handle_timeout(now);
        self.service(host);
    }

    /// Polls an endpoint after a change to it.
    fn service(&mut self, host: usize) {
        loop {
            while let Some((flow, is_receive, completion)) = self.hosts[host].poll_completion() {
                self.complete(host, flow, is_receive, completion.status);
            }
            while self.hosts[host].endpoint.poll_event().is_some() {}
            let node = &mut self.hosts[host];
            if node.port.busy || node.port.paused.is_some() {
                break;
            }
            let Some(packet) = node.transmit(self.now) else { break };
            self.transmit(Node::Host(host), 0, packet);
        }
        self.schedule_timer(host);
    }

    fn schedule_timer(&mut self, host: usize) {
        let node = &mut self.hosts[host];
        if let Some(at) = node.endpoint.poll_timeout()
            && node.timer.is_none_or(|timer| at < timer)
        {
            let at = at.max(self.now);
            node.timer = Some(at);
            self.events.schedule(at, Event::Timer { host });
        }
    }

    fn complete(&mut self, host: usize, number: usize, is_receive: bool, status: Status) {
        let flow = &mut self.flows[number];
        if status != Status::Success {
            let ended = flow.failed || flow.finished.is_some() || flow.spec.messages == u64::MAX;
            flow.failed = true;
            self.unfinished -= usize::from(!ended);
            return;
        }
        if is_receive {
            flow.delivered += 1;
            let qpn = flow.qpns[1];
            self.hosts[host].receive(qpn);
            for follower in self.followers[number].clone() {
                self.post(follower);
                // Its messages start at this host.
                debug_assert_eq!(self.flows[follower].spec.src, host);
            }
            return;
        }
        flow.completed += 1;
        if flow.completed == flow.spec.messages {
            flow.finished = Some(self.now);
            self.unfinished -= 1;
        }
        self.post(number);
    }

    /// Posts the messages of a flow that may be posted.
    fn post(&mut self, number: usize) {
        let flow = &self.flows[number];
        if self.now < flow.spec.start || flow.failed {
            return;
        }
        let ready = flow.after.map_or(u64::MAX, |after| self.flows[after].delivered + 1);
        let end = flow.spec.messages.min(flow.completed + DEPTH).min(ready);
        let (src, qpn, bytes) = (flow.spec.src, flow.qpns[0], flow.spec.message);
        for _ in flow.posted..end {
            self.hosts[src].send(self.now, qpn, bytes);
        }
        self.flows[number].posted = end.max(self.flows[number].posted);
    }
}

/// SplitMix64's finalizer.
pub(crate) fn mix(seed: u64) -> u64 {
    let mut mixed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}
