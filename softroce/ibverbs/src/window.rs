//! Memory windows.

use core::ffi::c_int;

use doorbell_roce_proto::memory::Bind;
use doorbell_roce_proto::qp::RemoteAccess;
use doorbell_roce_proto::work::{Operation, Payload, PostError, SendRequest};
use doorbell_roce_proto::{LKey, RKey};
use doorbell_softroce::{Mw, WindowKind};
use doorbell_verbs_sys::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE,
    IBV_ACCESS_ZERO_BASED, IBV_MW_TYPE_1, IBV_MW_TYPE_2, IBV_SEND_FENCE, IBV_SEND_SIGNALED, ibv_mw, ibv_mw_bind,
    ibv_mw_bind_info, ibv_mw_type, ibv_pd, ibv_qp, inline,
};

use crate::context::next_handle;
use crate::domain::SoftPd;
use crate::errno;
use crate::post::errno_of;
use crate::protection::errno_of_limit;
use crate::queue_pair::SoftQp;

#[repr(C)]
struct SoftMw {
    base: ibv_mw,
    mw: Mw,
}

pub(crate) unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, kind: ibv_mw_type) -> *mut ibv_mw {
    let window_kind = match kind {
        IBV_MW_TYPE_1 => WindowKind::One,
        IBV_MW_TYPE_2 => WindowKind::Two,
        _ => return errno::null(libc::EINVAL),
    };
    // SAFETY: live and ours by contract; the handle is written at creation and destruction only.
    let (soft, context) = unsafe { (&(*pd.cast::<SoftPd>()).pd, (*pd).context) };
    match soft.window(window_kind) {
        Ok(mw) => Box::into_raw(Box::new(SoftMw {
            base: ibv_mw {
                context,
                pd,
                rkey: mw.initial_rkey().0,
                handle: next_handle(),
                type_: kind,
            },
            mw,
        }))
        .cast(),
        Err(error) => errno::null(errno_of_limit(error)),
    }
}

/// Unbinds it too.
pub(crate) unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    // SAFETY: it came from a Box in `alloc_mw`, and the caller gives up ownership.
    drop(unsafe { Box::from_raw(mw.cast::<SoftMw>()) });
    0
}

/// For type 1: the window has the new key on return, valid when the request has been executed.
pub(crate) unsafe extern "C" fn bind_mw(qp: *mut ibv_qp, mw: *mut ibv_mw, mw_bind: *mut ibv_mw_bind) -> c_int {
    // SAFETY: all are live by contract, and no other thread binds the window during the call.
    let (soft, window, request) = unsafe { (SoftQp::handle(qp), *mw, &*mw_bind) };
    if window.type_ != IBV_MW_TYPE_1 {
        return libc::EINVAL;
    }
    let mr = request.bind_info.mr;
    // SAFETY: live by contract, or null.
    if !mr.is_null() && unsafe { (*mr).pd } != window.pd {
        return libc::EPERM;
    }
    let rkey = inline::inc_rkey(window.rkey);
    // SAFETY: live by contract.
    let bind = match unsafe { bind_of(mw, rkey, &request.bind_info) } {
        Ok(bind) => bind,
        Err(refused) => return errno_of(refused),
    };
    let send = SendRequest {
        wr_id: request.wr_id,
        operation: Operation::Bind(bind),
        payload: Payload::Gather(&[]),
        signaled: request.send_flags & IBV_SEND_SIGNALED != 0,
        fence: request.send_flags & IBV_SEND_FENCE != 0,
        solicited: false,
    };
    match soft.post_send(|posting| posting.send(&send)) {
        Ok(()) => {
            // SAFETY: the caller's window, whose key this call updates (man page).
            unsafe { (*mw).rkey = rkey };
            0
        }
        Err(refused) => errno_of(refused),
    }
}

/// The bind of a request. Region and range are checked when it is executed. The right to write
/// locally has no meaning for a window, but programs set it, and adapters take it.
///
/// # Errors
/// When the window is of another type than the request's, the key is not one of the window's, or an
/// access flag is not valid for a window.
///
/// # Safety
/// `mw` is null, or live and ours; so is the region.
unsafe fn bind_of(mw: *mut ibv_mw, rkey: u32, info: &ibv_mw_bind_info) -> Result<Bind, PostError> {
    const KNOWN: u32 = IBV_ACCESS_LOCAL_WRITE
        | IBV_ACCESS_REMOTE_WRITE
        | IBV_ACCESS_REMOTE_READ
        | IBV_ACCESS_REMOTE_ATOMIC
        | IBV_ACCESS_ZERO_BASED;
    // SAFETY: null, or live; a reference to the handle only, as the caller may write the key.
    let window = (!mw.is_null()).then(|| unsafe { &(*mw.cast::<SoftMw>()).mw });
    // SAFETY: null, or live by contract.
    let region = unsafe { info.mr.as_ref() };
    let flags = info.mw_access_flags;
    let to_nothing = region.is_none() && (info.addr != 0 || info.length != 0);
    if !window.is_some_and(|window| window.owns(RKey(rkey))) || flags & !KNOWN != 0 || to_nothing {
        return Err(PostError::Invalid);
    }
    Ok(Bind {
        rkey: RKey(rkey),
        region: LKey(region.map_or(0, |region| region.lkey)),
        addr: info.addr,
        len: info.length,
        access: RemoteAccess {
            read: flags & IBV_ACCESS_REMOTE_READ != 0,
            write: flags & IBV_ACCESS_REMOTE_WRITE != 0,
            atomic: flags & IBV_ACCESS_REMOTE_ATOMIC != 0,
            ..RemoteAccess::default()
        },
        zero_based: flags & IBV_ACCESS_ZERO_BASED != 0,
    })
}

/// The bind of a posted IBV_WR_BIND_MW, for type 2 windows; type 1 windows use [`bind_mw`].
///
/// # Errors
/// As [`bind_of`].
///
/// # Safety
/// As for [`bind_of`].
pub(crate) unsafe fn posted_bind(mw: *mut ibv_mw, rkey: u32, info: &ibv_mw_bind_info) -> Result<Bind, PostError> {
    // SAFETY: by contract.
    if mw.is_null() || unsafe { (*mw).type_ } != IBV_MW_TYPE_2 {
        return Err(PostError::Invalid);
    }
    // SAFETY: the same contract.
    unsafe { bind_of(mw, rkey, info) }
}
