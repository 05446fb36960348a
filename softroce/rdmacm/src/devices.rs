//! The configured soft devices of the process, opened when the first identifier needs one and never
//! closed, as rdma_get_devices(3) says (those that are added and go are none of them); and the
//! selection of a device by address.

use core::ffi::c_int;
use std::net::{IpAddr, Ipv4Addr};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use doorbell_roce_proto::cm::CmEvent;
use doorbell_softroce::cm::CmOwner;
use doorbell_softroce::{Device, EventQueue, Token};
use doorbell_softroce_ibverbs::{api, device_of, is_configured};
use doorbell_verbs_sys::{ibv_context, ibv_pd};
use parking_lot::Mutex;

use crate::address::{is_any, is_local, route_to};
use crate::dispatch::{self, Directory};
use crate::errno::{self, Errno};

/// How long an exiting process waits for its own locks.
const LOCK_TIMEOUT: Duration = Duration::from_millis(100);

pub(crate) const PORT: u8 = 1;

pub(crate) struct OpenDevice {
    pub(crate) context: *mut ibv_context,
    pub(crate) device: Arc<Device>,
    /// The default protection domain (rdma_create_qp(3)); null until needed.
    pd: Mutex<*mut ibv_pd>,
    pub(crate) events: Arc<EventQueue<(Token, CmEvent)>>,
    pub(crate) directory: Mutex<Directory>,
}

// SAFETY: contexts and protection domains may be used by any thread (ibv_open_device(3)); the
// pointers themselves are constant, or under the lock.
unsafe impl Send for OpenDevice {}
// SAFETY: as above.
unsafe impl Sync for OpenDevice {}

impl OpenDevice {
    pub(crate) fn ip(&self) -> IpAddr {
        self.device.info().address.ip()
    }

    /// The receiver of all connection manager events; the identifier is found by id.
    pub(crate) fn owner(&self) -> CmOwner {
        CmOwner {
            sink: self.events.clone(),
            token: 0,
        }
    }

    /// # Errors
    /// When it cannot be created.
    pub(crate) fn default_pd(&self) -> Result<*mut ibv_pd, Errno> {
        let mut pd = self.pd.lock();
        if pd.is_null() {
            // SAFETY: the context is open.
            *pd = unsafe { (api().alloc_pd)(self.context) };
        }
        if pd.is_null() {
            return Err(errno::last());
        }
        Ok(*pd)
    }
}

static OPENED: Mutex<&'static [OpenDevice]> = Mutex::new(&[]);

/// The process that opened the devices: a child of fork(2) has none of its connections.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// All devices that could be opened; by a child of fork(2) again.
///
/// # Errors
/// `ENODEV` when there is none; the next call tries again.
pub(crate) fn all() -> Result<&'static [OpenDevice], Errno> {
    let mut opened = OPENED.lock();
    if opened.is_empty() || opened.iter().any(|device| !device.device.host().is_ours()) {
        let found: &'static [OpenDevice] = Box::leak(open_all().into_boxed_slice());
        for device in found {
            dispatch::start_thread(device).map_err(|error| errno::of(&error))?;
        }
        *opened = found;
        OWNER.store(std::process::id(), Ordering::Relaxed);
        // SAFETY: the function is never unloaded, as a library with it is not. If registering
        // fails, peers are not notified, as when the process is killed.
        unsafe { libc::atexit(leave) };
    }
    if opened.is_empty() {
        return Err(libc::ENODEV);
    }
    Ok(*opened)
}

/// Ends the connections of an exiting process, as the kernel would: their peers are notified.
extern "C" fn leave() {
    if OWNER.load(Ordering::Relaxed) != std::process::id() {
        return;
    }
    // A thread stopped inside must not block the exit.
    let Some(opened) = OPENED.try_lock_for(LOCK_TIMEOUT) else {
        return;
    };
    for device in *opened {
        dispatch::destroy_all(device, LOCK_TIMEOUT);
    }
}

fn open_all() -> Vec<OpenDevice> {
    let mut count = 0;
    // SAFETY: `count` is writable.
    let list = unsafe { (api().get_device_list)(&raw mut count) };
    if list.is_null() {
        return Vec::new();
    }
    let open = |index| {
        // SAFETY: the list has `count` devices.
        let device = unsafe { *list.add(index) };
        // SAFETY: in the list.
        if !unsafe { is_configured(device) } {
            return None;
        }
        let events = Arc::new(EventQueue::new().ok()?);
        // SAFETY: in the list.
        let context = unsafe { (api().open_device)(device) };
        (!context.is_null()).then(|| OpenDevice {
            context,
            // SAFETY: just opened, and never closed.
            device: unsafe { device_of(context) },
            pd: Mutex::new(ptr::null_mut()),
            events,
            directory: Mutex::default(),
        })
    };
    let opened = (0..usize::try_from(count).unwrap_or(0)).filter_map(open).collect();
    // SAFETY: it came from there, once.
    unsafe { (api().free_device_list)(list) };
    opened
}

/// The device at a source address; `None` for a wildcard: the unspecified addresses, and those of
/// loopback without a device, as for Linux (`cma_any_addr`).
///
/// # Errors
/// `EADDRNOTAVAIL` for an address not of this host, `ENODEV` for one without a soft device.
pub(crate) fn with_address(address: IpAddr) -> Result<Option<&'static OpenDevice>, Errno> {
    // Opened for wildcards too: a program may announce its port before it listens there.
    let opened = all();
    if address.is_unspecified() {
        return Ok(None);
    }
    match opened.map(|opened| opened.iter().find(|opened| opened.ip() == address)) {
        Ok(Some(found)) => Ok(Some(found)),
        _ if address.is_loopback() => Ok(None),
        Ok(None) if is_local(address) => Err(libc::ENODEV),
        Ok(None) => Err(libc::EADDRNOTAVAIL),
        Err(value) => Err(value),
    }
}

/// The devices on which `local`, a wildcard, listens: those of its family, or all if it includes
/// the other one (ipv6(7), IPV6_V6ONLY); for loopback those that [`device_for_peer`] selects from.
///
/// # Errors
/// Those of [`all`].
pub(crate) fn for_wildcard(local: IpAddr, afonly: bool) -> Result<Vec<&'static OpenDevice>, Errno> {
    let opened = all()?;
    let of_family = |opened: &&OpenDevice| opened.ip().is_ipv4() == local.is_ipv4();
    let every = !afonly || local.is_loopback() && !opened.iter().any(|opened| of_family(&opened));
    Ok(opened.iter().filter(|opened| every || of_family(opened)).collect())
}

/// The device that routes to `peer`: the peer's own; or the one whose address the routing table
/// selects as source. A wildcard means this host: any device, preferably of its family. A loopback
/// address is another process's device if one of this process is on loopback, and else a wildcard.
///
/// # Errors
/// Those of the routing table, or `ENODEV` when the route's interface has no soft device.
pub(crate) fn device_for_peer(peer: IpAddr) -> Result<&'static OpenDevice, Errno> {
    let opened = all()?;
    let at = |ip| opened.iter().find(|opened| opened.ip() == ip);
    if let Some(own) = at(peer) {
        return Ok(own);
    }
    if is_any(peer) {
        let other_family = |ip: IpAddr| ip.is_ipv4() != peer.is_ipv4();
        let preference = |ip: IpAddr| (other_family(ip), ip != Ipv4Addr::LOCALHOST, !ip.is_loopback());
        let best = opened.iter().min_by_key(|opened| preference(opened.ip()));
        return best.ok_or(libc::ENODEV);
    }
    at(route_to(peer)?).ok_or(libc::ENODEV)
}

pub(crate) fn of_context(context: *mut ibv_context) -> Result<&'static OpenDevice, Errno> {
    all()?
        .iter()
        .find(|opened| opened.context == context)
        .ok_or(libc::EINVAL)
}

/// rdma_get_devices(3).
///
/// # Safety
/// `count` is null or writable.
pub unsafe extern "C" fn rdma_get_devices(count: *mut c_int) -> *mut *mut ibv_context {
    let opened = match all() {
        Ok(opened) => opened,
        Err(value) => return errno::null(value),
    };
    // SAFETY: calloc(3) has no preconditions; freed by `rdma_free_devices`.
    let list = unsafe { libc::calloc(opened.len() + 1, size_of::<*mut ibv_context>()) }.cast::<*mut ibv_context>();
    if list.is_null() {
        return errno::null(libc::ENOMEM);
    }
    for (index, device) in opened.iter().enumerate() {
        // SAFETY: there is space for a pointer per device, and the null pointer that calloc left.
        unsafe { list.add(index).write(device.context) };
    }
    if !count.is_null() {
        // SAFETY: not null, so writable by contract.
        unsafe { *count = opened.len() as c_int };
    }
    list
}

/// rdma_get_devices(3): the devices stay open.
///
/// # Safety
/// `list` came from [`rdma_get_devices`], or is null, and is not used again.
pub unsafe extern "C" fn rdma_free_devices(list: *mut *mut ibv_context) {
    // SAFETY: from calloc(3) by contract, or null.
    unsafe { libc::free(list.cast()) };
}
