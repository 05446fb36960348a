//! The operations of a send queue, as types: each knows its opcode and what it writes into a work request.

use doorbell_verbs_sys as sys;

use crate::memory::{Key, Remote, RemoteWord};
use crate::qp::Reason;

/// An operation of the send queue.
pub trait Operation: sealed::Fill + Copy {}

/// Operations that may carry 32 bits of immediate data: SEND, to a peer or an address, and WRITE (IBTA vol 1, 9.2.5).
pub trait Immediate: Operation {
    /// The opcode with immediate data.
    #[doc(hidden)]
    const WITH_IMMEDIATE: sys::ibv_wr_opcode;
}

pub(crate) mod sealed {
    use doorbell_verbs_sys as sys;

    use crate::qp::Reason;

    pub trait Fill {
        /// Writes opcode and operands.
        ///
        /// # Safety
        /// `wr` points to a work request.
        unsafe fn fill(&self, wr: *mut sys::ibv_send_wr);

        /// Why a message of `len` bytes would not do, if so.
        #[inline(always)]
        fn check(&self, _len: u64) -> Option<Reason> {
            None
        }

        /// Whether `check` finds nothing.
        #[inline(always)]
        fn admits(&self, len: u64) -> bool {
            self.check(len).is_none()
        }
    }
}

/// SEND (IBTA vol 1, 9.4.1): into a receive that the peer posted.
#[derive(Debug, Clone, Copy)]
pub struct Send;

/// SEND to an address that the request names (IBTA vol 1, 9.8.3): a datagram.
#[derive(Debug, Clone, Copy)]
pub struct SendTo {
    pub(crate) ah: *mut sys::ibv_ah,
    pub(crate) qpn: u32,
    pub(crate) qkey: u32,
    /// The longest message in bytes; `None` where the address handle is not the queue pair's to use.
    pub(crate) max_len: Option<u32>,
}

/// RDMA WRITE (IBTA vol 1, 9.4.3).
#[derive(Debug, Clone, Copy)]
pub struct Write(Target);

/// RDMA READ (IBTA vol 1, 9.4.4).
#[derive(Debug, Clone, Copy)]
pub struct Read(Target);

/// Compare and swap of eight bytes (IBTA vol 1, 9.4.5).
#[derive(Debug, Clone, Copy)]
pub struct CompareSwap {
    pub(crate) word: RemoteWord,
    pub(crate) compare: u64,
    pub(crate) swap: u64,
}

/// Fetch and add of eight bytes (IBTA vol 1, 9.4.5).
#[derive(Debug, Clone, Copy)]
pub struct FetchAdd {
    pub(crate) word: RemoteWord,
    pub(crate) add: u64,
}

#[derive(Debug, Clone, Copy)]
struct Target {
    addr: u64,
    len: u64,
    rkey: u32,
}

impl Target {
    #[inline(always)]
    fn new<K: Key>(remote: Remote<K>) -> Self {
        Self {
            addr: remote.addr(),
            len: remote.len(),
            rkey: remote.rkey().0,
        }
    }

    #[inline(always)]
    fn check(&self, len: u64) -> Option<Reason> {
        (len > self.len).then_some(Reason::RemoteTooShort { len, remote: self.len })
    }
}

impl Write {
    #[inline(always)]
    pub(crate) fn new<K: Key>(remote: Remote<K>) -> Self {
        Self(Target::new(remote))
    }
}

impl Read {
    #[inline(always)]
    pub(crate) fn new<K: Key>(remote: Remote<K>) -> Self {
        Self(Target::new(remote))
    }
}

impl sealed::Fill for Send {
    #[inline(always)]
    unsafe fn fill(&self, wr: *mut sys::ibv_send_wr) {
        // SAFETY: points to a request by contract.
        unsafe { (*wr).opcode = sys::IBV_WR_SEND }
    }
}

impl sealed::Fill for SendTo {
    #[inline(always)]
    unsafe fn fill(&self, wr: *mut sys::ibv_send_wr) {
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
    fn check(&self, len: u64) -> Option<Reason> {
        let Some(max) = self.max_len else {
            return Some(Reason::ForeignAddressHandle);
        };
        (len > u64::from(max)).then_some(Reason::DatagramTooLong { len, max })
    }
}

impl sealed::Fill for Write {
    #[inline(always)]
    unsafe fn fill(&self, wr: *mut sys::ibv_send_wr) {
        // SAFETY: as above.
        unsafe {
            (*wr).opcode = sys::IBV_WR_RDMA_WRITE;
            write_remote(wr, self.0);
        }
    }

    #[inline(always)]
    fn check(&self, len: u64) -> Option<Reason> {
        self.0.check(len)
    }
}

impl sealed::Fill for Read {
    #[inline(always)]
    unsafe fn fill(&self, wr: *mut sys::ibv_send_wr) {
        // SAFETY: as above.
        unsafe {
            (*wr).opcode = sys::IBV_WR_RDMA_READ;
            write_remote(wr, self.0);
        }
    }

    #[inline(always)]
    fn check(&self, len: u64) -> Option<Reason> {
        self.0.check(len)
    }
}

/// Writes a request's remote address and key, and nothing else of the union they lie in.
///
/// # Safety
/// `wr` points to a request.
#[inline(always)]
unsafe fn write_remote(wr: *mut sys::ibv_send_wr, target: Target) {
    // SAFETY: points to a request by contract; both are fields of the union's `rdma` variant.
    unsafe {
        (*wr).wr.rdma.remote_addr = target.addr;
        (*wr).wr.rdma.rkey = target.rkey;
    }
}

impl sealed::Fill for CompareSwap {
    #[inline(always)]
    unsafe fn fill(&self, wr: *mut sys::ibv_send_wr) {
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
}

impl sealed::Fill for FetchAdd {
    #[inline(always)]
    unsafe fn fill(&self, wr: *mut sys::ibv_send_wr) {
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
}

impl Operation for Send {}
impl Operation for SendTo {}
impl Operation for Write {}
impl Operation for Read {}
impl Operation for CompareSwap {}
impl Operation for FetchAdd {}
impl Immediate for Send {
    const WITH_IMMEDIATE: sys::ibv_wr_opcode = sys::IBV_WR_SEND_WITH_IMM;
}
impl Immediate for SendTo {
    const WITH_IMMEDIATE: sys::ibv_wr_opcode = sys::IBV_WR_SEND_WITH_IMM;
}
impl Immediate for Write {
    const WITH_IMMEDIATE: sys::ibv_wr_opcode = sys::IBV_WR_RDMA_WRITE_WITH_IMM;
}
