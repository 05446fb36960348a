//! Shared receive queues.

use std::ptr;
use std::rc::Rc;

use anyhow::Result;
use doorbell_verbs_sys::*;

use super::window::lacks;
use super::wr::chain;
use super::{Errno, Object, Pd, Posted, Recv, zeroed};

#[derive(Clone)]
pub(in crate::conformance) struct Srq {
    object: Rc<Object<ibv_srq>>,
    pd: Pd,
}

impl Pd {
    /// Not offered when the device has none.
    pub(in crate::conformance) fn srq(&self, max_wr: u32, max_sge: u32) -> Result<Srq> {
        let api = self.device().api();
        let (Some(create), Some(destroy)) = (api.create_srq, api.destroy_srq) else {
            return lacks("shared receive queues");
        };
        if self.device().query()?.max_srq == 0 {
            return lacks("shared receive queues");
        }
        let mut init: ibv_srq_init_attr = zeroed();
        init.attr = ibv_srq_attr {
            max_wr,
            max_sge,
            srq_limit: 0,
        };
        // SAFETY: the PD is live.
        let srq = unsafe { create(self.raw(), &mut init) };
        Ok(Srq {
            object: Rc::new(Object::new(self.device(), "shared receive queue", srq, destroy)?),
            pd: self.clone(),
        })
    }
}

impl Srq {
    pub(super) fn raw(&self) -> *mut ibv_srq {
        self.object.get()
    }

    pub(in crate::conformance) fn destroy(&self) -> Errno {
        self.object.destroy()
    }

    pub(in crate::conformance) fn query(&self) -> Result<ibv_srq_attr> {
        let Some(query) = self.pd.device().api().query_srq else {
            return lacks("queries of shared receive queues");
        };
        let mut attr: ibv_srq_attr = zeroed();
        // SAFETY: live; `attr` may be written.
        match unsafe { query(self.raw(), &mut attr) } {
            0 => Ok(attr),
            error => Err(Errno(error).into()),
        }
    }

    pub(in crate::conformance) fn modify(&self, max_wr: u32, limit: u32, mask: u32) -> Result<Errno> {
        let Some(modify) = self.pd.device().api().modify_srq else {
            return lacks("changes of shared receive queues");
        };
        let mut attr = ibv_srq_attr {
            max_wr,
            max_sge: 0,
            srq_limit: limit,
        };
        // SAFETY: live.
        Ok(Errno(unsafe { modify(self.raw(), &mut attr, mask as i32) }))
    }

    pub(in crate::conformance) fn receive(&self, receives: &[Recv]) -> Posted {
        let (mut list, _elements) = chain(receives);
        let first = list.as_mut_ptr();
        let mut bad = ptr::null_mut();
        // SAFETY: live, and with it its context, which has this entry where SRQs can be created; a
        // list of requests that live through the call.
        let result = unsafe {
            match (*self.pd.device().raw()).ops.post_srq_recv {
                Some(post) => post(self.raw(), first, &mut bad),
                None => libc::ENOSYS,
            }
        };
        Posted::new(
            result,
            (0..list.len()).find(|&index| ptr::eq(bad, first.wrapping_add(index))),
        )
    }
}
