//! One end of a connection: a queue pair, the peer's and the local mailbox, and the sequence
//! numbers of all protocols.
//!
//! Nothing here waits: an action that lacks a grant, a credit or a send queue slot returns so and
//! changes nothing. Control writes (grants, credits, lengths) are queued and posted with the next
//! message, or when the strand runner yields: doorbell batching.
//!
//! No model is possible: the other side is a device. Each word is loaded once with Acquire and
//! orders what was written before it.

use core::sync::atomic::{AtomicU64, Ordering};

use doorbell_verbs::{
    Batch, BufferAlias, PostError, QpState, QueuePair, QueuePairError, ReliableConnection, Remote, WriteAccess,
};

use super::error::Failed;
use super::window::Puts;
use crate::kernel::lines::{ll_flag_word, pack_ll, pack_ll128, try_unpack_ll, try_unpack_ll128};
use crate::protocol::{
    EAGER_BYTES, EAGER_SLOT, EAGER_SLOTS, GRANT_BYTES, GRANTS, LENGTHS_BYTES, LENGTHS_SLOTS, LineProtocol, mailbox,
};
use crate::types::Rank;

/// Maximum inline bytes of a send: covers short LL messages and all control writes.
pub(super) const INLINE: usize = 256;
/// Maximum queued control writes: each takes a send queue slot.
const MAX_CONTROL_WRITES: usize = 24;
pub(super) const SEND_DEPTH: u32 = 128;
/// Maximum WRITEs of a put that are posted together, the last of them signaled.
const PUT_BATCH: usize = 16;

/// A WRITE to the peer's mailbox beside messages: a grant, credits, or lengths.
#[derive(Clone, Copy)]
struct ControlWrite {
    bytes: [u8; GRANT_BYTES],
    len: usize,
    offset: usize,
}

/// Offsets are those of [`mailbox`]; the peer's device rejects accesses beyond its memory.
#[inline]
fn mailbox_range(mailbox: Remote<WriteAccess>, offset: usize, len: usize) -> Remote<WriteAccess> {
    Remote::from_raw(mailbox.addr().wrapping_add(offset as u64), mailbox.rkey().0, len as u64)
}

#[inline]
fn post_control_writes<'d>(
    batch: &mut Batch<'_, 'd>,
    control_writes: &'d [ControlWrite],
    mailbox: Remote<WriteAccess>,
) {
    for write in control_writes {
        batch.write_inline(
            &write.bytes[..write.len],
            mailbox_range(mailbox, write.offset, write.len),
        );
    }
}

#[derive(Clone, Copy, Default)]
struct Ring {
    /// Slots filled at the peer.
    sent: u64,
    /// Slots released here, and those of them that the peer has been credited.
    consumed: u64,
    credited: u64,
}

/// The memory of a link, in a segment that outlives its queue pair.
pub(super) struct MailboxMemory {
    pub(super) local: *mut u8,
    pub(super) remote: Remote<WriteAccess>,
    /// Staging buffer for lines and eager messages: rings as in the mailbox.
    pub(super) staging: *mut u8,
    pub(super) staging_alias: BufferAlias,
}

const LL_FLAGS: u64 = 1 << 31;

/// The LL flag of a message: never 0, the initial content of a mailbox.
#[inline]
fn ll_flag(number: u64) -> u32 {
    (number % LL_FLAGS) as u32 | 1 << 31
}

/// The offset of the sequence number in the slot of the eager message that follows `before` others.
#[inline]
fn eager_number(before: u64) -> usize {
    mailbox::EAGER_RING + (before % EAGER_SLOTS) as usize * EAGER_SLOT + EAGER_BYTES
}

/// The offset of the data of an eager message: right before the number, so that one WRITE has both.
#[inline]
fn eager_data(number: usize, len: usize) -> usize {
    number - len.next_multiple_of(64).min(EAGER_BYTES)
}

pub(super) const STAGING_BYTES: usize = mailbox::LENGTHS_RING - mailbox::LINE_RINGS[0];
const EAGER: usize = 2;
const LENGTHS: usize = 3;

// fields: one connection: the queue pair, the mailboxes of both ends, and the credits between them.
pub(super) struct Link {
    pub(super) peer: Rank,
    qp: QueuePair<ReliableConnection>,
    memory: MailboxMemory,
    pub(super) completed: u64,
    /// Sequence numbers of granted messages: sent; received.
    sent: u64,
    received: u64,
    /// Grants: used of the peer's; given to the peer, and those of them whose message has arrived.
    used: u64,
    granted: u64,
    filled: u64,
    /// WRITEs posted of the put in progress.
    put: usize,
    rings: [Ring; 4],
    control_writes: Vec<ControlWrite>,
}

// SAFETY: its pointers are into a segment of the engine's, which is Send and moves with it.
unsafe impl Send for Link {}

impl Link {
    pub(super) fn new(peer: Rank, qp: QueuePair<ReliableConnection>, memory: MailboxMemory) -> Self {
        Self {
            peer,
            qp,
            memory,
            completed: 0,
            sent: 0,
            received: 0,
            used: 0,
            granted: 0,
            filled: 0,
            put: 0,
            rings: [Ring::default(); 4],
            control_writes: Vec::with_capacity(MAX_CONTROL_WRITES),
        }
    }

    /// The number of requests posted so far.
    pub(super) fn requests(&self) -> u64 {
        self.qp.next_send()
    }

    pub(super) fn qpn(&self) -> doorbell_verbs::Qpn {
        self.qp.qpn()
    }

    /// A WRITE without effect. Returns the number of requests whose completion confirms it.
    pub(super) fn send_probe(&mut self) -> Option<u64> {
        let peer_range = self.peer_range(mailbox::PROBE, 8);
        let posted = self.has_queue_slots(1).then(|| {
            self.qp.post(|batch| {
                batch.write_inline(&[0; 8], peer_range).signaled();
            })
        });
        posted?.ok()?;
        Some(self.qp.next_send())
    }

    pub(super) fn is_broken(&self) -> bool {
        self.qp.state().is_ok_and(|state| state == QpState::Err)
    }

    pub(super) fn cut(&mut self) -> Result<(), QueuePairError> {
        self.qp.flush()
    }

    #[inline]
    fn word(&self, offset: usize) -> u64 {
        // SAFETY: offsets are those of `mailbox`, in the mailbox and aligned; the mailbox lives as
        // long as the engine. Devices write it by whole words.
        unsafe { (*self.memory.local.add(offset).cast::<AtomicU64>()).load(Ordering::Acquire) }
    }

    fn refused(&self, refused: &PostError) -> Failed {
        Failed::Refused {
            peer: self.peer,
            what: refused.to_string(),
        }
    }

    fn peer_range(&self, offset: usize, len: usize) -> Remote<WriteAccess> {
        mailbox_range(self.memory.remote, offset, len)
    }

    #[inline]
    fn has_queue_slots(&self, requests: usize) -> bool {
        self.qp.free_send_slots() as usize >= requests + self.control_writes.len()
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

    /// The peer must have used the grant whose slot it takes, and a control write must fit.
    #[inline]
    pub(super) fn may_grant(&self) -> bool {
        self.granted - self.filled < GRANTS && self.control_writes.len() < MAX_CONTROL_WRITES / 2
    }

    /// Grants memory for a fragment; `rest` bytes of the message remain, this fragment included.
    pub(super) fn grant(&mut self, addr: u64, rkey: u32, len: u32, rest: u64) {
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

    #[inline]
    pub(super) fn has_control_writes(&self) -> bool {
        !self.control_writes.is_empty()
    }

    pub(super) fn flush_control_writes(&mut self) -> Result<(), Failed> {
        // Those that fit: a peer that waits for the first has no need of the others.
        let fitting = self.control_writes.len().min(self.qp.free_send_slots() as usize);
        if fitting == 0 {
            return Ok(());
        }
        let (control_writes, remote) = (&self.control_writes[..fitting], self.memory.remote);
        let posted = self.qp.post(|batch| {
            post_control_writes(batch, control_writes, remote);
        });
        self.control_writes.drain(..fitting);
        posted.map_err(|error| self.refused(&error))
    }

    #[inline]
    fn has_slot(&self, ring: usize, slots: u64) -> bool {
        let sent = self.rings[ring].sent;
        sent - self.word(mailbox::CREDITS[ring]).min(sent) < slots
    }

    /// Releases a slot. The peer is credited every half ring, with or before the next message.
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

    /// Needs a credit of the ring, and room for a control write.
    pub(super) fn may_send_lengths(&self) -> bool {
        self.has_slot(LENGTHS, LENGTHS_SLOTS) && self.control_writes.len() < MAX_CONTROL_WRITES / 2
    }

    /// Sends the numbers of bytes that this side sends and expects. Requires `may_send_lengths`.
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

    /// Takes the numbers of bytes that the peer sends and expects; `None` until they have arrived.
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

    /// The peer's grant for the next rendezvous message of Simple; `None` if it has not arrived.
    #[inline]
    fn next_grant(&self, len: usize) -> Option<Remote<WriteAccess>> {
        let place = mailbox::GRANT_RING + (self.used % GRANTS) as usize * GRANT_BYTES;
        if self.word(place + 24) != self.used + 1 {
            return None;
        }
        let (addr, second) = (self.word(place), self.word(place + 8).to_ne_bytes());
        let rkey = u32::from_ne_bytes([second[0], second[1], second[2], second[3]]);
        let room = u32::from_ne_bytes([second[4], second[5], second[6], second[7]]);
        // The peer's device rejects requests beyond a grant that is too short.
        Some(Remote::from_raw(addr, rkey, u64::from(room).min(len as u64)))
    }

    #[inline]
    pub(super) fn is_granted(&self) -> bool {
        self.next_grant(0).is_some() && self.has_queue_slots(2)
    }

    /// Bytes of the message that the peer expects from the granted part on. Requires `is_granted`.
    pub(super) fn granted_rest(&self) -> u64 {
        self.word(mailbox::GRANT_RING + (self.used % GRANTS) as usize * GRANT_BYTES + 16)
    }

    #[inline]
    pub(super) fn may_send_eager(&self) -> bool {
        self.has_slot(EAGER, EAGER_SLOTS) && self.has_queue_slots(1)
    }

    /// Sends an eager message; requires `may_send_eager`. The source may be changed at once.
    ///
    /// # Safety
    /// `from` is valid for reads of `len` bytes, at most those of an eager message, and not written
    /// meanwhile.
    pub(super) unsafe fn send_eager(&mut self, from: *const u8, len: usize) -> Result<(), Failed> {
        let number = eager_number(self.rings[EAGER].sent);
        let start = eager_data(number, len);
        self.rings[EAGER].sent += 1;
        // SAFETY: by contract; both are in a slot of the staging buffer, which is free: the peer
        // has credited it, and so its earlier message has arrived.
        unsafe {
            core::ptr::copy_nonoverlapping(from, self.staging(start), len);
            self.staging(number).cast::<u64>().write(self.rings[EAGER].sent);
        }
        self.write_staged(start, number + 8 - start)
    }

    fn staging(&self, offset: usize) -> *mut u8 {
        self.memory.staging.wrapping_add(offset - mailbox::LINE_RINGS[0])
    }

    /// Writes a filled part of a slot of the staging buffer to the same place in the peer's
    /// mailbox, behind the control writes.
    #[inline]
    fn write_staged(&mut self, offset: usize, len: usize) -> Result<(), Failed> {
        let peer_range = self.peer_range(offset, len);
        let posted = if len <= INLINE && self.control_writes.is_empty() {
            // SAFETY: in the staging buffer, and not written before this slot is credited again.
            let bytes = unsafe { core::slice::from_raw_parts(self.staging(offset), len) };
            self.qp.write_inline(bytes, peer_range)
        } else {
            let alias = self.memory.staging_alias.slice(offset - mailbox::LINE_RINGS[0], len);
            let Some(alias) = alias else {
                return Err(Failed::Refused {
                    peer: self.peer,
                    what: "a message beyond its slot".to_owned(),
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

    /// Sends a message to the memory that the peer has granted; requires `is_granted`. Returns the
    /// number of requests whose completion frees the message's memory.
    pub(super) fn send_granted(&mut self, message: Option<(BufferAlias, usize)>) -> Result<u64, Failed> {
        let Some(peer_range) = self.next_grant(message.map_or(0, |(_, len)| len)) else {
            return Err(Failed::Refused {
                peer: self.peer,
                what: "a message without a grant".to_owned(),
            });
        };
        self.used += 1;
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
                .signaled();
        });
        self.control_writes.clear();
        posted.map_err(|error| self.refused(&error))?;
        Ok(self.qp.next_send())
    }

    /// Whether a granted message has arrived.
    #[inline]
    pub(super) fn has_arrived(&self) -> bool {
        self.word(mailbox::ARRIVED) > self.received
    }

    #[inline]
    pub(super) fn receive_granted(&mut self) {
        self.received += 1;
        self.filled += 1;
    }

    /// Consumes an eager message of `len` bytes, if it has arrived. Returns its data, valid until
    /// something is sent or queued to the peer.
    #[inline]
    pub(super) fn receive_eager(&mut self, len: usize) -> Option<*mut u8> {
        let consumed = self.rings[EAGER].consumed;
        let number = eager_number(consumed);
        if self.word(number) != consumed + 1 {
            return None;
        }
        self.release_slot(EAGER, EAGER_SLOTS);
        // SAFETY: in the mailbox.
        Some(unsafe { self.memory.local.add(eager_data(number, len)) })
    }

    #[inline]
    pub(super) fn may_send_lines(&self, lines: LineProtocol) -> bool {
        self.has_slot(lines.index(), lines.slots()) && self.has_queue_slots(1)
    }

    /// Sends `len` bytes by LL or LL128, at most the capacity of a slot; requires `may_send_lines`.
    /// The source may be changed at once.
    ///
    /// # Safety
    /// `from` is valid for reads of `len` bytes, not written meanwhile.
    pub(super) unsafe fn send_lines(&mut self, lines: LineProtocol, from: *const u8, len: usize) -> Result<(), Failed> {
        let ring = &mut self.rings[lines.index()];
        let slot = (ring.sent % lines.slots()) as usize * lines.slot();
        ring.sent += 1;
        let flag = ring.sent;
        let offset = mailbox::LINE_RINGS[lines.index()] + slot;
        let wire = lines.wire_bytes(len);
        // An empty message is one word of padding.
        let nothing = [0_u8; 4];
        let (from, len) = if len == 0 {
            (nothing.as_ptr(), nothing.len())
        } else {
            (from, len)
        };
        let into = self.staging(offset);
        // SAFETY: by contract; the slot of the staging buffer is long enough for the lines,
        // aligned, and free: the peer has credited it, and so its earlier message has arrived.
        unsafe {
            match lines {
                LineProtocol::Ll => pack_ll(ll_flag(flag), from, len, into),
                LineProtocol::Ll128 => pack_ll128(flag, from, len, into),
            }
        }
        self.write_staged(offset, wire)
    }

    /// Receives `len` bytes by LL or LL128, if all flags have arrived.
    ///
    /// # Safety
    /// `into` is valid for writes of `len` bytes (4, if that is 0), and not accessed by others.
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
            // LL flags wrap around, and remains of a long message may not have been overwritten by
            // short ones since. The slot is owned by this side until it is credited. SAFETY: in the
            // mailbox.
            unsafe { slot.write_bytes(0, lines.slot()) };
        }
        self.release_slot(lines.index(), lines.slots());
        true
    }

    /// Loads the last word of the next message by LL or LL128, until it has arrived or `polls`
    /// times. Returns whether it has arrived.
    pub(super) fn await_lines(&self, lines: LineProtocol, len: usize, polls: u32) -> bool {
        let consumed = self.rings[lines.index()].consumed;
        let slot = mailbox::LINE_RINGS[lines.index()] + (consumed % lines.slots()) as usize * lines.slot();
        let last = slot + lines.wire_bytes(len) - 8;
        let (mask, expected) = match lines {
            LineProtocol::Ll => (ll_flag_word(u32::MAX), ll_flag_word(ll_flag(consumed + 1))),
            LineProtocol::Ll128 => (u64::MAX, consumed + 1),
        };
        (0..polls).any(|_| self.word(last) & mask == expected)
    }

    /// Posts what fits of a put, behind the control writes. Returns whether all of it was posted.
    pub(super) fn put(&mut self, puts: &Puts) -> Result<bool, Failed> {
        self.flush_control_writes()?;
        let peer = self.peer;
        if self.put == 0
            && self.has_queue_slots(1)
            && let Some((credit, line)) = puts.credit(peer)
        {
            let posted = self.qp.post(|batch| {
                batch.write_inline(&credit, line).signaled();
            });
            posted.map_err(|error| self.refused(&error))?;
        }
        if !puts.may_write(peer) {
            return Ok(false);
        }
        loop {
            let (first, pieces) = (self.put, puts.len(peer));
            let fitting = PUT_BATCH.min(self.qp.free_send_slots() as usize);
            let last = pieces - first < fitting;
            if fitting < 2 {
                return Ok(false);
            }
            let until = if last { pieces } else { first + fitting };
            let (number, line) = puts.notification(peer);
            let posted = self.qp.post(|batch| {
                for index in first..until {
                    if let Some((source, target)) = puts.write(peer, index) {
                        batch.write(source, target).signaled_if(!last && index + 1 == until);
                    }
                }
                if last {
                    batch.write_inline(&number, line).signaled();
                }
            });
            posted.map_err(|error| self.refused(&error))?;
            if last {
                self.put = 0;
                return Ok(true);
            }
            self.put = until;
        }
    }
}
