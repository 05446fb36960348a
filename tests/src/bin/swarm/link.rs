//! A member's connection to one other: what it sends there, and what it checks of what comes.
//!
//! Each message kind is checked where its bytes can be seen whole: a SEND and a WRITE with immediate by whom they reach, a WRITE by the READ that follows it on the same queue pair, a fetch-and-add by
//! the value it finds. A slot that a WRITE with immediate went to is used again only when the other has said, by an empty SEND, that it has looked at it.

use std::collections::VecDeque;

use anyhow::{Context as _, Result, bail, ensure};
use doorbell_verbs::{
    All, Buffer, Buffers, Local, Memory, PreparedQueuePair, ProtectionDomain, QueuePair, Rc, Remote, RemoteAll,
    Success, Word,
};

use crate::{Pattern, Plan};

/// The longest WRITE and READ.
const MAX: usize = 256 << 10;
/// The longest SEND.
const MAX_SEND: usize = 32 << 10;
/// Slots for WRITEs that are read back, and one for WRITEs with immediate.
const SLOTS: usize = 2;
/// SENDs under way at most.
const SENDS: usize = 4;
/// Receives posted: for the peer's SENDs, a WRITE with immediate, and as many empty SENDs as ours call for.
const RECEIVES: usize = 8;
/// Send requests under way at most.
pub(crate) const DEPTH: u32 = 32;
/// Entries that a link takes in a completion queue.
pub(crate) const ENTRIES: u32 = DEPTH + RECEIVES as u32;
/// What the peer sees of a member's memory: the slots, and a word to add to.
const INBOX: usize = (SLOTS + 1) * MAX + 8;

/// A request under way.
#[derive(Debug)]
enum Task {
    /// A WRITE, which the READ behind it looks at.
    Write,
    /// The READ of what was written.
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
    /// A fetch-and-add, and what it should find.
    Add {
        found: u64,
    },
}

/// Why a link ended.
#[derive(Debug)]
pub(crate) struct Lost(pub(crate) doorbell_verbs::Failure);

/// Memory that other processes can map, or memory of the heap: payloads go other ways from either.
fn memory(len: usize, index: usize) -> Result<Memory> {
    Ok(if index.is_multiple_of(2) {
        Memory::shared(len)?
    } else {
        vec![0; len].into()
    })
}

/// What a link is before the peer is known.
#[derive(Debug)]
pub(crate) struct Unconnected {
    prepared: PreparedQueuePair<Rc>,
    inbox: Buffer<RemoteAll>,
}

/// A connected link.
#[derive(Debug)]
pub(crate) struct Link {
    me: usize,
    peer: usize,
    seed: u64,
    qp: QueuePair,
    inbox: Buffer<RemoteAll>,
    theirs: Remote<All>,
    tasks: VecDeque<Task>,
    /// For WRITEs, and what is read back; one of each for a slot.
    slots: [Option<(Buffer<Local>, Buffer<Local>)>; SLOTS],
    reading: [Option<Buffer<Local>>; SLOTS],
    immediate: Option<Buffer<Local>>,
    /// The peer has not looked at the slot yet.
    unseen: bool,
    sends: Vec<Buffer<Local>>,
    word: Option<Word>,
    /// Messages of each kind so far: written, written with immediate, sent, and received likewise.
    numbers: [u64; 3],
    received: [u64; 2],
    added: u64,
    /// Bytes that have arrived where they should.
    pub(crate) moved: u64,
    random: u64,
}

impl Unconnected {
    pub(crate) fn new(pd: &ProtectionDomain, prepared: PreparedQueuePair<Rc>, peer: usize) -> Result<Self> {
        let inbox = pd.register(memory(INBOX, peer)?, RemoteAll)?;
        Ok(Self { prepared, inbox })
    }

    /// What the peer has to know, in hexadecimal.
    pub(crate) fn card(&self) -> String {
        let bytes = [
            &self.prepared.endpoint().to_bytes()[..],
            &self.inbox.remote().to_bytes()[..],
        ];
        bytes.concat().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Connects to the peer whose card that is.
    pub(crate) fn connect(
        self,
        plan: &Plan,
        pd: &ProtectionDomain,
        me: usize,
        peer: usize,
        card: &str,
    ) -> Result<Link> {
        let bytes: Vec<u8> = (0..card.len() / 2)
            .map(|at| {
                card.get(2 * at..2 * at + 2)
                    .and_then(|digits| u8::from_str_radix(digits, 16).ok())
            })
            .collect::<Option<_>>()
            .context("a card that is not hexadecimal")?;
        let (endpoint, remote) = bytes.split_first_chunk().context("a card too short")?;
        let endpoint = doorbell_verbs::Endpoint::from_bytes(endpoint)?;
        let theirs = Remote::from_bytes(remote.try_into().context("a card of the wrong length")?)?;
        let mut qp = self.prepared.connect(&endpoint)?;
        let register = |len: usize| pd.register(vec![0; len], Local);
        for _ in 0..RECEIVES {
            qp.receive(register(MAX_SEND)?)?;
        }
        let mut slots = [None, None];
        for (index, slot) in slots.iter_mut().enumerate() {
            let from = pd.register(memory(MAX, index)?, Local)?;
            *slot = Some((from, register(MAX)?));
        }
        let word = register(8)?
            .into_word()
            .map_err(|_| anyhow::anyhow!("eight bytes of the heap are not aligned"))?;
        Ok(Link {
            me,
            peer,
            seed: plan.seed,
            qp,
            inbox: self.inbox,
            theirs,
            tasks: VecDeque::new(),
            slots,
            reading: [None, None],
            immediate: Some(register(MAX)?),
            unseen: false,
            sends: (0..SENDS).map(|_| register(MAX_SEND)).collect::<Result<_, _>>()?,
            word: Some(word),
            numbers: [0; 3],
            received: [0; 2],
            added: 0,
            moved: 0,
            random: Pattern::new(plan.seed, me, peer, u64::MAX).0 | 1,
        })
    }
}

impl Link {
    /// Whether nothing of ours is under way.
    pub(crate) fn is_quiet(&self) -> bool {
        self.tasks.is_empty()
    }

    /// Posts what there is memory and room for. False when there is nothing to post now.
    pub(crate) fn fill(&mut self) -> Result<bool> {
        let mut posted = false;
        // Room is left for what answers the peer.
        while self.qp.send_room() > 4 && self.post_some()? {
            posted = true;
        }
        Ok(posted)
    }

    /// Posts one message of a kind chosen at random; false when there is no memory for it, until what is under way comes back.
    fn post_some(&mut self) -> Result<bool> {
        match self.draw() % 8 {
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
        let len = self.draw_len(MAX);
        let Some((mut from, into)) = self.slots[slot].take() else {
            return Ok(false);
        };
        let number = self.count(0);
        self.pattern(number << 2).fill(&mut from[..len]);
        let at = self.slot(slot, len)?;
        self.qp.post(|batch| {
            batch.write(from.part(..len), at).signalled();
            batch.read(into.part(..len), at).signalled();
        })?;
        self.tasks.extend([Task::Write, Task::Read { slot, number, len }]);
        Ok(true)
    }

    fn post_with_immediate(&mut self) -> Result<bool> {
        if self.unseen {
            return Ok(false);
        }
        let Some(mut from) = self.immediate.take() else {
            return Ok(false);
        };
        let len = self.draw_len(MAX);
        let number = self.count(1);
        self.pattern(number << 2 | 1).fill(&mut from[..len]);
        let at = self.slot(SLOTS, len)?;
        self.qp
            .post(|batch| drop(batch.write(from.part(..len), at).imm(number as u32).signalled()))?;
        self.unseen = true;
        self.moved += len as u64;
        self.tasks.push_back(Task::WriteImm);
        Ok(true)
    }

    fn post_send(&mut self) -> Result<bool> {
        let Some(mut from) = self.sends.pop() else {
            return Ok(false);
        };
        let len = self.draw_len(MAX_SEND);
        let number = self.count(2);
        self.pattern(number << 2 | 2).fill(&mut from[..len]);
        self.qp.post(|batch| drop(batch.send(from.part(..len)).signalled()))?;
        self.tasks.push_back(Task::Send { len });
        Ok(true)
    }

    /// Adds one to the peer's word: also what shows that the peer lives when there is nothing else to send.
    pub(crate) fn add(&mut self) -> Result<bool> {
        let Some(word) = self.word.take() else {
            return Ok(false);
        };
        let at = self.theirs.word((INBOX - 8) as u64).context("the peer has no word")?;
        self.qp.post(|batch| drop(batch.fetch_add(word, at, 1).signalled()))?;
        self.tasks.push_back(Task::Add { found: self.added });
        self.added += 1;
        Ok(true)
    }

    /// A request of ours is done.
    pub(crate) fn sent(&mut self, mut buffers: Buffers) -> Result<()> {
        let task = self.tasks.pop_front().context("a completion of nothing")?;
        let peer = self.peer;
        if let Task::Add { found } = task {
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
        match task {
            Task::Write => {
                let slot = self
                    .reading
                    .iter()
                    .position(Option::is_none)
                    .context("a WRITE too many")?;
                self.reading[slot] = Some(buffer()?);
            }
            Task::Read { slot, number, len } => {
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
            Task::WriteImm => self.immediate = Some(buffer()?),
            Task::Send { len } => {
                self.moved += len as u64;
                self.sends.push(buffer()?);
            }
            Task::Free | Task::Add { .. } => {}
        }
        Ok(())
    }

    /// A message of the peer has come.
    pub(crate) fn received(&mut self, success: Success, mut buffers: Buffers, scratch: &mut Vec<u8>) -> Result<()> {
        let peer = self.peer;
        let buffer = buffers.take::<Local>().context("a receive without its buffer")?;
        match success {
            Success::Receive { imm: Some(_), .. } => {
                ensure!(self.unseen, "member {peer} frees a slot that is free");
                self.unseen = false;
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
                self.qp.post(|batch| drop(batch.send_inline(&[]).imm(0).signalled()))?;
                self.tasks.push_back(Task::Free);
            }
            other => bail!("a receive of {other:?} from member {peer}"),
        }
        self.qp.receive(buffer)?;
        Ok(())
    }

    fn slot(&self, slot: usize, len: usize) -> Result<Remote<All>> {
        self.theirs
            .slice((slot * MAX) as u64, len as u64)
            .context("the peer's memory is too small")
    }

    fn pattern(&self, number: u64) -> Pattern {
        Pattern::new(self.seed, self.me, self.peer, number)
    }

    fn theirs(&self, number: u64) -> Pattern {
        Pattern::new(self.seed, self.peer, self.me, number)
    }

    fn count(&mut self, kind: usize) -> u64 {
        self.numbers[kind] += 1;
        self.numbers[kind] - 1
    }

    fn take_number(&mut self, kind: usize) -> u64 {
        self.received[kind] += 1;
        self.received[kind] - 1
    }

    fn draw(&mut self) -> u64 {
        // xorshift64*.
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32
    }

    /// A length up to `max`, each power of two as likely as the next.
    fn draw_len(&mut self, max: usize) -> usize {
        let bits = self.draw() % u64::from(max.ilog2() + 1);
        let low = 1 << bits;
        (low + (self.draw() as usize & (low - 1))).min(max)
    }
}
