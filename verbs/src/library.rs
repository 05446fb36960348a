//! The source of devices: libibverbs, or another [`Api`] table (the userspace device's).

use std::ffi::CStr;
use std::io;

use doorbell_verbs_sys::{self as sys, Api};

use crate::context::Context;
use crate::error::DeviceError;

/// A source of RDMA devices: one table of verbs (ibv_get_device_list(3)).
#[doc(alias = "libibverbs")]
#[derive(Debug, Clone, Copy)]
pub struct Library {
    api: &'static Api,
}

/// A device that can be opened (ibv_get_device_name(3), ibv_get_device_guid(3)).
#[doc(alias = "ibv_device")]
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Device {
    /// Its name, as `rdma link` or `ibv_devices` shows it.
    #[doc(alias = "ibv_get_device_name")]
    pub name: String,
    /// Its globally unique identifier, in host byte order.
    #[doc(alias = "ibv_get_device_guid")]
    pub guid: u64,
}

impl Library {
    /// The system's libibverbs, loaded on the first call.
    ///
    /// # Errors
    /// When it is not installed or too old.
    pub fn system() -> Result<Self, DeviceError> {
        Ok(Self { api: Api::load()? })
    }

    /// The devices of another implementation of the verbs ABI.
    ///
    /// Every guarantee of this crate rests on the table's [`Promise`](doorbell_verbs_sys::Promise)
    /// that the functions behave as the man pages say.
    #[must_use]
    pub const fn new(api: &'static Api) -> Self {
        Self { api }
    }

    /// Its table of verbs.
    #[must_use]
    pub const fn api(&self) -> &'static Api {
        self.api
    }

    /// The devices present now (ibv_get_device_list(3)).
    ///
    /// # Errors
    /// When the list cannot be read.
    #[doc(alias("ibv_get_device_list", "ibv_free_device_list"))]
    pub fn devices(&self) -> Result<Vec<Device>, DeviceError> {
        let list = List::get(self.api)?;
        Ok(list
            .iter()
            .map(|device| Device {
                name: list.name(device),
                // SAFETY: `device` is of a live list.
                guid: u64::from_be(unsafe { (self.api.get_device_guid)(device) }),
            })
            .collect())
    }

    /// Opens the device called `name` (ibv_open_device(3)).
    ///
    /// # Errors
    /// When there is none (the error lists those there are), or it cannot be opened or queried.
    #[doc(alias = "ibv_open_device")]
    pub fn open(&self, name: &str) -> Result<Context, DeviceError> {
        let list = List::get(self.api)?;
        let Some(device) = list.iter().find(|&device| list.name(device) == name) else {
            return Err(DeviceError::NoDevice {
                name: name.to_owned(),
                available: list.iter().map(|device| list.name(device)).collect(),
            });
        };
        // SAFETY: `device` is of a live list; the context references it, so the list may be freed.
        let raw = unsafe { (self.api.open_device)(device) };
        if raw.is_null() {
            return Err(DeviceError::Open {
                name: name.to_owned(),
                error: io::Error::last_os_error(),
            });
        }
        Context::adopt(self.api, raw, name.to_owned())
    }
}

struct List {
    api: &'static Api,
    first: *mut *mut sys::ibv_device,
    len: usize,
}

impl List {
    fn get(api: &'static Api) -> Result<Self, DeviceError> {
        let mut len = 0;
        // SAFETY: `len` may be written.
        let first = unsafe { (api.get_device_list)(&mut len) };
        if first.is_null() {
            let error = io::Error::last_os_error();
            // ENOSYS: the kernel has no RDMA support at all, which is reported as an empty list.
            if error.kind() == io::ErrorKind::Unsupported || error.raw_os_error() == Some(0) {
                return Ok(Self { api, first, len: 0 });
            }
            return Err(DeviceError::List(error));
        }
        Ok(Self {
            api,
            first,
            len: usize::try_from(len).unwrap_or(0),
        })
    }

    fn iter(&self) -> impl Iterator<Item = *mut sys::ibv_device> + '_ {
        // SAFETY: the list has `len` entries, and lives as long as `self`.
        (0..self.len).map(|index| unsafe { *self.first.add(index) })
    }

    fn name(&self, device: *mut sys::ibv_device) -> String {
        // SAFETY: `device` is of this live list.
        let name = unsafe { (self.api.get_device_name)(device) };
        if name.is_null() {
            return String::new();
        }
        // SAFETY: a NUL-terminated string that lives as long as the list.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }
}

impl Drop for List {
    fn drop(&mut self) {
        if !self.first.is_null() {
            // SAFETY: allocated by get_device_list, freed once.
            unsafe { (self.api.free_device_list)(self.first) }
        }
    }
}
