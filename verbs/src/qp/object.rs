//! The queue pair itself: what must be destroyed before its rings, protection domain and completion queues go.

use core::mem::{ManuallyDrop, MaybeUninit};
use std::sync::Arc;

use doorbell_verbs_sys as sys;

use super::attributes::{Explanation, QpState};
use super::transport::TransportKind;
use crate::cq::Attachment;
use crate::error::{QueuePairError, check};
use crate::pd::PdInner;
use crate::types::Qpn;

pub(crate) struct QpObject {
    raw: *mut sys::ibv_qp,
    qpn: Qpn,
    transport: TransportKind,
    pd: ManuallyDrop<Arc<PdInner>>,
    send: ManuallyDrop<Attachment>,
    recv: ManuallyDrop<Attachment>,
}

// SAFETY: `raw` is only passed to verbs, which may be called from any thread; the rest is Send and Sync.
unsafe impl Send for QpObject {}
// SAFETY: as above.
unsafe impl Sync for QpObject {}

impl QpObject {
    /// # Safety
    /// `raw` is a queue pair of `transport` just made in `pd`, on the completion queues of `send` and `recv`.
    pub(crate) unsafe fn new(
        raw: *mut sys::ibv_qp,
        transport: TransportKind,
        pd: Arc<PdInner>,
        send: Attachment,
        recv: Attachment,
    ) -> Self {
        // SAFETY: live by contract.
        let qpn = Qpn::truncated(unsafe { (*raw).qp_num });
        Self {
            raw,
            qpn,
            transport,
            pd: ManuallyDrop::new(pd),
            send: ManuallyDrop::new(send),
            recv: ManuallyDrop::new(recv),
        }
    }

    pub(crate) fn raw(&self) -> *mut sys::ibv_qp {
        self.raw
    }

    pub(crate) fn qpn(&self) -> Qpn {
        self.qpn
    }

    pub(crate) fn pd(&self) -> &Arc<PdInner> {
        &self.pd
    }

    pub(crate) fn send(&self) -> &Attachment {
        &self.send
    }

    pub(crate) fn recv(&self) -> &Attachment {
        &self.recv
    }

    /// What an error message calls it.
    pub(crate) fn name(&self) -> String {
        format!("{} queue pair {}", self.pd.context.name, self.qpn)
    }

    /// The state it is in (ibv_query_qp(3)).
    pub(crate) fn state(&self) -> Result<QpState, QueuePairError> {
        let mut attr = MaybeUninit::<sys::ibv_qp_attr>::zeroed();
        let mut init = MaybeUninit::<sys::ibv_qp_init_attr>::zeroed();
        // SAFETY: the queue pair is live and both may be written.
        let result = unsafe {
            (self.pd.context.api.query_qp)(
                self.raw,
                attr.as_mut_ptr(),
                sys::IBV_QP_STATE.cast_signed(),
                init.as_mut_ptr(),
            )
        };
        check(result).map_err(|error| QueuePairError::Query {
            object: self.name(),
            error,
        })?;
        // SAFETY: zeroed before, which is valid for this struct of integers, and filled by the library.
        Ok(QpState::from_sys(unsafe { attr.assume_init_ref() }.qp_state))
    }

    /// Moves it from `from` to `to` with the attributes of `mask` (ibv_modify_qp(3)). A refusal is explained by the table, and by `notes` from the errno.
    pub(crate) fn modify(
        &self,
        (from, to): (QpState, QpState),
        mut attr: sys::ibv_qp_attr,
        mask: sys::ibv_qp_attr_mask,
        notes: impl FnOnce(&std::io::Error) -> Vec<String>,
    ) -> Result<(), QueuePairError> {
        let mask = mask | sys::IBV_QP_STATE;
        attr.qp_state = to.to_sys();
        // SAFETY: the queue pair is live.
        let result = unsafe { (self.pd.context.api.modify_qp)(self.raw, &mut attr, mask.cast_signed()) };
        check(result).map_err(|error| {
            let explanation = Explanation::of(self.transport, self.state().unwrap_or(from), to, mask);
            let explanation = notes(&error).into_iter().fold(explanation, Explanation::note);
            QueuePairError::Modify {
                object: format!("{}, {from} to {to}", self.name()),
                explanation: Box::new(explanation),
                error,
            }
        })
    }
}

/// Attributes that are all zero, to be filled with those that a transition's mask names.
pub(crate) fn no_attributes() -> sys::ibv_qp_attr {
    // SAFETY: all-zero is a valid value of this struct of integers.
    unsafe { core::mem::zeroed() }
}

impl Drop for QpObject {
    fn drop(&mut self) {
        let api = self.pd.context.api;
        // Stops what is in flight as early as can be. It fails harmlessly from RESET, or when the device is gone.
        let mut attr = no_attributes();
        attr.qp_state = sys::IBV_QPS_ERR;
        // SAFETY: the queue pair is live.
        unsafe { (api.modify_qp)(self.raw, &mut attr, sys::IBV_QP_STATE.cast_signed()) };
        // SAFETY: made by create_qp of this Api, destroyed once, here; posting needs the object that is being dropped.
        let result = unsafe { (api.destroy_qp)(self.raw) };
        if result == 0 {
            self.pd.handles.dismiss(&self.pd.context, self.send.ring());
        }
        match check(result) {
            // SAFETY: dropped once, here. The device is done with the queue pair, so what its rings hold may go.
            Ok(()) => unsafe {
                ManuallyDrop::drop(&mut self.send);
                ManuallyDrop::drop(&mut self.recv);
                ManuallyDrop::drop(&mut self.pd);
            },
            Err(error) => {
                tracing::error!(qp = %self.name(), %error, "ibv_destroy_qp failed; it is leaked with all it has in flight");
            }
        }
    }
}
