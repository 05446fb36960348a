//! Shm links between devices on one address: memory and queue pairs that are destroyed while peers
//! copy from them, and processes that are killed or stopped.

mod processes;
mod races;
mod side;

use doorbell_softroce::CopyMode;
use side::{Side, device, own_address};

/// A device without UDP refuses to connect to what it cannot reach by shm links.
#[test]
fn a_remote_peer_is_refused_without_udp() {
    let (local, remote) = (
        device(own_address(), CopyMode::Ring),
        device(own_address(), CopyMode::Ring),
    );
    let (a, b) = (
        Side::new(&local, 64, CopyMode::Ring),
        Side::new(&local, 64, CopyMode::Ring),
    );
    let elsewhere = Side::new(&remote, 64, CopyMode::Ring);
    assert!(a.try_connect(elsewhere.key(), 14).is_err());
    let mut unknown = b.key();
    unknown.qpn ^= 0x80_0000;
    assert!(b.try_connect(unknown, 14).is_err());
}
