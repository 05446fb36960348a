//! Shm links between devices on one address: memory and queue pairs that are destroyed while peers
//! copy from them, and processes that are killed or stopped.

mod processes;
mod races;
mod side;

use doorbell_softroce::Mover;
use side::{Side, device, own_address};

/// A device without UDP refuses to connect to what it cannot reach by shm links.
#[test]
fn what_is_not_local_is_refused() {
    let (near, far) = (device(own_address(), Mover::Ring), device(own_address(), Mover::Ring));
    let (a, b) = (Side::new(&near, 64, Mover::Ring), Side::new(&near, 64, Mover::Ring));
    let elsewhere = Side::new(&far, 64, Mover::Ring);
    assert!(a.try_connect(elsewhere.key(), 14).is_err());
    let mut nobody = b.key();
    nobody.qpn ^= 0x80_0000;
    assert!(b.try_connect(nobody, 14).is_err());
}
