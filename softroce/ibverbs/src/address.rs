//! Address handles: destinations of datagrams (ibv_create_ah(3)).

use core::ffi::c_int;
use std::net::IpAddr;

use doorbell_roce_proto::Gid;
use doorbell_roce_proto::qp::Path;
use doorbell_roce_proto::wire::{GRH_LEN, ip_header_addresses};
use doorbell_softroce::Pd;
use doorbell_verbs_sys::{IBV_WC_GRH, ibv_ah, ibv_ah_attr, ibv_context, ibv_grh, ibv_pd, ibv_wc};

use crate::context::{Context, next_handle};
use crate::domain::SoftPd;
use crate::gids::routable_index;
use crate::query::PORT;
use crate::{attributes, errno};

/// The hop limit of replies: the maximum.
const HOP_LIMIT: u8 = 255;

#[repr(C)]
struct SoftAh {
    base: ibv_ah,
    path: Path,
    _pd: Pd,
}

/// `None` for a null pointer, or one of another protection domain than `pd` (IBTA vol 1, 10.2.2).
///
/// # Safety
/// `ah` is null, or live and came from [`create_ah`].
pub(crate) unsafe fn path_of(ah: *mut ibv_ah, pd: *mut ibv_pd) -> Option<Path> {
    // SAFETY: by contract; `base` is the first member, and the pointer derives from the whole.
    let soft = unsafe { ah.cast::<SoftAh>().as_ref() };
    soft.filter(|soft| soft.base.pd == pd).map(|soft| soft.path)
}

pub(crate) unsafe extern "C" fn create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    // SAFETY: both are live by contract, and `pd` is ours.
    let (soft, attr) = unsafe { (&*pd.cast::<SoftPd>(), &*attr) };
    let path = match attributes::to_destination(attr, soft.pd.device().info()) {
        Ok(path) => path,
        Err(refused) => {
            tracing::debug!("ibv_create_ah: {refused}");
            return errno::null(libc::EINVAL);
        }
    };
    let ah = SoftAh {
        base: ibv_ah {
            // SAFETY: as above.
            context: unsafe { (*pd).context },
            pd,
            handle: next_handle(),
        },
        path,
        _pd: soft.pd.clone(),
    };
    Box::into_raw(Box::new(ah)).cast()
}

/// The address vector back to a datagram's sender; `None` if completion or GRH is not valid.
///
/// # Safety
/// `wc` is live, and `grh` points to the first 40 bytes of the receive that it completes.
unsafe fn reverse_path(local: IpAddr, wc: *const ibv_wc, grh: *const ibv_grh, port: u8) -> Option<ibv_ah_attr> {
    // SAFETY: live by contract.
    if unsafe { (*wc).wc_flags } & IBV_WC_GRH == 0 || port != PORT {
        return None;
    }
    // SAFETY: the completion's flag says that the 40 bytes are there; read without alignment.
    let header = unsafe { grh.cast::<[u8; GRH_LEN]>().read_unaligned() };
    let (source, _) = ip_header_addresses(&header)?;
    // SAFETY: integers only.
    let mut attr: ibv_ah_attr = unsafe { core::mem::zeroed() };
    attr.is_global = 1;
    attr.port_num = port;
    attr.grh.dgid.raw = Gid::from(source).0;
    // Its own also where the destination was a multicast group.
    attr.grh.sgid_index = routable_index(local);
    attr.grh.hop_limit = HOP_LIMIT;
    Some(attr)
}

pub(crate) unsafe extern "C" fn create_ah_from_wc(
    pd: *mut ibv_pd,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    port: u8,
) -> *mut ibv_ah {
    // SAFETY: live by contract, and ours.
    let local = unsafe { &*pd.cast::<SoftPd>() }.pd.device().info().address.ip();
    // SAFETY: the same contract.
    let Some(mut attr) = (unsafe { reverse_path(local, wc, grh, port) }) else {
        return errno::null(libc::EINVAL);
    };
    // SAFETY: `pd` is live by contract, and `attr` is here.
    unsafe { create_ah(pd, &mut attr) }
}

/// ibv_init_ah_from_wc(3): not in the table, as the safe API creates address handles directly.
///
/// # Safety
/// As in the man page: `context` is open, `wc` a receive completion of the device, `grh` the first
/// 40 bytes received, and `attr` is writable.
pub unsafe extern "C" fn init_ah_from_wc(
    context: *mut ibv_context,
    port: u8,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    attr: *mut ibv_ah_attr,
) -> c_int {
    // SAFETY: open by contract.
    let local = unsafe { Context::from_ptr(context) }.device.info().address.ip();
    // SAFETY: the same contract.
    match unsafe { reverse_path(local, wc, grh, port) } {
        Some(found) => {
            // SAFETY: writable by contract.
            unsafe { attr.write(found) };
            0
        }
        None => errno::minus_one(libc::EINVAL),
    }
}

/// Requests already posted with it are not affected.
pub(crate) unsafe extern "C" fn destroy_ah(ah: *mut ibv_ah) -> c_int {
    // SAFETY: it came from a Box in `create_ah`, and the caller gives up ownership.
    drop(unsafe { Box::from_raw(ah.cast::<SoftAh>()) });
    0
}
