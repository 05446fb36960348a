//! The CUDA driver, loaded at run time: a program starts on a machine without CUDA, and
//! [`Driver::load`] says in one line what is missing.

use core::ffi::{CStr, c_char, c_int};
use core::fmt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::OnceLock;

use crate::capture::Captures;
use crate::error::{Error, Failure, advice};
use crate::sys::{self, Status, Table, status};

const LIBRARY: &str = "libcuda.so.1";
const LIBRARY_ENV: &str = "DOORBELL_CUDA_LIBRARY";
/// CUDA 11.4, the first with all functions that the table requires.
const MIN_VERSION: i32 = 11040;

/// Why CUDA is unavailable on this machine, in one line.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The dynamic loader found no usable `libcuda.so.1`; its message follows.
    #[error("no CUDA: cannot load {library}: {reason}; NVIDIA's driver is needed for GPUs")]
    NoLibrary {
        /// The library's path.
        library: String,
        /// The message of dlerror(3).
        reason: String,
    },
    /// The library is older than CUDA 11.4.
    #[error(
        "no CUDA: the driver here is too old, its libcuda.so.1 has no {symbol}: one for CUDA 11.4 (version 470) or newer is needed"
    )]
    NoSymbol {
        /// The function's name.
        symbol: &'static str,
    },
    /// The driver reports a version older than CUDA 11.4.
    #[error("no CUDA: the driver here is for CUDA {}.{}: one for CUDA 11.4 (version 470) or newer is needed", version / 1000, version % 1000 / 10)]
    TooOld {
        /// As `cuDriverGetVersion` gives it: 13000 is 13.0.
        version: i32,
    },
    /// The driver failed to initialize, or has no device.
    #[error("no CUDA: {failure}{advice}")]
    Init {
        /// The failed call.
        failure: Failure,
        /// Advice, if any; begins with "; ".
        advice: &'static str,
    },
    /// The driver initialized, and shows this process no device.
    #[error("no CUDA: the driver has no GPU for this process (see CUDA_VISIBLE_DEVICES, and the container's devices)")]
    NoDevice,
}

/// The loaded and initialized driver. `Copy`.
#[derive(Clone, Copy)]
pub struct Driver(&'static Loaded);

pub(crate) struct Loaded {
    table: Table,
    version: i32,
    devices: usize,
    captures: Captures,
}

impl Driver {
    /// Loads and initializes `libcuda.so.1` once; it does not work in children forked after that.
    ///
    /// `DOORBELL_CUDA_LIBRARY` names another library, such as the tests' stand-in; it is trusted,
    /// and ignored in programs with elevated privileges (`AT_SECURE`, getauxval(3)).
    ///
    /// # Errors
    /// If this machine, or this process, has no usable GPU. The first call's result is final.
    #[doc(alias = "cuInit")]
    pub fn load() -> Result<Self, LoadError> {
        static SYSTEM: OnceLock<Result<Driver, LoadError>> = OnceLock::new();
        SYSTEM
            .get_or_init(|| {
                let named = library_from_environment();
                // SAFETY: the name is that of NVIDIA's driver, or of a library that the variable's
                // setter vouches for, as documented.
                unsafe { Self::load_from(named.as_deref().unwrap_or(Path::new(LIBRARY))) }
            })
            .clone()
    }

    /// Loads the driver from another path, each time anew.
    ///
    /// # Safety
    /// The library must be NVIDIA's driver, or implement the "CUDA Driver API" as specified.
    pub unsafe fn load_from(path: &Path) -> Result<Self, LoadError> {
        // SAFETY: the driver's initialisers have no requirements; the caller vouches for another
        // library.
        let library = unsafe { sys::open(path) }.map_err(|reason| LoadError::NoLibrary {
            library: path.display().to_string(),
            reason,
        })?;
        // SAFETY: the caller's promise.
        let table = unsafe { sys::fill(library) }.map_err(|symbol| LoadError::NoSymbol { symbol })?;
        Self::start(table)
    }

    fn start(table: Table) -> Result<Self, LoadError> {
        let mut loaded = Loaded {
            table,
            version: 0,
            devices: 0,
            captures: Captures::default(),
        };
        // SAFETY: cuInit takes only a flag, which must be 0.
        let status = unsafe { (loaded.table.init)(0) };
        loaded.check_init("cuInit", status)?;

        // SAFETY: the pointer is to a local c_int.
        let status = unsafe { (loaded.table.driver_get_version)(&raw mut loaded.version) };
        loaded.check_init("cuDriverGetVersion", status)?;
        if loaded.version < MIN_VERSION {
            return Err(LoadError::TooOld {
                version: loaded.version,
            });
        }

        let mut count: c_int = 0;
        // SAFETY: as above.
        let status = unsafe { (loaded.table.device_get_count)(&raw mut count) };
        loaded.check_init("cuDeviceGetCount", status)?;
        loaded.devices = usize::try_from(count).unwrap_or(0);
        if loaded.devices == 0 {
            return Err(LoadError::NoDevice);
        }
        Ok(Self(Box::leak(Box::new(loaded))))
    }

    /// The driver's CUDA version, as `cuDriverGetVersion` gives it: 13000 is 13.0.
    #[must_use]
    #[doc(alias("cuDriverGetVersion", "cudaDriverGetVersion"))]
    pub fn version(self) -> i32 {
        self.0.version
    }

    /// The number of devices visible to this process: at least one.
    #[must_use]
    #[doc(alias("cuDeviceGetCount", "cudaGetDeviceCount"))]
    pub fn device_count(self) -> usize {
        self.0.devices
    }

    pub(crate) fn table(self) -> &'static Table {
        &self.0.table
    }

    pub(crate) fn captures(self) -> &'static Captures {
        &self.0.captures
    }

    #[inline]
    pub(crate) fn check(self, status: Status, call: &'static str, on: fmt::Arguments<'_>) -> Result<(), Error> {
        if status == status::SUCCESS {
            return Ok(());
        }
        Err(self.failure(status, call, on).into())
    }

    #[cold]
    pub(crate) fn failure(self, status: Status, call: &'static str, on: fmt::Arguments<'_>) -> Failure {
        self.0.failure(status, call, on)
    }

    #[cold]
    pub(crate) fn missing(self, function: &'static str) -> Error {
        Error::Missing {
            function,
            version: self.0.version,
        }
    }
}

/// The library that the environment names, unless the program has elevated privileges.
fn library_from_environment() -> Option<PathBuf> {
    doorbell_trust::variable(LIBRARY_ENV)
        .filter(|name| !name.is_empty())
        .map(PathBuf::from)
}

impl Loaded {
    fn check_init(&self, call: &'static str, status: Status) -> Result<(), LoadError> {
        if status == status::SUCCESS {
            return Ok(());
        }
        Err(LoadError::Init {
            failure: self.failure(status, call, format_args!("the driver")),
            advice: advice(status),
        })
    }

    fn failure(&self, code: Status, call: &'static str, on: fmt::Arguments<'_>) -> Failure {
        let describe = |function: unsafe extern "C" fn(Status, *mut *const c_char) -> Status| {
            let mut text: *const c_char = ptr::null();
            // SAFETY: the pointer is to a local pointer; it is left null, or set to a static
            // string, for a number that the driver does not know.
            let status = unsafe { function(code, &raw mut text) };
            if status != status::SUCCESS || text.is_null() {
                return None;
            }
            // SAFETY: the driver returns a string that it never changes or frees.
            Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        };
        Failure {
            call,
            on: on.to_string(),
            code,
            name: describe(self.table.get_error_name).unwrap_or_else(|| format!("CUDA error {code}")),
            text: describe(self.table.get_error_string).unwrap_or_else(|| "the driver does not describe it".to_owned()),
        }
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver")
            .field("version", &self.0.version)
            .field("devices", &self.0.devices)
            .finish()
    }
}

impl PartialEq for Driver {
    fn eq(&self, other: &Self) -> bool {
        ptr::eq(self.0, other.0)
    }
}

impl Eq for Driver {}
