//! What members use of the host: descriptors, memfds, memory, slots, and the port.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use anyhow::{Context as _, Result};

/// Of one process.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Sample {
    pub(crate) descriptors: u64,
    pub(crate) memfds: u64,
    pub(crate) memory_kib: u64,
}

impl Sample {
    pub(crate) fn of(pid: u32) -> Result<Self> {
        let mut sample = Self::default();
        for target in descriptors(pid)? {
            sample.descriptors += 1;
            sample.memfds += u64::from(target.starts_with("/memfd:"));
        }
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        // Without shared memory, which each process that maps it has in its own count.
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        let kib = line.and_then(|rest| rest.split_whitespace().next());
        sample.memory_kib = kib.and_then(|kib| kib.parse().ok()).context("no RssAnon")?;
        Ok(sample)
    }

    /// How it is more than `other`, if by more than the tolerance: some descriptors of requests in
    /// progress and these `connections`, and what an allocator keeps.
    pub(crate) fn growth(self, other: Self, connections: u64) -> Option<String> {
        let grown = |now: u64, before: u64, by: u64| now > before + by;
        let leaks = grown(self.descriptors, other.descriptors, 4 + connections)
            || grown(self.memfds, other.memfds, 2)
            || grown(self.memory_kib, other.memory_kib + other.memory_kib / 4, 16 << 10);
        leaks.then(|| format!("{other:?} has become {self:?}"))
    }
}

/// What the descriptors of a process refer to.
fn descriptors(pid: u32) -> Result<Vec<String>> {
    let folder = format!("/proc/{pid}/fd");
    let entries = fs::read_dir(&folder).with_context(|| folder.clone())?;
    let targets = entries.flatten().filter_map(|entry| fs::read_link(entry.path()).ok());
    Ok(targets.map(|target| target.to_string_lossy().into_owned()).collect())
}

/// The listening abstract sockets of an address: one for each slot in use.
pub(crate) fn slots(address: IpAddr, port: u16) -> Result<usize> {
    let name = format!("/{}/", SocketAddr::new(address, port));
    let is_slot = |line: &&str| {
        let path = line.rsplit(' ').next().unwrap_or_default();
        let slot = path.strip_prefix("@doorbell").and_then(|rest| rest.split_once(&name));
        // Listening (SO_ACCEPTCON), which accepted connections to the same name are not.
        line.contains(" 00010000 ") && slot.is_some_and(|(_, slot)| slot.parse::<u16>().is_ok())
    };
    Ok(fs::read_to_string("/proc/net/unix")?.lines().filter(is_slot).count())
}

/// The process among these that has the UDP port of an IPv4 address bound.
pub(crate) fn port_holder(address: IpAddr, port: u16, pids: &[u32]) -> Option<u32> {
    let IpAddr::V4(address) = address else { return None };
    let local = format!("{:08X}:{port:04X}", u32::from(address).swap_bytes());
    let table = fs::read_to_string("/proc/net/udp").ok()?;
    let line = table
        .lines()
        .find(|line| line.split_whitespace().nth(1) == Some(&local))?;
    let socket = format!("socket:[{}]", line.split_whitespace().nth(9)?);
    let holds = |pid: &&u32| descriptors(**pid).is_ok_and(|targets| targets.contains(&socket));
    pids.iter().find(holds).copied()
}

/// Bytes of memory that are available, of /proc/meminfo.
pub(crate) fn available_memory() -> u64 {
    let text = fs::read_to_string(Path::new("/proc/meminfo")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, UdpSocket};

    use super::*;

    #[test]
    fn the_port_holder_is_found_by_its_socket() {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = socket.local_addr().unwrap().port();
        let pids = [1, std::process::id()];
        let address = IpAddr::V4(Ipv4Addr::LOCALHOST);
        assert_eq!(port_holder(address, port, &pids), Some(std::process::id()));
        drop(socket);
        assert_eq!(port_holder(address, port, &pids), None);
    }

    #[test]
    fn growth_beyond_the_tolerance_is_reported() {
        let before = Sample {
            descriptors: 100,
            memfds: 30,
            memory_kib: 10_000,
        };
        assert_eq!(before.growth(before, 0), None);
        for (descriptors, memfds, memory_kib) in [(105, 30, 10_000), (100, 33, 10_000), (100, 30, 30_000)] {
            let after = Sample {
                descriptors,
                memfds,
                memory_kib,
            };
            assert!(after.growth(before, 0).is_some(), "{after:?}");
            assert_eq!(before.growth(after, 0), None);
            assert_eq!(after.growth(before, 1).is_some(), descriptors == 100);
        }
    }
}
