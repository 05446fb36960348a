//! A million datagrams: noise, and valid packets of every kind with a few bits changed and their
//! ICRC recomputed. Nothing may panic, and no datagram may affect a queue pair that it does not
//! belong to: the attributes of the victim's others stay the same, and their conversations
//! complete.

use std::net::{IpAddr, Ipv4Addr};

use doorbell_roce_proto::memory::{AtomicOp, PdId, Sge};
use doorbell_roce_proto::qp::{Attributes, State};
use doorbell_roce_proto::wire::{
    Aeth, AtomicAckEth, AtomicEth, Credits, Extension, Feth, Ieth, ImmDt, Layout, Nak, Opcode, Packet, Position, Reth,
    RnrTimer, SelectiveEth, Syndrome, Transport, UDP_PORT,
};
use doorbell_roce_proto::work::{
    Completion, CompletionOpcode, Operation, Payload, ReceiveRequest, SendRequest, Status,
};
use doorbell_roce_proto::{Datagram, Endpoint, Ident, Psn, Qpn, RKey};
use fastrand::Rng;

use super::victim::{ATTACKER, FIRST_PSN, MTU, VICTIM, Victim, connect, init, packet, seal};
use crate::memory::{RegionId, Rights, SimMemory};

const HONEST: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 0, 2));
const HONEST_PD: PdId = PdId(2);
const TOTAL: u64 = 1_000_000;
const THREADS: u64 = 4;
/// One has part of a message, one waits for an acknowledgement, one for a READ response.
const BYSTANDERS: usize = 3;
const LEN: usize = 3 * 1024 + 100;

#[test]
fn a_million_datagrams_do_no_harm() {
    let threads: Vec<_> = (0..THREADS)
        .map(|seed| std::thread::spawn(move || bombard(seed, TOTAL / THREADS)))
        .collect();
    let mut totals = Totals::default();
    for (seed, thread) in threads.into_iter().enumerate() {
        let part = thread
            .join()
            .unwrap_or_else(|_| panic!("the datagrams of seed {seed} did harm, see above"));
        totals.answered += part.answered;
        totals.fatal += part.fatal;
    }
    println!(
        "{TOTAL} datagrams: {} answered, {} times the attacked queue pair failed",
        totals.answered, totals.fatal
    );
    // Proof that the datagrams passed the first checks.
    assert!(
        totals.answered > TOTAL / 50 && totals.fatal > TOTAL / 1000,
        "{totals:?}"
    );
}

#[derive(Debug, Default)]
struct Totals {
    answered: u64,
    fatal: u64,
}

fn bombard(seed: u64, count: u64) -> Totals {
    let mut rng = Rng::with_seed(seed);
    let mut setting = Setting::new(seed);
    let before = setting.attributes();
    let mut attack = Attack {
        expected: FIRST_PSN,
        requested: FIRST_PSN,
    };
    let mut totals = Totals::default();
    for i in 0..count {
        attack.keep_busy(&mut setting.victim, &mut rng);
        let (src, dst, datagram) = attack.generate(&mut rng, &setting);
        setting
            .victim
            .deliver(src, dst, if rng.u8(..8) == 0 { rng.u16(..) } else { 0 }, &datagram);
        setting.victim.drain(32);
        assert!(
            setting.victim.sent.iter().all(|(dst, _)| *dst == ATTACKER),
            "seed {seed}, datagram {i}: a bystander spoke"
        );
        assert!(
            setting.attributes() == before,
            "seed {seed}, datagram {i}: a bystander noticed {datagram:02x?} from {src}"
        );
        totals.answered += u64::from(!setting.victim.sent.is_empty());
        attack.learn(&mut setting.victim);
        totals.fatal += u64::from(attack.reconnect_failed(&mut setting.victim));
    }
    setting.finish();
    totals
}

struct Attack {
    expected: Psn,
    requested: Psn,
}

impl Attack {
    /// Keeps the attacked queue pair receiving and sending, so that its every part can be attacked.
    fn keep_busy(&self, victim: &mut Victim, rng: &mut Rng) {
        if rng.u8(..16) != 0 {
            return;
        }
        let sges = [Sge {
            addr: super::victim::BASE,
            len: 4000,
            lkey: victim.memory.lkey(victim.region),
        }];
        let request = ReceiveRequest { wr_id: 0, sges: &sges };
        // A full queue may refuse it.
        let _ = victim.endpoint.post_receive(victim.qpn, &request);
        let (addr, rkey) = (rng.u64(..), RKey(rng.u32(..)));
        let (operation, len) = match rng.u8(..4) {
            0 => (Operation::Send { imm: None }, rng.u32(..4000)),
            1 => (Operation::Write { addr, rkey, imm: None }, rng.u32(..4000)),
            2 => (Operation::Read { addr, rkey }, rng.u32(..4000)),
            _ => (
                Operation::Atomic {
                    addr: addr & !7,
                    rkey,
                    op: AtomicOp::FetchAdd { add: 1 },
                },
                8,
            ),
        };
        let sges = [Sge { len, ..sges[0] }];
        let payload = Payload::Gather(&sges);
        let request = SendRequest {
            wr_id: 0,
            operation,
            payload,
            signaled: true,
            fence: false,
            solicited: false,
        };
        let _ = victim.endpoint.post_send(victim.now, victim.qpn, &request);
        victim.drain(32);
    }

    /// A datagram and its addresses; never one that a bystander's own peer could have sent.
    fn generate(&self, rng: &mut Rng, setting: &Setting) -> (IpAddr, IpAddr, Vec<u8>) {
        let victim = &setting.victim;
        let (mut src, mut dst) = (ATTACKER, VICTIM);
        let mut bytes = match rng.u8(..16) {
            0 => (0..rng.usize(..200)).map(|_| rng.u8(..)).collect(),
            1 => vec![rng.u8(..); rng.usize(..5000)],
            2..12 => self.request(rng, victim),
            _ => self.response(rng, victim),
        };
        // A quarter is sent unchanged, so that the PSNs advance.
        match rng.u8(..16) {
            0..4 => return (src, dst, bytes),
            4 => {
                src = [
                    HONEST,
                    VICTIM,
                    IpAddr::V4(rng.u32(..).into()),
                    IpAddr::V6(rng.u128(..).into()),
                ][rng.usize(..4)]
            }
            5 => dst = IpAddr::V4(rng.u32(..).into()),
            6 => bytes.truncate(rng.usize(..=bytes.len())),
            7 => bytes.extend((0..rng.usize(..40)).map(|i| i as u8)),
            8 if bytes.len() > 8 => {
                let target = [
                    Qpn::new(rng.u32(..)),
                    setting.bystanders[rng.usize(..BYSTANDERS)],
                    Qpn::new(rng.u32(..4)),
                ][rng.usize(..3)];
                bytes[5..8].copy_from_slice(&target.get().to_be_bytes()[1..]);
            }
            _ => flip(rng, &mut bytes),
        }
        if rng.u8(..16) != 0 {
            seal(&mut bytes, src, dst, 0);
        }
        let named = bytes
            .get(5..8)
            .map(|qpn| Qpn::new(u32::from_be_bytes([0, qpn[0], qpn[1], qpn[2]])));
        if src == HONEST && named.is_some_and(|qpn| setting.bystanders.contains(&qpn)) {
            src = ATTACKER;
        }
        (src, dst, bytes)
    }

    fn request(&self, rng: &mut Rng, victim: &Victim) -> Vec<u8> {
        let requests = Opcode::ALL
            .iter()
            .filter(|opcode| opcode.transport() == Transport::Rc && !is_response(**opcode));
        let requests: Vec<_> = requests.copied().collect();
        let opcode = requests[rng.usize(..requests.len())];
        let psn = if rng.u8(..4) == 0 {
            self.expected.add(rng.u32(..8).wrapping_sub(6))
        } else {
            self.expected
        };
        let len = match (opcode.has_payload(), opcode.position()) {
            (false, _) => 0,
            (true, Position::First | Position::Middle) => MTU.bytes(),
            _ => rng.usize(..=MTU.bytes()),
        };
        let payload: Vec<u8> = vec![rng.u8(..); len];
        let extension = self.extension(rng, victim, opcode, len);
        packet(opcode, victim.qpn, psn, &extension, &payload)
    }

    fn response(&self, rng: &mut Rng, victim: &Victim) -> Vec<u8> {
        let responses = Opcode::ALL.iter().filter(|opcode| is_response(**opcode));
        let responses: Vec<_> = responses.copied().collect();
        let opcode = responses[rng.usize(..responses.len())];
        let len = if opcode.has_payload() {
            [MTU.bytes(), rng.usize(..=MTU.bytes())][rng.usize(..2)]
        } else {
            0
        };
        let extension = self.extension(rng, victim, opcode, len);
        packet(
            opcode,
            victim.qpn,
            self.requested.add(rng.u32(..8).wrapping_sub(4)),
            &extension,
            &vec![rng.u8(..); len],
        )
    }

    /// The extension headers of the opcode, mostly with valid contents.
    fn extension(&self, rng: &mut Rng, victim: &Victim, opcode: Opcode, payload: usize) -> Extension {
        let va = match rng.u8(..8) {
            0 => rng.u64(..),
            1 => super::victim::BASE - 8 + rng.u64(..16),
            _ => super::victim::BASE + rng.u64(..7000) / 8 * 8,
        };
        let rkey = match rng.u8(..8) {
            0 => RKey(rng.u32(..)),
            // That of the bystanders, which are in another protection domain.
            1 => RKey(victim.rkey().0 + 0x100),
            _ => victim.rkey(),
        };
        let longer = if opcode.position().ends() { 0 } else { rng.u32(1..3000) };
        let read = opcode == Opcode::RcReadRequest;
        let len = if read { rng.u32(..5000) } else { payload as u32 + longer };
        let reth = Reth {
            va,
            rkey,
            len: if rng.u8(..16) == 0 { rng.u32(..) } else { len },
        };
        let syndrome = match rng.u8(..16) {
            0 => Syndrome::Nak(Nak::RemoteAccess),
            1 => Syndrome::Nak(Nak::PsnSequence),
            2 => Syndrome::RnrNak(RnrTimer::from_code(rng.u8(..))),
            _ => Syndrome::Ack(Credits::UNLIMITED),
        };
        let aeth = Aeth {
            syndrome,
            msn: rng.u32(..1 << 24),
        };
        let atomic = AtomicEth {
            va,
            rkey,
            swap_add: rng.u64(..),
            compare: rng.u64(..4),
        };
        match opcode.layout() {
            Layout::Reth => Extension::Reth(reth),
            Layout::RethImm => Extension::RethImm(reth, ImmDt(rng.u32(..))),
            Layout::Imm => Extension::Imm(ImmDt(rng.u32(..))),
            Layout::Ieth => Extension::Ieth(Ieth { rkey }),
            Layout::Aeth => Extension::Aeth(aeth),
            Layout::AethAtomic => Extension::AethAtomic(aeth, AtomicAckEth { original: rng.u64(..) }),
            Layout::Selective => {
                let mut received = [0; SelectiveEth::LEN];
                rng.fill(&mut received);
                Extension::Selective(SelectiveEth::from_bytes(&received))
            }
            Layout::Atomic => Extension::Atomic(atomic),
            Layout::FethReth => Extension::FethReth(
                Feth {
                    plt: rng.u8(..16),
                    sel: rng.u8(..4),
                },
                reth,
            ),
            Layout::Bare | Layout::Deth | Layout::DethImm => Extension::Bare,
        }
    }

    /// Updates the PSNs from the victim's packets.
    fn learn(&mut self, victim: &mut Victim) {
        for (_, bytes) in victim.sent.drain(..) {
            let packet = Packet::parse(&bytes).expect("the victim sends packets");
            match packet.extension.aeth().map(|aeth| aeth.syndrome) {
                Some(Syndrome::Ack(_)) => self.expected = packet.bth.psn.add(1),
                Some(_) => self.expected = packet.bth.psn,
                None if is_response(packet.bth.opcode) => {}
                None => self.requested = packet.bth.psn,
            }
        }
        victim.completions.clear();
        victim.events.clear();
    }

    /// Reconnects a queue pair that failed; returns whether it had.
    fn reconnect_failed(&mut self, victim: &mut Victim) -> bool {
        let failed = victim
            .endpoint
            .query_qp(victim.qpn)
            .is_some_and(|attributes| attributes.state == State::Err);
        if failed {
            victim.reconnect();
            *self = Self {
                expected: FIRST_PSN,
                requested: FIRST_PSN,
            };
        }
        failed
    }
}

fn is_response(opcode: Opcode) -> bool {
    use doorbell_roce_proto::wire::Operation::{Acknowledge, AtomicAcknowledge, ReadResponse};
    opcode.transport() == Transport::Rc && matches!(opcode.operation(), ReadResponse | Acknowledge | AtomicAcknowledge)
}

/// Changes one to three bits, mostly in the headers.
fn flip(rng: &mut Rng, bytes: &mut [u8]) {
    for _ in 0..rng.usize(1..=3) {
        let reach = if rng.u8(..4) == 0 {
            bytes.len()
        } else {
            bytes.len().min(40)
        };
        if reach > 0 {
            bytes[rng.usize(..reach)] ^= 1 << rng.u8(..8);
        }
    }
}

/// The victim with its bystanders, and their honest peer.
struct Setting {
    victim: Victim,
    bystanders: [Qpn; BYSTANDERS],
    region: RegionId,
    peer: Endpoint,
    peer_memory: SimMemory,
    peer_region: RegionId,
    buf: Vec<u8>,
}

const NEAR_BASE: u64 = 0x2000_0000;
const FAR_BASE: u64 = 0x3000_0000;

impl Setting {
    /// Three conversations, with one packet sent in each.
    fn new(seed: u64) -> Self {
        let mut victim = Victim::new(seed);
        let mut peer = Endpoint::new(seed + 77);
        let mut peer_memory = SimMemory::default();
        let rights = Rights {
            local_write: true,
            read: true,
            write: true,
            atomic: true,
        };
        let region = victim.memory.register(HONEST_PD, NEAR_BASE, rights, vec![1; 3 * LEN]);
        let peer_region = peer_memory.register(HONEST_PD, FAR_BASE, rights, vec![2; 2 * LEN]);
        let bystanders = [0; BYSTANDERS].map(|_| victim.endpoint.create_qp(init(HONEST_PD)));
        for near in bystanders {
            let far = peer.create_qp(init(HONEST_PD));
            for modify in connect(VICTIM, HONEST, far, 4) {
                victim.endpoint.modify_qp(victim.now, near, &modify).unwrap();
            }
            for modify in connect(HONEST, VICTIM, near, 4) {
                peer.modify_qp(victim.now, far, &modify).unwrap();
            }
        }
        let mut setting = Self {
            victim,
            bystanders,
            region,
            peer,
            peer_memory,
            peer_region,
            buf: vec![0; 4096 + 128],
        };
        setting.begin();
        setting
    }

    fn begin(&mut self) {
        let near = Sge {
            addr: NEAR_BASE,
            len: LEN as u32,
            lkey: self.victim.memory.lkey(self.region),
        };
        let far = Sge {
            addr: FAR_BASE,
            len: LEN as u32,
            lkey: self.peer_memory.lkey(self.peer_region),
        };
        let rkey = self.peer_memory.rkey(self.peer_region);
        let now = self.victim.now;
        let [incoming, outgoing, reading] = self.bystanders;
        let far_of = |qpn| {
            self.victim
                .endpoint
                .query_qp(qpn)
                .and_then(|a| a.set.dest_qpn)
                .expect("it is connected")
        };
        let (far_incoming, far_outgoing) = (far_of(incoming), far_of(outgoing));
        let (near, far) = ([near], [far]);
        let third = |first: &[Sge; 1], n: u64| {
            [Sge {
                addr: first[0].addr + n * LEN as u64,
                ..first[0]
            }]
        };
        self.victim
            .endpoint
            .post_receive(incoming, &ReceiveRequest { wr_id: 0, sges: &near })
            .unwrap();
        self.peer
            .post_receive(far_outgoing, &ReceiveRequest { wr_id: 0, sges: &far })
            .unwrap();
        let send = Operation::Send { imm: Some(9) };
        self.peer
            .post_send(now, far_incoming, &request(send, &third(&far, 1)))
            .unwrap();
        self.victim
            .endpoint
            .post_send(now, outgoing, &request(send, &third(&near, 2)))
            .unwrap();
        let read = Operation::Read {
            addr: FAR_BASE + LEN as u64,
            rkey,
        };
        self.victim
            .endpoint
            .post_send(now, reading, &request(read, &third(&near, 1)))
            .unwrap();
        // Only the peer's first packet is delivered; the rest waits for the end.
        let transmit = self
            .peer
            .poll_transmit(now, &mut self.peer_memory, &mut self.buf)
            .expect("it has a message to send");
        let packet = &mut self.buf[..transmit.len];
        seal(packet, HONEST, VICTIM, 0);
        let packet = packet.to_vec();
        self.victim.deliver(HONEST, VICTIM, 0, &packet);
        self.victim.drain(1000);
        self.deliver_to_peer();
    }

    fn attributes(&self) -> [Option<Attributes>; BYSTANDERS] {
        self.bystanders.map(|qpn| self.victim.endpoint.query_qp(qpn))
    }

    fn deliver_to_peer(&mut self) -> bool {
        let mut any = false;
        for (dst, mut bytes) in self.victim.sent.drain(..).filter(|(dst, _)| *dst == HONEST) {
            seal(&mut bytes, VICTIM, HONEST, 0);
            let datagram = Datagram {
                src: VICTIM,
                dst,
                src_port: UDP_PORT,
                dst_port: UDP_PORT,
                ident: Ident::Known(0),
                traffic_class: 0,
                payload: &bytes,
            };
            self.peer
                .handle_datagram(self.victim.now, &datagram, &mut self.peer_memory);
            any = true;
        }
        any
    }

    fn finish(&mut self) {
        self.victim.endpoint.destroy_qp(self.victim.qpn);
        let mut done: Vec<Completion> = Vec::new();
        for _ in 0..200 {
            let moved = self.exchange();
            done.extend(
                self.victim
                    .completions
                    .drain(..)
                    .map(|(_, c)| c)
                    .filter(|c| self.bystanders.contains(&c.qpn)),
            );
            if !moved {
                let due = [self.victim.endpoint.poll_timeout(), self.peer.poll_timeout()]
                    .into_iter()
                    .flatten()
                    .min();
                let Some(due) = due else { break };
                self.victim.now = due;
                self.victim.endpoint.handle_timeout(due);
                self.peer.handle_timeout(due);
            }
        }
        let [incoming, outgoing, reading] = self.bystanders;
        for (qpn, opcode) in [
            (incoming, CompletionOpcode::Receive),
            (outgoing, CompletionOpcode::Send),
            (reading, CompletionOpcode::Read),
        ] {
            let found: Vec<_> = done
                .iter()
                .filter(|c| c.qpn == qpn)
                .map(|c| (c.status, c.opcode))
                .collect();
            assert_eq!(
                found,
                [(Status::Success, opcode)],
                "a bystander's conversation did not end well"
            );
        }
        let near = &self.victim.memory.region(self.region).bytes;
        let far = &self.peer_memory.region(self.peer_region).bytes;
        let filled = |bytes: &[u8], value| bytes.iter().all(|&byte| byte == value);
        assert!(filled(&near[..2 * LEN], 2), "what the bystanders received and read");
        assert!(
            filled(&near[2 * LEN..], 1) && filled(&far[LEN..], 2),
            "what they sent, and what was read"
        );
        assert!(filled(&far[..LEN], 1), "what the peer received");
    }

    /// Delivers packets both ways until there are none; returns whether there were any.
    fn exchange(&mut self) -> bool {
        let mut any = false;
        loop {
            self.victim.drain(1000);
            let mut moved = self.deliver_to_peer();
            while let Some(transmit) = self
                .peer
                .poll_transmit(self.victim.now, &mut self.peer_memory, &mut self.buf)
            {
                let mut bytes = self.buf[..transmit.len].to_vec();
                seal(&mut bytes, HONEST, VICTIM, 0);
                self.victim.deliver(HONEST, VICTIM, 0, &bytes);
                moved = true;
            }
            any |= moved;
            if !moved {
                return any;
            }
        }
    }
}

fn request(operation: Operation, sges: &[Sge]) -> SendRequest<'_> {
    SendRequest {
        wr_id: 0,
        operation,
        payload: Payload::Gather(sges),
        signaled: true,
        fence: false,
        solicited: false,
    }
}
