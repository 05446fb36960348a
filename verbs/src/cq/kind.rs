//! The two kinds of completion queue, as types: what is written once for both is generic over them, and compiled for each.

use doorbell_verbs_sys as sys;

use super::Poller;
use super::classic::ClassicCursor;
use super::extended::{Calls, ExtendedCursor, ExtendedEntry};
use super::spot::Retired;
use crate::error::CompletionQueueError;
use crate::memory::Buffers;

/// A completion queue whose completions are copied out by ibv_poll_cq(3): every device has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Classic {}

/// A completion queue made by ibv_create_cq_ex(3): what a completion says is read only if asked for, and it may say when it came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extended {}

/// [`Classic`] or [`Extended`].
pub trait CqKind: Machinery {}

impl CqKind for Classic {}
impl CqKind for Extended {}

/// What a kind of queue is to those who poll it.
pub trait Machinery: Sized + 'static {
    /// What it is called.
    const NAME: &'static str;

    /// What of a poller is this kind's own.
    type Own;
    /// Goes through the completions that a poll has found.
    type Cursor<'a>: Cursor<Self>;
    /// A completion, to be read.
    type Entry<'a>: Entry;

    /// Asks the device for completions, if none are left.
    fn look(poller: &mut Poller<Self>) -> Result<(), CompletionQueueError>;

    /// Whether completions are left that need not be asked for.
    fn has_found(poller: &Poller<Self>) -> bool;

    /// Begins to go through what is left.
    fn cursor(poller: &mut Poller<Self>) -> Self::Cursor<'_>;

    /// Leaves no poll open.
    fn close(poller: &mut Poller<Self>);
}

/// Goes through the completions found. It begins or resumes before each advance.
pub trait Cursor<Q: Machinery> {
    /// Begins to go through all. False when there is nothing.
    fn begin(&mut self) -> bool;

    /// Goes on, or begins without knowing how many are wanted. False when there is nothing more.
    fn resume(&mut self) -> bool;

    /// Takes what the next request has posted. `None` when there is none.
    fn advance(&mut self) -> Option<Buffers>;

    /// Gives the slot just taken from back to the poster. Returns the completion, and which request it was.
    ///
    /// # Safety
    /// `advance` has just returned buffers. The completion is not used after the next call of `advance`, or after the cursor is gone; of a [`Classic`] queue, and the request, as
    /// long as the poller stays borrowed.
    unsafe fn retire<'a>(&mut self) -> (Q::Entry<'a>, Retired<'a>);

    /// Goes on to the next request. False when there is nothing more.
    fn follow(&mut self) -> bool;

    /// Tells the poller how far it has come.
    fn put_down(&mut self);
}

/// What a completion says (ibv_poll_cq(3)). All but status and slot are valid in one that succeeded only, or as its flags say.
pub trait Entry: Copy {
    /// `ibv_wc_status`.
    fn status(self) -> sys::ibv_wc_status;
    /// The lower half of its `wr_id`.
    fn slot(self) -> u32;
    /// `ibv_wc_opcode`.
    fn opcode(self) -> sys::ibv_wc_opcode;
    /// The device's own code for an error.
    fn vendor_err(self) -> u32;
    /// Bytes received.
    fn byte_len(self) -> u32;
    /// The immediate data or the key that the peer has invalidated, as it was on the wire.
    fn imm_data(self) -> u32;
    /// The number of the queue pair that sent a datagram.
    fn src_qp(self) -> u32;
    /// `ibv_wc_flags`.
    fn wc_flags(self) -> u32;
    /// The index of the partition key; `None` where the kind does not tell.
    fn pkey_index(self) -> Option<u16>;
    /// The sender's LID.
    fn slid(self) -> u16;
    /// The service level.
    fn sl(self) -> u8;
    /// The lower bits of the destination LID.
    fn dlid_path_bits(self) -> u8;
}

impl Machinery for Classic {
    const NAME: &'static str = "classic";

    type Own = super::classic::Fetched;
    type Cursor<'a> = ClassicCursor<'a>;
    type Entry<'a> = &'a sys::ibv_wc;

    #[inline(always)]
    fn look(poller: &mut Poller<Self>) -> Result<(), CompletionQueueError> {
        poller.fetch()
    }

    #[inline(always)]
    fn has_found(poller: &Poller<Self>) -> bool {
        poller.own.is_left()
    }

    #[inline(always)]
    fn cursor(poller: &mut Poller<Self>) -> ClassicCursor<'_> {
        ClassicCursor::new(poller)
    }

    fn close(_: &mut Poller<Self>) {}
}

impl Machinery for Extended {
    const NAME: &'static str = "extended";

    type Own = Calls;
    type Cursor<'a> = ExtendedCursor<'a>;
    type Entry<'a> = ExtendedEntry<'a>;

    #[inline(always)]
    fn look(poller: &mut Poller<Self>) -> Result<(), CompletionQueueError> {
        poller.start()
    }

    #[inline(always)]
    fn has_found(poller: &Poller<Self>) -> bool {
        poller.own.is_left()
    }

    #[inline(always)]
    fn cursor(poller: &mut Poller<Self>) -> ExtendedCursor<'_> {
        ExtendedCursor::new(poller)
    }

    fn close(poller: &mut Poller<Self>) {
        poller.abandon();
    }
}

impl Entry for &sys::ibv_wc {
    #[inline(always)]
    fn status(self) -> sys::ibv_wc_status {
        self.status
    }

    #[inline(always)]
    fn slot(self) -> u32 {
        self.wr_id as u32
    }

    #[inline(always)]
    fn opcode(self) -> sys::ibv_wc_opcode {
        self.opcode
    }

    #[inline(always)]
    fn vendor_err(self) -> u32 {
        self.vendor_err
    }

    #[inline(always)]
    fn byte_len(self) -> u32 {
        self.byte_len
    }

    #[inline(always)]
    fn imm_data(self) -> u32 {
        // SAFETY: both variants of the union are 32-bit integers.
        unsafe { self.anon_1.imm_data }
    }

    #[inline(always)]
    fn src_qp(self) -> u32 {
        self.src_qp
    }

    #[inline(always)]
    fn wc_flags(self) -> u32 {
        self.wc_flags
    }

    #[inline(always)]
    fn pkey_index(self) -> Option<u16> {
        Some(self.pkey_index)
    }

    #[inline(always)]
    fn slid(self) -> u16 {
        self.slid
    }

    #[inline(always)]
    fn sl(self) -> u8 {
        self.sl
    }

    #[inline(always)]
    fn dlid_path_bits(self) -> u8 {
        self.dlid_path_bits
    }
}
