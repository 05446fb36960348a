//! The paths by which GPU memory can be registered, and why a path fails.

use core::fmt;
use core::str::FromStr;
use std::io;

use doorbell_verbs::MemoryError;

/// How GPU memory is registered, from best to worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Path {
    /// The CUDA driver exports a dma-buf, which the adapter imports.
    DmaBuf,
    /// The nvidia_peermem kernel module translates GPU addresses for the adapter.
    Peermem,
    /// A software device has the GPU copy.
    DeviceCopy,
    /// A staging buffer in pinned host memory is registered instead.
    Staged,
}

impl Path {
    /// All paths, best first.
    pub const ALL: [Self; 4] = [Self::DmaBuf, Self::Peermem, Self::DeviceCopy, Self::Staged];

    /// The environment variable that forces one: `dmabuf`, `peermem`, `device-copy` or `staged`;
    /// unset, empty or `auto` selects the best.
    pub const ENVIRONMENT: &'static str = "DOORBELL_GPU_PATH";

    /// Its name in results and the environment.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::DmaBuf => "dmabuf",
            Self::Peermem => "peermem",
            Self::DeviceCopy => "device-copy",
            Self::Staged => "staged",
        }
    }

    /// Whether the adapter accesses the GPU memory itself, rather than a staging buffer.
    #[must_use]
    pub const fn is_direct(self) -> bool {
        !matches!(self, Self::Staged)
    }

    /// The path that the environment forces, if any.
    ///
    /// # Errors
    /// [`InvalidPath`] for an unknown name.
    pub fn from_environment() -> Result<Option<Self>, InvalidPath> {
        let Some(value) = doorbell_trust::variable(Self::ENVIRONMENT) else {
            return Ok(None);
        };
        match value.to_str() {
            Some("" | "auto") => Ok(None),
            Some(name) => name.parse().map(Some),
            None => Err(InvalidPath(value.to_string_lossy().into_owned())),
        }
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Path {
    type Err = InvalidPath;

    fn from_str(name: &str) -> Result<Self, InvalidPath> {
        let named = Self::ALL.into_iter().find(|path| path.name() == name);
        named.ok_or_else(|| InvalidPath(name.to_owned()))
    }
}

/// An unknown path name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{}' is no path for GPU memory ({}): use dmabuf, peermem, device-copy, staged or auto", .0.escape_debug(), Path::ENVIRONMENT)]
pub struct InvalidPath(pub String);

/// Why a path fails.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The GPU does not support it.
    #[error("GPU {gpu} has {name} (attribute {number}) = {value}")]
    Attribute {
        /// The GPU's ordinal.
        gpu: usize,
        /// The attribute's name in cuda.h.
        name: &'static str,
        /// The attribute's number.
        number: i32,
        /// The attribute's value.
        value: i32,
    },
    /// The memory was not allocated for it.
    #[error("the memory was not allocated for GPUDirect RDMA (gpuDirectRDMACapable)")]
    NotGpuDirectCapable,
    /// A kernel module is not loaded.
    #[error("the kernel has not loaded {module} (no /sys/module/{module})")]
    ModuleNotLoaded {
        /// The module.
        module: &'static str,
    },
    /// The RDMA library lacks the function.
    #[error("the RDMA library has no {call}")]
    MissingFunction {
        /// The function.
        call: &'static str,
    },
    /// The adapter's provider, or its kernel driver, does not support it.
    #[error("{call} of {device}: {error}")]
    Provider {
        /// The function.
        call: &'static str,
        /// The adapter.
        device: String,
        /// Its error.
        error: io::Error,
    },
    /// The adapter is a software device.
    #[error("{device} is a device in software: no bus connects it to the GPU")]
    Software {
        /// The device.
        device: String,
    },
    /// The adapter is not Doorbell's software device.
    #[error("{device} is not the userspace device, the only one that has the GPU copy")]
    NotSoftware {
        /// The device.
        device: String,
    },
    /// From the CUDA driver.
    #[error(transparent)]
    Cuda(#[from] doorbell_cuda::Error),
    /// From the RDMA device.
    #[error(transparent)]
    Verbs(#[from] MemoryError),
    /// Another path is forced.
    #[error("{forced} is forced")]
    NotForced {
        /// The forced path.
        forced: Path,
    },
}

/// A failed path with the reason.
#[derive(Debug)]
pub struct Refused {
    /// The path.
    pub path: Path,
    /// The reason.
    pub why: Refusal,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.why)
    }
}

/// No path works.
#[derive(Debug)]
pub struct NoPath {
    /// The RDMA device.
    pub device: String,
    /// The GPU's ordinal.
    pub gpu: usize,
    /// The paths tried, in order.
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
