//! Port numbers bound by this process (rdma_bind_addr(3)). Listeners of other processes on the host
//! are known to their connection managers, which are queried on listen.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::sync::LazyLock;

use doorbell_verbs_sys::rdmacm::rdma_port_space;
use parking_lot::Mutex;

use crate::errno::Errno;

/// The range for port 0: Linux's default (ip(7), `ip_local_port_range`).
const EPHEMERAL: RangeInclusive<u16> = 32_768..=60_999;

struct Bound {
    ip: IpAddr,
    shared: bool,
}

type Key = (rdma_port_space, u16);

static BOUND: LazyLock<Mutex<HashMap<Key, Vec<Bound>>>> = LazyLock::new(Mutex::default);

#[derive(Debug)]
pub(crate) struct PortBinding {
    key: Key,
    ip: IpAddr,
    shared: bool,
}

impl PortBinding {
    /// Port 0 is any free one. Shared only if all users allow it (RDMA_OPTION_ID_REUSEADDR).
    ///
    /// # Errors
    /// `EADDRINUSE` when it is bound at an overlapping address, `EADDRNOTAVAIL` when none is free.
    pub(crate) fn new(space: rdma_port_space, address: SocketAddr, shared: bool) -> Result<Self, Errno> {
        let mut bound = BOUND.lock();
        let ip = address.ip();
        let mut try_bind = |port| try_bind(&mut bound, (space, port), ip, shared);
        if address.port() != 0 {
            return try_bind(address.port()).ok_or(libc::EADDRINUSE);
        }
        let count = EPHEMERAL.len();
        let first = RandomState::new().hash_one(address) as usize % count;
        let mut ports = (0..count).map(|n| *EPHEMERAL.start() + ((first + n) % count) as u16);
        ports.find_map(try_bind).ok_or(libc::EADDRNOTAVAIL)
    }

    pub(crate) fn port(&self) -> u16 {
        self.key.1
    }
}

fn try_bind(bound: &mut HashMap<Key, Vec<Bound>>, key: Key, ip: IpAddr, shared: bool) -> Option<PortBinding> {
    let others = bound.entry(key).or_default();
    let overlaps = |other: &Bound| other.ip == ip || other.ip.is_unspecified() || ip.is_unspecified();
    if others.iter().any(|other| overlaps(other) && !(other.shared && shared)) {
        return None;
    }
    others.push(Bound { ip, shared });
    Some(PortBinding { key, ip, shared })
}

impl Drop for PortBinding {
    fn drop(&mut self) {
        let mut bound = BOUND.lock();
        let Some(all) = bound.get_mut(&self.key) else { return };
        let own = |other: &Bound| other.ip == self.ip && other.shared == self.shared;
        if let Some(index) = all.iter().position(own) {
            all.swap_remove(index);
        }
        if all.is_empty() {
            bound.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use doorbell_verbs_sys::rdmacm::{RDMA_PS_TCP, RDMA_PS_UDP};

    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn a_port_is_bound_once_for_each_address() {
        let first = PortBinding::new(RDMA_PS_TCP, at("10.0.0.1:7471"), false).unwrap();
        assert_eq!(
            PortBinding::new(RDMA_PS_TCP, at("10.0.0.1:7471"), false).unwrap_err(),
            libc::EADDRINUSE
        );
        assert_eq!(
            PortBinding::new(RDMA_PS_TCP, at("0.0.0.0:7471"), true).unwrap_err(),
            libc::EADDRINUSE
        );
        let _other_address = PortBinding::new(RDMA_PS_TCP, at("10.0.0.2:7471"), false).unwrap();
        let _other_space = PortBinding::new(RDMA_PS_UDP, at("10.0.0.1:7471"), false).unwrap();
        drop(first);
        assert!(PortBinding::new(RDMA_PS_TCP, at("10.0.0.1:7471"), false).is_ok());
    }

    #[test]
    fn port_is_shared_with_reuseaddr() {
        let _one = PortBinding::new(RDMA_PS_TCP, at("10.0.1.1:7472"), true).unwrap();
        let _two = PortBinding::new(RDMA_PS_TCP, at("10.0.1.1:7472"), true).unwrap();
        assert!(PortBinding::new(RDMA_PS_TCP, at("10.0.1.1:7472"), false).is_err());
    }

    #[test]
    fn port_0_is_any_free_one() {
        let bindings: Vec<_> = (0..100)
            .map(|_| PortBinding::new(RDMA_PS_TCP, at("10.0.2.1:0"), false).unwrap())
            .collect();
        let mut ports: Vec<_> = bindings.iter().map(PortBinding::port).collect();
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), 100);
        assert!(ports.iter().all(|port| EPHEMERAL.contains(port)));
    }
}
