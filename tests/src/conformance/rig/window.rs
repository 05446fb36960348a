//! Memory windows.

use std::ffi::c_int;

use anyhow::{Result, ensure};
use doorbell_verbs_sys::*;

use super::{Errno, Mr, NotOffered, Object, Pd, Qp, zeroed};

pub(in crate::conformance) struct Mw {
    object: Object<ibv_mw>,
    _pd: Pd,
}

#[derive(Clone, Copy)]
pub(in crate::conformance) struct Binding<'a> {
    pub(in crate::conformance) mr: &'a Mr,
    pub(in crate::conformance) offset: usize,
    pub(in crate::conformance) len: usize,
    pub(in crate::conformance) rights: u32,
}

impl Binding<'_> {
    pub(super) fn info(&self) -> ibv_mw_bind_info {
        ibv_mw_bind_info {
            mr: self.mr.raw(),
            addr: self.mr.at(self.offset),
            length: self.len as u64,
            mw_access_flags: self.rights,
        }
    }
}

unsafe extern "C" fn dealloc(mw: *mut ibv_mw) -> c_int {
    // SAFETY: by the caller's contract.
    unsafe { inline::dealloc_mw(mw) }
}

impl Pd {
    /// A window of a type; not offered when the device lacks the type.
    pub(in crate::conformance) fn window(&self, kind: ibv_mw_type) -> Result<Mw> {
        let wanted = if kind == IBV_MW_TYPE_1 {
            IBV_DEVICE_MEM_WINDOW
        } else {
            IBV_DEVICE_MEM_WINDOW_TYPE_2B
        };
        self.device().needs(wanted, "memory windows of this type")?;
        // SAFETY: the PD is live.
        let mw = unsafe { inline::alloc_mw(self.raw(), kind) };
        Ok(Mw {
            object: Object::new(self.device(), "memory window", mw, dealloc)?,
            _pd: self.clone(),
        })
    }
}

impl Mw {
    pub(super) fn raw(&self) -> *mut ibv_mw {
        self.object.get()
    }

    /// The rkey: of a type 1 window that of its last binding; of a type 2 window that of its
    /// allocation, unless replaced by [`bound_as`](Self::bound_as).
    pub(in crate::conformance) fn rkey(&self) -> u32 {
        // SAFETY: live.
        unsafe { (*self.object.get()).rkey }
    }

    /// Stores the rkey that a type 2 window was bound with, as its user must.
    pub(in crate::conformance) fn bound_as(&self, rkey: u32) {
        // SAFETY: live; the user maintains the field.
        unsafe { (*self.object.get()).rkey = rkey };
    }

    pub(in crate::conformance) fn deallocate(&self) -> Errno {
        self.object.destroy()
    }
}

impl Qp {
    /// ibv_bind_mw(3): a type 1 window, signaled.
    pub(in crate::conformance) fn bind(&self, mw: &Mw, wr_id: u64, binding: Binding<'_>) -> Errno {
        let mut bind: ibv_mw_bind = zeroed();
        bind.wr_id = wr_id;
        bind.send_flags = IBV_SEND_SIGNALED;
        bind.bind_info = binding.info();
        // SAFETY: all live.
        Errno(unsafe { inline::bind_mw(self.raw(), mw.raw(), &mut bind) })
    }
}

/// The next rkey of a window.
pub(in crate::conformance) fn next_key(rkey: u32) -> u32 {
    inline::inc_rkey(rkey)
}

/// The rkey that a receive's completion reports as invalidated.
pub(in crate::conformance) fn invalidated(wc: &ibv_wc) -> Result<u32> {
    ensure!(wc.wc_flags & IBV_WC_WITH_INV != 0, "no invalidation is flagged");
    // SAFETY: both members are 32 bits.
    Ok(unsafe { wc.anon_1.invalidated_rkey })
}

pub(super) fn lacks<T>(what: &str) -> Result<T> {
    Err(NotOffered(what.to_owned()).into())
}
