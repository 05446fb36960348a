//! The two kinds of completion queue, as types.

use doorbell_verbs_sys as sys;

use super::Poller;
use super::classic::ClassicCursor;
use super::extended::{ExtendedCursor, ExtendedEntry, ExtendedPoll};
use super::ring_cursor::Retired;
use crate::error::CompletionQueueError;
use crate::memory::Buffers;

/// A completion queue whose completions are copied out by ibv_poll_cq(3). Every device supports it.
#[doc(alias("ibv_cq", "ibv_create_cq"))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(alias = "ibv_poll_cq")]
pub enum ClassicCq {}

/// A queue of ibv_create_cq_ex(3): fields are read on demand, and may include timestamps.
#[doc(alias("ibv_cq_ex", "ibv_create_cq_ex"))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(alias = "ibv_start_poll")]
pub enum ExtendedCq {}

/// [`ClassicCq`] or [`ExtendedCq`].
pub trait CqKind: PollBackend {}

impl CqKind for ClassicCq {}
impl CqKind for ExtendedCq {}

/// How a kind of queue is polled.
pub trait PollBackend: Sized + 'static {
    /// The kind's name, for descriptions.
    const NAME: &'static str;

    /// The part of the poller that depends on the kind.
    type PollState;
    /// The cursor over its completions.
    type Cursor<'a>: Cursor<Self>;
    /// A completion, to be read.
    type Entry<'a>: Entry;

    /// Polls the device if no completion is left to yield.
    fn refill(poller: &mut Poller<Self>) -> Result<(), CompletionQueueError>;

    /// Whether completions are left that need no poll of the device.
    fn has_completions(poller: &Poller<Self>) -> bool;

    /// Starts to walk the completions that are left.
    fn cursor(poller: &mut Poller<Self>) -> Self::Cursor<'_>;

    /// Closes an open poll.
    fn close(poller: &mut Poller<Self>);
}

/// Walks the completions found. `begin` or `resume` comes before each `advance`.
pub trait Cursor<Q: PollBackend> {
    /// Starts to walk all completions. False when there are none.
    fn begin(&mut self) -> bool;

    /// Continues, or starts when completions are taken one at a time. False when there are no more.
    fn resume(&mut self) -> bool;

    /// Takes the buffers of the next request. `None` when there is none.
    fn advance(&mut self) -> Option<Buffers>;

    /// Gives the slot just taken from back to the poster; returns completion and request.
    ///
    /// # Safety
    /// `advance` has just returned buffers. The completion is not used after the next call of
    /// `advance` or after the cursor is dropped; that of a [`ClassicCq`] queue, and the request,
    /// not after the poller's borrow ends.
    unsafe fn retire<'a>(&mut self) -> (Q::Entry<'a>, Retired<'a>);

    /// Moves to the next request. False when there are no more.
    fn step(&mut self) -> bool;

    /// Saves the position in the poller.
    fn save_position(&mut self);
}

/// The fields of a work completion (ibv_poll_cq(3)). All but status and slot are valid only in a
/// successful one, or as its flags say.
pub trait Entry: Copy {
    /// `ibv_wc_status`.
    fn status(self) -> sys::ibv_wc_status;
    /// The slot of the request: the lower half of `wr_id`.
    fn slot(self) -> u32;
    /// `ibv_wc_opcode`.
    fn opcode(self) -> sys::ibv_wc_opcode;
    /// The vendor's error code.
    fn vendor_err(self) -> u32;
    /// Bytes received.
    fn byte_len(self) -> u32;
    /// The immediate data or the rkey that the peer invalidated, in network byte order.
    fn imm_data(self) -> u32;
    /// The queue pair number of a datagram's sender.
    fn src_qp(self) -> u32;
    /// `ibv_wc_flags`.
    fn wc_flags(self) -> u32;
    /// The P_Key index; `None` where the kind does not report it.
    fn pkey_index(self) -> Option<u16>;
    /// The sender's LID.
    fn slid(self) -> u16;
    /// The service level.
    fn sl(self) -> u8;
    /// The lower bits of the destination LID.
    fn dlid_path_bits(self) -> u8;
}

impl PollBackend for ClassicCq {
    const NAME: &'static str = "classic";

    type PollState = super::classic::WcBatch;
    type Cursor<'a> = ClassicCursor<'a>;
    type Entry<'a> = &'a sys::ibv_wc;

    #[inline(always)]
    fn refill(poller: &mut Poller<Self>) -> Result<(), CompletionQueueError> {
        poller.fetch()
    }

    #[inline(always)]
    fn has_completions(poller: &Poller<Self>) -> bool {
        poller.state.has_unread()
    }

    #[inline(always)]
    fn cursor(poller: &mut Poller<Self>) -> ClassicCursor<'_> {
        ClassicCursor::new(poller)
    }

    fn close(_: &mut Poller<Self>) {}
}

impl PollBackend for ExtendedCq {
    const NAME: &'static str = "extended";

    type PollState = ExtendedPoll;
    type Cursor<'a> = ExtendedCursor<'a>;
    type Entry<'a> = ExtendedEntry<'a>;

    #[inline(always)]
    fn refill(poller: &mut Poller<Self>) -> Result<(), CompletionQueueError> {
        poller.start()
    }

    #[inline(always)]
    fn has_completions(poller: &Poller<Self>) -> bool {
        poller.state.has_unread()
    }

    #[inline(always)]
    fn cursor(poller: &mut Poller<Self>) -> ExtendedCursor<'_> {
        ExtendedCursor::new(poller)
    }

    fn close(poller: &mut Poller<Self>) {
        poller.end_abandoned();
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
