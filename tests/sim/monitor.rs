//! Checks the rules of the wire on every packet sent, independently of the endpoint's internals.

use std::collections::HashMap;

use doorbell_roce_proto::wire::{Cnp, Operation, Packet, Position};
use doorbell_roce_proto::{Mtu, Psn, Qpn};

/// Maximum packets of requests without an AckReq among them.
const ACK_REQ_EVERY: u32 = 64;

struct Flow {
    peer: Qpn,
    mtu: Mtu,
    window: u32,
    /// One past the last PSN sent.
    next: Psn,
    /// The message that the last new packet left incomplete.
    open: Option<Operation>,
    since_ack_req: u32,
    /// A READ takes many PSNs in one packet, so the window can no longer be observed.
    reads: bool,
    /// One past the highest PSN in the responses that arrived: nothing above it can be
    /// acknowledged.
    acked: Psn,
    /// One past the highest PSN that arrived in requests.
    arrived: Psn,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct FlowConfig {
    pub(crate) peer: Qpn,
    pub(crate) mtu: Mtu,
    pub(crate) window: u32,
    pub(crate) sq_psn: Psn,
    pub(crate) rq_psn: Psn,
}

#[derive(Default)]
pub(crate) struct Monitor {
    flows: HashMap<(usize, Qpn), Flow>,
}

impl Monitor {
    pub(crate) fn watch(&mut self, node: usize, qpn: Qpn, config: FlowConfig) {
        let FlowConfig {
            peer,
            mtu,
            window,
            sq_psn,
            rq_psn,
        } = config;
        let flow = Flow {
            peer,
            mtu,
            window,
            next: sq_psn,
            open: None,
            since_ack_req: 0,
            reads: false,
            acked: sq_psn,
            arrived: rq_psn,
        };
        self.flows.insert((node, qpn), flow);
    }

    pub(crate) fn delivered(&mut self, node: usize, payload: &[u8]) {
        let Ok(packet) = Packet::parse(payload) else { return };
        let Some(flow) = self.flows.get_mut(&(node, packet.bth.dest_qp)) else {
            return;
        };
        if is_request(&packet) {
            flow.arrived = later(flow.arrived, packet.bth.psn.add(span(&packet, flow.mtu)));
        } else {
            flow.acked = later(flow.acked, packet.bth.psn.add(1));
        }
    }

    /// Checks a packet; fails when it violates a rule.
    pub(crate) fn sent(&mut self, node: usize, qpn: Qpn, payload: &[u8]) -> Result<(), String> {
        // It has no PSN, and goes whatever the window.
        if Cnp::parse(payload).is_some() {
            return Ok(());
        }
        let packet = Packet::parse(payload).map_err(|error| format!("node {node} sends no packet: {error}"))?;
        let Some(flow) = self.flows.get_mut(&(node, qpn)) else {
            return Ok(());
        };
        let broken = if packet.bth.dest_qp != flow.peer {
            Some("is for another queue pair")
        } else if is_request(&packet) {
            flow.request(&packet)
        } else if packet.bth.psn.since(flow.arrived) >= 0 {
            Some("answers a request that never came")
        } else if packet.payload.len() > flow.mtu.bytes() {
            Some("is longer than the path MTU")
        } else {
            None
        };
        broken.map_or(Ok(()), |rule| {
            Err(format!("node {node} sends a packet that {rule}: {:?}", packet.bth))
        })
    }
}

impl Flow {
    fn request(&mut self, packet: &Packet<'_>) -> Option<&'static str> {
        let (opcode, psn, len, mtu) = (
            packet.bth.opcode,
            packet.bth.psn,
            packet.payload.len(),
            self.mtu.bytes(),
        );
        let right_size = match opcode.position() {
            Position::First | Position::Middle => len == mtu,
            Position::Last => (1..=mtu).contains(&len),
            Position::Only => len <= mtu,
        };
        let end = psn.add(span(packet, self.mtu));
        if !right_size {
            return Some("has a payload forbidden by its position in the message");
        }
        if psn.since(self.next) > 0 {
            return Some("leaves out PSNs");
        }
        let answered = packet.bth.ack_req || !matches!(opcode.operation(), Operation::Send | Operation::Write);
        self.since_ack_req = if answered { 0 } else { self.since_ack_req + 1 };
        if self.since_ack_req >= ACK_REQ_EVERY {
            return Some("is one of too many without AckReq");
        }
        if psn != self.next {
            return (end.since(self.next) > 0).then_some("repeats more than was sent");
        }
        self.next = end;
        let continues = self.open == Some(opcode.operation());
        if opcode.position().starts() == continues || !continues && self.open.is_some() {
            return Some("does not follow the one before it");
        }
        self.open = (!opcode.position().ends()).then_some(opcode.operation());
        self.reads |= opcode.operation() == Operation::ReadRequest;
        let outstanding = self.next.since(self.acked);
        (!self.reads && outstanding > self.window as i32).then_some("is outside the window")
    }
}

fn is_request(packet: &Packet<'_>) -> bool {
    !matches!(
        packet.bth.opcode.operation(),
        Operation::ReadResponse | Operation::Acknowledge | Operation::AtomicAcknowledge | Operation::SelectiveAck
    )
}

/// The number of PSNs a packet takes: a READ request as many as its response has packets.
fn span(packet: &Packet<'_>, mtu: Mtu) -> u32 {
    match (packet.bth.opcode.operation(), packet.extension.reth()) {
        (Operation::ReadRequest, Some(reth)) => reth.len.div_ceil(mtu.bytes() as u32).max(1),
        _ => 1,
    }
}

fn later(a: Psn, b: Psn) -> Psn {
    if b.since(a) > 0 { b } else { a }
}
