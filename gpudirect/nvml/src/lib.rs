//! The machine's GPUs as reported by NVIDIA's management library (NVML).
//!
//! [`Machine::read`] loads `libnvidia-ml.so.1` at run time. It initializes no GPU and creates no
//! context, so it may be called before fork(2) and without CUDA. A failed call becomes a note, and
//! the rest is read nevertheless. The GPUs are those of the machine or container, regardless of
//! `CUDA_VISIBLE_DEVICES`; their PCI addresses identify them in CUDA and sysfs.

mod absent;
mod query;
mod sys;

use core::fmt;
use std::path::Path;

pub use absent::LoadError;

/// Names another library than `libnvidia-ml.so.1`; ignored in programs with elevated privileges.
pub const LIBRARY_VARIABLE: &str = "DOORBELL_NVML_LIBRARY";

/// The GPUs of a machine.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Machine {
    /// The driver's version, such as `580.159.03`.
    pub driver: Option<String>,
    /// The GPUs, in NVML's order.
    pub gpus: Vec<Gpu>,
    /// What could not be read, and why.
    pub notes: Vec<String>,
}

impl Machine {
    /// Queries the system's library, or that of [`LIBRARY_VARIABLE`]: some ten milliseconds, or
    /// seconds if the driver has to initialize the GPUs first (no persistence daemon).
    ///
    /// # Errors
    /// An error if there is no library, or it cannot enumerate the GPUs.
    #[doc(alias("nvmlInit_v2", "nvmlDeviceGetCount_v2"))]
    pub fn read() -> Result<Self, LoadError> {
        query::system()
    }

    /// Queries a library at another path.
    ///
    /// # Safety
    /// The library must be NVML, or implement the "NVML API Reference Guide".
    pub unsafe fn read_from(path: &Path) -> Result<Self, LoadError> {
        // SAFETY: the caller's promise.
        unsafe { query::library(path) }
    }
}

/// A GPU.
#[derive(Clone, PartialEq, Eq, Debug)]
#[doc(alias = "nvmlDevice_t")]
pub struct Gpu {
    /// NVML's index, as in `nvidia-smi`.
    pub index: u32,
    /// Its PCI address, as in sysfs and CUDA: `0000:18:00.0`.
    pub address: String,
    /// Its unique identifier: `GPU-` and a UUID.
    pub uuid: Option<String>,
    /// Its product name.
    pub name: Option<String>,
    /// Its active NVLinks.
    pub links: Vec<Link>,
    /// The other GPUs, in NVML's order.
    pub peers: Vec<Peer>,
    /// The CPUs near it, in sysfs list format: `0-15,32-47`.
    pub cpus: Option<String>,
    /// The NUMA nodes near it.
    pub numa_nodes: Vec<u32>,
}

/// An active NVLink of a GPU.
#[derive(Clone, PartialEq, Eq, Debug)]
#[doc(alias = "nvmlDeviceGetNvLinkState")]
pub struct Link {
    /// Its number.
    pub number: u32,
    /// The NVLink version as numbered by the library (`nvmlNvlinkVersion_t`: 6 is NVLink 4).
    pub version: Option<u32>,
    /// Nominal bytes/s per direction: 25 GB/s where the driver's line rate is 26.562 GB/s.
    pub bytes_per_s: Option<u64>,
    /// The device at its remote end.
    pub remote: RemoteDevice,
}

/// The device at the remote end of an NVLink.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum RemoteDevice {
    /// The GPU with this PCI address.
    Gpu(String),
    /// An NVSwitch, through which all GPUs connected to one reach each other.
    Switch,
    /// A CPU.
    Processor,
    /// Not reported by the driver.
    Unknown,
}

/// Peer access of a GPU to another.
#[derive(Clone, PartialEq, Eq, Debug)]
#[doc(alias = "nvmlDeviceGetP2PStatus")]
pub struct Peer {
    /// The other GPU's PCI address.
    pub address: String,
    /// Their common ancestor in the PCIe topology.
    pub ancestor: Option<Ancestor>,
    /// Peer access over NVLink.
    pub nvlink: Option<P2pStatus>,
    /// Peer read access.
    pub read: Option<P2pStatus>,
    /// Peer write access.
    pub write: Option<P2pStatus>,
}

/// The lowest common ancestor of two GPUs: `nvmlGpuTopologyLevel_t`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[doc(alias("nvmlGpuTopologyLevel_t", "nvmlDeviceGetTopologyCommonAncestor"))]
pub enum Ancestor {
    /// The same board.
    Board,
    /// A single PCIe switch.
    Switch,
    /// Multiple PCIe switches below one root port.
    Switches,
    /// A host bridge.
    Bridge,
    /// A NUMA node.
    Node,
    /// Only the system interconnect.
    System,
}

/// Peer access status of two GPUs: `nvmlGpuP2PStatus_t`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[doc(alias = "nvmlGpuP2PStatus_t")]
pub enum P2pStatus {
    /// Supported.
    Yes,
    /// Not supported by the chipset.
    NoChipset,
    /// Not supported by one of the GPUs.
    NoGpu,
    /// Not supported by the I/O hub in between.
    NoHub,
    /// Disabled in the driver's configuration.
    Disabled,
    /// No connection of this kind.
    NoWay,
    /// Unknown to the driver.
    Unknown,
}

impl P2pStatus {
    /// Whether it is supported.
    #[must_use]
    pub fn is_supported(self) -> bool {
        self == Self::Yes
    }
}

impl fmt::Display for P2pStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Yes => "yes",
            Self::NoChipset => "no: the chipset cannot",
            Self::NoGpu => "no: one of the GPUs cannot",
            Self::NoHub => "no: not across this I/O hub",
            Self::Disabled => "no: disabled by a setting of the driver",
            Self::NoWay => "no",
            Self::Unknown => "the driver does not know",
        })
    }
}
