//! The open device.

use std::cell::RefCell;
use std::ffi::{CStr, c_int};
use std::mem::MaybeUninit;
use std::ptr;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use doorbell_verbs_sys::*;

use super::{Bench, Errno, NotOffered, Object, zeroed};

/// An open device. Each case opens its own, so that asynchronous events are its own too.
#[derive(Clone)]
pub(in crate::conformance) struct Device(Rc<Inner>);

struct Inner {
    object: Object<ibv_context>,
    api: &'static Api,
    port: ibv_port_attr,
    gid: ibv_gid,
    gid_index: u8,
    time_limit: Duration,
}

impl Bench {
    pub(in crate::conformance) fn open(&self) -> Result<Device> {
        let api = self.api;
        let (context, complaints) = (open(api, &self.device)?, Rc::clone(&self.complaints));
        let object = Object {
            ptr: std::cell::Cell::new(context),
            destroy: api.close_device,
            what: "device",
            complaints,
        };
        // SAFETY: just opened; the descriptor is the context's own.
        unsafe {
            let fd = (*context).async_fd;
            libc::fcntl(fd, libc::F_SETFL, libc::fcntl(fd, libc::F_GETFL) | libc::O_NONBLOCK);
        }
        let mut port: ibv_port_attr = zeroed();
        // SAFETY: just opened by this table; `port` may be written.
        let result = unsafe { inline::query_port(api, context, 1, &mut port) };
        ensure!(result == 0, "ibv_query_port: {}", Errno(result));
        let (gid_index, gid) = choose_gid(api, context, port.gid_tbl_len)?;
        Ok(Device(Rc::new(Inner {
            object,
            api,
            port,
            gid,
            gid_index,
            time_limit: self.time_limit,
        })))
    }
}

fn open(api: &Api, name: &str) -> Result<*mut ibv_context> {
    let mut count = 0;
    // SAFETY: the list has `count` devices that live until it is freed; an open device stays valid
    // after (man page).
    unsafe {
        let list = (api.get_device_list)(&mut count);
        ensure!(!list.is_null(), "ibv_get_device_list: {}", Errno::last());
        let all = std::slice::from_raw_parts(list, count as usize);
        let named =
            |device: &&*mut ibv_device| CStr::from_ptr((api.get_device_name)(**device)).to_bytes() == name.as_bytes();
        let context = all.iter().find(named).map(|&device| (api.open_device)(device));
        let error = Errno::last();
        (api.free_device_list)(list);
        let context = context.with_context(|| format!("there is no device {name}"))?;
        ensure!(!context.is_null(), "ibv_open_device: {error}");
        Ok(context)
    }
}

/// The GID to use: the first of an IPv4 address, which the port's namespace can reach from itself
/// at once, or else the first.
fn choose_gid(api: &Api, context: *mut ibv_context, len: c_int) -> Result<(u8, ibv_gid)> {
    let mut first = None;
    for index in 0..len.min(256) {
        let mut gid: ibv_gid = zeroed();
        // SAFETY: the context is live, and `gid` may be written.
        let result = unsafe { (api.query_gid)(context, 1, index, &mut gid) };
        // SAFETY: a GID is 16 bytes, whichever member was written.
        let raw = unsafe { gid.raw };
        if result != 0 || raw == [0; 16] {
            continue;
        }
        if raw[..12] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff] {
            return Ok((index as u8, gid));
        }
        first = first.or(Some((index as u8, gid)));
    }
    first.context("the port has no GID")
}

impl Device {
    pub(super) fn complaints(&self) -> Rc<RefCell<Vec<String>>> {
        Rc::clone(&self.0.object.complaints)
    }

    pub(in crate::conformance) fn api(&self) -> &'static Api {
        self.0.api
    }

    pub(in crate::conformance) fn time_limit(&self) -> Duration {
        self.0.time_limit
    }

    pub(in crate::conformance) fn raw(&self) -> *mut ibv_context {
        self.0.object.get()
    }

    pub(in crate::conformance) fn gid(&self) -> ibv_gid {
        self.0.gid
    }

    pub(in crate::conformance) fn gid_index(&self) -> u8 {
        self.0.gid_index
    }

    pub(in crate::conformance) fn port(&self) -> &ibv_port_attr {
        &self.0.port
    }

    pub(in crate::conformance) fn completion_vectors(&self) -> c_int {
        // SAFETY: live.
        unsafe { (*self.raw()).num_comp_vectors }
    }

    pub(in crate::conformance) fn close(&self) -> Errno {
        self.0.object.destroy()
    }

    pub(in crate::conformance) fn query(&self) -> Result<ibv_device_attr> {
        let mut attr = MaybeUninit::uninit();
        // SAFETY: live; filled when it says 0.
        unsafe {
            let result = (self.api().query_device)(self.raw(), attr.as_mut_ptr());
            ensure!(result == 0, "ibv_query_device: {}", Errno(result));
            Ok(attr.assume_init())
        }
    }

    pub(in crate::conformance) fn needs(&self, wanted: u32, what: &str) -> Result<()> {
        let reported = self.query()?.device_cap_flags;
        if reported & wanted == wanted {
            return Ok(());
        }
        Err(NotOffered(what.to_owned()).into())
    }

    /// A GID of the port; the errno value when there is none at the index.
    pub(in crate::conformance) fn gid_at(&self, port: u8, index: c_int) -> Result<[u8; 16], Errno> {
        let mut gid: ibv_gid = zeroed();
        // SAFETY: live; `gid` may be written. A GID is 16 bytes, whichever member was written.
        unsafe {
            match (self.api().query_gid)(self.raw(), port, index, &mut gid) {
                0 => Ok(gid.raw),
                _ => Err(Errno::last()),
            }
        }
    }

    pub(in crate::conformance) fn query_port(&self, port: u8) -> Result<ibv_port_attr, Errno> {
        let mut attr: ibv_port_attr = zeroed();
        // SAFETY: live and of this table; `attr` may be written.
        match unsafe { inline::query_port(self.api(), self.raw(), port, &mut attr) } {
            0 => Ok(attr),
            error => Err(Errno(error)),
        }
    }

    /// A P_Key of the port, big-endian; an error when there is none at the index.
    pub(in crate::conformance) fn pkey_at(&self, port: u8, index: c_int) -> Result<u16, Errno> {
        let mut pkey = 0;
        // SAFETY: live; `pkey` may be written.
        match unsafe { (self.api().query_pkey)(self.raw(), port, index, ptr::from_mut(&mut pkey)) } {
            0 => Ok(pkey),
            _ => Err(Errno::last()),
        }
    }
}

/// A GID in network byte order.
pub(in crate::conformance) fn gid_bytes(gid: &ibv_gid) -> [u8; 16] {
    // SAFETY: a GID is 16 bytes, whichever member was written.
    unsafe { gid.raw }
}
