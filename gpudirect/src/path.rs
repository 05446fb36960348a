//! The paths by which GPU memory can be registered, and why one is not possible.

use core::fmt;
use core::str::FromStr;
use std::io;

use doorbell_verbs::MemoryError;

/// How GPU memory is registered. Ordered: the better comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Path {
    /// The GPU's driver exports it as a dma-buf, which the adapter imports.
    DmaBuf,
    /// The kernel's nvidia_peermem tells the adapter where its addresses lead.
    Peermem,
    /// A device in software has the GPU copy.
    DeviceCopy,
    /// A mirror of it in pinned memory of the host is registered instead.
    Staged,
}

impl Path {
    /// All of them, the best first.
    pub const ALL: [Self; 4] = [Self::DmaBuf, Self::Peermem, Self::DeviceCopy, Self::Staged];

    /// What forces one: `dmabuf`, `peermem`, `device-copy` or `staged`; unset, empty or `auto` takes the best.
    pub const ENVIRONMENT: &'static str = "DOORBELL_GPU_PATH";

    /// Its name, as results and the environment have it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::DmaBuf => "dmabuf",
            Self::Peermem => "peermem",
            Self::DeviceCopy => "device-copy",
            Self::Staged => "staged",
        }
    }

    /// Whether the adapter reaches the GPU's own memory, and no mirror of it.
    #[must_use]
    pub const fn is_direct(self) -> bool {
        !matches!(self, Self::Staged)
    }

    /// The one that the environment forces, if any.
    ///
    /// # Errors
    /// [`BadPath`] when it names none.
    pub fn from_environment() -> Result<Option<Self>, BadPath> {
        let Some(value) = std::env::var_os(Self::ENVIRONMENT) else {
            return Ok(None);
        };
        match value.to_str() {
            Some("" | "auto") => Ok(None),
            Some(name) => name.parse().map(Some),
            None => Err(BadPath(value.to_string_lossy().into_owned())),
        }
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Path {
    type Err = BadPath;

    fn from_str(name: &str) -> Result<Self, BadPath> {
        let named = Self::ALL.into_iter().find(|path| path.name() == name);
        named.ok_or_else(|| BadPath(name.to_owned()))
    }
}

/// A name that is of no path.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{}' is no path for GPU memory ({}): it is dmabuf, peermem, device-copy, staged or auto", .0.escape_debug(), Path::ENVIRONMENT)]
pub struct BadPath(pub String);

/// Why a path is not possible.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The GPU does not have it.
    #[error("GPU {gpu} has {name} (attribute {number}) = {value}")]
    Attribute {
        /// The GPU's number.
        gpu: usize,
        /// The attribute, as cuda.h names it.
        name: &'static str,
        /// Its number there.
        number: i32,
        /// The driver's error.
        value: i32,
    },
    /// The memory was not made for it.
    #[error("the memory was not allocated for GPUDirect RDMA (gpuDirectRDMACapable)")]
    NotMadeForIt,
    /// A module of the kernel is not loaded.
    #[error("the kernel has not loaded {module} (no /sys/module/{module})")]
    NoModule {
        /// The module.
        module: &'static str,
    },
    /// The RDMA library is older than the call.
    #[error("the RDMA library has no {call}")]
    NoCall {
        /// The call.
        call: &'static str,
    },
    /// The adapter's provider, or its driver in the kernel, does not have it.
    #[error("{call} of {device}: {error}")]
    Provider {
        /// The call.
        call: &'static str,
        /// The adapter.
        device: String,
        /// What it says.
        error: io::Error,
    },
    /// The adapter is a program.
    #[error("{device} is a device in software: no bus leads from it to the GPU")]
    Software {
        /// The device.
        device: String,
    },
    /// The adapter is none in software of ours.
    #[error("{device} is not the userspace device, which alone copies by the GPU")]
    NotSoftware {
        /// The device.
        device: String,
    },
    /// The GPU's driver refused.
    #[error(transparent)]
    Cuda(#[from] doorbell_cuda::Error),
    /// The RDMA device refused.
    #[error(transparent)]
    Verbs(#[from] MemoryError),
    /// Another was asked for.
    #[error("{forced} is forced")]
    NotAsked {
        /// That one.
        forced: Path,
    },
}

/// A path, and why it is not possible.
#[derive(Debug)]
pub struct Refused {
    /// The path.
    pub path: Path,
    /// Why.
    pub why: Refusal,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.why)
    }
}

/// No path is possible: all that were tried.
#[derive(Debug)]
pub struct NoPath {
    /// The RDMA device.
    pub device: String,
    /// The GPU's number.
    pub gpu: usize,
    /// What was tried, in order.
    pub refused: Vec<Refused>,
}

impl fmt::Display for NoPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "memory of GPU {} cannot be registered with {}",
            self.gpu, self.device
        )?;
        for (at, refused) in self.refused.iter().enumerate() {
            write!(f, "{} {refused}", if at == 0 { ":" } else { ";" })?;
        }
        Ok(())
    }
}

impl std::error::Error for NoPath {}
