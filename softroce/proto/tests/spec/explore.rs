//! All schedules of a scenario: what the network does with each packet, and when timers expire.

use std::collections::{HashMap, VecDeque};
use std::fmt::{self, Write};
use std::hash::{DefaultHasher, Hash, Hasher};

use doorbell_roce_proto::memory::{AtomicOp, Sge};
use doorbell_roce_proto::qp::State;
use doorbell_roce_proto::wire::{Extension, Opcode, Syndrome};
use doorbell_roce_proto::work::{Operation, SendRequest};

use crate::model::{ADDEND, Op, Spec, bytes_of, word_of};
use crate::util::memory::rkey;
use crate::util::{Pair, RECV_CQ, SEND_CQ, Setup, atomic_write_to, read_from, request, send, success, write_operation};

const REQUESTER: usize = 0;
const RESPONDER: usize = 1;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Event {
    /// The first packet from this end arrives.
    Arrives(usize),
    /// Faults: it is lost; it arrives, and once more after all others; the second overtakes it.
    Lost(usize),
    Twice(usize),
    Overtaken(usize),
    /// The next timer expires; a fault while packets are in flight.
    Timer,
    /// A receive is posted.
    Receive,
    /// The responder sends what it has.
    Flush,
}

#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) ops: Vec<Op>,
    pub(crate) window: u32,
    pub(crate) max_reads: u8,
    /// How many faults happen at most.
    pub(crate) faults: usize,
    /// Receives are posted at any time, as opposed to before all.
    pub(crate) late_receives: bool,
    /// The responder sends at any time, so that ACKs coalesce, as opposed to after each packet.
    pub(crate) lazy: bool,
}

/// The PSNs wrap inside the first messages.
const FIRST_PSNS: [u32; 2] = [0x00ff_fffe, 0x00ff_ffff];

/// One schedule so far: the engines, the specification, and the network.
struct Run {
    pair: Pair,
    spec: Spec,
    scenario: Scenario,
    sges: Sges,
    /// Numbers of packets in flight from each end, in `pair.log`.
    flight: [VecDeque<usize>; 2],
    faults_left: usize,
    /// Timers that expired while a receive was missing.
    unready: usize,
}

struct Sges {
    local: Vec<Sge>,
    /// What each request sends or reads.
    bytes: Vec<Vec<u8>>,
    targets: Vec<Sge>,
    inboxes: Vec<Sge>,
    word: Sge,
}

impl Sges {
    fn new(pair: &mut Pair, spec: &Spec, ops: &[Op]) -> Self {
        let local = |(index, op): (usize, &Op)| {
            let filled = if op.is_read_or_atomic() {
                vec![0; op.len()]
            } else {
                bytes_of(index, *op)
            };
            pair.region(REQUESTER, filled)
        };
        Self {
            local: ops.iter().enumerate().map(local).collect(),
            bytes: ops.iter().enumerate().map(|(index, op)| bytes_of(index, *op)).collect(),
            targets: spec
                .targets
                .iter()
                .map(|bytes| pair.region(RESPONDER, bytes.clone()))
                .collect(),
            inboxes: spec
                .inboxes
                .iter()
                .map(|bytes| pair.region(RESPONDER, bytes.clone()))
                .collect(),
            word: pair.region(RESPONDER, vec![0; 8]),
        }
    }
}

impl Run {
    fn new(scenario: &Scenario) -> Self {
        let (window, max_reads) = (scenario.window, scenario.max_reads);
        let mut pair = Pair::connected(Setup {
            window,
            psns: FIRST_PSNS,
            rd_atomic: max_reads,
            dest_rd_atomic: max_reads,
            max_wr: 4,
            max_inline: 0,
            ..Setup::default()
        });
        let spec = Spec::new(&scenario.ops, FIRST_PSNS[0], window as usize, max_reads.into());
        let sges = Sges::new(&mut pair, &spec, &scenario.ops);
        let mut run = Self {
            pair,
            spec,
            scenario: scenario.clone(),
            sges,
            flight: Default::default(),
            faults_left: scenario.faults,
            unready: 0,
        };
        if !scenario.late_receives {
            (0..run.spec.inboxes.len()).for_each(|_| run.post_receive());
        }
        for index in 0..scenario.ops.len() {
            run.post(index);
        }
        run.flush(REQUESTER);
        run
    }

    fn post(&mut self, index: usize) {
        let (local, target) = ([self.sges.local[index]], self.sges.targets[index]);
        let wr_id = index as u64;
        let request: SendRequest<'_> = match self.scenario.ops[index] {
            Op::Send(_) => send(wr_id, &local),
            Op::Write(_) => request(wr_id, write_operation(target, None), &local),
            Op::WriteImm(_) => request(wr_id, write_operation(target, Some(7)), &local),
            Op::Read(_) => read_from(wr_id, &local, target),
            Op::FetchAdd => {
                let (addr, rkey) = (self.sges.word.addr, rkey(self.sges.word));
                let op = AtomicOp::FetchAdd { add: ADDEND };
                request(wr_id, Operation::Atomic { addr, rkey, op }, &local)
            }
            Op::AtomicWrite => atomic_write_to(wr_id, self.sges.word, word_of(index).to_ne_bytes()),
        };
        self.pair.post(REQUESTER, &request);
    }

    fn post_receive(&mut self) {
        let inbox = self.sges.inboxes[self.spec.posted];
        self.pair.receive(RESPONDER, self.spec.posted as u64, &[inbox]);
        self.spec.posted += 1;
    }

    /// An end sends all that it may.
    fn flush(&mut self, end: usize) {
        while let Some(sent) = self.pair.transmit_one(end) {
            let packet = sent.packet();
            if end == REQUESTER {
                self.spec.sends(packet.bth.psn);
            } else {
                self.spec.responds(packet.bth.psn, is_nak(&packet.extension));
            }
            self.flight[end].push_back(self.pair.log.len() - 1);
        }
    }

    fn options(&self) -> Vec<Event> {
        let mut options = Vec::new();
        for end in [REQUESTER, RESPONDER] {
            if !self.flight[end].is_empty() {
                options.push(Event::Arrives(end));
            }
        }
        let may_flush = self.pair.nodes[RESPONDER].endpoint.has_more();
        if may_flush {
            options.push(Event::Flush);
        }
        let is_quiet = options.is_empty();
        let receive_missing = self.spec.posted < self.spec.inboxes.len();
        let timer = self
            .pair
            .nodes
            .iter()
            .any(|node| node.endpoint.poll_timeout().is_some());
        if receive_missing {
            options.push(Event::Receive);
        }
        let may_expire = if is_quiet {
            !receive_missing || self.unready == 0
        } else {
            self.faults_left > 0
        };
        if timer && may_expire {
            options.push(Event::Timer);
        }
        if self.faults_left > 0 {
            for end in [REQUESTER, RESPONDER] {
                let faults = [Event::Lost(end), Event::Twice(end), Event::Overtaken(end)];
                options
                    .extend(&faults[..(self.flight[end].len() + 1).min(3) * usize::from(!self.flight[end].is_empty())]);
            }
        }
        options
    }

    fn arrives(&mut self, number: usize) {
        let sent = self.pair.log[number].clone();
        let to = 1 - sent.from;
        let packet = sent.packet();
        if to == RESPONDER {
            let read = match (packet.bth.opcode, packet.extension) {
                (Opcode::RcReadRequest, Extension::Reth(reth)) => reth.len as usize,
                _ => 0,
            };
            self.spec.request_arrives(packet.bth.psn, read);
        } else {
            self.spec.response_arrives(packet.bth.psn, is_nak(&packet.extension));
        }
        self.pair.deliver(&sent);
        if to == REQUESTER || !self.scenario.lazy {
            self.flush(to);
        }
    }

    fn apply(&mut self, event: Event) {
        let is_quiet = self.flight.iter().all(VecDeque::is_empty);
        match event {
            Event::Arrives(end) => {
                let number = self.flight[end].pop_front().unwrap();
                self.arrives(number);
            }
            Event::Lost(end) => drop(self.flight[end].pop_front()),
            Event::Twice(end) => {
                let number = self.flight[end].pop_front().unwrap();
                self.flight[end].push_back(number);
                self.arrives(number);
            }
            Event::Overtaken(end) => {
                let number = self.flight[end].remove(1).unwrap();
                self.arrives(number);
            }
            Event::Timer => {
                self.pair.now = self
                    .pair
                    .nodes
                    .iter()
                    .filter_map(|node| node.endpoint.poll_timeout())
                    .min()
                    .unwrap();
                let now = self.pair.now;
                self.unready += usize::from(self.spec.posted < self.spec.inboxes.len());
                for end in [REQUESTER, RESPONDER] {
                    self.pair.nodes[end].endpoint.handle_timeout(now);
                    self.flush(end);
                }
            }
            Event::Receive => self.post_receive(),
            Event::Flush => self.flush(RESPONDER),
        }
        let is_fault = matches!(event, Event::Lost(_) | Event::Twice(_) | Event::Overtaken(_));
        self.faults_left -= usize::from(is_fault || event == Event::Timer && !is_quiet);
    }

    /// The engines have done what the specification says, no more and no less.
    fn check(&self) {
        let (pair, spec, sges) = (&self.pair, &self.spec, &self.sges);
        assert_eq!(pair.expected_psn(RESPONDER), spec.psn(spec.expected).get());
        assert_eq!(pair.completed(RESPONDER, RECV_CQ), success(0..spec.received as u64));
        for (sge, bytes) in sges
            .targets
            .iter()
            .zip(&spec.targets)
            .chain(sges.inboxes.iter().zip(&spec.inboxes))
        {
            assert_eq!(pair.bytes(RESPONDER, *sge), bytes);
        }
        assert_eq!(pair.bytes(RESPONDER, sges.word), spec.word.to_ne_bytes());
        let completed = pair.completed(REQUESTER, SEND_CQ);
        assert_eq!(completed, success(0..completed.len() as u64), "each once, in order");
        spec.completes(completed.len());
        for (index, op) in self.scenario.ops.iter().enumerate() {
            let found = pair.bytes(REQUESTER, sges.local[index]);
            match op {
                Op::Read(_) | Op::FetchAdd if index >= completed.len() => {}
                Op::AtomicWrite => assert!(found.iter().all(|byte| *byte == 0)),
                Op::FetchAdd => assert_eq!(found, spec.originals[index].unwrap().to_ne_bytes()),
                _ => assert_eq!(found, sges.bytes[index]),
            }
        }
        assert!(
            pair.nodes.iter().all(|node| node.events.len() <= 1),
            "at most that it is established"
        );
    }

    /// Nothing more can happen: everything is done, and nothing is left.
    fn check_end(&mut self) {
        let (pair, count) = (&mut self.pair, self.scenario.ops.len() as u64);
        assert_eq!(pair.completed(REQUESTER, SEND_CQ), success(0..count));
        assert_eq!(self.spec.expected, self.spec.packets());
        for end in [REQUESTER, RESPONDER] {
            assert!(!pair.nodes[end].endpoint.has_more());
            assert_eq!(pair.nodes[end].endpoint.poll_timeout(), None);
            let before = pair.nodes[end].completions.len();
            pair.enter(end, State::Err);
            crate::util::drain(&mut pair.nodes[end]);
            assert_eq!(
                pair.nodes[end].completions.len(),
                before,
                "no request or receive is left"
            );
        }
    }

    /// The whole state: queue pairs, specification with the responder's memory, network.
    fn key(&self) -> u64 {
        let (mut key, mut text) = (DefaultHasher::new(), QueuePairText(String::new()));
        for node in &self.pair.nodes {
            // Fails where the queue pairs end.
            let _ = write!(text, "{:?}", node.endpoint);
            (node.endpoint.has_more(), node.endpoint.poll_timeout()).hash(&mut key);
        }
        text.0.hash(&mut key);
        for flight in &self.flight {
            flight.len().hash(&mut key);
            flight
                .iter()
                .for_each(|&number| self.pair.log[number].bytes.hash(&mut key));
        }
        for sge in &self.sges.local {
            self.pair.bytes(REQUESTER, *sge).hash(&mut key);
        }
        (&self.spec, self.faults_left, self.unready, self.pair.now).hash(&mut key);
        key.finish()
    }
}

/// What an endpoint prints, up to the end of its queue pairs: the rest follows from them, but for
/// what is hashed besides.
struct QueuePairText(String);

impl Write for QueuePairText {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if text == "page_index" {
            return Err(fmt::Error);
        }
        self.0.write_str(text)
    }
}

fn is_nak(extension: &Extension) -> bool {
    extension
        .aeth()
        .is_some_and(|aeth| !matches!(aeth.syndrome, Syndrome::Ack(_)))
}

/// Names the schedule of a failure.
struct Path<'a>(&'a Scenario, Vec<Event>);

impl Drop for Path<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{:?}: {:?}", self.0, self.1);
        }
    }
}

/// Whether a state was left for good, by its key: until then it is on the path.
type Seen = HashMap<u64, bool>;

/// Runs every schedule of a scenario; returns the number of states and of ends.
pub(crate) fn explore(scenario: &Scenario) -> (usize, usize) {
    let (mut seen, mut ends) = (Seen::new(), 0);
    let mut path = Path(scenario, Vec::new());
    visit(Run::new(scenario), &mut path, &mut seen, &mut ends);
    (seen.len(), ends)
}

fn visit(mut run: Run, path: &mut Path<'_>, seen: &mut Seen, ends: &mut usize) {
    let depth = path.1.len();
    let mut keys = Vec::new();
    loop {
        let key = run.key();
        if let Some(&left) = seen.get(&key) {
            assert!(left, "livelock: the state recurs");
            break;
        }
        seen.insert(key, false);
        keys.push(key);
        run.check();
        let options = run.options();
        let Some((first, others)) = options.split_first() else {
            run.check_end();
            *ends += 1;
            break;
        };
        for other in others {
            // An engine cannot be copied: the schedule is repeated.
            let mut again = Run::new(path.0);
            path.1.push(*other);
            path.1.iter().for_each(|event| again.apply(*event));
            visit(again, path, seen, ends);
            path.1.pop();
        }
        path.1.push(*first);
        run.apply(*first);
    }
    for key in keys {
        seen.insert(key, true);
    }
    path.1.truncate(depth);
}
