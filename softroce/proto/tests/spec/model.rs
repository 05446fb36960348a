//! The specification of a reliable connection in one direction (IBTA vol 1, 9.7): which packet the
//! responder executes and with what effect, what it may acknowledge, and what may complete.

use doorbell_roce_proto::Psn;

use crate::util::pattern;

/// Payload of a packet.
pub(crate) const MTU: usize = 256;
/// Bytes of a receive.
pub(crate) const INBOX: usize = 3 * MTU;
/// What a FETCH ADD adds: results show how often and in what order it was executed.
pub(crate) const ADDEND: u64 = 1 << 32 | 1;

/// A request of one to three packets; the peer's memory is a range of its own for each.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Op {
    Send(usize),
    Write(usize),
    WriteImm(usize),
    Read(usize),
    FetchAdd,
    /// Of the word that the FETCH ADDs are on.
    AtomicWrite,
}

impl Op {
    /// PSNs that it takes.
    pub(crate) fn packets(self) -> usize {
        match self {
            Self::Send(packets) | Self::Write(packets) | Self::WriteImm(packets) | Self::Read(packets) => packets,
            Self::FetchAdd | Self::AtomicWrite => 1,
        }
    }

    /// The last packet is not full.
    pub(crate) fn len(self) -> usize {
        match self {
            Self::FetchAdd | Self::AtomicWrite => 8,
            _ => self.packets() * MTU - 100,
        }
    }

    /// Whether it is answered by a READ response or an atomic ACK, in place of an ACK.
    pub(crate) fn is_read_or_atomic(self) -> bool {
        matches!(self, Self::Read(_) | Self::FetchAdd | Self::AtomicWrite)
    }

    pub(crate) fn receives(self) -> bool {
        matches!(self, Self::Send(_) | Self::WriteImm(_))
    }
}

/// What the requester sends as request `index`, or the responder's memory for a READ has.
pub(crate) fn bytes_of(index: usize, op: Op) -> Vec<u8> {
    pattern(op.len(), index as u64 + 1)
}

/// What an atomic WRITE stores as request `index`.
pub(crate) fn word_of(index: usize) -> u64 {
    u64::from_ne_bytes(pattern(8, index as u64 + 1).try_into().unwrap())
}

/// Both ends. Packets are numbered from 0 in the order of the requests.
#[derive(Hash, Debug)]
pub(crate) struct Spec {
    ops: Vec<Op>,
    first_psn: Psn,
    window: usize,
    max_reads: usize,
    /// Packets executed by the responder: the next one that it executes.
    pub(crate) expected: usize,
    /// Receives posted, and consumed.
    pub(crate) posted: usize,
    pub(crate) received: usize,
    /// The responder's memory: for each request, each receive, and the word of the atomics.
    pub(crate) targets: Vec<Vec<u8>>,
    pub(crate) inboxes: Vec<Vec<u8>>,
    pub(crate) word: u64,
    /// The original value for each atomic, by request.
    pub(crate) originals: Vec<Option<u64>>,
    /// Packets that the responses so far permit the requester to take as acknowledged.
    pub(crate) acked: usize,
}

impl Spec {
    pub(crate) fn new(ops: &[Op], first_psn: u32, window: usize, max_reads: usize) -> Self {
        let target = |(index, op): (usize, &Op)| match op {
            Op::Read(_) => bytes_of(index, *op),
            _ => vec![0; op.len()],
        };
        Self {
            targets: ops.iter().enumerate().map(target).collect(),
            inboxes: vec![vec![0; INBOX]; ops.iter().filter(|op| op.receives()).count()],
            originals: vec![None; ops.len()],
            ops: ops.to_vec(),
            first_psn: Psn::new(first_psn),
            window,
            max_reads,
            expected: 0,
            posted: 0,
            received: 0,
            word: 0,
            acked: 0,
        }
    }

    fn start(&self, request: usize) -> usize {
        self.ops[..request].iter().map(|op| op.packets()).sum()
    }

    pub(crate) fn end(&self, request: usize) -> usize {
        self.start(request + 1)
    }

    pub(crate) fn packets(&self) -> usize {
        self.start(self.ops.len())
    }

    pub(crate) fn psn(&self, packet: usize) -> Psn {
        self.first_psn.add(packet as u32)
    }

    fn packet(&self, psn: Psn) -> usize {
        let packet = usize::try_from(psn.since(self.first_psn)).expect("no PSN before the first");
        assert!(packet < self.packets(), "{psn:?} is of no request");
        packet
    }

    fn request(&self, packet: usize) -> usize {
        (0..self.ops.len()).find(|&request| packet < self.end(request)).unwrap()
    }

    /// The requester sends a packet: within its window, and with few enough READs before it.
    pub(crate) fn sends(&self, psn: Psn) {
        let packet = self.packet(psn);
        assert!(
            packet < self.acked + self.window,
            "packet {packet} is beyond the window: {self:?}"
        );
        let outstanding = (0..=self.request(packet))
            .filter(|&request| self.ops[request].is_read_or_atomic() && self.end(request) > self.acked);
        let counted = self.ops[self.request(packet)].is_read_or_atomic();
        assert!(
            !counted || outstanding.count() <= self.max_reads,
            "too many READs: {self:?}"
        );
    }

    /// A request reaches the responder: it is executed if it is the next one, and can be. A READ
    /// request is for `read` bytes, in as many packets as those take.
    pub(crate) fn request_arrives(&mut self, psn: Psn, read: usize) {
        let packet = self.packet(psn);
        if packet != self.expected {
            return;
        }
        let request = self.request(packet);
        let (op, part) = (self.ops[request], packet - self.start(request));
        let is_last = packet + 1 == self.end(request);
        let needs_receive = matches!(op, Op::Send(_)) || is_last && op.receives();
        if needs_receive && self.received == self.posted {
            return;
        }
        let bytes = bytes_of(request, op);
        let range = part * MTU..bytes.len().min((part + 1) * MTU);
        match op {
            Op::Send(_) => self.inboxes[self.received][range.clone()].copy_from_slice(&bytes[range]),
            Op::Write(_) | Op::WriteImm(_) => self.targets[request][range.clone()].copy_from_slice(&bytes[range]),
            Op::Read(_) => {}
            Op::FetchAdd => {
                self.originals[request] = Some(self.word);
                self.word = self.word.wrapping_add(ADDEND);
            }
            Op::AtomicWrite => self.word = word_of(request),
        }
        self.received += usize::from(is_last && op.receives());
        self.expected = packet + read.div_ceil(MTU).max(1);
        assert!(self.expected <= self.end(request), "a READ of more than its request");
    }

    /// The responder sends a response for this PSN: an ACK or data of what is executed, or a NAK of
    /// what came next when it was queued.
    pub(crate) fn responds(&self, psn: Psn, is_nak: bool) {
        if is_nak {
            assert!(
                psn.since(self.psn(self.expected)) <= 0,
                "{psn:?} was never the next: {self:?}"
            );
        } else {
            assert!(self.packet(psn) < self.expected, "{psn:?} is not executed: {self:?}");
        }
    }

    /// A response reaches the requester.
    pub(crate) fn response_arrives(&mut self, psn: Psn, is_nak: bool) {
        let packet = usize::try_from(psn.since(self.first_psn)).expect("no PSN before the first");
        self.acked = self.acked.max(packet + usize::from(!is_nak));
    }

    /// The requester has completed this many requests.
    pub(crate) fn completes(&self, requests: usize) {
        if let Some(last) = requests.checked_sub(1) {
            assert!(
                self.end(last) <= self.acked,
                "request {last} is not acknowledged: {self:?}"
            );
        }
    }
}
