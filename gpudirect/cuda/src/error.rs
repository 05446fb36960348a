//! Why something was not done: by the driver's answer, or because this crate refused it first.

use core::fmt;

use crate::sys::{self, Status, status};

/// What the driver answered to one call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The function of the driver API.
    pub call: &'static str,
    /// What it was called for: which device, how many bytes, which name.
    pub on: String,
    /// The `CUresult`.
    pub code: i32,
    /// Its name, such as `CUDA_ERROR_INVALID_VALUE`.
    pub name: String,
    /// The driver's own description of it.
    pub text: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}: {} ({})", self.call, self.on, self.name, self.text)
    }
}

/// Why something with a GPU was not done.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device, or pinned host memory, has not so much left.
    #[error("{0}: free memory of this GPU (see nvidia-smi for who has it) or ask for less")]
    OutOfMemory(Failure),
    /// One device cannot reach the memory of the other.
    #[error("{0}: these GPUs cannot reach each other's memory; copy through host memory instead")]
    NoPeerAccess(Failure),
    /// The device or the driver cannot do this.
    #[error("{0}: this GPU, or its driver, does not have it")]
    NotSupported(Failure),
    /// The context has failed for good: an earlier kernel or copy touched memory that it must not, or the device has broken. All later calls in
    /// this process answer the same.
    #[error(
        "{0}: work done earlier on this GPU has failed and left it unusable for this process; start the process anew (compute-sanitizer finds the work)"
    )]
    Lost(Failure),
    /// Any other answer of the driver.
    #[error("{failure}{advice}")]
    Driver {
        /// What it answered.
        failure: Failure,
        /// What to do about it, where that is known; begins with "; ".
        advice: &'static str,
    },
    /// PTX that the driver's compiler refused.
    #[error("{failure}: the driver cannot compile this PTX: {log}")]
    Compile {
        /// What it answered.
        failure: Failure,
        /// The first line of what its compiler said.
        log: String,
    },
    /// The driver is older than the function.
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
        /// The number asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// A range does not lie in its memory.
    #[error("bytes {start} to {end} do not lie in memory of {len} bytes")]
    OutOfBounds {
        /// The first byte asked for.
        start: usize,
        /// The byte after the last.
        end: usize,
        /// The length of the memory.
        len: usize,
    },
    /// The ends of a copy are not equally long.
    #[error("a copy of {from} bytes into {into}: both ends must be equally long")]
    Lengths {
        /// The length of the source.
        from: usize,
        /// The length of the target.
        into: usize,
    },
    /// The ends of a copy share bytes.
    #[error("a copy of {bytes} bytes to memory that overlaps what it is copied from")]
    Overlap {
        /// The length of each.
        bytes: usize,
    },
    /// The words of this API do not lie on any address.
    #[error("an offset of {offset} where a word of {word} bytes is meant: it must be a multiple of {word}")]
    Misaligned {
        /// The offset asked for.
        offset: usize,
        /// The word's size.
        word: usize,
    },
    /// Memory of no bytes.
    #[error("memory of no bytes was asked for")]
    Empty,
    /// What is asked for needs the only handle of its memory.
    #[error("the memory has other handles, or a graph uses it: its bytes can be borrowed only by the last handle")]
    Shared,
    /// Memory that is to be shared as one, and lies in several mappings.
    #[error(
        "memory of {len} bytes that lies in several mappings, of which the first has {first} of them: one can be shared (with PyTorch, leave expandable_segments off)"
    )]
    Scattered {
        /// Bytes of the memory.
        len: usize,
        /// How many of them are in the first mapping.
        first: usize,
    },
    /// Another process's memory, which was dropped here while work used it, and is not closed yet.
    #[error(
        "another process's memory is still used by work of a time that it was open here before: wait for that first"
    )]
    StillOpen,
    /// The time between events that do not know it.
    #[error("an event that knows no time: make both by Event::timed")]
    Untimed,
    /// An event of a capture, where a stream that is not in that capture was to wait for it.
    #[error(
        "an event that was recorded in the capture of a graph: only streams that are named to that capture can wait for it"
    )]
    Captured,
    /// Another process's event, where a stream of another device was to wait for it: the driver dies of that (seen with 580.159).
    #[error(
        "another process's event of GPU {event}, where a stream of GPU {stream} was to wait for it: have a stream of GPU {event} wait, record an event of this process behind it, and wait for that"
    )]
    Foreign {
        /// The event's device.
        event: usize,
        /// The stream's.
        stream: usize,
    },
    /// A stream that is being captured already.
    #[error("a stream that is being captured already: it can be in one capture at a time")]
    Capturing,
    /// The driver gave a file descriptor that is none.
    #[error("{call} gave the file descriptor {fd}, which is none")]
    NoDescriptor {
        /// The function of the driver API.
        call: &'static str,
        /// The number.
        fd: i32,
    },
    /// A name with a NUL in it.
    #[error("{0:?} has a NUL in it, which no name or text for the driver may have")]
    Nul(String),
    /// More arguments than a launch can have here.
    #[error("a launch with {0} arguments: at most {max} are passed", max = crate::module::MAX_ARGUMENTS)]
    Arguments(usize),
}

impl Error {
    /// The driver's answer, where it is one.
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
            code if sys::is_final(code) => Self::Lost(failure),
            code => Self::Driver {
                failure,
                advice: advice(code),
            },
        }
    }
}

/// What to do about an answer that has no variant of its own.
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
