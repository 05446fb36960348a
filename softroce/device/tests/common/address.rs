//! Addresses for tests, also those in `src`.

use std::net::{IpAddr, Ipv4Addr};
use std::process;
use std::sync::atomic::{AtomicU8, Ordering};

/// An address that no other test has, here or in another process.
pub(crate) fn own_address() -> IpAddr {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let pid = process::id();
    let last = NEXT.fetch_add(1, Ordering::Relaxed);
    IpAddr::V4(Ipv4Addr::new(127, 1 + (pid >> 8) as u8 % 250, pid as u8, last))
}
