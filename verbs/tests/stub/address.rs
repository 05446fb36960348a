//! Address handles of the stub: none may be destroyed while a send with it is incomplete.

use core::ffi::c_int;
use std::sync::atomic::Ordering;

use doorbell_verbs_sys::*;

use super::provider::{set_errno, stub_of};
use super::{Stub, Verb};

#[derive(Clone, Copy)]
pub(crate) enum Origin {
    Vector(ibv_ah_attr),
    /// A completion and the GRH of its datagram.
    Completion(ibv_wc, [u8; 40]),
}

impl Stub {
    pub(crate) fn handles(&self) -> Vec<Origin> {
        self.state().handles.clone()
    }
}

unsafe fn make(pd: *mut ibv_pd, origin: Origin) -> *mut ibv_ah {
    // SAFETY: a live domain.
    let (stub, context) = unsafe { (stub_of((*pd).context), (*pd).context) };
    if let Some(errno) = stub.failing(Verb::CreateAh) {
        set_errno(errno);
        return core::ptr::null_mut();
    }
    stub.count("ah", 1);
    stub.state().handles.push(origin);
    let handle = super::NEXT.fetch_add(1, Ordering::Relaxed);
    Box::into_raw(Box::new(ibv_ah { context, pd, handle }))
}

pub(super) unsafe extern "C" fn create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    // SAFETY: the caller's.
    unsafe { make(pd, Origin::Vector(*attr)) }
}

pub(super) unsafe extern "C" fn create_ah_from_wc(
    pd: *mut ibv_pd,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    _: u8,
) -> *mut ibv_ah {
    // SAFETY: the caller's; a header is 40 bytes.
    unsafe { make(pd, Origin::Completion(*wc, grh.cast::<[u8; 40]>().read_unaligned())) }
}

pub(super) unsafe extern "C" fn destroy_ah(ah: *mut ibv_ah) -> c_int {
    // SAFETY: made by `make`.
    let stub = unsafe { stub_of((*ah).context) };
    let pending = stub
        .state()
        .qps
        .values()
        .flat_map(|qp| qp.send.pending.iter())
        .filter(|request| request.to.is_some_and(|to| to.0 == ah as usize))
        .count();
    assert_eq!(pending, 0, "sends are in flight with an address handle that goes");
    stub.count("ah", -1);
    // SAFETY: as above.
    drop(unsafe { Box::from_raw(ah) });
    0
}
