//! Which process has blocks of its own on a GPU.
//!
//! Processes have a GPU's processors by turns, and a turn is long: where two of them copy by blocks on one GPU, each copy waits for the other's turn to end (some 150 us of an H200, where a copy engine takes 8). So the first process that asks has
//! the GPU for this, for as long as it lives or has memory of that GPU registered, and all others leave short copies to the copy engines, which take no turns.
//!
//! What is claimed is an abstract Unix address (unix(7)) with the GPU's identity in its name: it goes with the process, whatever becomes of it. Processes in other network namespaces do not see it; there, what has proved slow is given up
//! ([`SmallCopies`](doorbell_cuda::SmallCopies)).

use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::{Arc, Weak};

use doorbell_cuda::{Device, Uuid};
use parking_lot::Mutex;

/// A GPU on which no other process has blocks.
#[derive(Debug)]
pub(super) struct Claim {
    /// Has the address; nobody reads from it.
    _address: UnixDatagram,
}

/// Those of this process, which all its copies share.
static HELD: Mutex<Vec<(Uuid, Weak<Claim>)>> = Mutex::new(Vec::new());

/// Claims a GPU for this process; `None` where another one has it, or nothing can be claimed.
pub(super) fn claim(device: Device) -> Option<Arc<Claim>> {
    claim_of(device.uuid().ok()?)
}

fn claim_of(uuid: Uuid) -> Option<Arc<Claim>> {
    let mut held = HELD.lock();
    if let Some(claim) = held
        .iter()
        .find_map(|(known, claim)| claim.upgrade().filter(|_| *known == uuid))
    {
        return Some(claim);
    }
    let address = SocketAddr::from_abstract_name(format!("doorbell-blocks-{uuid}")).ok()?;
    let claim = Arc::new(Claim {
        _address: UnixDatagram::bind_addr(&address).ok()?,
    });
    held.retain(|(_, claim)| claim.strong_count() > 0);
    held.push((uuid, Arc::downgrade(&claim)));
    Some(claim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_one_process_s() {
        // One that nothing else here has.
        let mut bytes = [0x5a; 16];
        bytes[..4].copy_from_slice(&std::process::id().to_ne_bytes());
        let uuid = Uuid(bytes);
        let name = format!("doorbell-blocks-{uuid}");
        let address = SocketAddr::from_abstract_name(name).unwrap();
        let theirs = UnixDatagram::bind_addr(&address).unwrap();
        assert!(claim_of(uuid).is_none());
        drop(theirs);
        let ours = claim_of(uuid).unwrap();
        assert!(Arc::ptr_eq(&ours, &claim_of(uuid).unwrap()));
        assert!(UnixDatagram::bind_addr(&address).is_err());
        drop(ours);
        assert!(UnixDatagram::bind_addr(&address).is_ok());
    }
}
