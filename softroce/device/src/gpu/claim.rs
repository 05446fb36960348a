//! Exclusive use of small-copy kernels on a GPU by one process.
//!
//! Contexts of different processes run on a GPU in time slices: copy kernels of two of them wait
//! for each other (about 150 us on an H200, where a copy engine takes 8; decision 038). So the
//! first process claims the GPU while it lives or has memory of it registered; all others use the
//! copy engines. The claim is an abstract Unix address (unix(7)) with the GPU's UUID. Processes in
//! other network namespaces do not see it; [`SmallCopies`](doorbell_cuda::SmallCopies) stops using
//! kernels that prove slow.

use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::{Arc, Weak};

use doorbell_cuda::{Device, Uuid};
use parking_lot::Mutex;

#[derive(Debug)]
pub(super) struct Claim {
    /// Holds the address; never read.
    _address: UnixDatagram,
}

static CLAIMS: Mutex<Vec<(Uuid, Weak<Claim>)>> = Mutex::new(Vec::new());

/// Claims a GPU for this process; `None` where another one has it, or claiming fails.
pub(super) fn claim(device: Device) -> Option<Arc<Claim>> {
    claim_of(device.uuid().ok()?)
}

fn claim_of(uuid: Uuid) -> Option<Arc<Claim>> {
    let mut held = CLAIMS.lock();
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
    use std::time::{Duration, Instant};

    /// Until a child that another test forks has no copy of the socket any more.
    fn soon<T>(attempt: impl Fn() -> Option<T>) -> T {
        let until = Instant::now() + Duration::from_secs(10);
        loop {
            match attempt() {
                Some(done) => return done,
                None => assert!(Instant::now() < until, "the address stays taken"),
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_gpu_is_claimed_by_one_process() {
        // A UUID of no real GPU.
        let mut bytes = [0x5a; 16];
        bytes[..4].copy_from_slice(&std::process::id().to_ne_bytes());
        let uuid = Uuid(bytes);
        let name = format!("doorbell-blocks-{uuid}");
        let address = SocketAddr::from_abstract_name(name).unwrap();
        let theirs = UnixDatagram::bind_addr(&address).unwrap();
        assert!(claim_of(uuid).is_none());
        drop(theirs);
        let ours = soon(|| claim_of(uuid));
        assert!(Arc::ptr_eq(&ours, &claim_of(uuid).unwrap()));
        assert!(UnixDatagram::bind_addr(&address).is_err());
        drop(ours);
        soon(|| UnixDatagram::bind_addr(&address).ok());
    }
}
