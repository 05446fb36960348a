//! The application that runs a [`Plan`]; the [`oracle`](super::oracle) checks its results.

use doorbell_roce_proto::memory::{PdId, Sge};
use doorbell_roce_proto::qp::{Modify, Path, QpInit, RemoteAccess, State};
use doorbell_roce_proto::wire::Transport;
use doorbell_roce_proto::work::{Completion, CqId, Operation, Payload, ReceiveRequest, SendRequest};
use doorbell_roce_proto::{AsyncEvent, Endpoint, EndpointConfig, Instant, Qpn};

use super::oracle::EndState;
use super::plan::{Action, Area, Connection, End, MAX_SGE, Plan, Range};
use crate::memory::{RegionId, Rights, SimMemory};
use crate::monitor::FlowConfig;
use crate::net::{Network, Step};
use crate::trace::Trace;

/// Maximum duration of a conversation in virtual time: the slowest retries included.
const TIME_LIMIT: Instant = Instant(600_000_000_000);
const STEP_LIMIT: u64 = 4_000_000;

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) done: u64,
    /// Ends whose retries ran out.
    pub(crate) retry_exceeded: u64,
    /// Ends whose RNR retries ran out.
    pub(crate) rnr_exceeded: u64,
    pub(crate) steps: u64,
}

pub(super) struct RunningEnd<'a> {
    pub(super) end: &'a End,
    pub(super) qpn: Qpn,
    pub(super) regions: [RegionId; 5],
    pub(super) state: EndState,
    /// The last requested wake-up.
    wake: Option<Instant>,
}

struct Conversation<'a> {
    net: Network,
    /// Two for each connection.
    running: Vec<RunningEnd<'a>>,
    connections: &'a [Connection],
}

/// Runs and checks the conversation of `seed`; fails with the trace so far.
pub(crate) fn run(seed: u64, trace: Trace) -> Result<Outcome, (String, String)> {
    let plan = Plan::generate(seed);
    let mut conversation = Conversation::connect(seed, &plan, trace);
    let outcome = conversation.run_to_idle().and_then(|steps| conversation.close(steps));
    outcome.map_err(|error| (error, conversation.net.trace.text().to_owned()))
}

impl<'a> Conversation<'a> {
    fn connect(seed: u64, plan: &'a Plan, trace: Trace) -> Self {
        let mut net = Network::new(plan.link, trace);
        for (i, &address) in plan.addresses.iter().enumerate() {
            let config = EndpointConfig {
                key: seed.wrapping_add(i as u64).into(),
                window: plan.window,
                selective_repeat: seed % 2 == 1,
                ..EndpointConfig::default()
            };
            net.add(Endpoint::with_config(config), address);
        }
        let ends = plan.connections.iter().flat_map(|connection| &connection.ends);
        let running: Vec<_> = ends
            .enumerate()
            .map(|(i, end)| RunningEnd::create(&mut net, end, i))
            .collect();
        for (i, live) in running.iter().enumerate() {
            let peer = &running[i ^ 1];
            let mtu = plan.connections[i / 2].mtu;
            let (sq_psn, rq_psn) = (live.end.sq_psn, peer.end.sq_psn);
            let watched = FlowConfig {
                peer: peer.qpn,
                mtu,
                window: plan.window,
                sq_psn,
                rq_psn,
            };
            net.monitor.watch(live.end.node, live.qpn, watched);
            for modify in live.modifies(peer, mtu, &plan.addresses) {
                net.nodes[live.end.node]
                    .endpoint
                    .modify_qp(Instant::ZERO, live.qpn, &modify)
                    .expect("the table allows it");
            }
        }
        Self {
            net,
            running,
            connections: &plan.connections,
        }
    }

    /// Runs until nothing is in flight; returns the number of steps.
    fn run_to_idle(&mut self) -> Result<u64, String> {
        for i in 0..self.running.len() {
            self.pump(i)?;
        }
        for steps in 0..STEP_LIMIT {
            match self.net.step()? {
                Step::Idle => return self.check_finished().map(|()| steps),
                Step::Wake(i) => self.pump(i)?,
                Step::Node(node) => self.poll_completions(node)?,
            }
            if self.net.now > TIME_LIMIT {
                return Err("the conversation never ends".into());
            }
        }
        Err(format!("{STEP_LIMIT} steps, and no end"))
    }

    fn poll_completions(&mut self, node: usize) -> Result<(), String> {
        let mut any = false;
        while let Some((cq, completion)) = self.net.nodes[node].completions.pop_front() {
            self.complete(node, cq, &completion)?;
            any = true;
        }
        let events = &self.net.nodes[node].events;
        if let Some(event) = events
            .iter()
            .find(|event| !matches!(event, AsyncEvent::CommunicationEstablished(_)))
        {
            return Err(format!("node {node} reports {event:?}"));
        }
        for i in 0..self.running.len() {
            let live = &self.running[i];
            if live.end.node == node {
                let state = self.net.nodes[node]
                    .endpoint
                    .query_qp(live.qpn)
                    .map(|attributes| attributes.state);
                live.state.check_state(state)?;
                if any {
                    self.pump(i)?;
                }
            }
        }
        Ok(())
    }

    fn complete(&mut self, node: usize, cq: CqId, completion: &Completion) -> Result<(), String> {
        self.net.trace.remark(self.net.now, node, || format!("{completion:?}"));
        let i = (cq.0 / 2) as usize;
        if self
            .running
            .get(i)
            .is_none_or(|live| live.qpn != completion.qpn || live.end.node != node)
        {
            return Err(format!("a completion of {} in {cq:?} of node {node}", completion.qpn));
        }
        let peer = &self.running[i ^ 1];
        let (peer_end, peer_qpn, peer_posted) = (peer.end, peer.qpn, peer.state.posted);
        let live = &mut self.running[i];
        let memory = &self.net.nodes[node].memory;
        let read = |range: &Range| live.bytes(memory, range);
        let judged = if cq.0 & 1 == 0 {
            live.state.clone().sent(live.end, completion, read)
        } else {
            let ops = &peer_end.ops[..peer_posted];
            live.state.clone().received(live.end, ops, peer_qpn, completion, read)
        };
        live.state = judged.map_err(|error| format!("node {node} {}: {error}; {completion:?}", live.qpn))?;
        Ok(())
    }

    /// Posts what an end may post now, and schedules a wake-up for the rest.
    fn pump(&mut self, i: usize) -> Result<(), String> {
        self.post_receives(i)?;
        while self.post_next(i)? {}
        let RunningEnd { end, state, wake, .. } = &mut self.running[i];
        let receive = end
            .receives
            .get(state.receives_posted)
            .map(|receive| receive.not_before);
        let op = end.ops.get(state.posted).map(|op| op.not_before);
        let due = receive.into_iter().chain(op).filter(|&at| at > self.net.now).min();
        if due != *wake {
            *wake = due;
            due.into_iter().for_each(|at| self.net.wake_at(at, i));
        }
        Ok(())
    }

    fn post_receives(&mut self, i: usize) -> Result<(), String> {
        let RunningEnd {
            end,
            state,
            qpn,
            regions,
            ..
        } = &mut self.running[i];
        let node = &mut self.net.nodes[end.node];
        while let Some(receive) = end.receives.get(state.receives_posted) {
            let full = state.receives_posted - state.receives_done >= end.max_recv_wr as usize;
            if state.failed.is_some() || full || receive.not_before > self.net.now {
                break;
            }
            let sges = sges(&node.memory, regions, &receive.local);
            let request = ReceiveRequest {
                wr_id: state.receives_posted as u64,
                sges: &sges,
            };
            let posted = node.endpoint.post_receive(*qpn, &request);
            posted.map_err(|error| format!("receive {} of {qpn} refused: {error:?}", state.receives_posted))?;
            state.receives_posted += 1;
        }
        Ok(())
    }

    /// Posts and transmits the next request; false when none may be posted now.
    fn post_next(&mut self, i: usize) -> Result<bool, String> {
        let (live, peer) = (&self.running[i], &self.running[i ^ 1]);
        let (end, state, node) = (live.end, &live.state, live.end.node);
        let full = state.posted - state.retired >= end.max_send_wr as usize;
        let due = end.ops.get(state.posted).filter(|op| op.not_before <= self.net.now);
        let Some(op) = due.filter(|_| state.failed.is_none() && !full) else {
            return Ok(false);
        };
        let sges = sges(&self.net.nodes[node].memory, &live.regions, &op.local);
        let request = SendRequest {
            wr_id: state.posted as u64,
            operation: remote(&op.action, &self.net.nodes[peer.end.node].memory, &peer.regions),
            payload: if op.inline {
                Payload::Inline(&op.data)
            } else {
                Payload::Gather(&sges)
            },
            signaled: op.signaled,
            fence: op.fence,
            solicited: op.solicited,
        };
        self.net.trace.remark(self.net.now, node, || {
            format!("post {} {:?}", request.wr_id, request.operation)
        });
        let posted = self.net.nodes[node]
            .endpoint
            .post_send(self.net.now, live.qpn, &request);
        posted.map_err(|error| format!("request {} of {} refused: {error:?}", state.posted, live.qpn))?;
        self.running[i].state.posted += 1;
        self.net.service(node)?;
        self.poll_completions(node)?;
        Ok(true)
    }

    fn check_finished(&self) -> Result<(), String> {
        for live in &self.running {
            live.state
                .check_finished(live.end)
                .map_err(|error| format!("node {} {}: {error}", live.end.node, live.qpn))?;
        }
        Ok(())
    }

    /// Moves every queue pair to ERR, which flushes its receives, and checks all memory.
    fn close(&mut self, steps: u64) -> Result<Outcome, String> {
        let error = Modify {
            state: Some(State::Err),
            ..Modify::default()
        };
        for i in 0..self.running.len() {
            let (node, qpn) = (self.running[i].end.node, self.running[i].qpn);
            self.running[i].state.closed = true;
            let modified = self.net.nodes[node].endpoint.modify_qp(self.net.now, qpn, &error);
            modified.map_err(|error| format!("node {node} {qpn} into ERR: {error:?}"))?;
            self.net.service(node)?;
            while let Some((cq, completion)) = self.net.nodes[node].completions.pop_front() {
                self.complete(node, cq, &completion)?;
            }
        }
        let mut outcome = Outcome {
            steps,
            ..Outcome::default()
        };
        for (i, connection) in self.connections.iter().enumerate() {
            for (from, to) in [(2 * i, 2 * i + 1), (2 * i + 1, 2 * i)] {
                let (from, to) = (&self.running[from], &self.running[to]);
                let memory = |live: &RunningEnd<'_>, area: Area| {
                    let region = live.regions[area as usize];
                    self.net.nodes[live.end.node].memory.region(region).bytes.clone()
                };
                super::oracle::check_memory(from, to, connection.mtu.bytes(), memory)
                    .map_err(|error| format!("{} → {}: {error}", from.qpn, to.qpn))?;
                from.state.count(&mut outcome);
            }
        }
        for live in &self.running {
            let endpoint = &mut self.net.nodes[live.end.node].endpoint;
            if !endpoint.destroy_qp(live.qpn) || endpoint.query_qp(live.qpn).is_some() {
                return Err(format!("{} cannot be destroyed", live.qpn));
            }
        }
        Ok(outcome)
    }
}

impl<'a> RunningEnd<'a> {
    /// Send completions go to CQ 2i, receive completions to 2i + 1.
    fn create(net: &mut Network, end: &'a End, i: usize) -> Self {
        let pd = PdId(i as u32);
        let node = &mut net.nodes[end.node];
        let regions = Area::ALL.map(|area| {
            let rights = match area {
                Area::Source => Rights::default(),
                Area::Landing | Area::Receive => Rights::LOCAL,
                Area::Exposed => Rights {
                    read: true,
                    write: true,
                    ..Rights::LOCAL
                },
                Area::Words => Rights {
                    atomic: true,
                    ..Rights::LOCAL
                },
            };
            let base = 0x7f00_0000_0000 + ((i * 8 + area as usize) << 20) as u64;
            node.memory
                .register(pd, base, rights, end.areas.0[area as usize].clone())
        });
        let qpn = node.endpoint.create_qp(QpInit {
            transport: Transport::Rc,
            pd,
            send_cq: CqId(2 * i as u32),
            recv_cq: CqId(2 * i as u32 + 1),
            max_send_wr: end.max_send_wr,
            max_recv_wr: end.max_recv_wr,
            max_send_sge: MAX_SGE as u32,
            max_recv_sge: MAX_SGE as u32,
            max_inline: end.max_inline,
            signal_all: end.signal_all,
            srq: None,
            xrc_domain: None,
            ack_before_requests: false,
        });
        Self {
            end,
            qpn,
            regions,
            state: EndState::default(),
            wake: None,
        }
    }

    fn modifies(
        &self,
        peer: &RunningEnd<'_>,
        mtu: doorbell_roce_proto::Mtu,
        addresses: &[std::net::IpAddr],
    ) -> [Modify; 3] {
        let End {
            node,
            sq_psn,
            timeout,
            retry_cnt,
            rnr_retry,
            min_rnr_timer,
            max_rd_atomic,
            max_dest_rd_atomic,
            ..
        } = *self.end;
        let path = Path::new(addresses[node], addresses[peer.end.node]);
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
                ..Modify::default()
            },
            Modify {
                state: Some(State::Rtr),
                path: Some(path),
                path_mtu: Some(mtu),
                dest_qpn: Some(peer.qpn),
                rq_psn: Some(peer.end.sq_psn),
                max_dest_rd_atomic: Some(max_dest_rd_atomic),
                min_rnr_timer: Some(min_rnr_timer),
                ..Modify::default()
            },
            Modify {
                state: Some(State::Rts),
                sq_psn: Some(sq_psn),
                timeout: Some(timeout),
                retry_cnt: Some(retry_cnt),
                rnr_retry: Some(rnr_retry),
                max_rd_atomic: Some(max_rd_atomic),
                ..Modify::default()
            },
        ]
    }

    fn bytes(&self, memory: &SimMemory, range: &Range) -> Vec<u8> {
        let region = memory.region(self.regions[range.area as usize]);
        region.bytes[range.offset..range.offset + range.len].to_vec()
    }
}

fn sges(memory: &SimMemory, regions: &[RegionId; 5], ranges: &[Range]) -> Vec<Sge> {
    ranges
        .iter()
        .map(|range| {
            let region = regions[range.area as usize];
            let addr = memory.region(region).base + range.offset as u64;
            Sge {
                addr,
                len: range.len as u32,
                lkey: memory.lkey(region),
            }
        })
        .collect()
}

fn remote(action: &Action, memory: &SimMemory, regions: &[RegionId; 5]) -> Operation {
    let locate = |range: &Range| {
        let region = regions[range.area as usize];
        (memory.region(region).base + range.offset as u64, memory.rkey(region))
    };
    match *action {
        Action::Send { imm } => Operation::Send { imm },
        Action::Write { target, imm } => {
            let (addr, rkey) = locate(&target);
            Operation::Write { addr, rkey, imm }
        }
        Action::Read { source } => {
            let (addr, rkey) = locate(&source);
            Operation::Read { addr, rkey }
        }
        Action::Atomic { word, op } => {
            let (addr, rkey) = locate(&word);
            Operation::Atomic { addr, rkey, op }
        }
    }
}
