//! GPUs as the driver describes them: NVLinks and connected pairs.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{Device, DeviceKind, Distance, Host, Member, TopologyError};

/// A GPU's description, as distributed to other ranks.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Gpu {
    /// Its PCI address, as in sysfs and CUDA: `0000:18:00.0`.
    pub address: String,
    /// Its unique name: `GPU-` and a UUID.
    pub uuid: Option<String>,
    /// Its NVLinks, grouped by remote end.
    pub nvlinks: Vec<NvLinkGroup>,
    /// The driver's information about other GPUs.
    pub peers: Vec<GpuPeer>,
}

/// NVLinks of a GPU with the same remote end.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NvLinkGroup {
    /// The remote end.
    pub to: NvLinkEnd,
    /// Number of links.
    pub links: u32,
    /// Bytes/s of all together, each way; 0 if unknown.
    pub bytes_per_s: u64,
}

/// The remote end of NVLinks.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NvLinkEnd {
    /// The GPU with this PCI address.
    Gpu(String),
    /// NVSwitches, which reach all GPUs with links to switches.
    Switch,
    /// A CPU.
    Processor,
    /// Not reported by the driver.
    Unknown,
}

/// The driver's information about a pair of GPUs.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct GpuPeer {
    /// The other GPU's PCI address.
    pub address: String,
    /// Whether the other's memory is accessible by NVLink, if known.
    pub nvlink: Option<bool>,
    /// Whether the other's memory is accessible at all, by NVLink or PCIe, if known.
    pub access: Option<bool>,
}

/// NVLinks between two GPUs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct NvLink {
    /// Number of links.
    pub links: u32,
    /// Bytes/s of all together, each way; 0 if unknown.
    pub bytes_per_s: u64,
}

impl NvLink {
    /// The minimum: the capacity through a switch, or of two ends that differ.
    fn least(self, other: Self) -> Self {
        Self {
            links: self.links.min(other.links),
            bytes_per_s: self.bytes_per_s.min(other.bytes_per_s),
        }
    }

    /// The weight for comparison: MB/s, or the number of links if the rate is unknown.
    pub(super) fn weight(self) -> u64 {
        (self.bytes_per_s / 1_000_000).max(self.links.into())
    }
}

impl Gpu {
    /// NVLinks to another GPU, symmetric: direct links, or, if both have links to NVSwitches, as
    /// many as both have. `None` if there are none, or the driver reports that they are not usable.
    #[must_use]
    pub fn nvlink(&self, other: &Self) -> Option<NvLink> {
        let said = [self.driver_nvlink(other), other.driver_nvlink(self)];
        if self.address == other.address || said.contains(&Some(false)) {
            return None;
        }
        let direct = match (self.sum(|far| far.is(other)), other.sum(|far| far.is(self))) {
            (Some(one), Some(two)) => Some(one.least(two)),
            (one, two) => one.or(two),
        };
        let switched = || Some(self.sum(NvLinkEnd::is_switch)?.least(other.sum(NvLinkEnd::is_switch)?));
        // A driver that does not report remote ends may still report that two GPUs are connected.
        let unknown = || match said.contains(&Some(true)) {
            true => Some(
                self.sum(NvLinkEnd::is_unknown)?
                    .least(other.sum(NvLinkEnd::is_unknown)?),
            ),
            false => None,
        };
        direct.or_else(switched).or_else(unknown)
    }

    fn driver_nvlink(&self, other: &Self) -> Option<bool> {
        self.peers.iter().find(|peer| peer.address == other.address)?.nvlink
    }

    /// Whether each can access the other's memory, by NVLink or PCIe; `None` if unknown.
    #[must_use]
    pub fn access(&self, other: &Self) -> Option<bool> {
        let said = |one: &Self, two: &Self| one.peers.iter().find(|peer| peer.address == two.address)?.access;
        match (said(self, other), said(other, self)) {
            (Some(one), Some(two)) => Some(one && two),
            (one, two) => one.or(two),
        }
    }

    fn sum(&self, is: impl Fn(&NvLinkEnd) -> bool) -> Option<NvLink> {
        let such = self.nvlinks.iter().filter(|bundle| bundle.links > 0 && is(&bundle.to));
        such.map(|bundle| NvLink {
            links: bundle.links,
            bytes_per_s: bundle.bytes_per_s,
        })
        .reduce(|one, two| NvLink {
            links: one.links.saturating_add(two.links),
            bytes_per_s: one.bytes_per_s.saturating_add(two.bytes_per_s),
        })
    }

    /// All its NVLinks; `None` without any.
    #[must_use]
    pub fn all_nvlinks(&self) -> Option<NvLink> {
        self.sum(|_| true)
    }
}

impl NvLinkEnd {
    fn is(&self, gpu: &Gpu) -> bool {
        matches!(self, Self::Gpu(address) if *address == gpu.address)
    }

    fn is_switch(&self) -> bool {
        *self == Self::Switch
    }

    fn is_unknown(&self) -> bool {
        *self == Self::Unknown
    }
}

impl Host {
    /// This host, from sysfs and NVIDIA's driver. Querying the driver takes some ten milliseconds,
    /// and seconds if it has to initialise the GPUs.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn here(name: impl Into<String>) -> Result<Self, TopologyError> {
        let mut host = Self::read(Path::new("/sys"), name)?;
        host.query_driver();
        Ok(host)
    }

    /// Adds a note if there are GPUs, as the driver cannot be queried.
    #[cfg(not(feature = "gpu"))]
    pub fn query_driver(&mut self) {
        if self.devices.iter().any(|device| device.kind == DeviceKind::Gpu) {
            let note = "NVLink is not known: this is built without the feature `gpu`";
            self.notes.push(note.to_owned());
        }
    }

    /// NVLinks between two of its devices.
    #[must_use]
    pub fn nvlink(&self, one: &Device, two: &Device) -> Option<NvLink> {
        one.gpu.as_ref()?.nvlink(two.gpu.as_ref()?)
    }

    /// The distance of two of its devices.
    #[must_use]
    pub fn distance(&self, one: &Device, two: &Device) -> Distance {
        match self.nvlink(one, two) {
            Some(_) => Distance::NvLink,
            None => self.pcie_distance(one, two),
        }
    }

    /// The PCIe distance of two of its devices: from sysfs, else from the driver.
    #[must_use]
    pub fn pcie_distance(&self, one: &Device, two: &Device) -> Distance {
        if one.name == two.name && one.kind == two.kind {
            return Distance::Same;
        }
        let reported = |one: &Device, two: &Device| {
            one.ancestors
                .iter()
                .find(|(name, _)| *name == two.name)
                .map(|(_, far)| *far)
        };
        let known = !one.place.pcie_path.is_empty() && !two.place.pcie_path.is_empty();
        match reported(one, two).or_else(|| reported(two, one)) {
            Some(distance) if !known => distance,
            _ => one.place.distance(&two.place),
        }
    }

    /// The location of a rank with the GPU at this PCI address, as CUDA reports it.
    #[must_use]
    pub fn member(&self, address: &str) -> Option<Member> {
        let is_it = |device: &&Device| device.kind == DeviceKind::Gpu && device.name.eq_ignore_ascii_case(address);
        let device = self.devices.iter().find(is_it)?;
        Some(Member {
            host: self.name.clone(),
            place: device.place.clone(),
            gpu: device.gpu.clone(),
        })
    }
}

/// The least NVLink connection between the GPUs of these ranks, if all are of one host, each with a
/// GPU, and all are connected. Ranks that share a GPU need no link. This is the driver's view;
/// `cuDeviceCanAccessPeer` reports whether a process may use the links.
#[must_use]
pub fn least_nvlink(members: &[Member]) -> Option<NvLink> {
    let mut least: Option<NvLink> = None;
    for (at, one) in members.iter().enumerate() {
        for two in &members[at + 1..] {
            let (gpu, other) = (one.gpu.as_ref()?, two.gpu.as_ref()?);
            if one.host != two.host {
                return None;
            }
            if gpu.address != other.address {
                let link = gpu.nvlink(other)?;
                least = Some(least.map_or(link, |least| least.least(link)));
            }
        }
    }
    least
}
