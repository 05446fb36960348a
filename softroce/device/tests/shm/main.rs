//! Shm links on one address, whose memory, queue pairs or processes end while peers copy.

mod direct;
mod ecn;
mod foreign;
mod ports;
mod processes;
mod races;
mod random;
mod side;
mod signals;
mod unmapped;

use doorbell_softroce::CopyMode;
use side::{Side, device, own_address};

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
