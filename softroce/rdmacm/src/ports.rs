//! The port numbers of this process: who has bound which (rdma_bind_addr(3)). What other processes of the host listen on is known to their connection
//! manager, and asked when an identifier listens.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::sync::LazyLock;

use doorbell_verbs_sys::rdmacm::rdma_port_space;
use parking_lot::Mutex;

use crate::errno::Errno;

/// What is given to those who ask for port 0: Linux's own range by default (ip(7), `ip_local_port_range`).
const EPHEMERAL: RangeInclusive<u16> = 32_768..=60_999;

struct Bound {
    ip: IpAddr,
    shared: bool,
}

type Key = (rdma_port_space, u16);

static BOUND: LazyLock<Mutex<HashMap<Key, Vec<Bound>>>> = LazyLock::new(Mutex::default);

/// A port that an identifier has bound, until it is dropped.
#[derive(Debug)]
pub(crate) struct Claim {
    key: Key,
    ip: IpAddr,
    shared: bool,
}

impl Claim {
    /// Binds the port of `address`, or a free one if it is 0. A port is shared only by those who have all said that they would (RDMA_OPTION_ID_REUSEADDR).
    ///
    /// # Errors
    /// `EADDRINUSE` when it is bound at an overlapping address, `EADDRNOTAVAIL` when none is free.
    pub(crate) fn new(space: rdma_port_space, address: SocketAddr, shared: bool) -> Result<Self, Errno> {
        let mut bound = BOUND.lock();
        let ip = address.ip();
        let mut claim = |port| claim(&mut bound, (space, port), ip, shared);
        if address.port() != 0 {
            return claim(address.port()).ok_or(libc::EADDRINUSE);
        }
        let count = EPHEMERAL.len();
        let first = RandomState::new().hash_one(address) as usize % count;
        let mut ports = (0..count).map(|n| *EPHEMERAL.start() + ((first + n) % count) as u16);
        ports.find_map(claim).ok_or(libc::EADDRNOTAVAIL)
    }

    /// Its number.
    pub(crate) fn port(&self) -> u16 {
        self.key.1
    }
}

fn claim(bound: &mut HashMap<Key, Vec<Bound>>, key: Key, ip: IpAddr, shared: bool) -> Option<Claim> {
    let others = bound.entry(key).or_default();
    let overlaps = |other: &Bound| other.ip == ip || other.ip.is_unspecified() || ip.is_unspecified();
    if others.iter().any(|other| overlaps(other) && !(other.shared && shared)) {
        return None;
    }
    others.push(Bound { ip, shared });
    Some(Claim { key, ip, shared })
}

impl Drop for Claim {
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
        let first = Claim::new(RDMA_PS_TCP, at("10.0.0.1:7471"), false).unwrap();
        assert_eq!(
            Claim::new(RDMA_PS_TCP, at("10.0.0.1:7471"), false).unwrap_err(),
            libc::EADDRINUSE
        );
        assert_eq!(
            Claim::new(RDMA_PS_TCP, at("0.0.0.0:7471"), true).unwrap_err(),
            libc::EADDRINUSE
        );
        let _other_address = Claim::new(RDMA_PS_TCP, at("10.0.0.2:7471"), false).unwrap();
        let _other_space = Claim::new(RDMA_PS_UDP, at("10.0.0.1:7471"), false).unwrap();
        drop(first);
        assert!(Claim::new(RDMA_PS_TCP, at("10.0.0.1:7471"), false).is_ok());
    }

    #[test]
    fn a_port_is_shared_by_those_who_all_said_so() {
        let _one = Claim::new(RDMA_PS_TCP, at("10.0.1.1:7472"), true).unwrap();
        let _two = Claim::new(RDMA_PS_TCP, at("10.0.1.1:7472"), true).unwrap();
        assert!(Claim::new(RDMA_PS_TCP, at("10.0.1.1:7472"), false).is_err());
    }

    #[test]
    fn port_0_is_any_free_one() {
        let claims: Vec<_> = (0..100)
            .map(|_| Claim::new(RDMA_PS_TCP, at("10.0.2.1:0"), false).unwrap())
            .collect();
        let mut ports: Vec<_> = claims.iter().map(Claim::port).collect();
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), 100);
        assert!(ports.iter().all(|port| EPHEMERAL.contains(port)));
    }
}
