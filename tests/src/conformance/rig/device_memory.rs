//! Device memory, and reregistered regions.

use std::ffi::c_int;

use anyhow::Result;
use doorbell_verbs_sys::*;

use super::window::lacks;
use super::{Cq, Device, Errno, Memory, Mr, Object, Pd, zeroed};

pub(in crate::conformance) struct Dm {
    object: Object<ibv_dm>,
    /// Closed after the memory is freed.
    _device: Device,
}

/// ibv_free_dm (ibv_alloc_dm(3)).
unsafe extern "C" fn free(dm: *mut ibv_dm) -> c_int {
    // SAFETY: by the caller's contract.
    unsafe { inline::free_dm(dm) }
}

impl Device {
    /// Not offered when the device has none.
    pub(in crate::conformance) fn memory(&self, length: usize) -> Result<Dm> {
        if self.query_ex()?.max_dm_size == 0 {
            return lacks("device memory");
        }
        let mut attr: ibv_alloc_dm_attr = zeroed();
        attr.length = length;
        // SAFETY: live.
        let dm = unsafe { inline::alloc_dm(self.raw(), &mut attr) };
        Ok(Dm {
            object: Object::new(self, "device memory", dm, free)?,
            _device: self.clone(),
        })
    }
}

impl Dm {
    pub(in crate::conformance) fn free(&self) -> Errno {
        self.object.destroy()
    }

    pub(in crate::conformance) fn put(&self, offset: u64, bytes: &[u8]) -> Errno {
        // SAFETY: live; the bytes are read during the call. The device checks the range.
        Errno(unsafe { inline::memcpy_to_dm(self.object.get(), offset, bytes.as_ptr().cast(), bytes.len()) })
    }

    pub(in crate::conformance) fn get(&self, offset: u64, len: usize) -> Result<Vec<u8>, Errno> {
        let mut bytes = vec![0_u8; len];
        // SAFETY: live; the buffer has room for `len` bytes.
        match unsafe { inline::memcpy_from_dm(bytes.as_mut_ptr().cast(), self.object.get(), offset, len) } {
            0 => Ok(bytes),
            error => Err(Errno(error)),
        }
    }
}

impl Pd {
    /// A region of device memory, whose addresses begin at 0.
    pub(in crate::conformance) fn register_dm(
        &self,
        dm: &Dm,
        offset: u64,
        len: usize,
        rights: u32,
    ) -> Result<Mr, Errno> {
        // SAFETY: both live and of one device.
        let mr = unsafe { inline::reg_dm_mr(self.raw(), dm.object.get(), offset, len, rights | IBV_ACCESS_ZERO_BASED) };
        // It has no host memory.
        self.adopt_mr(mr, &Memory::new(0), 0)
    }

    /// A region whose addresses begin at `iova`.
    pub(in crate::conformance) fn register_at(&self, memory: &Memory, iova: u64, rights: u32) -> Result<Mr> {
        let Some(register) = self.device().api().reg_mr_iova else {
            return lacks("ibv_reg_mr_iova");
        };
        let ptr = memory.as_void_ptr();
        // SAFETY: the PD is live, and the memory is held by the region.
        let mr = unsafe { register(self.raw(), ptr, memory.len(), iova, rights as c_int) };
        Ok(self.adopt_mr(mr, memory, iova)?)
    }
}

impl Mr {
    /// ibv_rereg_mr(3); not offered when the device cannot.
    pub(in crate::conformance) fn change(
        &mut self,
        flags: u32,
        pd: &Pd,
        memory: &Memory,
        rights: u32,
    ) -> Result<Errno> {
        let api = pd.device().api();
        let Some(change) = api.rereg_mr else {
            return lacks("ibv_rereg_mr");
        };
        let ptr = memory.as_void_ptr();
        // SAFETY: region and PD are live; the region holds both memories from now on.
        let result = unsafe { change(self.raw(), flags as c_int, pd.raw(), ptr, memory.len(), rights as c_int) };
        if result == IBV_REREG_MR_ERR_CMD && matches!(Errno::last(), Errno(libc::EOPNOTSUPP | libc::ENOSYS)) {
            return lacks("ibv_rereg_mr");
        }
        if result == 0 {
            self.changed(flags, pd, memory);
        }
        Ok(Errno(result))
    }
}

impl Cq {
    /// Raises an event after `count` completions, or `period` µs after the first; not offered when
    /// the device cannot.
    pub(in crate::conformance) fn moderate(&self, count: u16, period: u16) -> Result<Errno> {
        let caps = self.device().query_ex()?.cq_mod_caps;
        if caps.max_cq_count == 0 {
            return lacks("moderation of events");
        }
        let mut attr: ibv_modify_cq_attr = zeroed();
        attr.attr_mask = IBV_CQ_ATTR_MODERATE;
        attr.moderate = ibv_moderate_cq {
            cq_count: count,
            cq_period: period,
        };
        // SAFETY: live.
        Ok(Errno(unsafe { inline::modify_cq(self.raw(), &mut attr) }))
    }
}
