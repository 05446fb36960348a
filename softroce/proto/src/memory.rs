//! Access to registered memory through a trait: the engine holds no pointers.

use core::ops::Range;

use crate::qp::RemoteAccess;
use crate::{LKey, Qpn, RKey};

/// A protection domain (PD), as numbered by the implementor of [`Memory`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PdId(pub u32);

/// The queue pair that accesses memory or binds a window: what a key is checked against.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct AccessContext {
    /// Its protection domain.
    pub pd: PdId,
    /// Its number: a type 2B window is valid for one queue pair only.
    pub qpn: Qpn,
}

/// The binding of a memory window to a range of a region (IBTA vol 1, 10.6.7.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bind {
    /// The window's new key: the upper 24 bits identify the window, the lower 8 are the consumer's.
    pub rkey: RKey,
    /// The region's local key; ignored when `len` is 0.
    pub region: LKey,
    /// The first byte, in the region's virtual addresses.
    pub addr: u64,
    /// Length in bytes; 0 unbinds a type 1 window.
    pub len: u64,
    /// The remote access rights of the window.
    pub access: RemoteAccess,
    /// Zero-based: remote addresses are offsets from the first byte of the window.
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

/// The remote access right that a peer's request needs (IBTA vol 1, 10.6.3.4).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RemoteRight {
    /// RDMA READ.
    Read,
    /// RDMA WRITE.
    Write,
    /// Atomic operation.
    Atomic,
}

/// Unknown key, other protection domain, out of range, or missing right: neither the wire nor a
/// work completion distinguishes them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AccessError;

/// Why a payload passed by reference was not copied.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CopyError {
    /// The destination does not permit it.
    #[error("the destination does not permit the access")]
    Access,
    /// The source was revoked, or its owner is gone. The packet counts as lost.
    #[error("the sender revoked the payload, or is gone")]
    Gone,
}

impl From<AccessError> for CopyError {
    fn from(_: AccessError) -> Self {
        Self::Access
    }
}

/// Who invalidates a window's key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Invalidator {
    /// The local consumer (IBV_WR_LOCAL_INV).
    Local,
    /// The peer, by a SEND with invalidate.
    Peer,
}

/// An atomic operation on eight aligned bytes (IBTA vol 1, 9.4.5). Values are in host order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AtomicOp {
    /// Fetch and add, modulo 2^64.
    FetchAdd {
        /// The addend.
        add: u64,
    },
    /// Compare and swap: stores `swap` if the value equals `compare`.
    CompareSwap {
        /// The value expected.
        compare: u64,
        /// The value to store.
        swap: u64,
    },
}

/// Where data must be before a FLUSH completes (IBTA vol 1, annex A19), or may be required to be.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Placement {
    /// Visible to all that access the memory.
    pub global: bool,
    /// Kept by the memory without power.
    pub persistent: bool,
}

impl Placement {
    /// Neither.
    pub const NONE: Self = Self {
        global: false,
        persistent: false,
    };

    /// Whether `granted` has all of it.
    pub const fn is_within(self, granted: Self) -> bool {
        (granted.global || !self.global) && (granted.persistent || !self.persistent)
    }
}

/// A FLUSH: what earlier requests of its queue pair wrote to this memory is placed as required.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Flush {
    /// Remote virtual address.
    pub addr: u64,
    /// Remote key.
    pub rkey: RKey,
    /// Length in bytes.
    pub len: u32,
    /// All of the region: address and length are not used.
    pub whole_region: bool,
    /// The placement required.
    pub placement: Placement,
}

/// Registered memory: checks of keys, ranges and rights, and copies.
///
/// Every method checks the key, the protection domain (and the queue pair, for the key of a window
/// bound to one), the range and the right at the time of the call, and copies nothing when a check
/// fails. A range of length 0 is always granted, whatever its key and address (IBTA vol 1, 9.4.3).
pub trait Memory {
    /// Copies local memory into `dst` (gather).
    ///
    /// # Errors
    /// When the range may not be read locally.
    fn gather(&mut self, pd: PdId, lkey: LKey, addr: u64, dst: &mut [u8]) -> Result<(), AccessError>;

    /// As [`gather`](Self::gather), with a read-ahead hint: the message continues with `behind`
    /// bytes of the same element, which memory that is slow to access may fetch too.
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

    /// Checks that all of `sge` may be read, or written if `write`, locally.
    ///
    /// # Errors
    /// When it may not.
    fn check_local(&mut self, pd: PdId, sge: &Sge, write: bool) -> Result<(), AccessError>;

    /// Copies `src` into local memory (scatter). Needs LOCAL_WRITE.
    ///
    /// # Errors
    /// When the range may not be written locally.
    fn scatter(&mut self, pd: PdId, lkey: LKey, addr: u64, src: &[u8]) -> Result<(), AccessError>;

    /// Checks that a peer has `right` on all of the range.
    ///
    /// # Errors
    /// When it has not.
    fn check_remote(
        &mut self,
        context: AccessContext,
        rkey: RKey,
        addr: u64,
        len: u64,
        right: RemoteRight,
    ) -> Result<(), AccessError>;

    /// Copies memory into `dst` for a peer's RDMA READ.
    ///
    /// # Errors
    /// When the range may not be read remotely.
    fn remote_read(&mut self, context: AccessContext, rkey: RKey, addr: u64, dst: &mut [u8])
    -> Result<(), AccessError>;

    /// As [`remote_read`](Self::remote_read), with a read-ahead hint of `behind` bytes.
    ///
    /// # Errors
    /// As [`remote_read`](Self::remote_read).
    fn remote_read_ahead(
        &mut self,
        context: AccessContext,
        rkey: RKey,
        addr: u64,
        dst: &mut [u8],
        _behind: usize,
    ) -> Result<(), AccessError> {
        self.remote_read(context, rkey, addr, dst)
    }

    /// Copies `src` into memory for a peer's RDMA WRITE; the last 8 bytes become visible last.
    ///
    /// # Errors
    /// When the range may not be written remotely.
    fn remote_write(&mut self, context: AccessContext, rkey: RKey, addr: u64, src: &[u8]) -> Result<(), AccessError>;

    /// Executes a peer's atomic on the 8 aligned bytes at `addr`, atomic with respect to the host's
    /// own, and returns the original value.
    ///
    /// # Errors
    /// When the right is missing.
    fn remote_atomic(
        &mut self,
        context: AccessContext,
        rkey: RKey,
        addr: u64,
        op: AtomicOp,
    ) -> Result<u64, AccessError>;

    /// Stores `word` in the 8 aligned bytes at `addr` at once, for a peer's atomic WRITE. Needs the
    /// right to WRITE. The default is for where [`remote_write`](Self::remote_write) does so.
    ///
    /// # Errors
    /// When the right is missing, or the memory cannot be written at once.
    fn remote_atomic_write(
        &mut self,
        context: AccessContext,
        rkey: RKey,
        addr: u64,
        word: [u8; 8],
    ) -> Result<(), AccessError> {
        self.remote_write(context, rkey, addr, &word)
    }

    /// As [`remote_atomic_write`](Self::remote_atomic_write), from the current packet's payload.
    ///
    /// # Errors
    /// When that fails, or the payload cannot be read.
    fn remote_atomic_write_by_ref(&mut self, context: AccessContext, rkey: RKey, addr: u64) -> Result<(), CopyError> {
        self.remote_write_by_ref(context, rkey, addr, size_of::<u64>())
    }

    /// Executes a peer's FLUSH. The range is checked even if it is empty, as is the key.
    ///
    /// # Errors
    /// When range or right do not permit it: always, without an implementation.
    fn remote_flush(&mut self, _context: AccessContext, _flush: &Flush) -> Result<(), AccessError> {
        Err(AccessError)
    }

    /// Binds a memory window: its old key becomes invalid, the new one grants the requested access.
    ///
    /// # Errors
    /// When window, region, range or rights do not permit it; nothing has changed then.
    fn bind(&mut self, context: AccessContext, bind: &Bind) -> Result<(), AccessError>;

    /// Invalidates the key of a type 2 window.
    ///
    /// # Errors
    /// When it is not the key of such a window, or may not be invalidated through this queue pair.
    fn invalidate(&mut self, context: AccessContext, rkey: RKey, by: Invalidator) -> Result<(), AccessError>;

    // Payloads by reference, on links. An implementor without links keeps the defaults.

    /// Whether some of `sges` is memory that the CPU cannot address: always passed by reference.
    fn is_device_memory(&mut self, _pd: PdId, _sges: &[Sge]) -> bool {
        false
    }

    /// The same for memory that a peer reads.
    fn is_remote_device_memory(&mut self, _via: AccessContext, _rkey: RKey) -> bool {
        false
    }

    /// Whether copies of READ responses to this queue pair are in progress: until they finish no
    /// SEND, WRITE or atomic begins, nor a fenced READ, as it might read the destination.
    fn has_pending_copies(&self, _qpn: Qpn) -> bool {
        false
    }

    /// Adds a range of local memory to the payload of the packet being written, by reference:
    /// checked as in [`gather`](Self::gather), but read by the receiver of the packet.
    ///
    /// # Errors
    /// When the range may not be read locally.
    fn add_local_ref(&mut self, _pd: PdId, _sge: &Sge) -> Result<(), AccessError> {
        Err(AccessError)
    }

    /// The same for a peer's RDMA READ: checked as in [`remote_read`](Self::remote_read).
    ///
    /// # Errors
    /// When the range may not be read remotely.
    fn add_remote_ref(&mut self, _via: AccessContext, _rkey: RKey, _addr: u64, _len: u32) -> Result<(), AccessError> {
        Err(AccessError)
    }

    /// As [`scatter`](Self::scatter), from bytes `part` of the current packet's payload.
    ///
    /// # Errors
    /// When the range may not be written locally, or the payload cannot be read.
    fn scatter_by_ref(&mut self, _pd: PdId, _lkey: LKey, _addr: u64, _part: Range<usize>) -> Result<(), CopyError> {
        Err(CopyError::Gone)
    }

    /// As [`remote_write`](Self::remote_write), from the current packet's payload.
    ///
    /// # Errors
    /// When the range may not be written remotely, or the payload cannot be read.
    fn remote_write_by_ref(
        &mut self,
        _via: AccessContext,
        _rkey: RKey,
        _addr: u64,
        _len: usize,
    ) -> Result<(), CopyError> {
        Err(CopyError::Gone)
    }
}
