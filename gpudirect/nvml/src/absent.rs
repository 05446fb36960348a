//! Why there is nothing to ask, in one line.

use crate::sys::{Status, status};

/// Why the library says nothing of this machine's GPUs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Absent {
    /// The dynamic loader found no usable library; its own words follow.
    #[error("no NVML: cannot load {library}: {reason}; it comes with NVIDIA's driver")]
    NoLibrary {
        /// The file that was looked for.
        library: String,
        /// What dlerror(3) said.
        reason: String,
    },
    /// The library is older than the functions that everything begins with.
    #[error("no NVML: the library here is too old, it has no {symbol}: one of driver version 470 or newer is needed")]
    NoSymbol {
        /// The function's name.
        symbol: &'static str,
    },
    /// The library did not start, or does not say how many GPUs there are.
    #[error("no NVML: {call} answers {code} ({text}){advice}", advice = advice(*code))]
    Refused {
        /// The function.
        call: &'static str,
        /// What it answered.
        code: i32,
        /// The library's own words for that.
        text: String,
    },
}

/// What to do about an answer, where that is known.
fn advice(code: Status) -> &'static str {
    match code {
        status::NO_PERMISSION => "; this process may not open the devices /dev/nvidia*",
        status::DRIVER_NOT_LOADED => "; load the kernel module nvidia, or give the container its devices",
        status::GPU_IS_LOST | status::RESET_REQUIRED => "; see dmesg for what the driver says of the GPU",
        status::LIB_RM_VERSION_MISMATCH => {
            "; the kernel's module is of another version than the library: reboot, or load that of the same version"
        }
        _ => "",
    }
}
