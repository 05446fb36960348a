//! Unique ids: the text of the collectives' own, in the 128 bytes of NCCL's.
//!
//! The process that makes one, which may be no rank, serves its rendezvous in a thread, until all
//! ranks have come or it ends. The first rank that registers says how many there are. Where
//! `NCCL_COMM_ID` names the rendezvous, each rank makes the same id, and rank 0 serves it.

use std::ffi::{CStr, c_char};
use std::net::{IpAddr, ToSocketAddrs};
use std::time::Duration;

use doorbell_collectives::Rank;
use doorbell_collectives::bootstrap::{self, Options, Rendezvous, RendezvousServer, Secret};
use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;

use crate::abi::UniqueId;
use crate::failure::Failure;

const VARIABLE: &str = "NCCL_SOCKET_IFNAME";
const NAMED: &str = "NCCL_COMM_ID";

/// Opens a rendezvous, and makes its id; or makes that of the one that rank 0 is to open.
pub(crate) fn create() -> Result<UniqueId, Failure> {
    if let Some(id) = named()? {
        return encode(&id);
    }
    let rendezvous = Rendezvous::open_for_any(address()?)?;
    let id = encode(rendezvous.id());
    rendezvous.spawn(Duration::MAX)?.detach();
    id
}

/// Has rank 0 serve a rendezvous that `NCCL_COMM_ID` names, which is over once all have come.
pub(crate) fn serve_named(
    id: &bootstrap::UniqueId,
    rank: Rank,
    ranks: u32,
) -> Result<Option<RendezvousServer>, Failure> {
    if rank != Rank(0) || !is_named(id)? {
        return Ok(None);
    }
    let addresses = (id.host(), id.port()).to_socket_addrs();
    let addresses = addresses.map_err(|error| Failure::system(format!("cannot find {}: {error}", id.host())))?;
    let mut opened = Err(Failure::system(format!("{} has no address", id.host())));
    for address in addresses {
        opened = Rendezvous::open_at(address, id.secret(), ranks).map_err(Failure::from);
        if opened.is_ok() {
            break;
        }
    }
    Ok(Some(opened?.spawn(Duration::MAX)?))
}

/// Whether it is the id of the rendezvous in the environment, which its maker has not opened.
pub(crate) fn is_named(id: &bootstrap::UniqueId) -> Result<bool, Failure> {
    let is_same = |other: &bootstrap::UniqueId| (other.host(), other.port()) == (id.host(), id.port());
    Ok(named()?.as_ref().is_some_and(is_same))
}

/// The id of the rendezvous in the environment, if any: of its address, and of the user's secret.
fn named() -> Result<Option<bootstrap::UniqueId>, Failure> {
    let Some(text) = doorbell_trust::text_variable(NAMED).filter(|text| !text.is_empty()) else {
        return Ok(None);
    };
    let Some((host, port)) = host_and_port(&text) else {
        return Err(Failure::invalid_argument(format!(
            "{NAMED} is {text:?}: it is an address and a port, as 10.1.2.3:4000, [fe80::1]:4000 or node1:4000"
        )));
    };
    let secret = Secret::from_env(&[NAMED, &text]).map_err(|error| Failure::system(error.to_string()))?;
    let id = bootstrap::UniqueId::new(host, port, secret);
    id.map(Some)
        .map_err(|error| Failure::invalid_argument(format!("{NAMED} is {text:?}: {error}")))
}

fn host_and_port(text: &str) -> Option<(&str, u16)> {
    let (host, port) = text.rsplit_once(':')?;
    let host = match host.strip_prefix('[') {
        Some(host) => host.strip_suffix(']')?,
        None => Some(host).filter(|host| !host.contains(':'))?,
    };
    Some((host, port.parse().ok()?))
}

fn encode(id: &bootstrap::UniqueId) -> Result<UniqueId, Failure> {
    let text = id.to_string();
    let mut bytes = [0; 128];
    // A byte remains for the end of the string.
    if text.len() >= bytes.len() {
        return Err(Failure::system(
            "the address of the rendezvous is too long for a unique id",
        ));
    }
    for (byte, character) in bytes.iter_mut().zip(text.bytes()) {
        *byte = character as c_char;
    }
    Ok(UniqueId(bytes))
}

pub(crate) fn decode(id: &UniqueId) -> Result<bootstrap::UniqueId, Failure> {
    parse(&id.0.map(|byte| byte as u8))
        .ok_or_else(|| Failure::invalid_argument("the unique id is not one that this library's ncclGetUniqueId made"))
}

/// As another rank's bytes have it.
pub(crate) fn parse(bytes: &[u8]) -> Option<bootstrap::UniqueId> {
    let text = CStr::from_bytes_until_nul(bytes).ok()?;
    text.to_str().ok()?.parse().ok()
}

/// The address to listen on: of the bootstrap's options, or of the best interface.
fn address() -> Result<IpAddr, Failure> {
    if let Some(address) = Options::from_env()?.bind {
        return Ok(address);
    }
    let names = doorbell_trust::text_variable(VARIABLE).unwrap_or_default();
    let rule = Rule::new(&names);
    let all = getifaddrs().map_err(|errno| Failure::system(format!("cannot list the interfaces: {errno}")))?;
    let candidates = all.enumerate().filter_map(|(place, interface)| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
        let v6 = || address.as_sockaddr_in6().map(|address| address.ip());
        // A link-local address needs an interface on the other side, too.
        let v6 = || v6().filter(|ip| !ip.is_unicast_link_local()).map(IpAddr::V6);
        let ip = v4.or_else(v6)?;
        let is_up = interface.flags.contains(InterfaceFlags::IFF_UP);
        let preference = rule.preference(&interface.interface_name).filter(|_| is_up)?;
        Some((preference, ip.is_ipv6(), place, ip))
    });
    let best = candidates.min_by_key(|(preference, is_v6, place, _)| (*preference, *is_v6, *place));
    best.map(|(.., ip)| ip)
        .ok_or_else(|| Failure::invalid_usage(format!("no interface that is up fits {VARIABLE}")))
}

/// `NCCL_SOCKET_IFNAME`: prefixes of names, separated by commas; after `=` whole names, after `^`
/// those not to use.
#[derive(Debug)]
struct Rule<'a> {
    names: Vec<&'a str>,
    excludes: bool,
    whole: bool,
}

impl<'a> Rule<'a> {
    fn new(text: &'a str) -> Self {
        let (excludes, text) = text.strip_prefix('^').map_or((false, text), |rest| (true, rest));
        let (whole, text) = text.strip_prefix('=').map_or((false, text), |rest| (true, rest));
        let names = text.split(',').filter(|name| !name.is_empty()).collect();
        Self { names, excludes, whole }
    }

    /// Lower ones first; `None` for an interface not to use.
    fn preference(&self, interface: &str) -> Option<usize> {
        let fits = |name: &&str| match self.whole {
            true => interface == *name,
            false => interface.starts_with(name),
        };
        let place = self.names.iter().position(fits);
        if !self.excludes && !self.names.is_empty() {
            return place;
        }
        // As NCCL: bridges of containers only before loopback.
        let last = ["docker", "virbr", "lo"];
        let rank = last.iter().position(|name| interface.starts_with(name));
        place.is_none().then_some(rank.map_or(0, |rank| rank + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn best(rule: &str) -> Vec<&'static str> {
        let rule = Rule::new(rule);
        let mut all = ["lo", "docker0", "eth0", "eth1", "eth10", "ib0"].map(|name| (rule.preference(name), name));
        all.sort_by_key(|(preference, _)| *preference);
        let used = all.into_iter().filter(|(preference, _)| preference.is_some());
        used.map(|(_, name)| name).collect()
    }

    #[test]
    fn interfaces_are_chosen_as_the_variable_says() {
        assert_eq!(best(""), ["eth0", "eth1", "eth10", "ib0", "docker0", "lo"]);
        assert_eq!(best("ib,eth1"), ["ib0", "eth1", "eth10"]);
        assert_eq!(best("=eth1,eth0"), ["eth1", "eth0"]);
        assert_eq!(best("^eth,docker"), ["ib0", "lo"]);
        assert_eq!(best("^=eth1"), ["eth0", "eth10", "ib0", "docker0", "lo"]);
        assert_eq!(best("lo"), ["lo"]);
    }

    #[test]
    fn a_rendezvous_is_named_by_address_and_port() {
        assert_eq!(host_and_port("10.1.2.3:4000"), Some(("10.1.2.3", 4000)));
        assert_eq!(host_and_port("[::1]:1"), Some(("::1", 1)));
        assert_eq!(host_and_port("node-1:4000"), Some(("node-1", 4000)));
        for wrong in ["", "node", "::1:4000", "[::1:4000", "node:port", "node:65536"] {
            assert_eq!(host_and_port(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn the_longest_id_fits_and_others_are_refused() {
        let long = "doorbell:[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:65535:0123456789abcdef0123456789abcdef";
        let id = encode(&long.parse().unwrap()).unwrap();
        assert_eq!(decode(&id).unwrap().port(), 65535);
        assert!(decode(&UniqueId([0; 128])).is_err());
        assert!(decode(&UniqueId([b'x' as c_char; 128])).is_err(), "without an end");
    }
}
