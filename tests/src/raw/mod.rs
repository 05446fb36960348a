//! The verbs as a C program calls them, and the exchange of the stock ping-pongs.

mod base;
mod exchange;

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::net::IpAddr;

use anyhow::{Result, ensure};
use doorbell_softroce_ibverbs::{DeviceConfig, api, configure};
use doorbell_verbs_sys::*;

pub use base::{Base, Cq, Qp, Srq};

/// The attributes of a queue pair that the peer needs.
#[derive(Clone, Copy, Debug)]
pub struct QpAddress {
    /// Its queue pair number.
    pub qpn: u32,
    /// Its first PSN.
    pub psn: u32,
    /// Its GID.
    pub gid: [u8; 16],
}

/// An error when the call's errno value is not 0.
pub fn check_errno(result: c_int, call: &str) -> Result<()> {
    ensure!(result == 0, "{call}: {}", std::io::Error::from_raw_os_error(result));
    Ok(())
}

/// The pointer, or the error of errno when it is null.
pub fn non_null<T>(object: *mut T, call: &str) -> Result<*mut T> {
    ensure!(!object.is_null(), "{call}: {}", std::io::Error::last_os_error());
    Ok(object)
}

/// A C struct for which all zeros is a valid value.
///
/// # Safety
/// It consists of integers, raw pointers and unions of these.
pub unsafe trait Plain: Copy {}

// SAFETY: consists of integers, raw pointers and unions of these.
unsafe impl Plain for ibv_gid {}
// SAFETY: as above.
unsafe impl Plain for ibv_qp_attr {}
// SAFETY: as above.
unsafe impl Plain for ibv_qp_init_attr {}
// SAFETY: as above.
unsafe impl Plain for ibv_send_wr {}
// SAFETY: as above.
unsafe impl Plain for ibv_srq_init_attr {}
// SAFETY: as above.
unsafe impl Plain for ibv_sge {}

/// The all-zero value.
pub fn zeroed<T: Plain>() -> T {
    // SAFETY: valid by the trait's contract.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

/// The verbs for a device: a name that begins with `soft` makes a soft device (fails when some were
/// configured already), any other is the system's.
pub fn api_for(device: &str, address: Option<IpAddr>) -> Result<&'static Api> {
    if !device.starts_with("soft") {
        return Ok(Api::load()?);
    }
    configure(vec![DeviceConfig {
        address,
        ..DeviceConfig::new(device)
    }])?;
    Ok(api())
}
