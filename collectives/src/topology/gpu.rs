//! GPUs as the driver tells of them: their NVLinks, which two of them are joined by some, and what a host gains by knowing.

use std::path::Path;

use doorbell_nvml as nvml;
use serde::Serialize;

use super::sysfs::natural;
use super::{Device, DeviceKind, Distance, Host, Member, Place, TopologyError};

/// What a GPU tells of itself that others have to know, to find out how they reach it.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Gpu {
    /// Its PCI address, as sysfs and CUDA write it: `0000:18:00.0`.
    pub address: String,
    /// What names it and no other: `GPU-` and a UUID.
    pub uuid: Option<String>,
    /// Its NVLinks, those with the same other end together.
    pub nvlinks: Vec<Bundle>,
    /// What the driver says of other GPUs.
    pub peers: Vec<Peer>,
}

/// NVLinks of a GPU that have the same other end.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Bundle {
    /// Their other end.
    pub to: Far,
    /// How many they are.
    pub links: u32,
    /// Bytes/s of all together, each way; 0 where it is not told.
    pub bytes_per_s: u64,
}

/// What is at the other end of NVLinks.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Far {
    /// The GPU with this PCI address.
    Gpu(String),
    /// NVSwitches, by which all GPUs are reached that have links to such.
    Switch,
    /// A processor.
    Processor,
    /// The driver does not say.
    Unknown,
}

/// What the driver says of a GPU and another.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Peer {
    /// The other's PCI address.
    pub address: String,
    /// Whether the other's memory is reached by NVLink, where that is known.
    pub nvlink: Option<bool>,
    /// Whether the other's memory can be read and written at all, by NVLink or PCIe, where that is known.
    pub access: Option<bool>,
}

/// What joins two GPUs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct NvLink {
    /// How many links.
    pub links: u32,
    /// Bytes/s of all together, each way; 0 where it is not told.
    pub bytes_per_s: u64,
}

impl NvLink {
    /// The lesser of two: what is between their far ends by a switch, and what two ends that differ agree on.
    fn least(self, other: Self) -> Self {
        Self {
            links: self.links.min(other.links),
            bytes_per_s: self.bytes_per_s.min(other.bytes_per_s),
        }
    }

    /// How much it carries, by which links are compared: MB/s, and where these are not told, how many links.
    pub(super) fn worth(self) -> u64 {
        (self.bytes_per_s / 1_000_000).max(self.links.into())
    }
}

impl Gpu {
    /// What joins it with another: the links between them, or, where both have links to NVSwitches, as many as both have. None where there are none, or the driver says that they do not reach each other by them.
    ///
    /// Both ends say the same of it, whoever is asked.
    #[must_use]
    pub fn nvlink(&self, other: &Self) -> Option<NvLink> {
        let said = [self.says(other), other.says(self)];
        if self.address == other.address || said.contains(&Some(false)) {
            return None;
        }
        let direct = match (self.sum(|far| far.is(other)), other.sum(|far| far.is(self))) {
            (Some(one), Some(two)) => Some(one.least(two)),
            (one, two) => one.or(two),
        };
        let switched = || Some(self.sum(Far::is_switch)?.least(other.sum(Far::is_switch)?));
        // A driver that does not say where links lead may still say that two GPUs have some.
        let unknown = || match said.contains(&Some(true)) {
            true => Some(self.sum(Far::is_unknown)?.least(other.sum(Far::is_unknown)?)),
            false => None,
        };
        direct.or_else(switched).or_else(unknown)
    }

    /// What the driver says of NVLink to the other.
    fn says(&self, other: &Self) -> Option<bool> {
        self.peers.iter().find(|peer| peer.address == other.address)?.nvlink
    }

    /// Whether each can read and write the other's memory, by NVLink or PCIe; none where it is not known.
    #[must_use]
    pub fn access(&self, other: &Self) -> Option<bool> {
        let said = |one: &Self, two: &Self| one.peers.iter().find(|peer| peer.address == two.address)?.access;
        match (said(self, other), said(other, self)) {
            (Some(one), Some(two)) => Some(one && two),
            (one, two) => one.or(two),
        }
    }

    /// The links whose other ends are such.
    fn sum(&self, is: impl Fn(&Far) -> bool) -> Option<NvLink> {
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

    /// All its links, whatever they lead to; none where there are none.
    #[must_use]
    pub fn all_nvlinks(&self) -> Option<NvLink> {
        self.sum(|_| true)
    }

    fn told(gpu: &nvml::Gpu) -> Self {
        let mut nvlinks: Vec<Bundle> = Vec::new();
        for link in &gpu.links {
            let to = Far::from(&link.far);
            let bytes_per_s = link.bytes_per_s.unwrap_or(0);
            match nvlinks.iter_mut().find(|bundle| bundle.to == to) {
                Some(bundle) => {
                    bundle.links += 1;
                    bundle.bytes_per_s = bundle.bytes_per_s.saturating_add(bytes_per_s);
                }
                None => nvlinks.push(Bundle {
                    to,
                    links: 1,
                    bytes_per_s,
                }),
            }
        }
        nvlinks.sort_by(|one, two| one.to.cmp(&two.to));
        let known = |reach: Option<nvml::Reach>| reach.filter(|reach| *reach != nvml::Reach::Unknown);
        let peers = gpu.peers.iter().map(|peer| Peer {
            address: peer.address.clone(),
            nvlink: known(peer.nvlink).map(nvml::Reach::is_yes),
            access: known(peer.read)
                .zip(known(peer.write))
                .map(|(read, write)| read.is_yes() && write.is_yes()),
        });
        Self {
            address: gpu.address.clone(),
            uuid: gpu.uuid.clone(),
            nvlinks,
            peers: peers.collect(),
        }
    }
}

impl Far {
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

impl From<&nvml::Far> for Far {
    fn from(far: &nvml::Far) -> Self {
        match far {
            nvml::Far::Gpu(address) => Self::Gpu(address.clone()),
            nvml::Far::Switch => Self::Switch,
            nvml::Far::Processor => Self::Processor,
            nvml::Far::Unknown => Self::Unknown,
        }
    }
}

/// How near what two GPUs have in common is.
fn distance(ancestor: nvml::Ancestor) -> Distance {
    match ancestor {
        nvml::Ancestor::Board | nvml::Ancestor::Switch | nvml::Ancestor::Switches => Distance::Switch,
        nvml::Ancestor::Bridge => Distance::Bridge,
        nvml::Ancestor::Node => Distance::Node,
        nvml::Ancestor::System => Distance::Cross,
    }
}

impl Host {
    /// This host: what sysfs and NVIDIA's driver say. Asking the driver takes some ten milliseconds, and seconds where it has to start the GPUs first.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn here(name: impl Into<String>) -> Result<Self, TopologyError> {
        let mut host = Self::read(Path::new("/sys"), name)?;
        host.ask_driver();
        Ok(host)
    }

    /// Adds what the driver of this machine says of its GPUs. Where it says nothing, and there are GPUs, that is a note.
    pub fn ask_driver(&mut self) {
        match nvml::Machine::read() {
            Ok(machine) => self.add_gpus(&machine),
            // Where there is no GPU there is nothing to miss.
            Err(absent) if self.devices.iter().any(|device| device.kind == DeviceKind::Gpu) => {
                self.notes.push(format!("NVLink is not known: {absent}"));
            }
            Err(_) => {}
        }
    }

    /// Adds what the driver says of this host's GPUs to what sysfs says of them. They are the same by their PCI addresses; those that sysfs does not show are devices at no known place.
    pub fn add_gpus(&mut self, machine: &nvml::Machine) {
        self.notes.extend(machine.notes.iter().cloned());
        for gpu in &machine.gpus {
            let is_it = |device: &Device| device.kind == DeviceKind::Gpu && device.name == gpu.address;
            let at = match self.devices.iter().position(is_it) {
                Some(at) => at,
                None => {
                    self.notes.push(format!(
                        "sysfs does not show GPU {}: nobody knows its PCIe switches",
                        gpu.address
                    ));
                    self.devices
                        .push(Device::new(gpu.address.clone(), DeviceKind::Gpu, Place::default()));
                    self.devices.len() - 1
                }
            };
            let device = &mut self.devices[at];
            if let (None, [node]) = (device.place.numa_node, &gpu.numa_nodes[..]) {
                device.place.numa_node = Some(*node);
            }
            device.index = Some(gpu.index);
            device.model.clone_from(&gpu.name);
            device.cpus.clone_from(&gpu.cpus);
            let ancestors = gpu.peers.iter();
            let ancestors = ancestors.filter_map(|peer| Some((peer.address.clone(), distance(peer.ancestor?))));
            device.ancestors = ancestors.collect();
            device.gpu = Some(Gpu::told(gpu));
        }
        let gpus = self
            .devices
            .partition_point(|device| device.kind == DeviceKind::Adapter);
        self.devices[gpus..].sort_by_cached_key(|device| natural(&device.name));
        let unknown = self.devices[gpus..]
            .iter()
            .filter(|device| device.gpu.is_none())
            .count();
        if unknown > 0 {
            self.notes.push(format!(
                "{unknown} of the GPUs that sysfs shows are not NVML's: they are hidden from this process, or have no driver"
            ));
        }
    }

    /// What joins two of its devices by NVLink.
    #[must_use]
    pub fn nvlink(&self, one: &Device, two: &Device) -> Option<NvLink> {
        one.gpu.as_ref()?.nvlink(two.gpu.as_ref()?)
    }

    /// How near two of its devices are.
    #[must_use]
    pub fn distance(&self, one: &Device, two: &Device) -> Distance {
        match self.nvlink(one, two) {
            Some(_) => Distance::NvLink,
            None => self.pcie_distance(one, two),
        }
    }

    /// How near two of its devices are by PCIe: by sysfs, and by what the driver says where sysfs shows nothing.
    #[must_use]
    pub fn pcie_distance(&self, one: &Device, two: &Device) -> Distance {
        if one.name == two.name && one.kind == two.kind {
            return Distance::Same;
        }
        let told = |one: &Device, two: &Device| {
            one.ancestors
                .iter()
                .find(|(name, _)| *name == two.name)
                .map(|(_, far)| *far)
        };
        let known = !one.place.pcie_path.is_empty() && !two.place.pcie_path.is_empty();
        match told(one, two).or_else(|| told(two, one)) {
            Some(distance) if !known => distance,
            _ => one.place.distance(&two.place),
        }
    }

    /// A rank with the GPU at this PCI address, such as CUDA tells of a device; none where the host has no such.
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

/// What the two of these ranks' GPUs are joined by that are joined by least, where all are joined with all by NVLink: those of one host, each with a GPU. None otherwise, and where there is no pair. Ranks that share a GPU need no
/// link between them.
///
/// This is what the driver says of the links; whether a process may use them, `cuDeviceCanAccessPeer` says.
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
