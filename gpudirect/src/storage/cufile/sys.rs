//! cuFile's functions, from `libcufile.so.0`, opened at run time ("cuFile API Reference").
#![expect(unsafe_code, reason = "functions of a library")]

use core::ffi::{c_int, c_uint, c_void};
use core::mem::MaybeUninit;
use std::error::Error as _;
use std::path::PathBuf;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use super::Mode;

const LIBRARY: &str = "libcufile.so.0";
const LIBRARY_ENV: &str = "DOORBELL_CUFILE_LIBRARY";

/// `CUfileError_t`: a status of cuFile, and one of CUDA.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct Status {
    pub(super) code: c_int,
    cuda: c_int,
}

/// `CUfileHandle_t`.
pub(super) type RawHandle = *mut c_void;

/// `CUfileDescr_t` of a file descriptor.
#[repr(C)]
struct Descriptor {
    kind: c_uint,
    handle: FileHandle,
    operations: *const c_void,
}

#[repr(C)]
union FileHandle {
    fd: c_int,
    other: *mut c_void,
}

const _: () = {
    assert!(core::mem::offset_of!(Descriptor, handle) == 8 && core::mem::offset_of!(Descriptor, operations) == 16);
};

/// The start of `CUfileDrvProps_t`, and room for what newer versions add.
#[repr(C)]
struct Properties {
    nvfs_major: c_uint,
    nvfs_minor: c_uint,
    rest: [u64; 64],
}

/// `CU_FILE_HANDLE_TYPE_OPAQUE_FD`.
const OPAQUE_FD: c_uint = 1;
/// `CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE`.
const ALLOW_COMPAT_MODE: c_int = 1;
/// `CUFILE_PARAM_FORCE_COMPAT_MODE`.
const FORCE_COMPAT_MODE: c_int = 2;
/// `CUFILE_PARAM_USE_PCIP2PDMA`.
const USE_PCIP2PDMA: c_int = 7;

/// The functions.
pub(super) struct Table {
    driver_open: unsafe extern "C" fn() -> Status,
    driver_get_properties: unsafe extern "C" fn(*mut Properties) -> Status,
    handle_register: unsafe extern "C" fn(*mut RawHandle, *mut Descriptor) -> Status,
    handle_deregister: unsafe extern "C" fn(RawHandle),
    read: unsafe extern "C" fn(RawHandle, *mut c_void, usize, i64, i64) -> isize,
    write: unsafe extern "C" fn(RawHandle, *const c_void, usize, i64, i64) -> isize,
    /// From CUDA 12.8 on.
    set_parameter_bool: Option<unsafe extern "C" fn(c_int, bool) -> Status>,
    get_parameter_bool: Option<unsafe extern "C" fn(c_int, *mut bool) -> Status>,
}

impl Table {
    /// Loads the library, which then stays loaded.
    pub(super) fn load() -> Result<Self, String> {
        let named = doorbell_trust::variable(LIBRARY_ENV).filter(|name| !name.is_empty());
        let path = named.map_or_else(|| PathBuf::from(LIBRARY), PathBuf::from);
        // SAFETY: NVIDIA's library, or one that the variable's setter vouches for; its initialisers
        // have no requirements.
        let library = match unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL) } {
            Ok(library) => Box::leak(Box::new(library)),
            Err(error) => {
                let reason = error.source().map_or_else(|| error.to_string(), ToString::to_string);
                return Err(format!("cannot load {}: {reason}", path.display()));
            }
        };
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: the library's function of this name has the type of the field.
                *unsafe { library.get($name) }
                    .map_err(|_| format!("{} has no {}", path.display(), String::from_utf8_lossy($name)))?
            };
        }
        Ok(Self {
            driver_open: function!(b"cuFileDriverOpen"),
            driver_get_properties: function!(b"cuFileDriverGetProperties"),
            handle_register: function!(b"cuFileHandleRegister"),
            handle_deregister: function!(b"cuFileHandleDeregister"),
            read: function!(b"cuFileRead"),
            write: function!(b"cuFileWrite"),
            // SAFETY: as above.
            set_parameter_bool: unsafe { library.get(b"cuFileSetParameterBool") }
                .ok()
                .map(|symbol| *symbol),
            // SAFETY: as above.
            get_parameter_bool: unsafe { library.get(b"cuFileGetParameterBool") }
                .ok()
                .map(|symbol| *symbol),
        })
    }

    /// Opens cuFile's driver without its compatibility mode, in which it would copy through host
    /// memory as this crate does. It is in that mode all the same where its configuration forces
    /// it, and of versions without [`Table::set`] where nvidia-fs is not loaded.
    pub(super) fn open(&self) -> Result<Mode, String> {
        self.set(ALLOW_COMPAT_MODE, false)?;
        // Older kernels have no P2PDMA for GPUs; then nvidia-fs is needed.
        let _ = self.set(USE_PCIP2PDMA, true);
        self.open_driver()?;
        // Only now: opening reads the configuration.
        if self.get(FORCE_COMPAT_MODE) == Some(true) {
            let why = "CUFILE_FORCE_COMPAT_MODE or force_compat_mode of cufile.json is set";
            return Ok(Mode::Compatibility(why.to_owned()));
        }
        if self.get(ALLOW_COMPAT_MODE) != Some(false) && self.nvidia_fs_version()? == (0, 0) {
            let why = "the kernel module nvidia-fs is not loaded";
            return Ok(Mode::Compatibility(why.to_owned()));
        }
        Ok(Mode::Direct)
    }

    /// Opens the driver in the compatibility mode, after [`Table::open`] has failed.
    pub(super) fn open_in_compatibility_mode(&self) -> Result<(), String> {
        self.set(ALLOW_COMPAT_MODE, true)?;
        self.open_driver()
    }

    fn open_driver(&self) -> Result<(), String> {
        // SAFETY: no parameters.
        check("cuFileDriverOpen", unsafe { (self.driver_open)() })
    }

    /// Of versions before CUDA 12.8 the configuration decides.
    fn set(&self, parameter: c_int, value: bool) -> Result<(), String> {
        match self.set_parameter_bool {
            // SAFETY: it takes numbers, and keeps no pointer.
            Some(set) => check("cuFileSetParameterBool", unsafe { set(parameter, value) }),
            None => Ok(()),
        }
    }

    fn get(&self, parameter: c_int) -> Option<bool> {
        let mut value = false;
        // SAFETY: the pointer is to a local value.
        let status = unsafe { self.get_parameter_bool?(parameter, &raw mut value) };
        (status.code == 0).then_some(value)
    }

    fn nvidia_fs_version(&self) -> Result<(c_uint, c_uint), String> {
        let mut properties = MaybeUninit::<Properties>::zeroed();
        // SAFETY: the pointer is to more room than any version's structure needs.
        let status = unsafe { (self.driver_get_properties)(properties.as_mut_ptr()) };
        check("cuFileDriverGetProperties", status)?;
        // SAFETY: zeroed, and numbers.
        let properties = unsafe { properties.assume_init() };
        Ok((properties.nvfs_major, properties.nvfs_minor))
    }

    pub(super) fn register(&self, fd: c_int) -> Result<RawHandle, String> {
        let mut handle = core::ptr::null_mut();
        // All of it has a value: the descriptor is shorter than the pointer beside it.
        let mut file = FileHandle {
            other: core::ptr::null_mut(),
        };
        file.fd = fd;
        let mut descriptor = Descriptor {
            kind: OPAQUE_FD,
            handle: file,
            operations: core::ptr::null(),
        };
        // SAFETY: pointers to local values.
        let status = unsafe { (self.handle_register)(&raw mut handle, &raw mut descriptor) };
        check("cuFileHandleRegister", status)?;
        Ok(handle)
    }

    /// # Safety
    /// The handle is registered, and not used afterwards.
    pub(super) unsafe fn deregister(&self, handle: RawHandle) {
        // SAFETY: the caller's promise.
        unsafe { (self.handle_deregister)(handle) }
    }

    /// The bytes transferred, or a negative number: -1 with errno, else a status of cuFile.
    ///
    /// # Safety
    /// The handle is registered, and `memory` is `len` bytes of device memory of the thread's
    /// context, which stays.
    pub(super) unsafe fn transfer(
        &self,
        handle: RawHandle,
        write: bool,
        memory: u64,
        len: usize,
        offset: u64,
    ) -> isize {
        let memory = core::ptr::without_provenance_mut::<c_void>(memory as usize);
        let offset = i64::try_from(offset).unwrap_or(i64::MAX);
        // SAFETY: the caller's promise.
        unsafe {
            if write {
                (self.write)(handle, memory, len, offset, 0)
            } else {
                (self.read)(handle, memory, len, offset, 0)
            }
        }
    }
}

fn check(call: &str, status: Status) -> Result<(), String> {
    match status.code {
        0 => Ok(()),
        code => Err(format!("{call}: {}", describe(code, status.cuda))),
    }
}

/// A status in words, with its name in cufile.h.
pub(super) fn describe(code: c_int, cuda: c_int) -> String {
    let words = match code.abs() {
        5001 => "CU_FILE_DRIVER_NOT_INITIALIZED: the kernel module nvidia-fs is not loaded",
        5002 => "CU_FILE_DRIVER_INVALID_PROPS",
        5003 => "CU_FILE_DRIVER_UNSUPPORTED_LIMIT",
        5004 => "CU_FILE_DRIVER_VERSION_MISMATCH: nvidia-fs is of another version",
        5005 => "CU_FILE_DRIVER_VERSION_READ_ERROR",
        5007 => "CU_FILE_PLATFORM_NOT_SUPPORTED",
        5008 => "CU_FILE_IO_NOT_SUPPORTED: the file system is not supported",
        5009 => "CU_FILE_DEVICE_NOT_SUPPORTED: the GPU is not supported",
        5010 => "CU_FILE_NVFS_DRIVER_ERROR",
        5011 => return format!("CU_FILE_CUDA_DRIVER_ERROR: CUDA error {cuda}"),
        5012 => "CU_FILE_CUDA_POINTER_INVALID",
        5013 => "CU_FILE_CUDA_MEMORY_TYPE_INVALID",
        5014 => "CU_FILE_CUDA_POINTER_RANGE_ERROR",
        5015 => "CU_FILE_CUDA_CONTEXT_MISMATCH",
        5018 => "CU_FILE_INVALID_FILE_TYPE",
        5019 => "CU_FILE_INVALID_FILE_OPEN_FLAG",
        5020 => "CU_FILE_DIO_NOT_SET",
        5022 => "CU_FILE_INVALID_VALUE",
        5025 => "CU_FILE_PERMISSION_DENIED",
        5030 => "CU_FILE_INTERNAL_ERROR: cufile.log says more",
        5033 => "CU_FILE_NVFS_SETUP_ERROR: nvidia-fs is not loaded, or of another version",
        5034 => "CU_FILE_IO_DISABLED: the configuration disables cuFile for the file",
        5036 => "CU_FILE_GPU_MEMORY_PINNING_FAILED",
        _ => return format!("status {code} of cufile.h"),
    };
    words.to_owned()
}
