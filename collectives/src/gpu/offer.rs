//! The description of memory that peers are to map: attributes go over the control mesh, the file
//! descriptor through [`descriptors`](super::descriptors). For memory shared by CUDA IPC handle the
//! descriptor is a memfd that contains the handle, so only its receivers get access.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use doorbell_cuda::{ExportedRange, IpcHandle, MemoryHandle, Shareable};
use nix::sys::memfd::{MFdFlags, memfd_create};

/// Bytes of the attributes: the kind of handle, and three numbers.
const ATTRIBUTE_BYTES: usize = 1 + 3 * 8;
const DESCRIPTOR: u8 = 0;
const IPC: u8 = 1;

pub(super) struct MemoryOffer {
    attributes: [u8; ATTRIBUTE_BYTES],
    descriptor: OwnedFd,
}

impl MemoryOffer {
    /// The error says why it cannot be shared.
    pub(super) fn new(memory: &dyn Shareable) -> Result<Self, String> {
        let shared = memory
            .share()
            .map_err(|e| format!("has memory that cannot be shared: {e}"))?;
        let mut attributes = [0; ATTRIBUTE_BYTES];
        let numbers = [shared.allocation, shared.offset, shared.len];
        for (bytes, number) in attributes[1..].as_chunks_mut().0.iter_mut().zip(numbers) {
            *bytes = (number as u64).to_be_bytes();
        }
        let descriptor = match shared.handle {
            MemoryHandle::Descriptor(descriptor) => {
                attributes[0] = DESCRIPTOR;
                descriptor
            }
            MemoryHandle::Ipc(handle) => {
                attributes[0] = IPC;
                file(&handle).map_err(|e| format!("cannot make a file for a handle of its memory: {e}"))?
            }
        };
        Ok(Self { attributes, descriptor })
    }

    pub(super) fn attributes(&self) -> [u8; ATTRIBUTE_BYTES] {
        self.attributes
    }

    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// Whether the owning rank must keep the memory as long as others have it open.
pub(super) fn is_ipc_shared(attributes: &[u8]) -> bool {
    attributes.first() == Some(&IPC)
}

fn file(handle: &IpcHandle) -> std::io::Result<OwnedFd> {
    let file = File::from(memfd_create(c"doorbell-ipc", MFdFlags::MFD_CLOEXEC)?);
    file.write_all_at(&handle.0, 0)?;
    Ok(file.into())
}

pub(super) fn parse(descriptor: OwnedFd, attributes: &[u8]) -> Option<ExportedRange> {
    let (&kind, numbers) = attributes.split_first()?;
    let (numbers, []) = numbers.as_chunks::<8>() else {
        return None;
    };
    let &[allocation, offset, len] = numbers else {
        return None;
    };
    let number = |bytes| usize::try_from(u64::from_be_bytes(bytes)).ok();
    let handle = match kind {
        DESCRIPTOR => MemoryHandle::Descriptor(descriptor),
        IPC => {
            let mut bytes = [0; 64];
            File::from(descriptor).read_exact_at(&mut bytes, 0).ok()?;
            MemoryHandle::Ipc(IpcHandle(bytes))
        }
        _ => return None,
    };
    Some(ExportedRange {
        handle,
        allocation: number(allocation)?,
        offset: number(offset)?,
        len: number(len)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken_as(attributes: &[u8]) -> Option<ExportedRange> {
        parse(file(&IpcHandle([7; 64])).unwrap(), attributes)
    }

    #[test]
    fn ipc_handle_travels_in_a_memfd() {
        let mut attributes = [0; ATTRIBUTE_BYTES];
        (attributes[0], attributes[8], attributes[16], attributes[24]) = (IPC, 100, 30, 60);
        let shared = taken_as(&attributes).unwrap();
        assert_eq!((shared.allocation, shared.offset, shared.len), (100, 30, 60));
        assert!(matches!(shared.handle, MemoryHandle::Ipc(handle) if handle == IpcHandle([7; 64])));
        attributes[0] = DESCRIPTOR;
        assert!(matches!(
            taken_as(&attributes).unwrap().handle,
            MemoryHandle::Descriptor(_)
        ));
    }

    #[test]
    fn invalid_offers_are_rejected() {
        let mut attributes = [0; ATTRIBUTE_BYTES];
        assert!(taken_as(&attributes).is_some());
        assert!(taken_as(&attributes[1..]).is_none(), "too short");
        assert!(taken_as(&[&attributes[..], &[0]].concat()).is_none(), "too long");
        assert!(taken_as(&[]).is_none(), "nothing");
        attributes[0] = 2;
        assert!(taken_as(&attributes).is_none(), "no such kind");
        attributes[0] = IPC;
        let empty = OwnedFd::from(File::open("/dev/null").unwrap());
        assert!(parse(empty, &attributes).is_none(), "a file that is too short");
    }
}
