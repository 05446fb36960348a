//! The description of memory that peers are to map: its attributes go over the control mesh, its
//! file descriptor through [`descriptors`](super::descriptors).
//!
//! The descriptor is the memory's own; for memory shared by CUDA IPC handle it is a memfd that
//! contains the handle, so that only processes that receive the descriptor get access.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use doorbell_cuda::{Handle, IpcHandle, Shareable, Shared};
use nix::sys::memfd::{MFdFlags, memfd_create};

/// Bytes of the attributes: the kind of handle, and three numbers.
const TERMS: usize = 1 + 3 * 8;
const DESCRIPTOR: u8 = 0;
const IPC: u8 = 1;

/// A rank's own memory.
pub(super) struct Offer {
    terms: [u8; TERMS],
    descriptor: OwnedFd,
}

impl Offer {
    /// The error says why it cannot be shared.
    pub(super) fn new(memory: &dyn Shareable) -> Result<Self, String> {
        let shared = memory
            .share()
            .map_err(|e| format!("has memory that cannot be shared: {e}"))?;
        let mut terms = [0; TERMS];
        let numbers = [shared.allocation, shared.offset, shared.len];
        for (bytes, number) in terms[1..].as_chunks_mut().0.iter_mut().zip(numbers) {
            *bytes = (number as u64).to_be_bytes();
        }
        let descriptor = match shared.handle {
            Handle::Descriptor(descriptor) => {
                terms[0] = DESCRIPTOR;
                descriptor
            }
            Handle::Ipc(handle) => {
                terms[0] = IPC;
                file(&handle).map_err(|e| format!("cannot make a file for a handle of its memory: {e}"))?
            }
        };
        Ok(Self { terms, descriptor })
    }

    /// The attributes sent to all ranks.
    pub(super) fn terms(&self) -> [u8; TERMS] {
        self.terms
    }

    /// The descriptor passed to ranks of this host.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// Whether the owning rank must keep the memory as long as others have it open.
pub(super) fn is_lent(terms: &[u8]) -> bool {
    terms.first() == Some(&IPC)
}

/// A memfd that contains the handle.
fn file(handle: &IpcHandle) -> std::io::Result<OwnedFd> {
    let file = File::from(memfd_create(c"doorbell-ipc", MFdFlags::MFD_CLOEXEC)?);
    file.write_all_at(&handle.0, 0)?;
    Ok(file.into())
}

/// Parses another rank's description; `None` if it is invalid.
pub(super) fn taken(descriptor: OwnedFd, terms: &[u8]) -> Option<Shared> {
    let (&kind, numbers) = terms.split_first()?;
    let (numbers, []) = numbers.as_chunks::<8>() else {
        return None;
    };
    let &[allocation, offset, len] = numbers else {
        return None;
    };
    let number = |bytes| usize::try_from(u64::from_be_bytes(bytes)).ok();
    let handle = match kind {
        DESCRIPTOR => Handle::Descriptor(descriptor),
        IPC => {
            let mut bytes = [0; 64];
            File::from(descriptor).read_exact_at(&mut bytes, 0).ok()?;
            Handle::Ipc(IpcHandle(bytes))
        }
        _ => return None,
    };
    Some(Shared {
        handle,
        allocation: number(allocation)?,
        offset: number(offset)?,
        len: number(len)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken_as(terms: &[u8]) -> Option<Shared> {
        taken(file(&IpcHandle([7; 64])).unwrap(), terms)
    }

    #[test]
    fn a_handle_goes_in_a_file() {
        let mut terms = [0; TERMS];
        (terms[0], terms[8], terms[16], terms[24]) = (IPC, 100, 30, 60);
        let shared = taken_as(&terms).unwrap();
        assert_eq!((shared.allocation, shared.offset, shared.len), (100, 30, 60));
        assert!(matches!(shared.handle, Handle::Ipc(handle) if handle == IpcHandle([7; 64])));
        terms[0] = DESCRIPTOR;
        assert!(matches!(taken_as(&terms).unwrap().handle, Handle::Descriptor(_)));
    }

    #[test]
    fn what_makes_no_sense_is_not_taken() {
        let mut terms = [0; TERMS];
        assert!(taken_as(&terms).is_some());
        assert!(taken_as(&terms[1..]).is_none(), "too short");
        assert!(taken_as(&[&terms[..], &[0]].concat()).is_none(), "too long");
        assert!(taken_as(&[]).is_none(), "nothing");
        terms[0] = 2;
        assert!(taken_as(&terms).is_none(), "no such kind");
        terms[0] = IPC;
        let empty = OwnedFd::from(File::open("/dev/null").unwrap());
        assert!(taken(empty, &terms).is_none(), "a file that is too short");
    }
}
