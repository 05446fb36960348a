//! One end of a connection: a queue pair, the mailbox that the peer writes, and the counts of both protocols' messages.
//!
//! Everything here is tried: what cannot be done yet, for want of a grant, a slot or room in the queue, says so and changes nothing. What is to go to the peer beside messages, grants and slots given slices_back, is collected and leaves
//! with the next message, or when the lane is done for now: one doorbell.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use doorbell_verbs::{Alias, Batch, QpState, QueuePair, QueuePairError, Rc, Refused, Remote, Write};

use super::error::Failed;
use super::mapped_segment::MappedSegment;
use crate::kernel::lines::{pack_ll, pack_ll128, try_unpack_ll, try_unpack_ll128};
use crate::protocol::{
    EAGER_BYTES, EAGER_SLOTS, GRANT_BYTES, GRANTS, LENGTHS_BYTES, LENGTHS_SLOTS, LineProtocol, mailbox,
};
use crate::types::Rank;

/// Bytes that lines are sent inline with, at most: a word of credit or a grant takes fewer.
pub(super) const INLINE: usize = 256;
/// Notes that wait to be sent, at most: each takes a place in the send queue.
const MAX_CONTROL_WRITES: usize = 24;
/// Requests that a send queue holds.
pub(super) const SEND_DEPTH: u32 = 128;

/// What is written into the peer's mailbox beside messages.
#[derive(Clone, Copy)]
struct ControlWrite {
    bytes: [u8; GRANT_BYTES],
    len: usize,
    offset: usize,
}

/// Where in a mailbox `len` bytes lie. Offsets are those of [`at`]; the peer's device refuses what is beyond its memory.
#[inline]
fn mailbox_range(mailbox: Remote<Write>, offset: usize, len: usize) -> Remote<Write> {
    Remote::from_raw(mailbox.addr().wrapping_add(offset as u64), mailbox.rkey().0, len as u64)
}

/// Adds the control_writes to a batch.
#[inline]
fn post_control_writes<'d>(batch: &mut Batch<'_, 'd>, control_writes: &'d [ControlWrite], mailbox: Remote<Write>) {
    for write in control_writes {
        batch.write_inline(
            &write.bytes[..write.len],
            mailbox_range(mailbox, write.offset, write.len),
        );
    }
}

/// One ring of slots, seen from both its ends.
#[derive(Clone, Copy, Default)]
struct Ring {
    /// Slots filled at the peer's.
    sent: u64,
    /// Slots emptied here, and those of them that the peer knows of.
    consumed: u64,
    credited: u64,
}

/// The memory of a link: of a segment that lives as long as its queue pair.
pub(super) struct MailboxMemory {
    /// The mailbox here.
    pub(super) local: *mut u8,
    /// The peer's mailbox for this side.
    pub(super) remote: Remote<Write>,
    /// Where lines are laid out that are too long to be sent inline: rings as in the mailbox, slot by slot.
    pub(super) staging: *mut u8,
    /// The same for requests.
    pub(super) staging_alias: Alias,
}

/// The peer's mailbox for this side, mapped here.
pub(super) struct MappedMailbox {
    start: NonNull<u8>,
    /// Whose mapping it is in.
    _mapped: Arc<MappedSegment>,
}

impl MappedMailbox {
    /// To the mailbox `remote`, if it is in what is mapped, and has all that a mailbox has: one of messages between two ranks has no lines, and no mapped.
    pub(super) fn new(mapped: Arc<MappedSegment>, remote: Remote<Write>) -> Option<Self> {
        let start = mapped.translate(remote.addr(), usize::try_from(remote.len()).ok()?)?;
        (remote.len() == mailbox::LEN as u64).then_some(Self { start, _mapped: mapped })
    }

    /// Where something is in the mailbox.
    fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset < mailbox::LEN, "offsets are those of `at`");
        // SAFETY: `new` has checked that `mailbox::LEN` bytes from `start` on are in the mapping, which `_mapped` keeps; offsets are those of `at`, before that.
        unsafe { self.start.add(offset) }.as_ptr()
    }

    /// Stores a word, behind all that was stored before.
    fn store_word(&self, offset: usize, word: u64) {
        // SAFETY: in the mapping, as of `at`, and aligned: a mailbox begins at a multiple of 64 (`MappedSegment::at`), and `at` has words at multiples of 8. Both processes access these words atomically.
        unsafe { (*self.at(offset).cast::<AtomicU64>()).store(word, Ordering::Release) };
    }

    /// Stores a note: its last word behind the others.
    fn store_control_write(&self, write: &ControlWrite) {
        for (index, word) in write.bytes[..write.len].as_chunks().0.iter().enumerate() {
            self.store_word(write.offset + 8 * index, u64::from_ne_bytes(*word));
        }
    }
}

/// Flags of words: so many peer_range are, and then they come again.
const LL_FLAGS: u64 = 1 << 31;

/// The flag of a message's words: never 0, which is what a mailbox holds at first.
#[inline]
fn ll_flag(number: u64) -> u32 {
    (number % LL_FLAGS) as u32 | 1 << 31
}

/// How long the staging of a link are.
pub(super) const STAGING_BYTES: usize = mailbox::EAGER_RING - mailbox::LINE_RINGS[0];
/// Which of the rings is that of eager messages, behind those of lines.
const EAGER: usize = 2;
/// And that of lengths.
const LENGTHS: usize = 3;

/// One end of a connection.
pub(super) struct Link {
    pub(super) peer: Rank,
    qp: QueuePair<Rc>,
    memory: MailboxMemory,
    mapped: Option<MappedMailbox>,
    /// The requests that have to be confirmed until nothing of Simple is on its way by the queue pair.
    posted: u64,
    /// Requests of the send queue that are confirmed.
    pub(super) completed: u64,
    /// Messages of Simple, eager or not: sent; received.
    sent: u64,
    received: u64,
    /// Grants: of the peer's, those that messages were sent by; given to it, and of these those whose message is here.
    used: u64,
    granted: u64,
    filled: u64,
    rings: [Ring; 4],
    control_writes: Vec<ControlWrite>,
}

// SAFETY: its pointers are into a segment of the engine's, which is Send and moves with it, and into a mapping that it holds.
unsafe impl Send for Link {}

impl Link {
    pub(super) fn new(peer: Rank, qp: QueuePair<Rc>, memory: MailboxMemory, mapped: Option<MappedMailbox>) -> Self {
        Self {
            peer,
            qp,
            memory,
            mapped,
            posted: 0,
            completed: 0,
            sent: 0,
            received: 0,
            used: 0,
            granted: 0,
            filled: 0,
            rings: [Ring::default(); 4],
            control_writes: Vec::with_capacity(MAX_CONTROL_WRITES),
        }
    }

    pub(super) fn qpn(&self) -> doorbell_verbs::Qpn {
        self.qp.qpn()
    }

    /// Whether the peer's mailbox is mapped.
    pub(super) fn is_mapped(&self) -> bool {
        self.mapped.is_some()
    }

    /// Writes what changes nothing. Gives the requests that have to be confirmed until it has come peer_range; none if it cannot be sent.
    pub(super) fn send_probe(&mut self) -> Option<u64> {
        let peer_range = self.peer_range(mailbox::PROBE, 8);
        let posted = self.has_queue_slots(1).then(|| {
            self.qp.post(|batch| {
                batch.write_inline(&[0; 8], peer_range).signalled();
            })
        });
        posted?.ok()?;
        Some(self.qp.next_send())
    }

    /// Whether the queue pair can do nothing any more.
    pub(super) fn is_broken(&self) -> bool {
        self.qp.state().is_ok_and(|state| state == QpState::Err)
    }

    /// Breaks the queue pair, and forgets the mapping.
    pub(super) fn cut(&mut self) -> Result<(), QueuePairError> {
        self.mapped = None;
        self.qp.flush()
    }

    /// A word of the local mailbox.
    #[inline]
    fn word(&self, offset: usize) -> u64 {
        // SAFETY: offsets are those of `at`, in the mailbox and aligned; the mailbox lives as long as the engine. Devices write it by whole words.
        unsafe { (*self.memory.local.add(offset).cast::<AtomicU64>()).load(Ordering::Acquire) }
    }

    fn refused(&self, refused: &Refused) -> Failed {
        Failed::Refused {
            peer: self.peer,
            what: refused.to_string(),
        }
    }

    /// Where in the peer's mailbox `len` bytes lie.
    fn peer_range(&self, offset: usize, len: usize) -> Remote<Write> {
        mailbox_range(self.memory.remote, offset, len)
    }

    /// Whether the queue takes that many requests beside the control_writes.
    #[inline]
    fn has_queue_slots(&self, requests: usize) -> bool {
        self.qp.send_room() as usize >= requests + self.control_writes.len()
    }

    fn queue_control_write(&mut self, offset: usize, bytes: &[u8]) {
        let mut write = ControlWrite {
            bytes: [0; GRANT_BYTES],
            len: bytes.len(),
            offset,
        };
        write.bytes[..bytes.len()].copy_from_slice(bytes);
        self.control_writes.push(write);
    }

    /// Whether another grant may be given: the peer has seen the one whose place it takes, and peer_range is room to note it.
    #[inline]
    pub(super) fn may_grant(&self) -> bool {
        self.granted - self.filled < GRANTS && self.control_writes.len() < MAX_CONTROL_WRITES / 2
    }

    /// Grants the peer `len` bytes for its next message that has none.
    pub(super) fn grant(&mut self, addr: u64, rkey: u32, len: u32) {
        self.grant_rest(addr, rkey, len, 0);
    }

    /// The same for a part of a message, of which so many bytes are to come with it and after it.
    pub(super) fn grant_rest(&mut self, addr: u64, rkey: u32, len: u32, rest: u64) {
        let place = mailbox::GRANT_RING + (self.granted % GRANTS) as usize * GRANT_BYTES;
        self.granted += 1;
        let mut bytes = [0; GRANT_BYTES];
        bytes[..8].copy_from_slice(&addr.to_ne_bytes());
        bytes[8..12].copy_from_slice(&rkey.to_ne_bytes());
        bytes[12..16].copy_from_slice(&len.to_ne_bytes());
        bytes[16..24].copy_from_slice(&rest.to_ne_bytes());
        bytes[24..].copy_from_slice(&self.granted.to_ne_bytes());
        self.queue_control_write(place, &bytes);
    }

    /// Whether something is noted that has not been sent.
    #[inline]
    pub(super) fn has_control_writes(&self) -> bool {
        !self.control_writes.is_empty()
    }

    /// Sends what has been noted, if the queue has room for it.
    #[inline]
    pub(super) fn flush_control_writes(&mut self) -> Result<(), Failed> {
        if self.control_writes.is_empty() {
            return Ok(());
        }
        if let Some(mapped) = &self.mapped {
            self.control_writes
                .drain(..)
                .for_each(|write| mapped.store_control_write(&write));
            return Ok(());
        }
        if !self.has_queue_slots(0) {
            return Ok(());
        }
        let (control_writes, remote) = (&self.control_writes, self.memory.remote);
        let posted = self.qp.post(|batch| {
            post_control_writes(batch, control_writes, remote);
        });
        self.control_writes.clear();
        posted.map_err(|error| self.refused(&error))
    }

    /// Whether the peer has emptied a slot of a ring of so many.
    #[inline]
    fn has_slot(&self, ring: usize, slots: u64) -> bool {
        let sent = self.rings[ring].sent;
        sent - self.word(mailbox::CREDITS[ring]).min(sent) < slots
    }

    /// A slot of a ring is empty again: the peer hears of it every half ring, with or before what is sent next.
    #[inline]
    fn release_slot(&mut self, ring: usize, slots: u64) {
        let Ring { consumed, credited, .. } = &mut self.rings[ring];
        *consumed += 1;
        if *consumed - *credited >= slots / 2 {
            *credited = *consumed;
            let credited = credited.to_ne_bytes();
            self.queue_control_write(mailbox::CREDITS[ring], &credited);
        }
    }

    /// Whether this side's lengths of an operation could be lengths_sent now: the peer has consumed those before, and peer_range is room to note them.
    pub(super) fn may_send_lengths(&self) -> bool {
        self.has_slot(LENGTHS, LENGTHS_SLOTS) && self.control_writes.len() < MAX_CONTROL_WRITES / 2
    }

    /// Says how many bytes this side sends the peer in an operation, and how many it expects of it; it `may_send_lengths`.
    pub(super) fn send_lengths(&mut self, sends: u64, expects: u64) {
        let lengths_sent = &mut self.rings[LENGTHS].sent;
        let place = mailbox::LENGTHS_RING + (*lengths_sent % LENGTHS_SLOTS) as usize * LENGTHS_BYTES;
        *lengths_sent += 1;
        let mut bytes = [0; LENGTHS_BYTES];
        for (into, word) in bytes.chunks_exact_mut(8).zip([sends, expects, *lengths_sent]) {
            into.copy_from_slice(&word.to_ne_bytes());
        }
        self.queue_control_write(place, &bytes);
    }

    /// Takes the peer's lengths of an operation, if they are peer_range: how many bytes it sends, and how many it expects.
    pub(super) fn receive_lengths(&mut self) -> Option<(u64, u64)> {
        let consumed = self.rings[LENGTHS].consumed;
        let place = mailbox::LENGTHS_RING + (consumed % LENGTHS_SLOTS) as usize * LENGTHS_BYTES;
        if self.word(place + 16) != consumed + 1 {
            return None;
        }
        let lengths = (self.word(place), self.word(place + 8));
        self.release_slot(LENGTHS, LENGTHS_SLOTS);
        Some(lengths)
    }

    /// Where the next message of Simple that is not eager may go: the peer's grant; none yet.
    #[inline]
    fn next_grant(&self, len: usize) -> Option<Remote<Write>> {
        let place = mailbox::GRANT_RING + (self.used % GRANTS) as usize * GRANT_BYTES;
        if self.word(place + 24) != self.used + 1 {
            return None;
        }
        let (addr, second) = (self.word(place), self.word(place + 8).to_ne_bytes());
        let rkey = u32::from_ne_bytes([second[0], second[1], second[2], second[3]]);
        let room = u32::from_ne_bytes([second[4], second[5], second[6], second[7]]);
        // A peer that grants too little is refused by the request, as one that goes beyond what was granted.
        Some(Remote::from_raw(addr, rkey, u64::from(room).min(len as u64)))
    }

    /// Whether a message of Simple could be sent now: the peer has granted memory for it, or emptied a slot for one that is eager.
    #[inline]
    pub(super) fn may_send(&self, eager: bool) -> bool {
        if eager {
            self.has_slot(EAGER, EAGER_SLOTS) && self.has_queue_slots(2)
        } else {
            self.is_granted()
        }
    }

    /// Whether a message could be sent where the peer has granted memory for it.
    #[inline]
    pub(super) fn is_granted(&self) -> bool {
        self.next_grant(0).is_some() && self.has_queue_slots(2)
    }

    /// Of a part that `is_granted`: how many bytes the peer expects with it and after it.
    pub(super) fn granted_rest(&self) -> u64 {
        self.word(mailbox::GRANT_RING + (self.used % GRANTS) as usize * GRANT_BYTES + 16)
    }

    /// Sends a message of Simple, which it `may_send`: nothing for one without content. Gives the number of requests posted with it, the last of which says by its completion that the message's memory is free.
    pub(super) fn send(&mut self, message: Option<(Alias, usize)>, eager: bool) -> Result<u64, Failed> {
        if !eager {
            return self.send_granted(message);
        }
        let len = message.map_or(0, |(_, len)| len);
        let slot = &mut self.rings[EAGER].sent;
        let place = mailbox::EAGER_RING + (*slot % EAGER_SLOTS) as usize * EAGER_BYTES;
        *slot += 1;
        self.send_to(self.peer_range(place, len), message)
    }

    /// Whether an eager message could be stored in the peer's mailbox: it is mapped and has an empty slot, and no message before is on its way by the queue pair, which this one would overtake.
    #[inline]
    pub(super) fn may_store(&self) -> bool {
        self.mapped.is_some() && self.completed >= self.posted && self.has_slot(EAGER, EAGER_SLOTS)
    }

    /// Stores an eager message, which it `may_store`. Its memory is free at once.
    ///
    /// # Safety
    /// `from` can be read for `len` bytes, at most those of an eager message, which nobody writes meanwhile.
    pub(super) unsafe fn store(&mut self, from: *const u8, len: usize) -> Result<(), Failed> {
        self.flush_control_writes()?;
        let Some(mapped) = &self.mapped else { return Ok(()) };
        let slot = &mut self.rings[EAGER].sent;
        let place = mailbox::EAGER_RING + (*slot % EAGER_SLOTS) as usize * EAGER_BYTES;
        *slot += 1;
        self.sent += 1;
        // SAFETY: by contract; the slot is in the mailbox and as long, and this side's alone, as the peer has emptied it.
        unsafe { core::ptr::copy_nonoverlapping(from, mapped.at(place), len.min(EAGER_BYTES)) };
        mapped.store_word(mailbox::ARRIVED, self.sent);
        Ok(())
    }

    /// The same where the peer has granted memory, as the message `is_granted`.
    pub(super) fn send_granted(&mut self, message: Option<(Alias, usize)>) -> Result<u64, Failed> {
        let Some(peer_range) = self.next_grant(message.map_or(0, |(_, len)| len)) else {
            return Err(Failed::Refused {
                peer: self.peer,
                what: "a message without a grant".to_owned(),
            });
        };
        self.used += 1;
        self.send_to(peer_range, message)
    }

    fn send_to(&mut self, peer_range: Remote<Write>, message: Option<(Alias, usize)>) -> Result<u64, Failed> {
        if self.mapped.is_some() {
            // SlotTransport the queue pair they might come behind later ones that are stored: a count of slots would go slices_back, and the peer wait for slots that it has.
            self.flush_control_writes()?;
        }
        self.sent += 1;
        let number = self.sent.to_ne_bytes();
        let (control_writes, remote) = (&self.control_writes, self.memory.remote);
        let posted = self.qp.post(|batch| {
            post_control_writes(batch, control_writes, remote);
            if let Some((alias, _)) = message {
                batch.write(alias, peer_range);
            }
            batch
                .write_inline(&number, mailbox_range(remote, mailbox::ARRIVED, 8))
                .signalled();
        });
        self.control_writes.clear();
        posted.map_err(|error| self.refused(&error))?;
        self.posted = self.qp.next_send();
        Ok(self.posted)
    }

    /// Whether the next message of Simple is peer_range.
    #[inline]
    pub(super) fn has_arrived(&self) -> bool {
        self.word(mailbox::ARRIVED) > self.received
    }

    /// Takes the message that `has_arrived` where the grant lengths_sent.
    #[inline]
    pub(super) fn receive_granted(&mut self) {
        self.received += 1;
        self.filled += 1;
    }

    /// Takes the message that `has_arrived`: gives where an eager one is, until something is sent to the peer or noted for it; others are where the grant lengths_sent.
    #[inline]
    pub(super) fn receive(&mut self, eager: bool) -> Option<*mut u8> {
        if !eager {
            self.receive_granted();
            return None;
        }
        self.received += 1;
        let slot = (self.rings[EAGER].consumed % EAGER_SLOTS) as usize;
        self.release_slot(EAGER, EAGER_SLOTS);
        // SAFETY: in the mailbox.
        Some(unsafe { self.memory.local.add(mailbox::EAGER_RING + slot * EAGER_BYTES) })
    }

    /// Whether lines could be sent now: the peer has emptied a slot.
    #[inline]
    pub(super) fn may_send_lines(&self, lines: LineProtocol) -> bool {
        self.has_slot(lines.index(), lines.slots()) && (self.mapped.is_some() || self.has_queue_slots(1))
    }

    /// Sends `len` bytes as lines, at most what a slot has room for; it `may_send_lines`. They may be input_copied at once.
    ///
    /// # Safety
    /// `from` can be read for `len` bytes, which nobody writes meanwhile.
    pub(super) unsafe fn send_lines(&mut self, lines: LineProtocol, from: *const u8, len: usize) -> Result<(), Failed> {
        let ring = &mut self.rings[lines.index()];
        let slot = (ring.sent % lines.slots()) as usize * lines.slot();
        ring.sent += 1;
        let flag = ring.sent;
        let offset = mailbox::LINE_RINGS[lines.index()] + slot;
        let wire = lines.wire_bytes(len);
        // A message without content is a word of data that says nothing.
        let nothing = [0_u8; 4];
        let (from, len) = if len == 0 {
            (nothing.as_ptr(), nothing.len())
        } else {
            (from, len)
        };
        // SAFETY: by contract; all targets are long enough for the lines, aligned, and this side's alone: the peer has emptied the slot, and so whatever was sent from the same place of the staging has arrived. In the peer's, where it looks
        // meanwhile, flags come last, and words of LL at once.
        let pack = |into: *mut u8| unsafe {
            match lines {
                LineProtocol::Ll => pack_ll(ll_flag(flag), from, len, into),
                LineProtocol::Ll128 => pack_ll128(flag, from, len, into),
            }
        };
        if self.mapped.is_some() {
            self.flush_control_writes()?;
            if let Some(mapped) = &self.mapped {
                pack(mapped.at(offset));
            }
            return Ok(());
        }
        let peer_range = self.peer_range(offset, wire);
        let posted = if wire <= INLINE && self.control_writes.is_empty() {
            let mut draft = core::mem::MaybeUninit::<[u64; INLINE / 8]>::uninit();
            pack(draft.as_mut_ptr().cast());
            // SAFETY: the first `wire` bytes have just been written, in whole words or lines.
            let draft = unsafe { core::slice::from_raw_parts(draft.as_ptr().cast::<u8>(), wire) };
            self.qp.write_inline(draft, peer_range)
        } else {
            let place = offset - mailbox::LINE_RINGS[0];
            // SAFETY: in the staging.
            pack(unsafe { self.memory.staging.add(place) });
            let Some(alias) = self.memory.staging_alias.slice(place, wire) else {
                return Err(Failed::Refused {
                    peer: self.peer,
                    what: "lines beyond their slot".to_owned(),
                });
            };
            let (control_writes, remote) = (&self.control_writes, self.memory.remote);
            let posted = self.qp.post(|batch| {
                post_control_writes(batch, control_writes, remote);
                batch.write(alias, peer_range);
            });
            self.control_writes.clear();
            posted
        };
        posted.map_err(|error| self.refused(&error))
    }

    /// Takes `len` bytes of lines, if all of them are peer_range.
    ///
    /// # Safety
    /// `into` can be written for `len` bytes (4, if that is 0), which nobody else touches.
    #[inline]
    pub(super) unsafe fn receive_lines(&mut self, lines: LineProtocol, into: *mut u8, len: usize) -> bool {
        let consumed = self.rings[lines.index()].consumed;
        let flag = consumed + 1;
        // SAFETY: in the mailbox.
        let slot = unsafe {
            self.memory
                .local
                .add(mailbox::LINE_RINGS[lines.index()] + (consumed % lines.slots()) as usize * lines.slot())
        };
        // SAFETY: the slot is aligned and as long as its lines; `into` by contract.
        let complete = unsafe {
            match lines {
                LineProtocol::Ll => try_unpack_ll(ll_flag(flag), slot, len.max(4), into),
                LineProtocol::Ll128 => try_unpack_ll128(flag, slot, len.max(4), into),
            }
        };
        if !complete {
            return false;
        }
        if lines == LineProtocol::Ll && flag % LL_FLAGS <= lines.slots() {
            // Flags come again, and what a long message left may not have been overwritten by short ones since. The slot is this side's until it is given slices_back.
            // SAFETY: in the mailbox.
            unsafe { slot.write_bytes(0, lines.slot()) };
        }
        self.release_slot(lines.index(), lines.slots());
        true
    }
}
