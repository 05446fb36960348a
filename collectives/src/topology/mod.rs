//! Topology: adapters and GPUs of a host, their distances, and the order of ranks in a ring.
//!
//! [`Host::read`] reads sysfs, below any root; [`Host::query_driver`] adds NVLinks from
//! NVIDIA's driver. [`Distance`] is by the nearest common ancestor of two devices. [`ring`] orders
//! ranks by their [`Member`]s so that each host is entered once and near ranks are neighbours.

mod cycle;
mod draw;
#[cfg(feature = "gpu")]
mod driver;
mod gpu;
mod member;
mod order;
mod sysfs;

use core::fmt;

use serde::{Deserialize, Serialize};

use crate::types::named;

#[cfg(feature = "gpu")]
pub use doorbell_nvml::LIBRARY_VARIABLE as NVML_LIBRARY_VARIABLE;
pub use gpu::{Gpu, GpuPeer, NvLink, NvLinkEnd, NvLinkGroup, least_nvlink};
pub use member::Member;
pub use order::ring;
pub use sysfs::TopologyError;

/// The hardware of a host.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Host {
    /// Its name.
    pub name: String,
    /// The NUMA nodes, by number.
    pub numa_nodes: Vec<NumaNode>,
    /// RDMA adapters, then GPUs, each sorted by name.
    pub devices: Vec<Device>,
    /// Errors while reading.
    pub notes: Vec<String>,
}

/// A NUMA node.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct NumaNode {
    /// Its number.
    pub node: u32,
    /// Its processors, in sysfs list format: `0-3,8`.
    pub cpus: String,
    /// Distances to the host's nodes, in order: 10 is itself (ACPI SLIT).
    pub distances: Vec<u32>,
}

named! {
    /// The kind of a device.
    DeviceKind, "kind of device" {
        /// An RDMA adapter.
        Adapter = "adapter",
        /// A GPU.
        Gpu = "gpu",
    }
}

/// A device and its location.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Device {
    /// The adapter's name, or the GPU's PCI address.
    pub name: String,
    /// The kind.
    pub kind: DeviceKind,
    /// The location.
    #[serde(flatten)]
    pub place: Location,
    /// State and rate of an adapter's first port, as in sysfs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<String>,
    /// The driver's index of a GPU, as in `nvidia-smi`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<u32>,
    /// A GPU's product name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// The processors near a GPU, as the driver reports them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus: Option<String>,
    /// The driver's information about a GPU's links.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<Gpu>,
    /// Distances to other GPUs, as the driver reports them.
    #[serde(skip)]
    ancestors: Vec<(String, Distance)>,
}

impl Device {
    fn new(name: String, kind: DeviceKind, place: Location) -> Self {
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

/// A location in a host.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
pub struct Location {
    /// The NUMA node, if known.
    pub numa_node: Option<u32>,
    /// The PCIe path: host bridge, bridges, and the device. Empty if it is not on PCIe.
    pub pcie_path: Vec<String>,
}

named! {
    /// The distance of two locations of a host, the nearest first.
    Distance, "distance" {
        /// The same device.
        Same = "same",
        /// Connected by NVLink: traffic bypasses PCIe.
        NvLink = "nvlink",
        /// Below the same PCIe switch or root port: traffic bypasses the host bridge.
        Switch = "switch",
        /// Below the same host bridge.
        Bridge = "bridge",
        /// On the same NUMA node.
        Node = "node",
        /// Across NUMA nodes, or unknown.
        Cross = "cross",
    }
}

impl Location {
    /// The distance to another location. Functions of one device count as sharing a switch.
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
    /// The adapters with their distances, nearest to `place` first: the equally near first ones are
    /// its rails.
    #[must_use]
    pub fn adapters_near(&self, place: &Location) -> Vec<(&Device, Distance)> {
        self.near(place, DeviceKind::Adapter)
    }

    /// The GPUs with their distances, nearest to `place` first.
    #[must_use]
    pub fn gpus_near(&self, place: &Location) -> Vec<(&Device, Distance)> {
        self.near(place, DeviceKind::Gpu)
    }

    fn near(&self, place: &Location, kind: DeviceKind) -> Vec<(&Device, Distance)> {
        let devices = self.devices.iter().filter(|device| device.kind == kind);
        let mut found: Vec<_> = devices.map(|device| (device, place.distance(&device.place))).collect();
        found.sort_by_key(|(_, distance)| *distance);
        found
    }

    /// Each pair of devices with their distance.
    pub fn distances(&self) -> impl Iterator<Item = (&Device, &Device, Distance)> {
        self.devices.iter().enumerate().flat_map(move |(index, one)| {
            self.devices[index + 1..]
                .iter()
                .map(move |two| (one, two, self.distance(one, two)))
        })
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        draw::host(self, f)
    }
}

#[cfg(test)]
mod tests;
