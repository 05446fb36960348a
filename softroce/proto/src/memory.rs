//! How the engine reaches registered memory: through a trait, so that it holds no pointers and its tests use plain vectors.

use core::ops::Range;

use crate::qp::RemoteAccess;
use crate::{LKey, Qpn, RKey};

/// A protection domain, as the owner of the [`Memory`] numbers them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PdId(pub u32);

/// The queue pair through which a peer reaches memory, or a window is bound.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Via {
    /// Its protection domain.
    pub pd: PdId,
    /// Its number: a window of type 2B is good for one queue pair only.
    pub qpn: Qpn,
}

/// The binding of a memory window to a range of a region (IBTA vol 1, 10.6.7.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bind {
    /// The key that the window gets: its upper 24 bits name the window and never change, the lower 8 are the consumer's.
    pub rkey: RKey,
    /// The region, by its local key; of no concern when `len` is 0.
    pub region: LKey,
    /// The first byte, as the region has its addresses.
    pub addr: u64,
    /// Length in bytes; with 0 a window of type 1 is bound to nothing.
    pub len: u64,
    /// What peers may do through the window.
    pub access: RemoteAccess,
    /// Peers count addresses from 0 at the first byte of the window, not as the region has them.
    pub zero_based: bool,
}

/// One scatter/gather element: a range of a local memory region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sge {
    /// Virtual address of the first byte, as registered.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// The region's local key.
    pub lkey: LKey,
}

/// What a peer's request wants to do with a range (IBTA vol 1, 10.6.3.4).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RemoteRight {
    /// RDMA READ.
    Read,
    /// RDMA WRITE.
    Write,
    /// Atomic operation.
    Atomic,
}

/// Memory refused: unknown key, another protection domain, out of range, or a right the region does not grant.
///
/// One value for all of them on purpose: neither the wire nor a work completion tells them apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AccessError;

/// Why bytes that a packet refers to were not copied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CopyError {
    /// Where they were to go does not allow it.
    Access,
    /// They cannot be had any more: their owner has taken them back, or is gone. The packet is as good as lost.
    Gone,
}

impl From<AccessError> for CopyError {
    fn from(_: AccessError) -> Self {
        Self::Access
    }
}

/// Who takes a window's key away.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Invalidator {
    /// The owner, by a request of its own (IBV_WR_LOCAL_INV).
    Local,
    /// The peer, by a SEND with invalidate.
    Peer,
}

/// An atomic operation on eight aligned bytes (IBTA vol 1, 9.4.5). Values are in host order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AtomicOp {
    /// Adds, modulo 2^64.
    FetchAdd {
        /// What to add.
        add: u64,
    },
    /// Stores `swap` where the word equals `compare`.
    CompareSwap {
        /// The value expected.
        compare: u64,
        /// The value stored when it is there.
        swap: u64,
    },
}

/// Registered memory: keys, ranges, rights, and the moving of bytes.
///
/// Every method checks the key, the protection domain (of a key of a window also what ties it to a queue pair), the range and the right at the time of the call
/// and moves nothing when one of them fails. A range of length 0 is always granted, whatever its key and address (IBTA vol 1, 9.4.3: no check for zero-length RDMA).
pub trait Memory {
    /// Copies from local memory (a gather) into `dst`.
    ///
    /// # Errors
    /// When the range may not be read locally.
    fn gather(&mut self, pd: PdId, lkey: LKey, addr: u64, dst: &mut [u8]) -> Result<(), AccessError>;

    /// The same, when `behind` bytes more of the same element follow in the message, by which packet ever: memory that is slow to reach may bring them along.
    ///
    /// # Errors
    /// As [`gather`](Self::gather).
    fn gather_ahead(
        &mut self,
        pd: PdId,
        lkey: LKey,
        addr: u64,
        dst: &mut [u8],
        _behind: usize,
    ) -> Result<(), AccessError> {
        self.gather(pd, lkey, addr, dst)
    }

    /// Checks that all of `sge` may be read, or written when `write`, locally.
    ///
    /// # Errors
    /// When it may not.
    fn check_local(&mut self, pd: PdId, sge: &Sge, write: bool) -> Result<(), AccessError>;

    /// Copies `src` into local memory (a scatter: received SENDs, READ responses, atomic results). Needs LOCAL_WRITE.
    ///
    /// # Errors
    /// When the range may not be written locally.
    fn scatter(&mut self, pd: PdId, lkey: LKey, addr: u64, src: &[u8]) -> Result<(), AccessError>;

    /// Checks that a peer may use all of the range so.
    ///
    /// # Errors
    /// When it may not.
    fn check_remote(
        &mut self,
        via: Via,
        rkey: RKey,
        addr: u64,
        len: u64,
        right: RemoteRight,
    ) -> Result<(), AccessError>;

    /// Copies out for a peer's RDMA READ.
    ///
    /// # Errors
    /// When the range may not be read remotely.
    fn remote_read(&mut self, via: Via, rkey: RKey, addr: u64, dst: &mut [u8]) -> Result<(), AccessError>;

    /// The same, when the READ asks for `behind` bytes more that follow.
    ///
    /// # Errors
    /// As [`remote_read`](Self::remote_read).
    fn remote_read_ahead(
        &mut self,
        via: Via,
        rkey: RKey,
        addr: u64,
        dst: &mut [u8],
        _behind: usize,
    ) -> Result<(), AccessError> {
        self.remote_read(via, rkey, addr, dst)
    }

    /// Copies in for a peer's RDMA WRITE; the last 8 bytes become visible last.
    ///
    /// # Errors
    /// When the range may not be written remotely.
    fn remote_write(&mut self, via: Via, rkey: RKey, addr: u64, src: &[u8]) -> Result<(), AccessError>;

    /// Performs a peer's atomic on the eight bytes at `addr` and gives the value before. Atomic with respect to the host's own 8-byte atomics. The
    /// caller has checked the alignment of `addr`.
    ///
    /// # Errors
    /// When the word may not be used so.
    fn remote_atomic(&mut self, via: Via, rkey: RKey, addr: u64, op: AtomicOp) -> Result<u64, AccessError>;

    /// Binds a memory window: its old key is worth nothing from then on, its new one grants what was asked for.
    ///
    /// # Errors
    /// When window, region, range or rights do not allow it; nothing changed then.
    fn bind(&mut self, via: Via, bind: &Bind) -> Result<(), AccessError>;

    /// Takes the key of a window of type 2 away.
    ///
    /// # Errors
    /// When it is not the key of such a window, or not one that may be taken away through this queue pair.
    fn invalidate(&mut self, via: Via, rkey: RKey, by: Invalidator) -> Result<(), AccessError>;

    // By reference: packets on a lane. Memory whose owner has no lanes leaves these as they are.

    /// Whether any of `sges` is memory that the processor does not reach, such as a GPU's: packets on a lane refer to it, however short their payload is.
    fn is_distant(&mut self, _pd: PdId, _sges: &[Sge]) -> bool {
        false
    }

    /// The same of memory that a peer reads.
    fn is_distant_remote(&mut self, _via: Via, _rkey: RKey) -> bool {
        false
    }

    /// Whether bytes of READ responses that this queue pair was given are still on their way to where they belong: no SEND, WRITE or atomic begins meanwhile, nor a READ with a fence, as
    /// it might read them. When they are there the owner says so ([`Endpoint::settled`](crate::Endpoint::settled)).
    fn is_unsettled(&self, _qpn: Qpn) -> bool {
        false
    }

    /// Adds a range of local memory to what the packet being written refers to: checked as [`gather`](Self::gather) does, but read by whoever receives the packet.
    ///
    /// # Errors
    /// When the range may not be read locally.
    fn refer_local(&mut self, _pd: PdId, _sge: &Sge) -> Result<(), AccessError> {
        Err(AccessError)
    }

    /// Likewise for a peer's RDMA READ: checked as [`remote_read`](Self::remote_read) does.
    ///
    /// # Errors
    /// When the range may not be read remotely.
    fn refer_remote(&mut self, _via: Via, _rkey: RKey, _addr: u64, _len: u32) -> Result<(), AccessError> {
        Err(AccessError)
    }

    /// As [`scatter`](Self::scatter), with the bytes at `part` of the payload of the lane's packet at hand.
    ///
    /// # Errors
    /// When the range may not be written locally, or the bytes cannot be had.
    fn scatter_referred(&mut self, _pd: PdId, _lkey: LKey, _addr: u64, _part: Range<usize>) -> Result<(), CopyError> {
        Err(CopyError::Gone)
    }

    /// As [`remote_write`](Self::remote_write), with the whole payload of the lane's packet at hand, which is `len` bytes.
    ///
    /// # Errors
    /// When the range may not be written remotely, or the bytes cannot be had.
    fn remote_write_referred(&mut self, _via: Via, _rkey: RKey, _addr: u64, _len: usize) -> Result<(), CopyError> {
        Err(CopyError::Gone)
    }
}
