//! Checks of a port: whether it is active, its MTU and the largest possible one, and the GID of the
//! test.
//!
//! A [`Port`] comes from the device's library, or partly from sysfs where the library does not open
//! the device; the checks depend on neither.

use std::net::{IpAddr, Ipv6Addr};

use doorbell_verbs::{Context, GidType, LinkLayer, PortState};

use super::sources::Sources;
use crate::device::PORT;
use crate::report::{Code, Warning};

/// What the kernel reserves of an Ethernet frame for the GRH, UDP, BTH, the longest extended
/// headers and the ICRC when it derives the port's MTU from the interface's.
const HEADERS: u32 = 96;
/// The usual interface MTU for the largest path MTU.
const RECOMMENDED_MTU: u32 = 4200;
/// The most GID table entries that are read from sysfs.
const GIDS: u32 = 1024;

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Port {
    /// Its state as a word, if it is not active.
    pub(super) inactive: Option<String>,
    pub(super) is_ethernet: bool,
    /// The active MTU, and the largest possible one.
    pub(super) mtus_bytes: Option<(u32, u32)>,
    pub(super) bits_per_s: Option<u64>,
    pub(super) gids: Vec<PortGid>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PortGid {
    pub(super) index: u32,
    pub(super) address: IpAddr,
    /// RoCE v1; false where the type is unknown.
    pub(super) is_v1: bool,
}

impl PortGid {
    fn is_link_local(&self) -> bool {
        matches!(self.address, IpAddr::V6(address) if address.is_unicast_link_local())
    }

    /// Greater is better, in the order in which the safe API prefers them: RoCE v2 first, then
    /// IPv4, routable IPv6, link-local. Of equal ones the first entry.
    fn preference(&self) -> impl Ord + use<> {
        (
            !self.is_v1,
            self.address.is_ipv4(),
            !self.is_link_local(),
            std::cmp::Reverse(self.index),
        )
    }
}

impl std::fmt::Display for PortGid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let version = if self.is_v1 { 1 } else { 2 };
        write!(f, "RoCE v{version}, {}", self.address)
    }
}

impl Port {
    pub(crate) fn of_context(context: &Context) -> Option<Port> {
        let port = context.port(PORT).ok()?;
        let gids = context.gids(PORT).unwrap_or_default();
        let is_up = matches!(port.state, PortState::Active | PortState::ActiveDefer);
        Some(Port {
            inactive: (!is_up).then(|| port.state.to_string()),
            is_ethernet: port.link_layer == LinkLayer::Ethernet,
            mtus_bytes: Some((port.active_mtu.bytes(), port.max_mtu.bytes())),
            bits_per_s: port.bits_per_s,
            gids: gids
                .iter()
                .map(|entry| PortGid {
                    index: entry.index,
                    address: entry.gid.to_ip(),
                    is_v1: entry.kind == GidType::RoceV1,
                })
                .collect(),
        })
    }

    /// The port according to sysfs, which lacks the MTUs.
    pub(super) fn of_sysfs(sources: &Sources, device: &str) -> Option<Port> {
        let of = |file: &str| format!("sys/class/infiniband/{device}/ports/{PORT}/{file}");
        // "4: ACTIVE".
        let state = sources.text(&of("state"))?;
        let is_up = matches!(state.split(':').next(), Some("4" | "5"));
        // "200 Gb/sec (4X HDR)".
        let rate = sources.text(&of("rate"));
        let gbit_per_s = rate.and_then(|rate| rate.split(' ').next()?.parse::<f64>().ok());
        let is_ethernet = sources.text(&of("link_layer")).as_deref() == Some("Ethernet");
        let gid = |index: u32| {
            let address: Ipv6Addr = sources.text(&of(&format!("gids/{index}")))?.parse().ok()?;
            let kind = sources.text(&of(&format!("gid_attrs/types/{index}")));
            (!address.is_unspecified()).then_some(PortGid {
                index,
                address: address.to_ipv4_mapped().map_or(IpAddr::V6(address), IpAddr::V4),
                is_v1: is_ethernet && kind.is_some_and(|kind| !kind.contains("v2")),
            })
        };
        Some(Port {
            inactive: (!is_up).then(|| state.rsplit(": ").next().unwrap_or_default().to_ascii_lowercase()),
            is_ethernet,
            mtus_bytes: None,
            bits_per_s: gbit_per_s
                .filter(|rate| (0.1..1e6).contains(rate))
                .map(|rate| (rate * 1e9) as u64),
            gids: (0..GIDS).filter_map(gid).collect(),
        })
    }

    fn chosen(&self, index: Option<u32>) -> Option<PortGid> {
        match index {
            Some(index) => self.gids.iter().copied().find(|gid| gid.index == index),
            None => self.best(|_| true),
        }
    }

    fn best(&self, fits: impl Fn(&PortGid) -> bool) -> Option<PortGid> {
        self.gids.iter().copied().filter(fits).max_by_key(PortGid::preference)
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct PortUse<'a> {
    pub(super) device: &'a str,
    /// Whether it is a system device, with network interfaces.
    pub(super) is_system: bool,
    pub(super) gid_index: Option<u32>,
    pub(super) mtu_bytes: Option<u32>,
}

pub(super) fn of_port(sources: &Sources, port: &Port, wanted: &PortUse<'_>) -> Vec<Warning> {
    let device = wanted.device;
    let mut warnings = Vec::new();
    if let Some(state) = &port.inactive {
        warnings.push(Code::PortNotActive.warning(format!("port {PORT} of {device} is {state}: check the cable, ip link and, on InfiniBand, the subnet manager (sminfo)")));
    }
    warnings.extend(mtu(sources, port, wanted));
    if let (Some(requested), Some((active, _))) = (wanted.mtu_bytes, port.mtus_bytes)
        && requested < active
    {
        warnings.push(Code::PathMtu.warning(format!("the path MTU is {requested} B, below the {active} B of {device}'s port: leave --mtu (-m) out for the largest")));
    }
    if port.is_ethernet {
        warnings.extend(gid(port, wanted));
    }
    warnings
}

fn mtu(sources: &Sources, port: &Port, wanted: &PortUse<'_>) -> Option<Warning> {
    let device = wanted.device;
    let interface = if port.is_ethernet {
        interface(sources, port, wanted)
    } else {
        None
    };
    let (active, most) = match (port.mtus_bytes, &interface) {
        (Some(mtus), _) => mtus,
        (None, Some((_, mtu))) => (fitting(*mtu)?, 4096),
        (None, None) => return None,
    };
    if active >= most {
        return None;
    }
    let what = format!("the MTU of {device}'s port is {active} B of {most} B");
    let advice = match interface {
        Some((name, mtu)) if mtu < RECOMMENDED_MTU => {
            format!(
                ", as interface {name} has {mtu} B: ip link set dev {name} mtu {RECOMMENDED_MTU} on both hosts, and let the switches pass that"
            )
        }
        _ if port.is_ethernet => {
            ": raise that of its network interface to 4200 B on both hosts, and let the switches pass that".into()
        }
        _ => ": set the partition's MTU at the subnet manager".into(),
    };
    Some(Code::Mtu.warning(format!("{what}{advice}")))
}

fn fitting(interface_bytes: u32) -> Option<u32> {
    let fits = |mtu: &u32| mtu + HEADERS <= interface_bytes;
    [4096, 2048, 1024, 512, 256].into_iter().find(fits)
}

/// The interface of the GID that a test uses, with its MTU.
fn interface(sources: &Sources, port: &Port, wanted: &PortUse<'_>) -> Option<(String, u32)> {
    if !wanted.is_system {
        return None;
    }
    let folder = format!("sys/class/infiniband/{}", wanted.device);
    let of_gid = port
        .chosen(wanted.gid_index)
        .and_then(|gid| sources.text(&format!("{folder}/ports/{PORT}/gid_attrs/ndevs/{}", gid.index)));
    // rxe also names its interface here.
    let name = of_gid.or_else(|| sources.text(&format!("{folder}/parent")))?;
    if !super::sources::is_file_name(&name) {
        return None;
    }
    let mtu = sources.number(&format!("sys/class/net/{name}/mtu"))?;
    Some((name, mtu))
}

fn gid(port: &Port, wanted: &PortUse<'_>) -> Option<Warning> {
    let device = wanted.device;
    let gid = port.chosen(wanted.gid_index)?;
    let instead = |better: PortGid| format!("--gid-index {0} (-x {0}) is {better}", better.index);
    if gid.is_v1 {
        let advice = port
            .best(|other| !other.is_v1)
            .map_or_else(|| "give its network interface an IP address".into(), instead);
        return Some(Code::GidRoceV1.warning(format!(
            "GID {} of {device} ({gid}) is not routable: {advice}",
            gid.index
        )));
    }
    if gid.is_link_local()
        && let Some(better) = port.best(|other| !other.is_v1 && !other.is_link_local())
    {
        return Some(Code::GidLinkLocal.warning(format!(
            "GID {} of {device} ({gid}) reaches its own segment only: {}",
            gid.index,
            instead(better)
        )));
    }
    (wanted.is_system && gid.address.is_loopback()).then(|| {
        Code::GidLoopback.warning(format!("GID {} of {device} ({gid}) never leaves this host: give its network interface an address, or choose another with --gid-index (-x)", gid.index))
    })
}

pub(super) fn show_gbit(bits_per_s: u64) -> String {
    format!("{:.1} Gbit/s", bits_per_s as f64 / 1e9)
}

#[cfg(test)]
#[path = "port_tests.rs"]
mod tests;
