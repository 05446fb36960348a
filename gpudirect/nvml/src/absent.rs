//! Why NVML is unavailable, in one line.

use crate::sys::{Status, status};

/// Why the library cannot report this machine's GPUs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The dynamic loader found no usable library; its message follows.
    #[error("no NVML: cannot load {library}: {reason}; it comes with NVIDIA's driver")]
    NoLibrary {
        /// The library's path.
        library: String,
        /// The message of dlerror(3).
        reason: String,
    },
    /// The library is too old for a required function.
    #[error("no NVML: the library here is too old, it has no {symbol}: one of driver version 470 or newer is needed")]
    NoSymbol {
        /// The function's name.
        symbol: &'static str,
    },
    /// The library failed to initialize, or to count the GPUs.
    #[error("no NVML: {call} answers {code} ({text}){advice}", advice = advice(*code))]
    Refused {
        /// The function.
        call: &'static str,
        /// The code it returned.
        code: i32,
        /// The library's description of the code.
        text: String,
    },
}

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
