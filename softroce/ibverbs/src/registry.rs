//! The devices of the process: those configured, by the program or by the environment, which stay,
//! and those [added](add), which go with their handle.
//!
//! A device is shared by the registry, the lists that have it (ibv_get_device_list(3)) and what is
//! open on it.

use core::ffi::{c_char, c_int};
use std::fmt;
use std::mem;
use std::net::IpAddr;
use std::sync::Arc;

use doorbell_softroce::host::JoinError;
use doorbell_softroce::links::udp::BindError;
use doorbell_softroce::{ConfigError, CopyMode, Device, DeviceConfig, OpenError};
use doorbell_verbs_sys::{_ibv_device_ops, IBV_NODE_CA, IBV_TRANSPORT_IB, ibv_device};
use parking_lot::Mutex;

use crate::errno;

#[repr(C)]
pub(crate) struct SoftDevice {
    base: ibv_device,
    /// Null: rdma-core drivers linked into programs read it to find whether a device is theirs.
    _driver: usize,
    config: DeviceConfig,
    guid: u64,
    /// Not added: it is a device for as long as the process lives.
    configured: bool,
    /// The device while any context is open on it; all contexts of the process share it. It is
    /// opened and closed under this lock, so that its address is free when it is opened again.
    open: Mutex<Option<Arc<Device>>>,
}

/// The devices were already listed, so their configuration is fixed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the soft devices are in use already: configure them before the first call that lists them")]
pub struct AlreadyInUse;

struct Registry {
    present: Vec<Arc<SoftDevice>>,
    /// Set by the first call that needs the configured devices.
    configured: Option<Result<(), ConfigError>>,
    /// How many devices were added.
    added: usize,
}

impl Registry {
    fn configure(&mut self, configs: Result<Vec<DeviceConfig>, ConfigError>) {
        self.configured = Some(configs.map(|configs| {
            // Before those that were added: the indices are known in sysfs.
            let device = |(index, config): (usize, _)| Arc::new(SoftDevice::new(&index.to_string(), config, None));
            let configured = configs.into_iter().enumerate().map(device);
            self.present.splice(0..0, configured);
        }));
    }
}

static DEVICES: Mutex<Registry> = Mutex::new(Registry {
    present: Vec::new(),
    configured: None,
    added: 0,
});

static LAST_OPEN_ERROR: Mutex<Option<String>> = Mutex::new(None);

/// Configures this process's devices, before they are listed; the default is the environment.
///
/// # Errors
/// When the devices have been listed or configured already.
pub fn configure(devices: Vec<DeviceConfig>) -> Result<(), AlreadyInUse> {
    let mut registry = DEVICES.lock();
    if registry.configured.is_some() {
        return Err(AlreadyInUse);
    }
    registry.configure(Ok(devices));
    Ok(())
}

/// Adds a device to those of the process, and opens it. Its name is that of the configuration and a
/// number, as in `soft-3`, which no other device of the process has.
///
/// # Errors
/// When it cannot be opened.
pub fn add(config: DeviceConfig) -> Result<AddedDevice, OpenError> {
    let number = {
        let added = &mut DEVICES.lock().added;
        *added += 1;
        *added
    };
    let name = format!("{}-{number}", config.name);
    let mut config = DeviceConfig { name, ..config };
    let device = Device::open(&config)?;
    // The GUID is derived from it.
    config.address = Some(device.info().address.ip());
    let soft = Arc::new(SoftDevice::new(
        &format!("-{number}"),
        config,
        Some(Arc::clone(&device)),
    ));
    DEVICES.lock().present.push(Arc::clone(&soft));
    Ok(AddedDevice {
        soft,
        device: Some(device),
    })
}

/// Whether a device was configured, and not added.
///
/// # Safety
/// It is in a list of ibv_get_device_list(3).
pub unsafe fn is_configured(device: *mut ibv_device) -> bool {
    // SAFETY: the same contract.
    unsafe { SoftDevice::from_ptr(device) }.configured
}

/// A device that was [added](add). It is listed, and open, for as long as this value lives, and
/// stays open until the last context and object of it is closed.
pub struct AddedDevice {
    soft: Arc<SoftDevice>,
    /// `None` once dropped.
    device: Option<Arc<Device>>,
}

impl AddedDevice {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.soft.config.name
    }

    /// Its address.
    pub fn address(&self) -> Option<IpAddr> {
        self.soft.config.address
    }
}

impl fmt::Debug for AddedDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AddedDevice").field(&self.soft.config).finish()
    }
}

impl Drop for AddedDevice {
    fn drop(&mut self) {
        let is_other = |device: &Arc<SoftDevice>| !Arc::ptr_eq(device, &self.soft);
        DEVICES.lock().present.retain(is_other);
        if let Some(device) = self.device.take() {
            self.soft.close(device);
        }
    }
}

/// Why the last attempt to list or open a device failed, in one line; `None` if none did.
pub fn last_open_error() -> Option<String> {
    LAST_OPEN_ERROR.lock().clone()
}

/// This open device's globally unique process group; `None` if it reaches all peers over UDP.
pub fn process_group(name: &str) -> Option<u64> {
    with_open_device(name, |device| device.shm_group()).flatten()
}

/// This open device's copy modes to other processes, by preference; empty if all goes over UDP.
pub fn copy_modes(name: &str) -> Vec<CopyMode> {
    with_open_device(name, |device| device.copy_modes()).unwrap_or_default()
}

fn with_open_device<R>(name: &str, query: impl FnOnce(&Device) -> R) -> Option<R> {
    let devices = devices().ok()?;
    let device = devices.iter().find(|device| device.config.name == name)?;
    device.open.lock().as_deref().map(query)
}

fn record_error(error: &dyn std::fmt::Display) {
    tracing::error!("{error}");
    *LAST_OPEN_ERROR.lock() = Some(error.to_string());
}

/// Those present now.
fn devices() -> Result<Vec<Arc<SoftDevice>>, ConfigError> {
    let mut registry = DEVICES.lock();
    if registry.configured.is_none() {
        registry.configure(DeviceConfig::from_env());
    }
    match &registry.configured {
        Some(Err(error)) => Err(error.clone()),
        _ => Ok(registry.present.clone()),
    }
}

/// Copies a C string; the last byte of the array stays zero.
fn set(to: &mut [c_char], text: &str) {
    let room = to.len() - 1;
    for (to, from) in to[..room].iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
}

impl SoftDevice {
    /// Configured, or added as `open`.
    fn new(index: &str, config: DeviceConfig, open: Option<Arc<Device>>) -> Self {
        let mut base = ibv_device {
            _ops: _ibv_device_ops {
                _dummy1: None,
                _dummy2: None,
            },
            node_type: IBV_NODE_CA,
            transport_type: IBV_TRANSPORT_IB,
            name: [0; 64],
            dev_name: [0; 64],
            dev_path: [0; 256],
            ibdev_path: [0; 256],
        };
        // The kernel's paths, which exist under `doorbell run`.
        set(&mut base.name, &config.name);
        set(&mut base.dev_name, &format!("uverbs{index}"));
        set(
            &mut base.dev_path,
            &format!("/sys/class/infiniband_verbs/uverbs{index}"),
        );
        set(&mut base.ibdev_path, &format!("/sys/class/infiniband/{}", config.name));
        Self {
            base,
            _driver: 0,
            guid: config.guid(),
            config,
            configured: open.is_none(),
            open: Mutex::new(open),
        }
    }

    /// # Safety
    /// `device` is in a list of [`get_device_list`], or of a configured device that was.
    pub(crate) unsafe fn from_ptr(device: *mut ibv_device) -> Arc<Self> {
        let device = device.cast::<Self>();
        // SAFETY: the pointer to `base`, the first member, came from `as_ptr`, thus from an Arc,
        // which the list, or for a configured device the registry, still has: it is live, and the
        // count that is added here is the result's.
        unsafe {
            Arc::increment_strong_count(device);
            Arc::from_raw(device)
        }
    }

    pub(crate) fn as_ptr(self: &Arc<Self>) -> *mut ibv_device {
        Arc::as_ptr(self).cast::<ibv_device>().cast_mut()
    }

    pub(crate) fn guid(&self) -> u64 {
        self.guid
    }

    /// Shared if this process has it open already. The reason of an error is kept for
    /// [`last_open_error`].
    pub(crate) fn open(&self) -> Result<Arc<Device>, c_int> {
        let mut open = self.open.lock();
        // After fork(2) contexts of the parent may be open: their device is not a child's.
        if let Some(device) = open.as_ref().filter(|device| device.host().is_ours()) {
            return Ok(Arc::clone(device));
        }
        match Device::open(&self.config) {
            Ok(device) => {
                *open = Some(Arc::clone(&device));
                Ok(device)
            }
            Err(error) => {
                record_error(&error);
                Err(errno_of(&error))
            }
        }
    }
}

impl SoftDevice {
    pub(crate) fn close(&self, device: Arc<Device>) {
        let mut open = self.open.lock();
        drop(device);
        // The one left is this field's, and no thread can clone it under the lock. Objects that
        // outlive their context keep the device open.
        if open.as_ref().is_some_and(|device| Arc::strong_count(device) == 1) {
            *open = None;
        }
    }
}

fn errno_of(error: &OpenError) -> c_int {
    match error {
        OpenError::Bind { error, .. } => match error {
            BindError::AddressInUse { .. } => libc::EADDRINUSE,
            BindError::AddressNotAvailable { .. } => libc::EADDRNOTAVAIL,
            BindError::PermissionDenied { .. } => libc::EACCES,
            BindError::NotUnicast { .. } => libc::EINVAL,
            BindError::NotShared(JoinError::Io { error, .. }) => errno::of(error),
            BindError::NotShared(_) => libc::EADDRINUSE,
            BindError::Io { error, .. } => errno::of(error),
        },
        OpenError::NoFreeAddress { .. } => libc::EADDRINUSE,
        OpenError::NoQpns { .. } => libc::ENOMEM,
        OpenError::Mtu { .. } | OpenError::Port { .. } => libc::EINVAL,
        OpenError::Capture { error, .. } | OpenError::Thread { error, .. } | OpenError::ShmRing { error, .. } => {
            errno::of(error)
        }
    }
}

pub(crate) unsafe extern "C" fn get_device_list(num_devices: *mut c_int) -> *mut *mut ibv_device {
    let devices = match devices() {
        Ok(devices) => devices,
        Err(error) => {
            record_error(&error);
            return errno::null(libc::EINVAL);
        }
    };
    // SAFETY: calloc(3) has no preconditions; `free_device_list` frees it.
    let list = unsafe { libc::calloc(devices.len() + 1, size_of::<*mut ibv_device>()) }.cast::<*mut ibv_device>();
    if list.is_null() {
        return errno::null(libc::ENOMEM);
    }
    if !num_devices.is_null() {
        // SAFETY: not null, so writable by contract (man page).
        unsafe { *num_devices = devices.len() as c_int };
    }
    for (index, device) in devices.into_iter().enumerate() {
        // SAFETY: `list` has space for a pointer per device, and the null pointer that calloc left.
        unsafe { list.add(index).write(device.as_ptr()) };
        // The list's, until it is freed.
        mem::forget(device);
    }
    list
}

/// Configured devices, and added ones whose handle lives, stay valid.
pub(crate) unsafe extern "C" fn free_device_list(list: *mut *mut ibv_device) {
    if list.is_null() {
        return;
    }
    let mut next = list;
    // SAFETY: the list came from `get_device_list`: from calloc(3), with a null pointer at its end,
    // and a count of each device, which is released here.
    unsafe {
        while !(*next).is_null() {
            drop(Arc::from_raw((*next).cast::<SoftDevice>()));
            next = next.add(1);
        }
        libc::free(list.cast());
    }
}

pub(crate) unsafe extern "C" fn get_device_name(device: *mut ibv_device) -> *const c_char {
    // SAFETY: `device` is of our list by contract.
    unsafe { (&raw const (*device).name).cast() }
}

pub(crate) unsafe extern "C" fn get_device_guid(device: *mut ibv_device) -> u64 {
    // SAFETY: `device` is of our list by contract.
    unsafe { SoftDevice::from_ptr(device) }.guid().to_be()
}
