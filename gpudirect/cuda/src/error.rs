//! Errors: the driver's, and those of this crate's own checks.

use core::fmt;

use crate::sys::{self, Status, status};

/// A failed driver call.
#[derive(Debug, Clone, PartialEq, Eq)]
#[doc(alias = "CUresult")]
pub struct Failure {
    /// The function of the driver API.
    pub call: &'static str,
    /// Its object: which device, how many bytes, which name.
    pub on: String,
    /// The `CUresult`.
    pub code: i32,
    /// The name of the code, such as `CUDA_ERROR_INVALID_VALUE`.
    pub name: String,
    /// The driver's description of the code.
    pub text: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}: {} ({})", self.call, self.on, self.name, self.text)
    }
}

/// A failed CUDA operation.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Device memory or pinned host memory is exhausted.
    #[error("{0}: free memory of this GPU (nvidia-smi lists its users) or request less")]
    OutOfMemory(Failure),
    /// There is no peer access between the devices.
    #[error("{0}: these GPUs cannot reach each other's memory; copy through host memory instead")]
    NoPeerAccess(Failure),
    /// The device or the driver does not support it.
    #[error("{0}: not supported by this GPU or its driver")]
    NotSupported(Failure),
    /// A sticky error: the context is unusable, because an earlier kernel or copy made an invalid
    /// access or the device failed. All later calls in this process return it.
    #[error(
        "{0}: work done earlier on this GPU has failed and left it unusable for this process; restart the process (compute-sanitizer finds the cause)"
    )]
    Lost(Failure),
    /// Any other driver error.
    #[error("{failure}{advice}")]
    Driver {
        /// The failed call.
        failure: Failure,
        /// Advice, if any; begins with "; ".
        advice: &'static str,
    },
    /// The driver's compiler rejected the PTX.
    #[error("{failure}: the driver cannot compile this PTX: {log}")]
    Compile {
        /// The failed call.
        failure: Failure,
        /// The first line of the compiler's log.
        log: String,
    },
    /// The driver is too old for the function.
    #[error("the driver here (CUDA {}.{}) has no {function}: a newer one is needed", version / 1000, version % 1000 / 10)]
    Missing {
        /// The function of the driver API.
        function: &'static str,
        /// The driver's CUDA version, as `cuDriverGetVersion` gives it.
        version: i32,
    },
    /// There is no such device.
    #[error("there is no GPU {ordinal}: this process sees {count} (see CUDA_VISIBLE_DEVICES)")]
    NoSuchDevice {
        /// The requested ordinal.
        ordinal: usize,
        /// The number of devices.
        count: usize,
    },
    /// A range exceeds its memory.
    #[error("bytes {start} to {end} do not lie in memory of {len} bytes")]
    OutOfBounds {
        /// The first requested byte.
        start: usize,
        /// The byte after the last.
        end: usize,
        /// The length of the memory.
        len: usize,
    },
    /// The source and target of a copy have different lengths.
    #[error("a copy of {from} bytes into {into}: the lengths must be equal")]
    Lengths {
        /// The length of the source.
        from: usize,
        /// The length of the target.
        into: usize,
    },
    /// The source and target of a copy overlap.
    #[error("a copy of {bytes} bytes to memory that overlaps what it is copied from")]
    Overlap {
        /// Their length.
        bytes: usize,
    },
    /// A word's offset is not aligned.
    #[error("offset {offset} of a word of {word} bytes: it must be a multiple of {word}")]
    Misaligned {
        /// The requested offset.
        offset: usize,
        /// The word's size.
        word: usize,
    },
    /// An allocation of zero bytes.
    #[error("an allocation of 0 bytes")]
    Empty,
    /// The operation requires the only handle of the memory.
    #[error("the memory has other handles, or a graph uses it: its bytes can be borrowed only by the last handle")]
    Shared,
    /// Memory to be shared as one allocation spans several mappings.
    #[error(
        "memory of {len} bytes in several mappings, the first of {first} bytes: only memory in one mapping can be shared (with PyTorch, leave expandable_segments off)"
    )]
    MultipleMappings {
        /// Bytes of the memory.
        len: usize,
        /// How many of them are in the first mapping.
        first: usize,
    },
    /// Another process's memory that was dropped here while work used it, and is not closed yet.
    #[error("another process's memory is still used by work from an earlier opening: wait for that work first")]
    StillOpen,
    /// The elapsed time of events created without timing.
    #[error("an event without timing: create both with Event::timed")]
    Untimed,
    /// A wait for an event recorded in a capture, by a stream outside that capture.
    #[error("an event recorded in a capture: only streams of that capture can wait for it")]
    Captured,
    /// A stream's wait for another process's event of another device: driver 580.159 crashes.
    #[error(
        "a stream of GPU {stream} cannot wait for another process's event of GPU {event}: let a stream of GPU {event} wait, record an event of this process behind it, and wait for that"
    )]
    ForeignEvent {
        /// The event's device.
        event: usize,
        /// The stream's.
        stream: usize,
    },
    /// A context of the crate `cudarc` that is not the one of this crate's driver and device.
    #[cfg(feature = "cudarc")]
    #[error(
        "this context of cudarc is not the primary one of GPU {ordinal} in this driver: make it by CudaContext::new, and let both crates load one libcuda.so"
    )]
    OtherContext {
        /// The device.
        ordinal: usize,
    },
    /// The stream is already being captured.
    #[error("the stream is already being captured: it can be in one capture at a time")]
    Capturing,
    /// The driver returned an invalid file descriptor.
    #[error("{call} returned the invalid file descriptor {fd}")]
    NoDescriptor {
        /// The function of the driver API.
        call: &'static str,
        /// The descriptor.
        fd: i32,
    },
    /// A name with an embedded NUL.
    #[error("{0:?} contains a NUL, which names and texts for the driver may not")]
    Nul(String),
    /// Too many kernel arguments.
    #[error("a launch with {0} arguments: the maximum is {max}", max = crate::module::MAX_ARGUMENTS)]
    Arguments(usize),
}

impl Error {
    /// The failed driver call, if it is one.
    #[must_use]
    pub fn failure(&self) -> Option<&Failure> {
        match self {
            Self::OutOfMemory(failure)
            | Self::NoPeerAccess(failure)
            | Self::NotSupported(failure)
            | Self::Lost(failure)
            | Self::Driver { failure, .. }
            | Self::Compile { failure, .. } => Some(failure),
            _ => None,
        }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        match failure.code {
            status::OUT_OF_MEMORY => Self::OutOfMemory(failure),
            status::PEER_ACCESS_UNSUPPORTED | status::PEER_ACCESS_NOT_ENABLED | status::TOO_MANY_PEERS => {
                Self::NoPeerAccess(failure)
            }
            status::NOT_SUPPORTED => Self::NotSupported(failure),
            code if sys::is_sticky(code) => Self::Lost(failure),
            code => Self::Driver {
                failure,
                advice: advice(code),
            },
        }
    }
}

/// Advice for a code without a variant of its own.
pub(crate) fn advice(code: Status) -> &'static str {
    match code {
        status::STUB_LIBRARY => {
            "; this is the toolkit's stub, for linking only: take its folder out of LD_LIBRARY_PATH"
        }
        status::NO_DEVICE => {
            "; no NVIDIA GPU is visible to this process (see CUDA_VISIBLE_DEVICES, and the container's devices)"
        }
        status::SYSTEM_NOT_READY => "; nvidia-fabricmanager is to be started first",
        status::SYSTEM_DRIVER_MISMATCH => {
            "; the kernel's module is of another version than the library: load that of the same version, or reboot"
        }
        status::COMPAT_NOT_SUPPORTED_ON_DEVICE => {
            "; the compatibility library of the toolkit does not go with this GPU: use the driver's own libcuda.so.1"
        }
        status::INVALID_IMAGE | status::NO_BINARY_FOR_GPU => "; it was made for another kind of GPU",
        status::INVALID_PTX | status::UNSUPPORTED_PTX_VERSION => {
            "; the PTX is of a newer version than this driver knows"
        }
        status::JIT_COMPILER_NOT_FOUND => "; install the driver's libnvidia-ptxjitcompiler",
        status::OPERATING_SYSTEM => {
            "; the kernel refused it: see the limit of open files, and of locked memory, and dmesg"
        }
        status::NOT_PERMITTED => {
            "; the driver forbids it here (a container without the rights, or a capture that does not allow it)"
        }
        status::LAUNCH_OUT_OF_RESOURCES => "; fewer threads for each block, or less shared memory, are needed",
        status::STREAM_CAPTURE_UNSUPPORTED..=status::STREAM_CAPTURE_WRONG_THREAD => {
            "; a capture of a graph is going on that does not allow it"
        }
        _ => "",
    }
}
