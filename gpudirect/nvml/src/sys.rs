//! Declarations of NVML: types, constants, and the [`Table`] of functions, as in NVIDIA's "NVML API
//! Reference Guide". A status is a plain number: a newer library may return one that no enum has.

use core::ffi::{c_char, c_int, c_uint, c_ulong, c_void};
use std::error::Error as _;
use std::path::Path;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// The status of a call: `nvmlReturn_t`.
pub(crate) type Status = c_int;
/// `nvmlDevice_t`.
pub(crate) type RawDevice = *mut c_void;

pub(crate) mod status {
    use super::Status;

    pub(crate) const SUCCESS: Status = 0;
    pub(crate) const INVALID_ARGUMENT: Status = 2;
    pub(crate) const NOT_SUPPORTED: Status = 3;
    pub(crate) const NO_PERMISSION: Status = 4;
    pub(crate) const DRIVER_NOT_LOADED: Status = 9;
    pub(crate) const GPU_IS_LOST: Status = 15;
    pub(crate) const RESET_REQUIRED: Status = 16;
    pub(crate) const LIB_RM_VERSION_MISMATCH: Status = 18;
}

/// `nvmlPciInfo_t`, as `nvmlDeviceGetPciInfo_v3` and `nvmlDeviceGetNvLinkRemotePciInfo_v2` fill it.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct PciInfo {
    legacy_id: [u8; 16],
    pub(crate) domain: c_uint,
    pub(crate) bus: c_uint,
    pub(crate) device: c_uint,
    device_id: c_uint,
    subsystem_id: c_uint,
    id: [u8; 32],
}

const _: () = assert!(size_of::<PciInfo>() == 68);

/// `nvmlFieldValue_t`, with the eight bytes of its union.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct FieldValue {
    pub(crate) field: c_uint,
    pub(crate) scope: c_uint,
    timestamp: i64,
    latency_us: i64,
    kind: c_int,
    status: Status,
    value: u64,
}

const _: () = assert!(size_of::<FieldValue>() == 40);

impl FieldValue {
    pub(crate) fn of(field: c_uint, scope: c_uint) -> Self {
        // A value that the library leaves untouched must not count as a success.
        Self {
            field,
            scope,
            status: status::NOT_SUPPORTED,
            ..Self::default()
        }
    }

    /// The value, if it is a non-negative integer.
    pub(crate) fn number(&self) -> Option<u64> {
        if self.status != status::SUCCESS {
            return None;
        }
        match self.kind {
            // unsigned int; unsigned long and unsigned long long; the signed ones; unsigned short.
            1 => Some(u64::from(self.value as u32)),
            2 | 3 => Some(self.value),
            4 => u64::try_from(self.value.cast_signed()).ok(),
            5 => u64::try_from((self.value as u32).cast_signed()).ok(),
            6 => Some(u64::from(self.value as u16)),
            _ => None,
        }
    }
}

/// `NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON`: the common speed of a GPU's active links.
pub(crate) const FIELD_COMMON_SPEED: c_uint = 90;
/// `NVML_FI_DEV_NVLINK_GET_SPEED`, of the link given as the scope.
pub(crate) const FIELD_LINK_SPEED: c_uint = 164;

/// `nvmlIntNvLinkDeviceType_t`.
pub(crate) mod remote_device {
    use core::ffi::c_int;

    pub(crate) const GPU: c_int = 0;
    pub(crate) const NPU: c_int = 1;
    pub(crate) const SWITCH: c_int = 2;
}

/// `nvmlGpuP2PCapsIndex_t`.
pub(crate) mod capability {
    use core::ffi::c_int;

    pub(crate) const READ: c_int = 0;
    pub(crate) const WRITE: c_int = 1;
    pub(crate) const NVLINK: c_int = 2;
}

/// `NVML_AFFINITY_SCOPE_NODE`.
pub(crate) const SCOPE_NODE: c_uint = 0;

/// A function by name; `call` is `None` where the library does not have it.
#[derive(Clone, Copy)]
pub(crate) struct Function<F> {
    pub(crate) name: &'static str,
    pub(crate) call: Option<F>,
}

/// Generates the table, and `fill`, which resolves each function.
macro_rules! table {
    (
        required { $( fn $req:ident = $rsym:literal ( $($rarg:ident : $rty:ty),* ); )* }
        optional { $( fn $opt:ident = $osym:literal ( $($oarg:ident : $oty:ty),* ); )* }
    ) => {
        /// The library's functions, named without `nvml`.
        pub(crate) struct Table {
            pub(crate) error_string: unsafe extern "C" fn(Status) -> *const c_char,
            $( pub(crate) $req: unsafe extern "C" fn($($rarg: $rty),*) -> Status, )*
            $( pub(crate) $opt: Function<unsafe extern "C" fn($($oarg: $oty),*) -> Status>, )*
        }

        /// Resolves every function; returns the first missing required symbol as the error.
        ///
        /// # Safety
        /// The library must be NVML, or implement its functions as specified.
        pub(crate) unsafe fn fill(library: &Library) -> Result<Table, &'static str> {
            Ok(Table {
                error_string: {
                    // SAFETY: by the caller's promise the symbol is NVML's function of this name,
                    // whose prototype in nvml.h is the field's type.
                    let symbol = unsafe { library.get::<unsafe extern "C" fn(Status) -> *const c_char>(b"nvmlErrorString") };
                    *symbol.map_err(|_| "nvmlErrorString")?
                },
                $( $req: {
                    // SAFETY: as above.
                    let symbol = unsafe { library.get::<unsafe extern "C" fn($($rty),*) -> Status>($rsym.as_bytes()) };
                    *symbol.map_err(|_| $rsym)?
                }, )*
                $( $opt: {
                    // SAFETY: as above.
                    let symbol = unsafe { library.get::<unsafe extern "C" fn($($oty),*) -> Status>($osym.as_bytes()) };
                    Function { name: $osym, call: symbol.ok().map(|function| *function) }
                }, )*
            })
        }
    };
}

table! {
    required {
        fn init = "nvmlInit_v2"();
        fn shutdown = "nvmlShutdown"();
        fn device_get_count = "nvmlDeviceGetCount_v2"(count: *mut c_uint);
        fn device_get_handle_by_index = "nvmlDeviceGetHandleByIndex_v2"(index: c_uint, device: *mut RawDevice);
        fn device_get_pci_info = "nvmlDeviceGetPciInfo_v3"(device: RawDevice, pci: *mut PciInfo);
    }
    optional {
        fn system_get_driver_version = "nvmlSystemGetDriverVersion"(version: *mut c_char, length: c_uint);
        fn device_get_uuid = "nvmlDeviceGetUUID"(device: RawDevice, uuid: *mut c_char, length: c_uint);
        fn device_get_name = "nvmlDeviceGetName"(device: RawDevice, name: *mut c_char, length: c_uint);
        fn device_get_nvlink_state = "nvmlDeviceGetNvLinkState"(device: RawDevice, link: c_uint, active: *mut c_uint);
        fn device_get_nvlink_version = "nvmlDeviceGetNvLinkVersion"(device: RawDevice, link: c_uint, version: *mut c_uint);
        fn device_get_nvlink_remote_device_type = "nvmlDeviceGetNvLinkRemoteDeviceType"(device: RawDevice, link: c_uint, kind: *mut c_int);
        fn device_get_nvlink_remote_pci_info = "nvmlDeviceGetNvLinkRemotePciInfo_v2"(device: RawDevice, link: c_uint, pci: *mut PciInfo);
        fn device_get_field_values = "nvmlDeviceGetFieldValues"(device: RawDevice, count: c_int, values: *mut FieldValue);
        fn device_get_topology_common_ancestor = "nvmlDeviceGetTopologyCommonAncestor"(one: RawDevice, two: RawDevice, level: *mut c_int);
        fn device_get_p2p_status = "nvmlDeviceGetP2PStatus"(one: RawDevice, two: RawDevice, capability: c_int, status: *mut c_int);
        fn device_get_cpu_affinity = "nvmlDeviceGetCpuAffinity"(device: RawDevice, words: c_uint, set: *mut c_ulong);
        fn device_get_memory_affinity = "nvmlDeviceGetMemoryAffinity"(device: RawDevice, words: c_uint, set: *mut c_ulong, scope: c_uint);
    }
}

/// Opens the library for the life of the process; on failure, the message of dlerror(3).
///
/// # Safety
/// The library's initialisers must have no requirements that the caller does not meet.
pub(crate) unsafe fn open(path: &Path) -> Result<&'static Library, String> {
    // SAFETY: the caller's promise.
    match unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) } {
        Ok(library) => Ok(Box::leak(Box::new(library))),
        Err(error) => {
            let message = error.source().map_or_else(|| error.to_string(), ToString::to_string);
            let prefix = format!("{}: ", path.display());
            Err(message.strip_prefix(&prefix).unwrap_or(&message).to_owned())
        }
    }
}
