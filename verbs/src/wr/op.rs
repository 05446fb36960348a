//! The operations of a send queue as types: each knows its opcode and operands.

use doorbell_verbs_sys::{self as sys, work_requests};

use crate::memory::{KeyAccess, Remote, RemoteWord};
use crate::qp::RejectReason;

/// An operation of the send queue.
#[doc(alias = "ibv_wr_opcode")]
pub trait Operation: sealed::SendOperation + Copy + core::fmt::Debug {}

/// Operations that may request a solicited event: SEND, WRITE, SEND with invalidate.
pub trait Message: Operation {}

/// Operations that may carry 32 bits of immediate data: SEND and WRITE (IBTA vol 1, 9.2.5).
#[doc(alias = "imm_data")]
pub trait Immediate: Message {
    #[doc(hidden)]
    const WITH_IMMEDIATE: sys::ibv_wr_opcode;

    /// Makes the `ibv_wr_*` call of the operation with immediate data.
    ///
    /// # Safety
    /// As for the operation without.
    #[doc(hidden)]
    unsafe fn call_wr_with_imm(&self, qp: *mut sys::ibv_qp_ex, imm: u32);
}

pub(crate) mod sealed {
    use doorbell_verbs_sys as sys;

    use crate::qp::RejectReason;

    pub trait SendOperation {
        /// Writes opcode and operands.
        ///
        /// # Safety
        /// `wr` points to a work request.
        unsafe fn fill_wr(&self, wr: *mut sys::ibv_send_wr);

        /// Makes the operation's `ibv_wr_*` call.
        ///
        /// # Safety
        /// `qp` is live, of ibv_create_qp_ex, in a batch; the operation `is_callable`.
        unsafe fn call_wr(&self, qp: *mut sys::ibv_qp_ex);

        /// Whether any queue pair of its transport supports it; else `is_callable` decides.
        const ALWAYS_SUPPORTED: bool = true;

        /// Whether the queue pair supports it; what its transport always has was checked before.
        ///
        /// # Safety
        /// `qp` is live and was made by ibv_create_qp_ex.
        #[inline(always)]
        unsafe fn is_callable(&self, _qp: *mut sys::ibv_qp_ex) -> bool {
            true
        }

        /// Whether a message of `len` bytes is invalid, where `room` are possible.
        #[inline(always)]
        fn rejects(&self, len: u64, room: u64) -> bool {
            len > room
        }

        /// Why it is invalid, if `rejects` says so.
        fn reject_reason(&self, len: u64, room: u64) -> Option<RejectReason> {
            (len > room).then_some(RejectReason::RemoteTooShort { len, remote: room })
        }
    }
}

/// An [`Immediate`] operation with its 32 bits.
#[derive(Debug, Clone, Copy)]
#[doc(alias = "imm_data")]
pub struct WithImmediate<O> {
    pub(crate) op: O,
    pub(crate) imm: u32,
}

/// SEND (IBTA vol 1, 9.4.1): into a receive that the peer posted.
#[derive(Debug, Clone, Copy)]
#[doc(alias = "IBV_WR_SEND")]
pub struct SendOp;

/// SEND to an address that the request names (IBTA vol 1, 9.8.3): a datagram.
#[derive(Debug, Clone, Copy)]
#[doc(alias("IBV_WR_SEND", "ibv_wr_set_ud_addr"))]
pub struct SendTo {
    /// Null if the queue pair may not use the address handle.
    pub(crate) ah: *mut sys::ibv_ah,
    pub(crate) qpn: u32,
    pub(crate) qkey: u32,
}

/// RDMA WRITE (IBTA vol 1, 9.4.3).
#[derive(Debug, Clone, Copy)]
#[doc(alias = "IBV_WR_RDMA_WRITE")]
pub struct RdmaWrite(RemoteAddress);

/// RDMA READ (IBTA vol 1, 9.4.4).
#[derive(Debug, Clone, Copy)]
#[doc(alias = "IBV_WR_RDMA_READ")]
pub struct RdmaRead(RemoteAddress);

/// Compare and swap of eight bytes (IBTA vol 1, 9.4.5).
#[derive(Debug, Clone, Copy)]
#[doc(alias = "IBV_WR_ATOMIC_CMP_AND_SWP")]
pub struct CompareSwap {
    pub(crate) word: RemoteWord,
    pub(crate) compare: u64,
    pub(crate) swap: u64,
}

/// Fetch and add of eight bytes (IBTA vol 1, 9.4.5).
#[derive(Debug, Clone, Copy)]
#[doc(alias = "IBV_WR_ATOMIC_FETCH_AND_ADD")]
pub struct FetchAdd {
    pub(crate) word: RemoteWord,
    pub(crate) add: u64,
}

/// SEND with invalidate of a peer's key (IBTA vol 1, 9.4.1.1).
#[derive(Debug, Clone, Copy)]
#[doc(alias = "IBV_WR_SEND_WITH_INV")]
pub struct SendInvalidate {
    pub(crate) rkey: u32,
}

/// Bind of a memory window (IBTA vol 1, 10.8.3.3).
#[derive(Debug, Clone, Copy)]
#[doc(alias = "IBV_WR_BIND_MW")]
pub struct Bind(pub(crate) Binding);

/// Local invalidate of a memory window (IBTA vol 1, 10.8.3.3).
#[derive(Debug, Clone, Copy)]
#[doc(alias = "IBV_WR_LOCAL_INV")]
pub struct Invalidate(pub(crate) Binding);

#[derive(Debug, Clone, Copy)]
pub(crate) struct Binding {
    /// Live, unless `objection` is set.
    pub(crate) mw: *mut sys::ibv_mw,
    /// The new key, or the one to invalidate.
    pub(crate) rkey: u32,
    pub(crate) info: sys::ibv_mw_bind_info,
    pub(crate) objection: Option<BindError>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum BindError {
    Gone,
    Foreign,
    Empty,
}

impl Binding {
    pub(crate) fn reason(&self) -> Option<RejectReason> {
        self.objection.map(|objection| match objection {
            BindError::Gone => RejectReason::WindowGone,
            BindError::Foreign => RejectReason::ForeignWindow,
            BindError::Empty => RejectReason::EmptyWindow,
        })
    }
}

/// A remote address and rkey. Two words, so that it is passed in registers to the slow path.
#[derive(Debug, Clone, Copy)]
struct RemoteAddress {
    addr: u64,
    rkey: u32,
}

impl RemoteAddress {
    #[inline(always)]
    fn new<K: KeyAccess>(remote: Remote<K>) -> Self {
        Self {
            addr: remote.addr(),
            rkey: remote.rkey().0,
        }
    }
}

/// The longest message where only the payload's own limits apply.
pub(crate) const UNBOUNDED: u64 = u64::MAX;

impl RdmaWrite {
    #[inline(always)]
    pub(crate) fn new<K: KeyAccess>(remote: Remote<K>) -> Self {
        Self(RemoteAddress::new(remote))
    }
}

impl RdmaRead {
    #[inline(always)]
    pub(crate) fn new<K: KeyAccess>(remote: Remote<K>) -> Self {
        Self(RemoteAddress::new(remote))
    }
}

impl sealed::SendOperation for SendOp {
    #[inline(always)]
    unsafe fn fill_wr(&self, wr: *mut sys::ibv_send_wr) {
        // SAFETY: points to a request by contract.
        unsafe { (*wr).opcode = sys::IBV_WR_SEND }
    }

    #[inline(always)]
    unsafe fn call_wr(&self, qp: *mut sys::ibv_qp_ex) {
        // SAFETY: by contract.
        unsafe { work_requests::wr_send(qp) }
    }
}

impl sealed::SendOperation for SendTo {
    #[inline(always)]
    unsafe fn fill_wr(&self, wr: *mut sys::ibv_send_wr) {
        // SAFETY: as above.
        unsafe {
            (*wr).opcode = sys::IBV_WR_SEND;
            (*wr).wr.ud = sys::ibv_send_wr_ud {
                ah: self.ah,
                remote_qpn: self.qpn,
                remote_qkey: self.qkey,
            };
        }
    }

    #[inline(always)]
    unsafe fn call_wr(&self, qp: *mut sys::ibv_qp_ex) {
        // SAFETY: by contract; the address handle is live, as the request borrows it.
        unsafe {
            work_requests::wr_send(qp);
            work_requests::wr_set_ud_addr(qp, self.ah, self.qpn, self.qkey);
        }
    }

    #[inline(always)]
    fn rejects(&self, len: u64, room: u64) -> bool {
        self.ah.is_null() || len > room
    }

    fn reject_reason(&self, len: u64, room: u64) -> Option<RejectReason> {
        if self.ah.is_null() {
            return Some(RejectReason::ForeignAddressHandle);
        }
        let max = u32::try_from(room).unwrap_or(u32::MAX);
        (len > room).then_some(RejectReason::DatagramTooLong { len, max })
    }
}

impl sealed::SendOperation for RdmaWrite {
    #[inline(always)]
    unsafe fn fill_wr(&self, wr: *mut sys::ibv_send_wr) {
        // SAFETY: as above.
        unsafe {
            (*wr).opcode = sys::IBV_WR_RDMA_WRITE;
            write_remote(wr, self.0);
        }
    }

    #[inline(always)]
    unsafe fn call_wr(&self, qp: *mut sys::ibv_qp_ex) {
        // SAFETY: by contract.
        unsafe { work_requests::wr_rdma_write(qp, self.0.rkey, self.0.addr) }
    }
}

impl sealed::SendOperation for RdmaRead {
    #[inline(always)]
    unsafe fn fill_wr(&self, wr: *mut sys::ibv_send_wr) {
        // SAFETY: as above.
        unsafe {
            (*wr).opcode = sys::IBV_WR_RDMA_READ;
            write_remote(wr, self.0);
        }
    }

    #[inline(always)]
    unsafe fn call_wr(&self, qp: *mut sys::ibv_qp_ex) {
        // SAFETY: by contract.
        unsafe { work_requests::wr_rdma_read(qp, self.0.rkey, self.0.addr) }
    }
}

/// Writes a request's remote address and key, and nothing else of the union they lie in.
///
/// # Safety
/// `wr` points to a request.
#[inline(always)]
unsafe fn write_remote(wr: *mut sys::ibv_send_wr, target: RemoteAddress) {
    // SAFETY: points to a request by contract; both are fields of the union's `rdma` variant.
    unsafe {
        (*wr).wr.rdma.remote_addr = target.addr;
        (*wr).wr.rdma.rkey = target.rkey;
    }
}

impl sealed::SendOperation for CompareSwap {
    #[inline(always)]
    unsafe fn fill_wr(&self, wr: *mut sys::ibv_send_wr) {
        // SAFETY: as above.
        unsafe {
            (*wr).opcode = sys::IBV_WR_ATOMIC_CMP_AND_SWP;
            (*wr).wr.atomic = sys::ibv_send_wr_atomic {
                remote_addr: self.word.addr,
                compare_add: self.compare,
                swap: self.swap,
                rkey: self.word.rkey.0,
            };
        }
    }

    #[inline(always)]
    unsafe fn call_wr(&self, qp: *mut sys::ibv_qp_ex) {
        // SAFETY: by contract.
        unsafe { work_requests::wr_atomic_cmp_swp(qp, self.word.rkey.0, self.word.addr, self.compare, self.swap) }
    }

    const ALWAYS_SUPPORTED: bool = false;

    #[inline(always)]
    unsafe fn is_callable(&self, qp: *mut sys::ibv_qp_ex) -> bool {
        // SAFETY: by contract.
        unsafe { (*qp).wr_atomic_cmp_swp.is_some() }
    }
}

impl sealed::SendOperation for FetchAdd {
    #[inline(always)]
    unsafe fn fill_wr(&self, wr: *mut sys::ibv_send_wr) {
        // SAFETY: as above.
        unsafe {
            (*wr).opcode = sys::IBV_WR_ATOMIC_FETCH_AND_ADD;
            (*wr).wr.atomic = sys::ibv_send_wr_atomic {
                remote_addr: self.word.addr,
                compare_add: self.add,
                swap: 0,
                rkey: self.word.rkey.0,
            };
        }
    }

    #[inline(always)]
    unsafe fn call_wr(&self, qp: *mut sys::ibv_qp_ex) {
        // SAFETY: by contract.
        unsafe { work_requests::wr_atomic_fetch_add(qp, self.word.rkey.0, self.word.addr, self.add) }
    }

    const ALWAYS_SUPPORTED: bool = false;

    #[inline(always)]
    unsafe fn is_callable(&self, qp: *mut sys::ibv_qp_ex) -> bool {
        // SAFETY: by contract.
        unsafe { (*qp).wr_atomic_fetch_add.is_some() }
    }
}

impl sealed::SendOperation for SendInvalidate {
    #[inline(always)]
    unsafe fn fill_wr(&self, wr: *mut sys::ibv_send_wr) {
        // SAFETY: as above.
        unsafe {
            (*wr).opcode = sys::IBV_WR_SEND_WITH_INV;
            (*wr).anon_1.invalidate_rkey = self.rkey;
        }
    }

    #[inline(always)]
    unsafe fn call_wr(&self, qp: *mut sys::ibv_qp_ex) {
        // SAFETY: by contract.
        unsafe { work_requests::wr_send_inv(qp, self.rkey) }
    }

    #[inline(always)]
    unsafe fn is_callable(&self, qp: *mut sys::ibv_qp_ex) -> bool {
        // SAFETY: by contract.
        unsafe { (*qp).wr_send_inv.is_some() }
    }
}

impl sealed::SendOperation for Bind {
    unsafe fn fill_wr(&self, wr: *mut sys::ibv_send_wr) {
        // SAFETY: as above.
        unsafe {
            (*wr).opcode = sys::IBV_WR_BIND_MW;
            (*wr).anon_2.bind_mw = sys::ibv_send_wr_bind_mw {
                mw: self.0.mw,
                rkey: self.0.rkey,
                bind_info: self.0.info,
            };
        }
    }

    unsafe fn call_wr(&self, qp: *mut sys::ibv_qp_ex) {
        // SAFETY: by contract; window and region are live, as the request keeps them.
        unsafe { work_requests::wr_bind_mw(qp, self.0.mw, self.0.rkey, &raw const self.0.info) }
    }

    unsafe fn is_callable(&self, qp: *mut sys::ibv_qp_ex) -> bool {
        // SAFETY: by contract.
        unsafe { (*qp).wr_bind_mw.is_some() }
    }

    fn rejects(&self, _len: u64, _room: u64) -> bool {
        self.0.objection.is_some()
    }

    fn reject_reason(&self, _len: u64, _room: u64) -> Option<RejectReason> {
        self.0.reason()
    }
}

impl sealed::SendOperation for Invalidate {
    unsafe fn fill_wr(&self, wr: *mut sys::ibv_send_wr) {
        // SAFETY: as above.
        unsafe {
            (*wr).opcode = sys::IBV_WR_LOCAL_INV;
            (*wr).anon_1.invalidate_rkey = self.0.rkey;
        }
    }

    unsafe fn call_wr(&self, qp: *mut sys::ibv_qp_ex) {
        // SAFETY: by contract.
        unsafe { work_requests::wr_local_inv(qp, self.0.rkey) }
    }

    unsafe fn is_callable(&self, qp: *mut sys::ibv_qp_ex) -> bool {
        // SAFETY: by contract.
        unsafe { (*qp).wr_local_inv.is_some() }
    }

    fn rejects(&self, _len: u64, _room: u64) -> bool {
        self.0.objection.is_some()
    }

    fn reject_reason(&self, _len: u64, _room: u64) -> Option<RejectReason> {
        self.0.reason()
    }
}

impl<O: Immediate> sealed::SendOperation for WithImmediate<O> {
    #[inline(always)]
    unsafe fn fill_wr(&self, wr: *mut sys::ibv_send_wr) {
        // SAFETY: as above.
        unsafe {
            self.op.fill_wr(wr);
            (*wr).opcode = O::WITH_IMMEDIATE;
            (*wr).anon_1.imm_data = self.imm.to_be();
        }
    }

    #[inline(always)]
    unsafe fn call_wr(&self, qp: *mut sys::ibv_qp_ex) {
        // SAFETY: by contract.
        unsafe { self.op.call_wr_with_imm(qp, self.imm) }
    }

    #[inline(always)]
    fn rejects(&self, len: u64, room: u64) -> bool {
        self.op.rejects(len, room)
    }

    fn reject_reason(&self, len: u64, room: u64) -> Option<RejectReason> {
        self.op.reject_reason(len, room)
    }
}

impl<O: Immediate> Operation for WithImmediate<O> {}
impl<O: Immediate> Message for WithImmediate<O> {}
impl Operation for SendOp {}
impl Operation for SendTo {}
impl Operation for RdmaWrite {}
impl Operation for RdmaRead {}
impl Operation for CompareSwap {}
impl Operation for FetchAdd {}
impl Operation for SendInvalidate {}
impl Operation for Bind {}
impl Operation for Invalidate {}
impl Message for SendInvalidate {}
impl Message for SendOp {}
impl Message for SendTo {}
impl Message for RdmaWrite {}
impl Immediate for SendOp {
    const WITH_IMMEDIATE: sys::ibv_wr_opcode = sys::IBV_WR_SEND_WITH_IMM;

    #[inline(always)]
    unsafe fn call_wr_with_imm(&self, qp: *mut sys::ibv_qp_ex, imm: u32) {
        // SAFETY: by contract.
        unsafe { work_requests::wr_send_imm(qp, imm.to_be()) }
    }
}
impl Immediate for SendTo {
    const WITH_IMMEDIATE: sys::ibv_wr_opcode = sys::IBV_WR_SEND_WITH_IMM;

    #[inline(always)]
    unsafe fn call_wr_with_imm(&self, qp: *mut sys::ibv_qp_ex, imm: u32) {
        // SAFETY: by contract.
        unsafe {
            work_requests::wr_send_imm(qp, imm.to_be());
            work_requests::wr_set_ud_addr(qp, self.ah, self.qpn, self.qkey);
        }
    }
}
impl Immediate for RdmaWrite {
    const WITH_IMMEDIATE: sys::ibv_wr_opcode = sys::IBV_WR_RDMA_WRITE_WITH_IMM;

    #[inline(always)]
    unsafe fn call_wr_with_imm(&self, qp: *mut sys::ibv_qp_ex, imm: u32) {
        // SAFETY: by contract.
        unsafe { work_requests::wr_rdma_write_imm(qp, self.0.rkey, self.0.addr, imm.to_be()) }
    }
}
