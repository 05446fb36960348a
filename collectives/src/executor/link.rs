//! One end of a connection: a queue pair, the mailbox that the peer writes, and the counts of both protocols' messages.
//!
//! Everything here is tried: what cannot be done yet, for want of a grant, a slot or room in the queue, says so and changes nothing. What is to go to the peer beside messages, grants and slots given back, is collected and leaves
//! with the next message, or when the lane is done for now: one doorbell.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use doorbell_verbs::{Alias, Batch, QpState, QueuePair, QueuePairError, Rc, Refused, Remote, Write};

use super::error::Failed;
use super::mapped::Mapped;
use crate::kernel::lines::{pack_ll, pack_ll128, try_unpack_ll, try_unpack_ll128};
use crate::protocol::{EAGER, EAGER_SLOTS, GRANT, GRANTS, Lines, TERMS, TERMS_SLOTS, at};
use crate::types::Rank;

/// Bytes that lines are sent inline with, at most: a word of credit or a grant takes fewer.
pub(super) const INLINE: usize = 256;
/// Notes that wait to be sent, at most: each takes a place in the send queue.
const NOTES: usize = 24;
/// Requests that a send queue holds.
pub(super) const SEND_DEPTH: u32 = 128;

/// What is written into the peer's mailbox beside messages.
#[derive(Clone, Copy)]
struct Note {
    bytes: [u8; GRANT],
    len: usize,
    at: usize,
}

/// Where in a mailbox `len` bytes lie. Offsets are those of [`at`]; the peer's device refuses what is beyond its memory.
#[inline]
fn within(mailbox: Remote<Write>, offset: usize, len: usize) -> Remote<Write> {
    Remote::from_raw(mailbox.addr().wrapping_add(offset as u64), mailbox.rkey().0, len as u64)
}

/// Adds the notes to a batch.
#[inline]
fn write_notes<'d>(batch: &mut Batch<'_, 'd>, notes: &'d [Note], mailbox: Remote<Write>) {
    for note in notes {
        batch.write_inline(&note.bytes[..note.len], within(mailbox, note.at, note.len));
    }
}

/// One ring of slots, seen from both its ends.
#[derive(Clone, Copy, Default)]
struct Ring {
    /// Slots filled at the peer's.
    sent: u64,
    /// Slots emptied here, and those of them that the peer knows of.
    taken: u64,
    returned: u64,
}

/// The memory of a link: of a segment that lives as long as its queue pair.
pub(super) struct Mail {
    /// The mailbox here.
    pub(super) own: *mut u8,
    /// The peer's mailbox for this side.
    pub(super) theirs: Remote<Write>,
    /// Where lines are laid out that are too long to be sent inline: rings as in the mailbox, slot by slot.
    pub(super) drafts: *mut u8,
    /// The same for requests.
    pub(super) drafts_alias: Alias,
}

/// The peer's mailbox for this side, mapped here.
pub(super) struct Door {
    start: NonNull<u8>,
    /// Whose mapping it is in.
    _mapped: Arc<Mapped>,
}

impl Door {
    /// To the mailbox `theirs`, if it is in what is mapped, and has all that a mailbox has: one of messages between two ranks has no lines, and no door.
    pub(super) fn new(mapped: Arc<Mapped>, theirs: Remote<Write>) -> Option<Self> {
        let start = mapped.at(theirs.addr(), usize::try_from(theirs.len()).ok()?)?;
        (theirs.len() == at::LEN as u64).then_some(Self { start, _mapped: mapped })
    }

    /// Where something is in the mailbox.
    fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset < at::LEN, "offsets are those of `at`");
        // SAFETY: `new` has checked that `at::LEN` bytes from `start` on are in the mapping, which `_mapped` keeps; offsets are those of `at`, before that.
        unsafe { self.start.add(offset) }.as_ptr()
    }

    /// Stores a word, behind all that was stored before.
    fn put(&self, offset: usize, word: u64) {
        // SAFETY: in the mapping, as of `at`, and aligned: a mailbox begins at a multiple of 64 (`Mapped::at`), and `at` has words at multiples of 8. Both processes access these words atomically.
        unsafe { (*self.at(offset).cast::<AtomicU64>()).store(word, Ordering::Release) };
    }

    /// Stores a note: its last word behind the others.
    fn put_note(&self, note: &Note) {
        for (index, word) in note.bytes[..note.len].as_chunks().0.iter().enumerate() {
            self.put(note.at + 8 * index, u64::from_ne_bytes(*word));
        }
    }
}

/// Flags of words: so many there are, and then they come again.
const FLAGS: u64 = 1 << 31;

/// The flag of a message's words: never 0, which is what a mailbox holds at first.
#[inline]
fn flag_of_words(number: u64) -> u32 {
    (number % FLAGS) as u32 | 1 << 31
}

/// How long the drafts of a link are.
pub(super) const DRAFTS: usize = at::EAGERS - at::RINGS[0];
/// Which of the rings is that of eager messages, behind those of lines.
const EAGERS: usize = 2;
/// And that of terms.
const SAID: usize = 3;

/// One end of a connection.
pub(super) struct Link {
    pub(super) peer: Rank,
    qp: QueuePair<Rc>,
    mail: Mail,
    door: Option<Door>,
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
    notes: Vec<Note>,
}

// SAFETY: its pointers are into a segment of the engine's, which is Send and moves with it, and into a mapping that it holds.
unsafe impl Send for Link {}

impl Link {
    pub(super) fn new(peer: Rank, qp: QueuePair<Rc>, mail: Mail, door: Option<Door>) -> Self {
        Self {
            peer,
            qp,
            mail,
            door,
            posted: 0,
            completed: 0,
            sent: 0,
            received: 0,
            used: 0,
            granted: 0,
            filled: 0,
            rings: [Ring::default(); 4],
            notes: Vec::with_capacity(NOTES),
        }
    }

    pub(super) fn qpn(&self) -> doorbell_verbs::Qpn {
        self.qp.qpn()
    }

    /// Whether the peer's mailbox is mapped.
    pub(super) fn is_mapped(&self) -> bool {
        self.door.is_some()
    }

    /// Writes what changes nothing. Gives the requests that have to be confirmed until it has come there; none if it cannot be sent.
    pub(super) fn try_it(&mut self) -> Option<u64> {
        let there = self.there(at::TRIED, 8);
        let posted = self.has_room(1).then(|| {
            self.qp.post(|batch| {
                batch.write_inline(&[0; 8], there).signalled();
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
        self.door = None;
        self.qp.flush()
    }

    /// A word of the own mailbox.
    #[inline]
    fn word(&self, offset: usize) -> u64 {
        // SAFETY: offsets are those of `at`, in the mailbox and aligned; the mailbox lives as long as the engine. Devices write it by whole words.
        unsafe { (*self.mail.own.add(offset).cast::<AtomicU64>()).load(Ordering::Acquire) }
    }

    fn refused(&self, refused: &Refused) -> Failed {
        Failed::Refused {
            peer: self.peer,
            what: refused.to_string(),
        }
    }

    /// Where in the peer's mailbox `len` bytes lie.
    fn there(&self, offset: usize, len: usize) -> Remote<Write> {
        within(self.mail.theirs, offset, len)
    }

    /// Whether the queue takes that many requests beside the notes.
    #[inline]
    fn has_room(&self, requests: usize) -> bool {
        self.qp.send_room() as usize >= requests + self.notes.len()
    }

    fn note(&mut self, at: usize, bytes: &[u8]) {
        let mut note = Note {
            bytes: [0; GRANT],
            len: bytes.len(),
            at,
        };
        note.bytes[..bytes.len()].copy_from_slice(bytes);
        self.notes.push(note);
    }

    /// Whether another grant may be given: the peer has seen the one whose place it takes, and there is room to note it.
    #[inline]
    pub(super) fn may_grant(&self) -> bool {
        self.granted - self.filled < GRANTS && self.notes.len() < NOTES / 2
    }

    /// Grants the peer `len` bytes for its next message that has none.
    pub(super) fn grant(&mut self, addr: u64, rkey: u32, len: u32) {
        self.grant_rest(addr, rkey, len, 0);
    }

    /// The same for a part of a message, of which so many bytes are to come with it and after it.
    pub(super) fn grant_rest(&mut self, addr: u64, rkey: u32, len: u32, rest: u64) {
        let place = at::GRANTED + (self.granted % GRANTS) as usize * GRANT;
        self.granted += 1;
        let mut bytes = [0; GRANT];
        bytes[..8].copy_from_slice(&addr.to_ne_bytes());
        bytes[8..12].copy_from_slice(&rkey.to_ne_bytes());
        bytes[12..16].copy_from_slice(&len.to_ne_bytes());
        bytes[16..24].copy_from_slice(&rest.to_ne_bytes());
        bytes[24..].copy_from_slice(&self.granted.to_ne_bytes());
        self.note(place, &bytes);
    }

    /// Whether something is noted that has not been sent.
    #[inline]
    pub(super) fn has_notes(&self) -> bool {
        !self.notes.is_empty()
    }

    /// Sends what has been noted, if the queue has room for it.
    #[inline]
    pub(super) fn send_notes(&mut self) -> Result<(), Failed> {
        if self.notes.is_empty() {
            return Ok(());
        }
        if let Some(door) = &self.door {
            self.notes.drain(..).for_each(|note| door.put_note(&note));
            return Ok(());
        }
        if !self.has_room(0) {
            return Ok(());
        }
        let (notes, theirs) = (&self.notes, self.mail.theirs);
        let posted = self.qp.post(|batch| {
            write_notes(batch, notes, theirs);
        });
        self.notes.clear();
        posted.map_err(|error| self.refused(&error))
    }

    /// Whether the peer has emptied a slot of a ring of so many.
    #[inline]
    fn has_slot(&self, ring: usize, slots: u64) -> bool {
        let sent = self.rings[ring].sent;
        sent - self.word(at::RETURNED[ring]).min(sent) < slots
    }

    /// A slot of a ring is empty again: the peer hears of it every half ring, with or before what is sent next.
    #[inline]
    fn empty_slot(&mut self, ring: usize, slots: u64) {
        let Ring { taken, returned, .. } = &mut self.rings[ring];
        *taken += 1;
        if *taken - *returned >= slots / 2 {
            *returned = *taken;
            let returned = returned.to_ne_bytes();
            self.note(at::RETURNED[ring], &returned);
        }
    }

    /// Whether this side's terms of an operation could be said now: the peer has taken those before, and there is room to note them.
    pub(super) fn may_say_terms(&self) -> bool {
        self.has_slot(SAID, TERMS_SLOTS) && self.notes.len() < NOTES / 2
    }

    /// Says how many bytes this side sends the peer in an operation, and how many it expects of it; it `may_say_terms`.
    pub(super) fn say_terms(&mut self, sends: u64, expects: u64) {
        let said = &mut self.rings[SAID].sent;
        let place = at::TERMS + (*said % TERMS_SLOTS) as usize * TERMS;
        *said += 1;
        let mut bytes = [0; TERMS];
        for (into, word) in bytes.chunks_exact_mut(8).zip([sends, expects, *said]) {
            into.copy_from_slice(&word.to_ne_bytes());
        }
        self.note(place, &bytes);
    }

    /// Takes the peer's terms of an operation, if they are there: how many bytes it sends, and how many it expects.
    pub(super) fn hear_terms(&mut self) -> Option<(u64, u64)> {
        let taken = self.rings[SAID].taken;
        let place = at::TERMS + (taken % TERMS_SLOTS) as usize * TERMS;
        if self.word(place + 16) != taken + 1 {
            return None;
        }
        let terms = (self.word(place), self.word(place + 8));
        self.empty_slot(SAID, TERMS_SLOTS);
        Some(terms)
    }

    /// Where the next message of Simple that is not eager may go: the peer's grant; none yet.
    #[inline]
    fn granted_to_us(&self, len: usize) -> Option<Remote<Write>> {
        let place = at::GRANTED + (self.used % GRANTS) as usize * GRANT;
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
            self.has_slot(EAGERS, EAGER_SLOTS) && self.has_room(2)
        } else {
            self.is_granted()
        }
    }

    /// Whether a message could be sent where the peer has granted memory for it.
    #[inline]
    pub(super) fn is_granted(&self) -> bool {
        self.granted_to_us(0).is_some() && self.has_room(2)
    }

    /// Of a part that `is_granted`: how many bytes the peer expects with it and after it.
    pub(super) fn granted_rest(&self) -> u64 {
        self.word(at::GRANTED + (self.used % GRANTS) as usize * GRANT + 16)
    }

    /// Sends a message of Simple, which it `may_send`: nothing for one without content. Gives the number of requests posted with it, the last of which says by its completion that the message's memory is free.
    pub(super) fn send(&mut self, message: Option<(Alias, usize)>, eager: bool) -> Result<u64, Failed> {
        if !eager {
            return self.send_granted(message);
        }
        let len = message.map_or(0, |(_, len)| len);
        let slot = &mut self.rings[EAGERS].sent;
        let place = at::EAGERS + (*slot % EAGER_SLOTS) as usize * EAGER;
        *slot += 1;
        self.send_to(self.there(place, len), message)
    }

    /// Whether an eager message could be stored in the peer's mailbox: it is mapped and has an empty slot, and no message before is on its way by the queue pair, which this one would overtake.
    #[inline]
    pub(super) fn may_store(&self) -> bool {
        self.door.is_some() && self.completed >= self.posted && self.has_slot(EAGERS, EAGER_SLOTS)
    }

    /// Stores an eager message, which it `may_store`. Its memory is free at once.
    ///
    /// # Safety
    /// `from` can be read for `len` bytes, at most those of an eager message, which nobody writes meanwhile.
    pub(super) unsafe fn store(&mut self, from: *const u8, len: usize) -> Result<(), Failed> {
        self.send_notes()?;
        let Some(door) = &self.door else { return Ok(()) };
        let slot = &mut self.rings[EAGERS].sent;
        let place = at::EAGERS + (*slot % EAGER_SLOTS) as usize * EAGER;
        *slot += 1;
        self.sent += 1;
        // SAFETY: by contract; the slot is in the mailbox and as long, and this side's alone, as the peer has emptied it.
        unsafe { core::ptr::copy_nonoverlapping(from, door.at(place), len.min(EAGER)) };
        door.put(at::ARRIVED, self.sent);
        Ok(())
    }

    /// The same where the peer has granted memory, as the message `is_granted`.
    pub(super) fn send_granted(&mut self, message: Option<(Alias, usize)>) -> Result<u64, Failed> {
        let Some(there) = self.granted_to_us(message.map_or(0, |(_, len)| len)) else {
            return Err(Failed::Refused {
                peer: self.peer,
                what: "a message without a grant".to_owned(),
            });
        };
        self.used += 1;
        self.send_to(there, message)
    }

    fn send_to(&mut self, there: Remote<Write>, message: Option<(Alias, usize)>) -> Result<u64, Failed> {
        if self.door.is_some() {
            // By the queue pair they might come behind later ones that are stored: a count of slots would go back, and the peer wait for slots that it has.
            self.send_notes()?;
        }
        self.sent += 1;
        let number = self.sent.to_ne_bytes();
        let (notes, theirs) = (&self.notes, self.mail.theirs);
        let posted = self.qp.post(|batch| {
            write_notes(batch, notes, theirs);
            if let Some((alias, _)) = message {
                batch.write(alias, there);
            }
            batch.write_inline(&number, within(theirs, at::ARRIVED, 8)).signalled();
        });
        self.notes.clear();
        posted.map_err(|error| self.refused(&error))?;
        self.posted = self.qp.next_send();
        Ok(self.posted)
    }

    /// Whether the next message of Simple is there.
    #[inline]
    pub(super) fn has_arrived(&self) -> bool {
        self.word(at::ARRIVED) > self.received
    }

    /// Takes the message that `has_arrived` where the grant said.
    #[inline]
    pub(super) fn receive_granted(&mut self) {
        self.received += 1;
        self.filled += 1;
    }

    /// Takes the message that `has_arrived`: gives where an eager one is, until something is sent to the peer or noted for it; others are where the grant said.
    #[inline]
    pub(super) fn receive(&mut self, eager: bool) -> Option<*mut u8> {
        if !eager {
            self.receive_granted();
            return None;
        }
        self.received += 1;
        let slot = (self.rings[EAGERS].taken % EAGER_SLOTS) as usize;
        self.empty_slot(EAGERS, EAGER_SLOTS);
        // SAFETY: in the mailbox.
        Some(unsafe { self.mail.own.add(at::EAGERS + slot * EAGER) })
    }

    /// Whether lines could be sent now: the peer has emptied a slot.
    #[inline]
    pub(super) fn may_send_lines(&self, lines: Lines) -> bool {
        self.has_slot(lines.index(), lines.slots()) && (self.door.is_some() || self.has_room(1))
    }

    /// Sends `len` bytes as lines, at most what a slot has room for; it `may_send_lines`. They may be changed at once.
    ///
    /// # Safety
    /// `from` can be read for `len` bytes, which nobody writes meanwhile.
    pub(super) unsafe fn send_lines(&mut self, lines: Lines, from: *const u8, len: usize) -> Result<(), Failed> {
        let ring = &mut self.rings[lines.index()];
        let slot = (ring.sent % lines.slots()) as usize * lines.slot();
        ring.sent += 1;
        let flag = ring.sent;
        let offset = at::RINGS[lines.index()] + slot;
        let wire = lines.wire(len);
        // A message without content is a word of data that says nothing.
        let nothing = [0_u8; 4];
        let (from, len) = if len == 0 {
            (nothing.as_ptr(), nothing.len())
        } else {
            (from, len)
        };
        // SAFETY: by contract; all targets are long enough for the lines, aligned, and this side's alone: the peer has emptied the slot, and so whatever was sent from the same place of the drafts has arrived. In the peer's, where it looks
        // meanwhile, flags come last, and words of LL at once.
        let pack = |into: *mut u8| unsafe {
            match lines {
                Lines::Ll => pack_ll(flag_of_words(flag), from, len, into),
                Lines::Ll128 => pack_ll128(flag, from, len, into),
            }
        };
        if self.door.is_some() {
            self.send_notes()?;
            if let Some(door) = &self.door {
                pack(door.at(offset));
            }
            return Ok(());
        }
        let there = self.there(offset, wire);
        let posted = if wire <= INLINE && self.notes.is_empty() {
            let mut draft = core::mem::MaybeUninit::<[u64; INLINE / 8]>::uninit();
            pack(draft.as_mut_ptr().cast());
            // SAFETY: the first `wire` bytes have just been written, in whole words or lines.
            let draft = unsafe { core::slice::from_raw_parts(draft.as_ptr().cast::<u8>(), wire) };
            self.qp.write_inline(draft, there)
        } else {
            let place = offset - at::RINGS[0];
            // SAFETY: in the drafts.
            pack(unsafe { self.mail.drafts.add(place) });
            let Some(alias) = self.mail.drafts_alias.slice(place, wire) else {
                return Err(Failed::Refused {
                    peer: self.peer,
                    what: "lines beyond their slot".to_owned(),
                });
            };
            let (notes, theirs) = (&self.notes, self.mail.theirs);
            let posted = self.qp.post(|batch| {
                write_notes(batch, notes, theirs);
                batch.write(alias, there);
            });
            self.notes.clear();
            posted
        };
        posted.map_err(|error| self.refused(&error))
    }

    /// Takes `len` bytes of lines, if all of them are there.
    ///
    /// # Safety
    /// `into` can be written for `len` bytes (4, if that is 0), which nobody else touches.
    #[inline]
    pub(super) unsafe fn receive_lines(&mut self, lines: Lines, into: *mut u8, len: usize) -> bool {
        let taken = self.rings[lines.index()].taken;
        let flag = taken + 1;
        // SAFETY: in the mailbox.
        let slot = unsafe {
            self.mail
                .own
                .add(at::RINGS[lines.index()] + (taken % lines.slots()) as usize * lines.slot())
        };
        // SAFETY: the slot is aligned and as long as its lines; `into` by contract.
        let there = unsafe {
            match lines {
                Lines::Ll => try_unpack_ll(flag_of_words(flag), slot, len.max(4), into),
                Lines::Ll128 => try_unpack_ll128(flag, slot, len.max(4), into),
            }
        };
        if !there {
            return false;
        }
        if lines == Lines::Ll && flag % FLAGS <= lines.slots() {
            // Flags come again, and what a long message left may not have been overwritten by short ones since. The slot is this side's until it is given back.
            // SAFETY: in the mailbox.
            unsafe { slot.write_bytes(0, lines.slot()) };
        }
        self.empty_slot(lines.index(), lines.slots());
        true
    }
}
