//! TCP ports for servers of tests.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicU32, Ordering};

/// Below the ephemeral range, from which a connection could take it before the server listens; each
/// process of tests begins elsewhere.
pub(crate) fn free_port() -> u16 {
    static TAKEN: AtomicU32 = AtomicU32::new(0);
    let start = std::process::id().wrapping_mul(61);
    loop {
        let next = start.wrapping_add(TAKEN.fetch_add(1, Ordering::Relaxed));
        let port = 20_000 + (next % 12_000) as u16;
        if TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok() {
            return port;
        }
    }
}
