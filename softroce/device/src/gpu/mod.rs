//! Memory of GPUs: registered as the host's is, and moved by the GPUs' copy engines.
//!
//! A region of such memory is a [`Range`]: the rules are those of any region, and only the code that moves bytes differs. Four ways there are:
//! - **Beside the engine** ([`Copies`]): what a packet of a lane refers to, or what it is to go to, is a GPU's. The receiver begins a copy, and the engine goes on as if it were done; what it then
//!   says, completions and answers, is kept back ([`gate`]) until the copy really is. So copies follow one another without a pause, and those that continue each other are one.
//! - **For many packets at once** ([`Ahead`]): what goes over UDP. The caller waits, once for a batch of packets.
//! - **At once** ([`Range::read`], [`Range::write`]): what goes to a process that has not imported the memory, and the few bytes of atomics' results. The caller waits.
//! - **Not at all**: atomics on such memory are refused.
//!
//! **Between processes** an allocation is told of as a [segment](crate::local::segment) is, over the connection of the two: by its descriptor, or by the bytes that `cuIpcOpenMemHandle` takes, in a file.
//! Only a process that has registered memory of a GPU is told: nobody else starts CUDA for it.
//!
//! [`cuda`](self) is all there is of CUDA; the rest of the crate knows that there is memory which the processor does not reach.

mod ahead;
#[cfg(feature = "cuda")]
mod claim;
mod copies;
pub(crate) mod gate;
mod pins;

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(not(feature = "cuda"))]
#[path = "none.rs"]
mod cuda;
#[cfg(feature = "cuda")]
mod short;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Weak};

use nix::sys::memfd::{MFdFlags, memfd_create};
use parking_lot::Mutex;

use crate::local::segment::{self, SegmentId};

pub(crate) use ahead::Ahead;
pub(crate) use copies::{Asked, Copies, Landing, Owner, Target};
use cuda::NoMemory;
pub(crate) use cuda::{Memory, is_possible};
#[cfg(not(feature = "cuda"))]
pub(crate) use cuda::{Short, make_short};
pub(crate) use pins::Bounds;
#[cfg(feature = "cuda")]
pub(crate) use short::{Short, make_short};

/// Bytes of the ring of pinned memory by which host and GPU exchange payloads.
const RING: usize = 16 << 20;

/// What another process imports an allocation by.
#[derive(Debug)]
pub(crate) enum Handle {
    /// A descriptor of mapped memory.
    Descriptor(OwnedFd),
    /// What `cuIpcOpenMemHandle` takes.
    Ipc([u8; 64]),
}

impl Handle {
    /// As a descriptor that can be sent. Whether it is the memory's own, or of a file with the bytes.
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

    /// Of a descriptor that another process sent.
    pub(crate) fn from_descriptor(fd: OwnedFd, own: bool) -> io::Result<Self> {
        if own {
            return Ok(Self::Descriptor(fd));
        }
        let mut bytes = [0; 64];
        File::from(fd).read_exact_at(&mut bytes, 0)?;
        Ok(Self::Ipc(bytes))
    }
}

/// An allocation of this process in which memory is registered.
#[derive(Debug)]
pub(crate) struct Allocation {
    /// Its number among the segments. Never used again.
    id: SegmentId,
    memory: Memory,
    /// What it is shared by, and whether that is its own descriptor; `None` where it cannot be shared.
    shared: Option<(OwnedFd, bool)>,
}

impl Allocation {
    pub(crate) fn id(&self) -> SegmentId {
        self.id
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Copies out, and waits for that.
    ///
    /// # Safety
    /// `to` is writable for `len` bytes.
    pub(crate) unsafe fn read(&self, offset: usize, to: *mut u8, len: usize) -> Result<(), Failed> {
        // SAFETY: the same contract.
        unsafe { self.memory.read(offset, to, len) }.map_err(|error| failed(&error))
    }

    /// Its bytes, and what another process is to be sent for it; `None` where it cannot be shared.
    pub(crate) fn shared(&self) -> Option<(usize, BorrowedFd<'_>, bool)> {
        self.shared
            .as_ref()
            .map(|(fd, own)| (self.memory.len(), fd.as_fd(), *own))
    }
}

/// What a range that the processor does not reach is.
#[derive(Debug)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "nothing is found then"))]
pub(crate) enum Found {
    /// Memory of the host, which CUDA has pinned or mapped.
    Host,
    /// Memory of a GPU, and where in it the range begins.
    Device(Memory, usize),
}

/// The allocations that somebody has registered memory in.
static KNOWN: Mutex<Vec<Weak<Allocation>>> = Mutex::new(Vec::new());

/// Memory of a GPU from some place of an allocation on.
#[derive(Clone, Debug)]
pub(crate) struct Range {
    pub(crate) allocation: Arc<Allocation>,
    /// Where it begins in the allocation.
    pub(crate) offset: usize,
}

/// What memory is that the processor does not reach.
#[derive(Debug)]
pub(crate) enum Place {
    /// The host's nevertheless.
    Host,
    /// A GPU's.
    Device(Range),
}

/// Looks up memory that the processor does not reach; `None`, with the reason traced, where it is nobody's.
pub(crate) fn find(addr: u64, len: usize) -> Option<Place> {
    match look_up(addr, len) {
        Ok(place) => Some(place),
        Err(reason) => {
            tracing::debug!("{len} bytes at {addr:#x} cannot be registered: {reason}");
            None
        }
    }
}

fn look_up(addr: u64, len: usize) -> Result<Place, NoMemory> {
    match cuda::find(addr, len)? {
        Found::Host => Ok(Place::Host),
        Found::Device(memory, offset) => Ok(Place::Device(Range {
            allocation: known(memory),
            offset,
        })),
    }
}

/// The allocation that this memory is.
fn known(memory: Memory) -> Arc<Allocation> {
    let mut known = KNOWN.lock();
    known.retain(|allocation| allocation.strong_count() != 0);
    let found = known
        .iter()
        .filter_map(Weak::upgrade)
        .find(|allocation| allocation.memory.is_same_allocation(&memory));
    if let Some(allocation) = found {
        return allocation;
    }
    let handle = memory.share().unwrap_or_else(|error| {
        tracing::debug!("memory of a GPU is not shared with other processes: {error}");
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

/// An allocation of this process by its number: a peer in the same process has told of it.
pub(crate) fn own(id: SegmentId) -> Option<Memory> {
    let known = KNOWN.lock();
    let found = known.iter().filter_map(Weak::upgrade).find(|found| found.id == id);
    found.map(|allocation| allocation.memory.clone())
}

/// It could not be done; why is traced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Failed;

impl Range {
    /// Copies out, and waits for that.
    ///
    /// # Safety
    /// `to` is writable for `len` bytes.
    pub(crate) unsafe fn read(&self, offset: usize, to: *mut u8, len: usize) -> Result<(), Failed> {
        // SAFETY: the same contract.
        unsafe { self.allocation.read(self.offset + offset, to, len) }
    }

    /// Copies in, and waits for that.
    ///
    /// # Safety
    /// `from` is readable for `len` bytes.
    pub(crate) unsafe fn write(&self, offset: usize, from: *const u8, len: usize) -> Result<(), Failed> {
        // SAFETY: the same contract.
        let written = unsafe { self.allocation.memory.write(self.offset + offset, from, len) };
        written.map_err(|error| failed(&error))
    }
}

/// Says why copies failed.
fn failed(error: &cuda::Trouble) -> Failed {
    tracing::error!("a copy of a GPU's memory failed: {error}");
    Failed
}
