//! Port numbers bound by this process (rdma_bind_addr(3)). Listeners of other processes on the host
//! are known to their connection managers, which are queried on listen.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::os::unix::fs::MetadataExt;
use std::sync::LazyLock;
use std::{fs, process};

use doorbell_verbs_sys::rdmacm::rdma_port_space;
use parking_lot::Mutex;

use crate::errno::Errno;

/// The range for port 0: Linux's default (ip(7), `ip_local_port_range`).
const EPHEMERAL: RangeInclusive<u16> = 32_768..=60_999;

/// Ports of the range from which a process draws first. A program may announce a port before it
/// listens there, when no other process can know of it: processes that start together, with
/// successive ids, draw from different ones.
const SHARE: usize = 64;

/// How a port is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Claim {
    /// A device's, or the unspecified one for all wildcards.
    pub(crate) ip: IpAddr,
    /// RDMA_OPTION_ID_REUSEADDR.
    pub(crate) shared: bool,
    /// RDMA_OPTION_ID_AFONLY.
    pub(crate) afonly: bool,
}

impl Claim {
    /// As Linux's `cma_check_port`.
    fn check(&self, other: &Self) -> Result<(), Errno> {
        let disjoint = self.afonly && other.afonly && self.ip.is_ipv4() != other.ip.is_ipv4();
        if disjoint || self.shared && other.shared {
            return Ok(());
        }
        match self.ip.is_unspecified() || other.ip.is_unspecified() {
            true => Err(libc::EADDRNOTAVAIL),
            false if self.ip == other.ip => Err(libc::EADDRINUSE),
            false => Ok(()),
        }
    }
}

/// The number of the namespace of this process's id, 0 without /proc.
static NAMESPACE: LazyLock<u64> = LazyLock::new(|| fs::metadata("/proc/self/ns/pid").map_or(0, |file| file.ino()));

type Key = (rdma_port_space, u16);

static BOUND: LazyLock<Mutex<HashMap<Key, Vec<Claim>>>> = LazyLock::new(Mutex::default);

#[derive(Debug)]
pub(crate) struct PortBinding {
    key: Key,
    claim: Claim,
}

impl PortBinding {
    /// Port 0 is any free one. Shared only if all users allow it (RDMA_OPTION_ID_REUSEADDR), or if
    /// they are of different families and exclude the other one (RDMA_OPTION_ID_AFONLY).
    ///
    /// # Errors
    /// `EADDRINUSE` when it is bound at the same address, `EADDRNOTAVAIL` when one of the two is a
    /// wildcard, and when none is free.
    pub(crate) fn new(space: rdma_port_space, port: u16, claim: Claim) -> Result<Self, Errno> {
        let mut bound = BOUND.lock();
        let mut try_bind = |port| try_bind(&mut bound, (space, port), claim);
        if port != 0 {
            return try_bind(port);
        }
        // Processes of containers on one network may have the same id.
        let mut ports = ephemeral(u64::from(process::id()).wrapping_add(*NAMESPACE));
        ports.find_map(|port| try_bind(port).ok()).ok_or(libc::EADDRNOTAVAIL)
    }

    /// Changes how it is used from now on; its other users do not object.
    pub(crate) fn set_options(&mut self, shared: bool, afonly: bool) {
        let (before, ip) = (self.claim, self.claim.ip);
        self.claim = Claim { ip, shared, afonly };
        let mut bound = BOUND.lock();
        let mut all = bound.get_mut(&self.key).into_iter().flatten();
        if let Some(claim) = all.find(|other| **other == before) {
            *claim = self.claim;
        }
    }

    pub(crate) fn port(&self) -> u16 {
        self.key.1
    }
}

/// All ports of the range, those of the process's share first, from a random one on.
fn ephemeral(process: u64) -> impl Iterator<Item = u16> {
    let share = process as usize % (EPHEMERAL.len() / SHARE) * SHARE;
    let first = RandomState::new().hash_one(process) as usize;
    let own = (0..SHARE).map(move |n| share + first.wrapping_add(n) % SHARE);
    let others = (SHARE..EPHEMERAL.len()).map(move |n| (share + n) % EPHEMERAL.len());
    own.chain(others).map(|n| *EPHEMERAL.start() + n as u16)
}

fn try_bind(bound: &mut HashMap<Key, Vec<Claim>>, key: Key, claim: Claim) -> Result<PortBinding, Errno> {
    let others = bound.entry(key).or_default();
    others.iter().try_for_each(|other| claim.check(other))?;
    others.push(claim);
    Ok(PortBinding { key, claim })
}

impl Drop for PortBinding {
    fn drop(&mut self) {
        let mut bound = BOUND.lock();
        let Some(all) = bound.get_mut(&self.key) else { return };
        if let Some(index) = all.iter().position(|other| *other == self.claim) {
            all.swap_remove(index);
        }
        if all.is_empty() {
            bound.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use doorbell_verbs_sys::rdmacm::{RDMA_PS_TCP, RDMA_PS_UDP};

    use super::*;

    fn bind(space: rdma_port_space, ip: &str, port: u16, shared: bool) -> Result<PortBinding, Errno> {
        let ip: IpAddr = ip.parse().unwrap();
        let afonly = ip.is_ipv4();
        PortBinding::new(space, port, Claim { ip, shared, afonly })
    }

    #[test]
    fn a_port_is_bound_once_for_each_address() {
        let first = bind(RDMA_PS_TCP, "10.0.0.1", 7471, false).unwrap();
        let again = |ip, shared| bind(RDMA_PS_TCP, ip, 7471, shared).unwrap_err();
        assert_eq!(again("10.0.0.1", false), libc::EADDRINUSE);
        assert_eq!(again("0.0.0.0", true), libc::EADDRNOTAVAIL);
        assert_eq!(again("::", false), libc::EADDRNOTAVAIL);
        let _other_address = bind(RDMA_PS_TCP, "10.0.0.2", 7471, false).unwrap();
        let _other_space = bind(RDMA_PS_UDP, "10.0.0.1", 7471, false).unwrap();
        drop(first);
        bind(RDMA_PS_TCP, "10.0.0.1", 7471, false).unwrap();
    }

    #[test]
    fn port_is_shared_with_reuseaddr() {
        let [_one, _two] = [0; 2].map(|_| bind(RDMA_PS_TCP, "10.0.1.1", 7472, true).unwrap());
        assert!(bind(RDMA_PS_TCP, "10.0.1.1", 7472, false).is_err());
    }

    /// Servers that start together and announce a port each, before any listens.
    #[test]
    fn successive_processes_draw_different_ports() {
        let processes = EPHEMERAL.len() / SHARE;
        let drawn = |process| ephemeral(process).take(SHARE);
        let ports: HashSet<u16> = (1000..).take(processes).flat_map(drawn).collect();
        assert_eq!(ports.len(), processes * SHARE);
        let mut all: Vec<_> = ephemeral(7).collect();
        all.sort_unstable();
        assert!(all.into_iter().eq(EPHEMERAL));
    }

    #[test]
    fn port_0_is_any_free_one() {
        let bindings: Vec<_> = (0..100)
            .map(|_| bind(RDMA_PS_TCP, "10.0.2.1", 0, false).unwrap())
            .collect();
        let mut ports: Vec<_> = bindings.iter().map(PortBinding::port).collect();
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), 100);
        assert!(ports.iter().all(|port| EPHEMERAL.contains(port)));
    }
}
