//! Topology: which adapters and GPUs a host has, how near they are to one another, and in which order a ring goes through the ranks.
//!
//! [`Host::read`] reads sysfs, below any root, so that a copy of another machine's tree can be looked at; [`Host::add_gpus`] adds what NVIDIA's driver says of NVLink. [`Distance`] is by the nearest thing that two devices have in
//! common: NVLink, a PCIe switch, a host bridge, a NUMA node. Ranks tell one another where they are as [`Member`]s; [`ring`] orders them so that each host is entered once, and ranks that are near one another are neighbours, and
//! [`least_nvlink`] says whether all their GPUs are joined.

mod cycle;
mod draw;
mod gpu;
mod member;
mod order;
mod sysfs;

use core::fmt;

use serde::{Deserialize, Serialize};

use crate::types::named;

pub use gpu::{Bundle, Far, Gpu, NvLink, Peer, least_nvlink};
pub use member::Member;
pub use order::ring;
pub use sysfs::TopologyError;

/// What a host is made of.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Host {
    /// Its name.
    pub name: String,
    /// The NUMA nodes, by number.
    pub numa_nodes: Vec<NumaNode>,
    /// RDMA adapters and GPUs: first the adapters, each kind by name.
    pub devices: Vec<Device>,
    /// What could not be read, and why.
    pub notes: Vec<String>,
}

/// A NUMA node.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct NumaNode {
    /// Its number.
    pub node: u32,
    /// Its processors, as sysfs lists them: `0-3,8`.
    pub cpus: String,
    /// How far the nodes of the host are from it, in their order: 10 is itself (ACPI SLIT).
    pub distances: Vec<u32>,
}

named! {
    /// What a device is.
    DeviceKind, "kind of device" {
        /// An RDMA adapter.
        Adapter = "adapter",
        /// A GPU.
        Gpu = "gpu",
    }
}

impl Serialize for DeviceKind {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// A device, and where it is.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Device {
    /// Its name: that of the adapter, the PCI address of a GPU.
    pub name: String,
    /// What it is.
    pub kind: DeviceKind,
    /// Where it is.
    #[serde(flatten)]
    pub place: Place,
    /// State and rate of an adapter's first port, as sysfs has them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<String>,
    /// The driver's number of a GPU, as `nvidia-smi` has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<u32>,
    /// A GPU's product name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// The processors near a GPU, as the driver says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus: Option<String>,
    /// What the driver says of a GPU's links.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<Gpu>,
    /// How near other GPUs are, as the driver says.
    #[serde(skip)]
    ancestors: Vec<(String, Distance)>,
}

impl Device {
    fn new(name: String, kind: DeviceKind, place: Place) -> Self {
        Self {
            name,
            kind,
            place,
            port: None,
            index: None,
            model: None,
            cpus: None,
            gpu: None,
            ancestors: Vec::new(),
        }
    }
}

/// Where something is in a host.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
pub struct Place {
    /// The NUMA node, if it is told.
    pub numa_node: Option<u32>,
    /// The way to it: the host bridge, then bridge after bridge, and itself. Empty for what is not on PCIe.
    pub pcie_path: Vec<String>,
}

named! {
    /// How near two places of a host are, the nearest first.
    Distance, "distance" {
        /// It is the same.
        Same = "same",
        /// Joined by NVLink: traffic does not go by PCIe.
        NvLink = "nvlink",
        /// Below the same PCIe switch or root port: traffic does not come near the processor.
        Switch = "switch",
        /// Below the same host bridge.
        Bridge = "bridge",
        /// At the same NUMA node.
        Node = "node",
        /// Across NUMA nodes, or nobody knows.
        Cross = "cross",
    }
}

impl Serialize for Distance {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl Place {
    /// How near the other is. Functions of one device are below the same port, and so as near as what shares a switch.
    #[must_use]
    pub fn distance(&self, other: &Self) -> Distance {
        if !self.pcie_path.is_empty() && self.pcie_path == other.pcie_path {
            return Distance::Same;
        }
        let common = self
            .pcie_path
            .iter()
            .zip(&other.pcie_path)
            .take_while(|(one, two)| one == two)
            .count();
        match common {
            2.. => Distance::Switch,
            1 => Distance::Bridge,
            0 if self.numa_node.is_some() && self.numa_node == other.numa_node => Distance::Node,
            0 => Distance::Cross,
        }
    }
}

impl Host {
    /// The adapters, nearest to `place` first, and how near they are: the first ones that are equally near are its rails.
    #[must_use]
    pub fn adapters_near(&self, place: &Place) -> Vec<(&Device, Distance)> {
        self.near(place, DeviceKind::Adapter)
    }

    /// The GPUs, nearest to `place` first, and how near they are.
    #[must_use]
    pub fn gpus_near(&self, place: &Place) -> Vec<(&Device, Distance)> {
        self.near(place, DeviceKind::Gpu)
    }

    fn near(&self, place: &Place, kind: DeviceKind) -> Vec<(&Device, Distance)> {
        let devices = self.devices.iter().filter(|device| device.kind == kind);
        let mut found: Vec<_> = devices.map(|device| (device, place.distance(&device.place))).collect();
        found.sort_by_key(|(_, distance)| *distance);
        found
    }

    /// Each two different devices with their distance.
    pub fn distances(&self) -> impl Iterator<Item = (&Device, &Device, Distance)> {
        self.devices.iter().enumerate().flat_map(move |(index, one)| {
            self.devices[index + 1..]
                .iter()
                .map(move |two| (one, two, self.distance(one, two)))
        })
    }
}

impl fmt::Display for Host {
    /// A drawing, in lines.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        draw::host(self, f)
    }
}

#[cfg(test)]
mod tests;
