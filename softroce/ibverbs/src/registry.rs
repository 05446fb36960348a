//! The device list: fixed by the first call that needs it, for the life of the process.

use core::ffi::{c_char, c_int};
use std::ptr;
use std::sync::{Arc, OnceLock};

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
    /// The device while any context is open on it; all contexts of the process share it. It is
    /// opened and closed under this lock, so that its address is free when it is opened again.
    open: Mutex<Option<Arc<Device>>>,
}

/// The devices were already listed, so their configuration is fixed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the soft devices are in use already: configure them before the first call that lists them")]
pub struct AlreadyInUse;

/// Never moved or freed once set: C holds pointers into it.
static DEVICES: OnceLock<Result<Box<[SoftDevice]>, ConfigError>> = OnceLock::new();

static LAST_OPEN_ERROR: Mutex<Option<String>> = Mutex::new(None);

/// Configures this process's devices, before they are listed; the default is the environment.
///
/// # Errors
/// When the devices have been listed or configured already.
pub fn configure(devices: Vec<DeviceConfig>) -> Result<(), AlreadyInUse> {
    let mut given = Some(devices);
    let set = || Ok(soft_devices(given.take().unwrap_or_default()));
    // If the closure ran, this call was the first.
    let _ = DEVICES.get_or_init(set);
    given.map_or(Ok(()), |_| Err(AlreadyInUse))
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
    let device = devices().ok()?.iter().find(|device| device.config.name == name)?;
    device.open.lock().as_deref().map(query)
}

fn record_error(error: &dyn std::fmt::Display) {
    tracing::error!("{error}");
    *LAST_OPEN_ERROR.lock() = Some(error.to_string());
}

fn devices() -> Result<&'static [SoftDevice], &'static ConfigError> {
    DEVICES
        .get_or_init(|| DeviceConfig::from_env().map(soft_devices))
        .as_deref()
}

fn soft_devices(configs: Vec<DeviceConfig>) -> Box<[SoftDevice]> {
    let device = |(index, config)| SoftDevice::new(index, config);
    configs.into_iter().enumerate().map(device).collect()
}

/// Copies a C string; the last byte of the array stays zero.
fn set(to: &mut [c_char], text: &str) {
    let room = to.len() - 1;
    for (to, from) in to[..room].iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
}

impl SoftDevice {
    fn new(index: usize, config: DeviceConfig) -> Self {
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
            open: Mutex::new(None),
        }
    }

    /// # Safety
    /// `device` came from [`get_device_list`].
    pub(crate) unsafe fn from_ptr(device: *mut ibv_device) -> &'static Self {
        // SAFETY: the list holds pointers to `base`, the first member of SoftDevice, each derived
        // from a reference to the whole, which is never freed.
        unsafe { &*device.cast::<Self>() }
    }

    pub(crate) fn as_ptr(&'static self) -> *mut ibv_device {
        ptr::from_ref(self).cast::<ibv_device>().cast_mut()
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
        OpenError::Bind { source, .. } => match source {
            BindError::AddressInUse { .. } => libc::EADDRINUSE,
            BindError::AddressNotAvailable { .. } => libc::EADDRNOTAVAIL,
            BindError::PermissionDenied { .. } => libc::EACCES,
            BindError::NotUnicast { .. } => libc::EINVAL,
            BindError::NotShared(JoinError::Io { source, .. }) => errno::of(source),
            BindError::NotShared(_) => libc::EADDRINUSE,
            BindError::Io { source, .. } => errno::of(source),
        },
        OpenError::NoFreeAddress { .. } => libc::EADDRINUSE,
        OpenError::NoQpns { .. } => libc::ENOMEM,
        OpenError::Mtu { .. } | OpenError::Port { .. } => libc::EINVAL,
        OpenError::Capture { source, .. } | OpenError::Thread { source, .. } | OpenError::ShmRing { source, .. } => {
            errno::of(source)
        }
    }
}

pub(crate) unsafe extern "C" fn get_device_list(num_devices: *mut c_int) -> *mut *mut ibv_device {
    let devices = match devices() {
        Ok(devices) => devices,
        Err(error) => {
            record_error(error);
            return errno::null(libc::EINVAL);
        }
    };
    // SAFETY: calloc(3) has no preconditions; it is freed by `free_device_list`.
    let list = unsafe { libc::calloc(devices.len() + 1, size_of::<*mut ibv_device>()) }.cast::<*mut ibv_device>();
    if list.is_null() {
        return errno::null(libc::ENOMEM);
    }
    for (index, device) in devices.iter().enumerate() {
        // SAFETY: `list` has space for a pointer per device, and the null pointer that calloc left.
        unsafe { list.add(index).write(device.as_ptr()) };
    }
    if !num_devices.is_null() {
        // SAFETY: not null, so writable by contract (man page).
        unsafe { *num_devices = devices.len() as c_int };
    }
    list
}

/// The devices in it stay valid.
pub(crate) unsafe extern "C" fn free_device_list(list: *mut *mut ibv_device) {
    // SAFETY: the list came from `get_device_list`, thus from calloc(3), or is null.
    unsafe { libc::free(list.cast()) };
}

pub(crate) unsafe extern "C" fn get_device_name(device: *mut ibv_device) -> *const c_char {
    // SAFETY: `device` is of our list by contract.
    let device = unsafe { SoftDevice::from_ptr(device) };
    device.base.name.as_ptr()
}

pub(crate) unsafe extern "C" fn get_device_guid(device: *mut ibv_device) -> u64 {
    // SAFETY: `device` is of our list by contract.
    unsafe { SoftDevice::from_ptr(device) }.guid().to_be()
}
