//! A member's connection to one peer. A SEND and a WRITE with immediate are verified by the
//! receiver, a WRITE by the READ behind it, a fetch-and-add by the value it returns. The slot of a
//! WRITE with immediate is reused after the peer has reported, by an empty SEND, its check.

use std::collections::VecDeque;

use anyhow::{Context as _, Result, bail, ensure};
use doorbell_tests::attributes::{decode, encode};
use doorbell_verbs::{
    AllAccess, AtomicWord, Buffer, Buffers, Local, Memory, PeerAll, PreparedQueuePair, ProtectionDomain, QueuePair,
    ReliableConnection, Remote, Success,
};

use crate::{Pattern, Plan};

const MAX: usize = 256 << 10;
const MAX_SEND: usize = 32 << 10;
/// Slots for WRITEs that are read back, and one for WRITEs with immediate.
const SLOTS: usize = 2;
const SENDS: usize = 4;
/// For the peer's SENDs, a WRITE with immediate, and the empty SENDs that answer ours.
const RECEIVES: usize = 8;
pub(crate) const DEPTH: u32 = 32;
pub(crate) const ENTRIES: u32 = DEPTH + RECEIVES as u32;
/// The memory exposed to a peer: the slots, and a word for atomics.
const INBOX: usize = (SLOTS + 1) * MAX + 8;

#[derive(Debug)]
enum InFlight {
    /// A WRITE, verified by the READ behind it.
    Write,
    /// The READ of written data.
    Read {
        slot: usize,
        number: u64,
        len: usize,
    },
    WriteImm,
    Send {
        len: usize,
    },
    /// The empty SEND that frees the peer's slot.
    Free,
    /// A fetch-and-add, and the value it should return.
    Add {
        found: u64,
    },
}

/// The failure that ended a link.
#[derive(Debug)]
pub(crate) struct Lost(pub(crate) doorbell_verbs::CompletionError);

/// Memory that other processes can map, or heap memory: they use different copy modes.
fn memory(len: usize, index: usize) -> Result<Memory> {
    Ok(if index.is_multiple_of(2) {
        Memory::shared(len)?
    } else {
        vec![0; len].into()
    })
}

#[derive(Debug)]
pub(crate) struct Unconnected {
    prepared: PreparedQueuePair<ReliableConnection>,
    inbox: Buffer<PeerAll>,
}

#[derive(Debug)]
// fields: per-operation state of one test link
pub(crate) struct Link {
    index: usize,
    peer: usize,
    seed: u64,
    qp: QueuePair,
    inbox: Buffer<PeerAll>,
    theirs: Remote<AllAccess>,
    in_flight: VecDeque<InFlight>,
    /// Slots of the peer's that were checked, to be freed once the send queue has room: several
    /// receives may be polled before the completions of earlier answers.
    frees_owed: usize,
    /// For each slot: the WRITE's source, and the READ's destination.
    slots: [Option<(Buffer<Local>, Buffer<Local>)>; SLOTS],
    reading: [Option<Buffer<Local>>; SLOTS],
    immediate: Option<Buffer<Local>>,
    /// The peer has not checked the slot yet.
    unchecked: bool,
    sends: Vec<Buffer<Local>>,
    word: Option<AtomicWord>,
    /// Messages of each kind so far: written, written with immediate, sent; and received likewise.
    numbers: [u64; 3],
    received: [u64; 2],
    added: u64,
    /// Bytes verified.
    pub(crate) moved: u64,
    /// Requests completed.
    pub(crate) operations: u64,
    rng: u64,
}

impl Unconnected {
    pub(crate) fn new(
        pd: &ProtectionDomain,
        prepared: PreparedQueuePair<ReliableConnection>,
        peer: usize,
    ) -> Result<Self> {
        let inbox = pd.register(memory(INBOX, peer)?, PeerAll)?;
        Ok(Self { prepared, inbox })
    }

    pub(crate) fn endpoint_info(&self) -> String {
        encode(&self.prepared.endpoint(), &self.inbox.remote())
    }

    pub(crate) fn connect(
        self,
        plan: &Plan,
        pd: &ProtectionDomain,
        index: usize,
        peer: usize,
        endpoint_info: &str,
    ) -> Result<Link> {
        let (endpoint, theirs) = decode(endpoint_info)?;
        let mut qp = self.prepared.connect(&endpoint)?;
        let register = |len: usize| pd.register(vec![0; len], Local);
        for _ in 0..RECEIVES {
            qp.receive(register(MAX_SEND)?)?;
        }
        let mut slots = [None, None];
        for (number, slot) in slots.iter_mut().enumerate() {
            let from = pd.register(memory(MAX, number)?, Local)?;
            *slot = Some((from, register(MAX)?));
        }
        let word = register(8)?
            .into_word()
            .map_err(|_| anyhow::anyhow!("eight bytes of the heap are not aligned"))?;
        Ok(Link {
            index,
            peer,
            seed: plan.seed,
            qp,
            inbox: self.inbox,
            theirs,
            in_flight: VecDeque::new(),
            frees_owed: 0,
            slots,
            reading: [None, None],
            immediate: Some(register(MAX)?),
            unchecked: false,
            sends: (0..SENDS).map(|_| register(MAX_SEND)).collect::<Result<_, _>>()?,
            word: Some(word),
            numbers: [0; 3],
            received: [0; 2],
            added: 0,
            moved: 0,
            operations: 0,
            rng: Pattern::new(plan.seed, index, peer, u64::MAX).0 | 1,
        })
    }
}

impl Link {
    pub(crate) fn is_quiet(&self) -> bool {
        self.in_flight.is_empty() && self.frees_owed == 0
    }

    /// Posts as much as buffers and free slots allow. False when nothing was posted.
    pub(crate) fn fill(&mut self) -> Result<bool> {
        let mut posted = self.post_frees()?;
        // Keeps slots for answers to the peer.
        while self.qp.free_send_slots() > 4 && self.post_some()? {
            posted = true;
        }
        Ok(posted)
    }

    fn post_frees(&mut self) -> Result<bool> {
        let frees = self.frees_owed.min(self.qp.free_send_slots() as usize);
        for _ in 0..frees {
            self.qp.post(|batch| drop(batch.send_inline(&[]).imm(0).signaled()))?;
            self.in_flight.push_back(InFlight::Free);
        }
        self.frees_owed -= frees;
        Ok(frees > 0)
    }

    /// Posts one request of a random kind; false when its buffers are in flight.
    fn post_some(&mut self) -> Result<bool> {
        match self.random() % 8 {
            0..3 => self.post_written_and_read(),
            3 | 4 => self.post_with_immediate(),
            5 | 6 => self.post_send(),
            _ => self.add(),
        }
    }

    fn post_written_and_read(&mut self) -> Result<bool> {
        let Some(slot) = self.slots.iter().position(Option::is_some) else {
            return Ok(false);
        };
        let len = self.random_len(MAX);
        let Some((mut from, into)) = self.slots[slot].take() else {
            return Ok(false);
        };
        let number = self.count(0);
        self.pattern(number << 2).fill(&mut from[..len]);
        let at = self.slot(slot, len)?;
        self.qp.post(|batch| {
            batch.write(from.part(..len), at).signaled();
            batch.read(into.part(..len), at).signaled();
        })?;
        self.in_flight
            .extend([InFlight::Write, InFlight::Read { slot, number, len }]);
        Ok(true)
    }

    fn post_with_immediate(&mut self) -> Result<bool> {
        if self.unchecked {
            return Ok(false);
        }
        let Some(mut from) = self.immediate.take() else {
            return Ok(false);
        };
        let len = self.random_len(MAX);
        let number = self.count(1);
        self.pattern(number << 2 | 1).fill(&mut from[..len]);
        let at = self.slot(SLOTS, len)?;
        self.qp
            .post(|batch| drop(batch.write(from.part(..len), at).imm(number as u32).signaled()))?;
        self.unchecked = true;
        self.moved += len as u64;
        self.in_flight.push_back(InFlight::WriteImm);
        Ok(true)
    }

    fn post_send(&mut self) -> Result<bool> {
        let Some(mut from) = self.sends.pop() else {
            return Ok(false);
        };
        let len = self.random_len(MAX_SEND);
        let number = self.count(2);
        self.pattern(number << 2 | 2).fill(&mut from[..len]);
        self.qp.post(|batch| drop(batch.send(from.part(..len)).signaled()))?;
        self.in_flight.push_back(InFlight::Send { len });
        Ok(true)
    }

    /// Increments the peer's word; also probes whether the peer is alive while idle.
    pub(crate) fn add(&mut self) -> Result<bool> {
        let Some(word) = self.word.take() else {
            return Ok(false);
        };
        let at = self.theirs.word((INBOX - 8) as u64).context("the peer has no word")?;
        self.qp.post(|batch| drop(batch.fetch_add(word, at, 1).signaled()))?;
        self.in_flight.push_back(InFlight::Add { found: self.added });
        self.added += 1;
        Ok(true)
    }

    pub(crate) fn sent(&mut self, mut buffers: Buffers) -> Result<()> {
        let request = self.in_flight.pop_front().context("a completion of nothing")?;
        self.operations += 1;
        let peer = self.peer;
        if let InFlight::Add { found } = request {
            let word = buffers.take::<Local>().and_then(|buffer| buffer.into_word().ok());
            let word = word.context("an atomic without its word")?;
            ensure!(
                word.get() == found,
                "member {peer}'s word was {} and not {found}",
                word.get()
            );
            self.moved += 8;
            self.word = Some(word);
            return Ok(());
        }
        let mut buffer = || buffers.take::<Local>().context("a completion without its buffer");
        match request {
            InFlight::Write => {
                let slot = self
                    .reading
                    .iter()
                    .position(Option::is_none)
                    .context("a WRITE too many")?;
                self.reading[slot] = Some(buffer()?);
            }
            InFlight::Read { slot, number, len } => {
                let into = buffer()?;
                if let Some(wrong) = self.pattern(number << 2).find_wrong(&into[..len]) {
                    bail!(
                        "what was written to member {peer} and read back, message {number} of {len} bytes, is wrong from byte {wrong} on"
                    );
                }
                self.moved += 2 * len as u64;
                let from = self
                    .reading
                    .iter_mut()
                    .find_map(Option::take)
                    .context("a READ without its WRITE")?;
                self.slots[slot] = Some((from, into));
            }
            InFlight::WriteImm => self.immediate = Some(buffer()?),
            InFlight::Send { len } => {
                self.moved += len as u64;
                self.sends.push(buffer()?);
            }
            InFlight::Free | InFlight::Add { .. } => {}
        }
        Ok(())
    }

    pub(crate) fn received(&mut self, success: Success, mut buffers: Buffers, scratch: &mut Vec<u8>) -> Result<()> {
        let peer = self.peer;
        let buffer = buffers.take::<Local>().context("a receive without its buffer")?;
        match success {
            Success::Receive { imm: Some(_), .. } => {
                ensure!(self.unchecked, "member {peer} frees a slot that is free");
                self.unchecked = false;
            }
            Success::Receive { len, imm: None } => {
                let number = self.take_number(1);
                let bytes = buffer
                    .get(..len as usize)
                    .context("more was received than there is room for")?;
                if let Some(wrong) = self.theirs(number << 2 | 2).find_wrong(bytes) {
                    bail!("message {number} of {len} bytes from member {peer} is wrong from byte {wrong} on");
                }
            }
            Success::ReceiveWrite { len, imm } => {
                let number = self.take_number(0);
                ensure!(
                    imm == number as u32,
                    "immediate {imm} from member {peer} is not {number}"
                );
                scratch.resize(len as usize, 0);
                self.inbox.read_at(SLOTS * MAX, scratch);
                if let Some(wrong) = self.theirs(number << 2 | 1).find_wrong(scratch) {
                    bail!("WRITE {number} of {len} bytes from member {peer} is wrong from byte {wrong} on");
                }
                self.frees_owed += 1;
                self.post_frees()?;
            }
            other => bail!("a receive of {other:?} from member {peer}"),
        }
        self.qp.receive(buffer)?;
        Ok(())
    }

    fn slot(&self, slot: usize, len: usize) -> Result<Remote<AllAccess>> {
        self.theirs
            .slice((slot * MAX) as u64, len as u64)
            .context("the peer's memory is too small")
    }

    fn pattern(&self, number: u64) -> Pattern {
        Pattern::new(self.seed, self.index, self.peer, number)
    }

    fn theirs(&self, number: u64) -> Pattern {
        Pattern::new(self.seed, self.peer, self.index, number)
    }

    fn count(&mut self, kind: usize) -> u64 {
        self.numbers[kind] += 1;
        self.numbers[kind] - 1
    }

    fn take_number(&mut self, kind: usize) -> u64 {
        self.received[kind] += 1;
        self.received[kind] - 1
    }

    fn random(&mut self) -> u64 {
        // xorshift64*.
        self.rng ^= self.rng >> 12;
        self.rng ^= self.rng << 25;
        self.rng ^= self.rng >> 27;
        self.rng.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32
    }

    /// A length up to `max`, log-uniformly distributed.
    fn random_len(&mut self, max: usize) -> usize {
        let bits = self.random() % u64::from(max.ilog2() + 1);
        let low = 1 << bits;
        (low + (self.random() as usize & (low - 1))).min(max)
    }
}
