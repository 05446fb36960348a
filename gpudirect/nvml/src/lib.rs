//! What NVIDIA's management library (NVML) says of a machine's GPUs: which there are, which NVLinks lead where, and which of them reach each other.
//!
//! Nothing is linked: [`Machine::read`] opens `libnvidia-ml.so.1` at run time, and says in one line what is missing where it is not there. It starts no GPU and makes no context, so that it can be called before fork(2),
//! in processes that never compute, and without CUDA. What one call of the library refuses is a note, and the rest is read all the same.
//!
//! The GPUs are those of the machine (or the container), whatever `CUDA_VISIBLE_DEVICES` says; by their PCI addresses they are found again in CUDA, and in sysfs.

mod absent;
mod ask;
mod sys;

use core::fmt;
use std::path::Path;

pub use absent::Absent;

/// The environment's name for another library than the system's `libnvidia-ml.so.1`. As with `LD_LIBRARY_PATH`, whoever sets it answers for what the library does; programs that run with other rights than their caller's ignore it.
pub const LIBRARY_VARIABLE: &str = "DOORBELL_NVML_LIBRARY";

/// The GPUs of a machine.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Machine {
    /// The driver's version, such as `580.159.03`.
    pub driver: Option<String>,
    /// The GPUs, as the library counts them.
    pub gpus: Vec<Gpu>,
    /// What could not be read, and why.
    pub notes: Vec<String>,
}

impl Machine {
    /// Asks the system's library, or the one that [`LIBRARY_VARIABLE`] names. It takes some ten milliseconds, and seconds where the driver has to start the GPUs first (no persistence daemon).
    ///
    /// # Errors
    /// [`Absent`] when there is no library, or it cannot say which GPUs there are.
    pub fn read() -> Result<Self, Absent> {
        ask::system()
    }

    /// Asks a library of another name.
    ///
    /// # Safety
    /// The library must be NVML, or do as the "NVML API Reference Guide" says in each of its functions.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub unsafe fn read_from(path: &Path) -> Result<Self, Absent> {
        // SAFETY: the caller's promise.
        unsafe { ask::library(path) }
    }
}

/// A GPU.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Gpu {
    /// The library's number of it, as `nvidia-smi` has it.
    pub index: u32,
    /// Its PCI address, as sysfs and CUDA write it: `0000:18:00.0`.
    pub address: String,
    /// What names it and no other: `GPU-` and a UUID.
    pub uuid: Option<String>,
    /// Its product's name.
    pub name: Option<String>,
    /// Its NVLinks that are active.
    pub links: Vec<Link>,
    /// The other GPUs, as the library counts them.
    pub peers: Vec<Peer>,
    /// The processors near it, as sysfs lists them: `0-15,32-47`.
    pub cpus: Option<String>,
    /// The NUMA nodes near it.
    pub numa_nodes: Vec<u32>,
}

/// An active NVLink of a GPU.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Link {
    /// Its number.
    pub number: u32,
    /// The version of NVLink, in the library's own count (`nvmlNvlinkVersion_t`: 6 is NVLink 4).
    pub version: Option<u32>,
    /// Bytes/s each way: as links are sold (25 GB/s), where the driver tells what the line has (26.562 GB/s).
    pub bytes_per_s: Option<u64>,
    /// What is at its other end.
    pub far: Far,
}

/// What is at the other end of an NVLink.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Far {
    /// The GPU with this PCI address.
    Gpu(String),
    /// An NVSwitch, by which all GPUs are reached that have links to one.
    Switch,
    /// A processor.
    Processor,
    /// The driver does not say.
    Unknown,
}

/// How a GPU reaches another.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Peer {
    /// The other's PCI address.
    pub address: String,
    /// What the two have in common on the PCIe bus.
    pub ancestor: Option<Ancestor>,
    /// Whether it reaches the other's memory by NVLink.
    pub nvlink: Option<Reach>,
    /// Whether it reads the other's memory.
    pub read: Option<Reach>,
    /// Whether it writes the other's memory.
    pub write: Option<Reach>,
}

/// The lowest thing that two GPUs have in common: `nvmlGpuTopologyLevel_t`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Ancestor {
    /// Their board.
    Board,
    /// One PCIe switch.
    Switch,
    /// PCIe switches below one root port.
    Switches,
    /// A host bridge.
    Bridge,
    /// A NUMA node.
    Node,
    /// Nothing but the machine.
    System,
}

/// Whether one GPU reaches another, and why not: `nvmlGpuP2PStatus_t`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Reach {
    /// It does.
    Yes,
    /// The chipset cannot.
    NoChipset,
    /// One of the GPUs cannot.
    NoGpu,
    /// It would go by an I/O hub that cannot.
    NoHub,
    /// The driver was told not to.
    Disabled,
    /// There is no way of this kind.
    NoWay,
    /// The driver does not know.
    Unknown,
}

impl Reach {
    /// Whether it does.
    #[must_use]
    pub fn is_yes(self) -> bool {
        self == Self::Yes
    }
}

impl fmt::Display for Reach {
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
