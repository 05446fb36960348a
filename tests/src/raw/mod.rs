//! The verbs as a C program calls them, and the exchange of the stock ping-pongs.

mod rendezvous;

use std::ffi::{CStr, c_int};
use std::mem::MaybeUninit;
use std::net::IpAddr;

use anyhow::{Result, bail, ensure};
use doorbell_softroce_ibverbs::{DeviceConfig, api, configure};
use doorbell_verbs_sys::*;

pub use rendezvous::Rendezvous;

/// The first PSN of every queue pair, chosen to wrap soon.
pub const PSN: u32 = 0xff_fff0;

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

/// The verbs for a device: a name that begins with `soft` makes a soft device at `address` (fails
/// when some were configured already), any other is the system's.
pub fn api_for(device: &str, address: IpAddr) -> Result<&'static Api> {
    if !device.starts_with("soft") {
        return Ok(Api::load()?);
    }
    configure(vec![DeviceConfig {
        address: Some(address),
        ..DeviceConfig::new(device)
    }])?;
    Ok(api())
}

/// Opens a device by its name.
///
/// # Safety
/// `api` is a libibverbs.
pub unsafe fn open_device(api: &Api, name: &str) -> Result<*mut ibv_context> {
    let mut count = 0;
    // SAFETY: the list has `count` entries; it is never freed, so the devices stay valid.
    unsafe {
        let list = non_null((api.get_device_list)(&mut count), "ibv_get_device_list")?;
        for index in 0..count as usize {
            let device = *list.add(index);
            if CStr::from_ptr((api.get_device_name)(device)).to_str() == Ok(name) {
                return non_null((api.open_device)(device), "ibv_open_device");
            }
        }
    }
    bail!("no device {name}")
}

/// The GID of an address, and its index; fails when none matches.
///
/// # Safety
/// `context` is live and of `api`.
pub unsafe fn find_gid(api: &Api, context: *mut ibv_context, address: IpAddr) -> Result<(u8, ibv_gid)> {
    let wanted = match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    };
    for index in 0..16 {
        let mut gid: ibv_gid = zeroed();
        // SAFETY: by contract; 16 bytes whichever member was written.
        unsafe {
            if (api.query_gid)(context, 1, index, &mut gid) == 0 && gid.raw == wanted {
                return Ok((index as u8, gid));
            }
        }
    }
    bail!("no GID for {address}")
}

/// Brings a queue pair from INIT to RTS, and returns the peer's address vector.
///
/// # Safety
/// The queue pair is live and of `api`.
pub unsafe fn connect(api: &Api, qp: *mut ibv_qp, sgid_index: u8, peer: &QpAddress) -> Result<ibv_ah_attr> {
    let mut attr: ibv_qp_attr = zeroed();
    attr.path_mtu = IBV_MTU_1024;
    attr.dest_qp_num = peer.qpn;
    attr.rq_psn = peer.psn;
    attr.sq_psn = PSN;
    attr.max_dest_rd_atomic = 4;
    attr.max_rd_atomic = 4;
    attr.min_rnr_timer = 12;
    attr.timeout = 17;
    attr.retry_cnt = 7;
    attr.rnr_retry = 7;
    attr.ah_attr.is_global = 1;
    attr.ah_attr.port_num = 1;
    attr.ah_attr.grh.dgid.raw = peer.gid;
    attr.ah_attr.grh.sgid_index = sgid_index;
    attr.ah_attr.grh.hop_limit = 64;
    let path = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
    let responder = IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    let requester = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
    // SAFETY: live, by contract.
    let (rtr, rts) = match unsafe { (*qp).qp_type } {
        IBV_QPT_RC => (path | responder, requester),
        IBV_QPT_UC => (path, 0),
        _ => (0, 0),
    };
    for (state, mask) in [(IBV_QPS_RTR, rtr), (IBV_QPS_RTS, IBV_QP_SQ_PSN | rts)] {
        attr.qp_state = state;
        // SAFETY: as above; the attributes are read in the call.
        let result = unsafe { (api.modify_qp)(qp, &mut attr, (IBV_QP_STATE | mask) as c_int) };
        check_errno(result, "ibv_modify_qp")?;
    }
    Ok(attr.ah_attr)
}
