//! GPU memory: registered like host memory, moved by the GPUs' copy engines (decisions 035 to 039).
//!
//! A region of it is a [`Range`]; only the copies differ from other memory:
//! - **asynchronous** ([`Copies`]) for packets of a shm link, whose completions and responses are
//!   [deferred];
//! - **batched** ([`UdpStaging`]) for UDP: the caller waits once for a batch of packets;
//! - **synchronous** ([`Range::read`], [`Range::write`]) for a process that has not imported the
//!   memory;
//! - atomics are refused.
//!
//! An allocation is shared like a [segment]: by its descriptor, or by the `cuIpcOpenMemHandle`
//! handle in a file, and only with processes that have registered GPU memory: no other loads CUDA.
//! [`cuda`](self) wraps CUDA.

#[cfg(feature = "cuda")]
mod claim;
#[cfg(feature = "cuda")]
mod contexts;
mod copies;
pub(crate) mod deferred;
mod pins;
mod udp_staging;

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(not(feature = "cuda"))]
#[path = "none.rs"]
mod cuda;
#[cfg(feature = "cuda")]
mod small;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Weak};

use nix::sys::memfd::{MFdFlags, memfd_create};
use parking_lot::Mutex;

use crate::links::shm_ring::segment::{self, SegmentId};

pub(crate) use copies::{Copies, CopyOwner, CopyRequest, StagedCopy, Target};
use cuda::NoMemory;
pub(crate) use cuda::{FreesDeferred, Memory, PreparedDevice, is_possible, separate_contexts};
pub(crate) use pins::Bounds;
pub(crate) use udp_staging::{UdpPinned, UdpStaging};

/// Bytes of the pinned ring through which payloads go between host and GPU.
const RING: usize = 16 << 20;

#[derive(Debug)]
pub(crate) enum Handle {
    /// The descriptor of memory mapped by `cuMemMap`.
    Descriptor(OwnedFd),
    /// For `cuIpcOpenMemHandle`.
    Ipc([u8; 64]),
}

impl Handle {
    /// For sending. Whether the descriptor is the memory's own, or a file with the handle.
    fn into_descriptor(self) -> io::Result<(OwnedFd, bool)> {
        match self {
            Self::Descriptor(fd) => Ok((fd, true)),
            Self::Ipc(bytes) => {
                let file = File::from(memfd_create(c"doorbell-ipc", MFdFlags::MFD_CLOEXEC)?);
                file.write_all_at(&bytes, 0)?;
                Ok((file.into(), false))
            }
        }
    }

    pub(crate) fn from_descriptor(fd: OwnedFd, own: bool) -> io::Result<Self> {
        if own {
            return Ok(Self::Descriptor(fd));
        }
        let mut bytes = [0; 64];
        File::from(fd).read_exact_at(&mut bytes, 0)?;
        Ok(Self::Ipc(bytes))
    }
}

/// An allocation of this process with registered memory.
#[derive(Debug)]
pub(crate) struct Allocation {
    /// Its number among the segments. Never reused.
    id: SegmentId,
    memory: Memory,
    /// The descriptor and whether it is the memory's own; `None` where it cannot be shared.
    shared: Option<(OwnedFd, bool)>,
}

impl Allocation {
    pub(crate) fn id(&self) -> SegmentId {
        self.id
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// # Safety
    /// `to` is writable for `len` bytes.
    pub(crate) unsafe fn read(&self, offset: usize, to: *mut u8, len: usize) -> Result<(), Failed> {
        // SAFETY: the same contract.
        unsafe { self.memory.read(offset, to, len) }.map_err(|error| failed(&error))
    }

    pub(crate) fn shared(&self) -> Option<(usize, BorrowedFd<'_>, bool)> {
        self.shared
            .as_ref()
            .map(|(fd, own)| (self.memory.len(), fd.as_fd(), *own))
    }
}

/// A range that the CPU cannot access, as CUDA resolves it.
#[derive(Debug)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "nothing is found then"))]
pub(crate) enum Located {
    /// Host memory that CUDA has pinned or mapped.
    Host,
    Device(Memory, usize),
}

static ALLOCATIONS: Mutex<Vec<Weak<Allocation>>> = Mutex::new(Vec::new());

#[derive(Clone, Debug)]
pub(crate) struct Range {
    pub(crate) allocation: Arc<Allocation>,
    pub(crate) offset: usize,
}

#[derive(Debug)]
pub(crate) enum MemoryKind {
    Host,
    Device(Range),
}

/// Resolves a range that the CPU cannot access; failures are traced.
pub(crate) fn find(addr: u64, len: usize) -> Option<MemoryKind> {
    match resolve(addr, len) {
        Ok(place) => Some(place),
        Err(reason) => {
            tracing::debug!("{len} bytes at {addr:#x} cannot be registered: {reason}");
            None
        }
    }
}

fn resolve(addr: u64, len: usize) -> Result<MemoryKind, NoMemory> {
    match cuda::find(addr, len)? {
        Located::Host => Ok(MemoryKind::Host),
        Located::Device(memory, offset) => Ok(MemoryKind::Device(Range {
            allocation: shared_entry(memory),
            offset,
        })),
    }
}

fn shared_entry(memory: Memory) -> Arc<Allocation> {
    let mut known = ALLOCATIONS.lock();
    known.retain(|allocation| allocation.strong_count() != 0);
    let found = known
        .iter()
        .filter_map(Weak::upgrade)
        .find(|allocation| allocation.memory.is_same_allocation(&memory));
    if let Some(allocation) = found {
        return allocation;
    }
    let handle = memory.share().unwrap_or_else(|error| {
        tracing::debug!("GPU memory is not shared with other processes: {error}");
        None
    });
    let shared = handle.and_then(|handle| handle.into_descriptor().ok());
    let allocation = Arc::new(Allocation {
        id: segment::next_id(),
        memory,
        shared,
    });
    known.push(Arc::downgrade(&allocation));
    allocation
}

/// A local allocation by its number, when the peer is in the same process.
pub(crate) fn local_allocation(id: SegmentId) -> Option<Memory> {
    let known = ALLOCATIONS.lock();
    let found = known.iter().filter_map(Weak::upgrade).find(|found| found.id == id);
    found.map(|allocation| allocation.memory.clone())
}

/// A copy failed; the reason was traced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Failed;

impl Range {
    /// # Safety
    /// `to` is writable for `len` bytes.
    pub(crate) unsafe fn read(&self, offset: usize, to: *mut u8, len: usize) -> Result<(), Failed> {
        // SAFETY: the same contract.
        unsafe { self.allocation.read(self.offset + offset, to, len) }
    }

    /// # Safety
    /// `from` is readable for `len` bytes.
    pub(crate) unsafe fn write(&self, offset: usize, from: *const u8, len: usize) -> Result<(), Failed> {
        // SAFETY: the same contract.
        let written = unsafe { self.allocation.memory.write(self.offset + offset, from, len) };
        written.map_err(|error| failed(&error))
    }
}

fn failed(error: &cuda::DriverError) -> Failed {
    tracing::error!("a copy of GPU memory failed: {error}");
    Failed
}
