//! The `ibv_qp` itself, destroyed before its rings, protection domain and completion queues.

use core::mem::ManuallyDrop;
use core::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use doorbell_verbs_sys as sys;

use super::attributes::{Explanation, QpState};
use super::multicast::Group;
use super::query::QueuePairAttr;
use super::ring::QpId;
use super::transport::TransportKind;
use crate::cq::Attachment;
use crate::error::{QueuePairError, check, modify_advice};
use crate::pd::PdInner;
use crate::raw::Lender;
use crate::sync::Mutex;
use crate::types::Qpn;

pub(crate) struct QpObject {
    raw: *mut sys::ibv_qp,
    qpn: Qpn,
    transport: TransportKind,
    pd: ManuallyDrop<Arc<PdInner>>,
    send: ManuallyDrop<Attachment>,
    recv: ManuallyDrop<Attachment>,
    lender: ManuallyDrop<Lender>,
    /// Multicast groups that it is attached to.
    pub(super) groups: Mutex<Vec<Group>>,
}

// SAFETY: `raw` is only passed to verbs, which any thread may call; the rest is Send and Sync.
unsafe impl Send for QpObject {}
// SAFETY: as above.
unsafe impl Sync for QpObject {}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl QpObject {
    /// # Safety
    /// `raw` is a queue pair of `transport` in `pd`, on the completion queues of `send` and `recv`,
    /// with nothing posted; no other owner than the lender destroys it.
    pub(crate) unsafe fn new(
        raw: *mut sys::ibv_qp,
        transport: TransportKind,
        pd: Arc<PdInner>,
        send: Attachment,
        recv: Attachment,
        lender: Lender,
    ) -> Self {
        // SAFETY: live by contract.
        let qpn = Qpn::truncated(unsafe { (*raw).qp_num });
        let id = QpId(NEXT_ID.fetch_add(1, Ordering::Relaxed));
        send.ring().set_qp(id, qpn);
        recv.ring().set_qp(id, qpn);
        Self {
            raw,
            qpn,
            transport,
            pd: ManuallyDrop::new(pd),
            send: ManuallyDrop::new(send),
            recv: ManuallyDrop::new(recv),
            lender: ManuallyDrop::new(lender),
            groups: Mutex::default(),
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

    pub(crate) fn name(&self) -> String {
        format!("{} queue pair {}", self.pd.context.name, self.qpn)
    }

    pub(crate) fn state(&self) -> Result<QpState, QueuePairError> {
        let (attr, _) = self.query_qp(sys::IBV_QP_STATE)?;
        Ok(QpState::from_sys(attr.qp_state))
    }

    pub(crate) fn query(&self) -> Result<QueuePairAttr, QueuePairError> {
        let (attr, init) = self.query_qp(ALL)?;
        Ok(QueuePairAttr::from_sys(self.qpn, self.transport, &attr, &init))
    }

    fn query_qp(
        &self,
        mask: sys::ibv_qp_attr_mask,
    ) -> Result<(sys::ibv_qp_attr, sys::ibv_qp_init_attr), QueuePairError> {
        let mut attr = zeroed_attr();
        // SAFETY: all-zero is a valid value of this struct of integers and nullable pointers.
        let mut init: sys::ibv_qp_init_attr = unsafe { core::mem::zeroed() };
        // SAFETY: the queue pair is live and both may be written.
        let result = unsafe { (self.pd.context.api.query_qp)(self.raw, &mut attr, mask.cast_signed(), &mut init) };
        check(result).map_err(|error| QueuePairError::Query {
            object: self.name(),
            error,
        })?;
        Ok((attr, init))
    }

    /// A transition (ibv_modify_qp(3)); the table explains errors, and `notes` errno values.
    pub(crate) fn transition(
        &self,
        (from, to): (QpState, QpState),
        mut attr: sys::ibv_qp_attr,
        mask: sys::ibv_qp_attr_mask,
        notes: impl FnOnce(&std::io::Error) -> Vec<String>,
    ) -> Result<(), QueuePairError> {
        let mask = mask | sys::IBV_QP_STATE;
        attr.qp_state = to.to_sys();
        self.modify_qp(attr, mask).map_err(|error| {
            let object = format!("{}, {from} to {to}", self.name());
            self.modify_error(object, (self.state().unwrap_or(from), to), mask, error, notes)
        })
    }

    /// Modifies attributes in the current state; errors as in [`transition`](Self::transition).
    pub(crate) fn modify(
        &self,
        attr: sys::ibv_qp_attr,
        mask: sys::ibv_qp_attr_mask,
        notes: impl FnOnce(&std::io::Error) -> Vec<String>,
    ) -> Result<(), QueuePairError> {
        self.modify_qp(attr, mask).map_err(|error| {
            let state = self.state().unwrap_or(QpState::Rts);
            let object = format!("{}, in {state}", self.name());
            self.modify_error(object, (state, state), mask, error, notes)
        })
    }

    fn modify_qp(&self, mut attr: sys::ibv_qp_attr, mask: sys::ibv_qp_attr_mask) -> Result<(), std::io::Error> {
        // SAFETY: the queue pair is live.
        check(unsafe { (self.pd.context.api.modify_qp)(self.raw, &mut attr, mask.cast_signed()) })
    }

    fn modify_error(
        &self,
        object: String,
        (from, to): (QpState, QpState),
        mask: sys::ibv_qp_attr_mask,
        error: std::io::Error,
        notes: impl FnOnce(&std::io::Error) -> Vec<String>,
    ) -> QueuePairError {
        let explanation = Explanation::of(self.transport, from, to, mask);
        let explanation = notes(&error).into_iter().fold(explanation, Explanation::note);
        let advice = modify_advice(&error).filter(|_| explanation.notes.is_empty());
        let explanation = advice.into_iter().fold(explanation, Explanation::note);
        QueuePairError::Modify {
            object,
            explanation: Box::new(explanation),
            error,
        }
    }

    pub(crate) fn draining_note(&self) -> Vec<String> {
        match self.query() {
            Ok(attr) if attr.draining => vec!["it is still draining: wait for the event SendQueueDrained".to_owned()],
            _ => Vec::new(),
        }
    }
}

const ALL: sys::ibv_qp_attr_mask = (sys::IBV_QP_DEST_QPN << 1) - 1;

pub(crate) fn zeroed_attr() -> sys::ibv_qp_attr {
    // SAFETY: all-zero is a valid value of this struct of integers.
    unsafe { core::mem::zeroed() }
}

impl Drop for QpObject {
    fn drop(&mut self) {
        self.detach_all();
        let api = self.pd.context.api;
        // Flushes early; fails harmlessly in RESET, or when the device is gone.
        let mut attr = zeroed_attr();
        attr.qp_state = sys::IBV_QPS_ERR;
        // SAFETY: the queue pair is live.
        unsafe { (api.modify_qp)(self.raw, &mut attr, sys::IBV_QP_STATE.cast_signed()) };
        // A provider may lock an extended completion queue while it is polled, and ibv_destroy_qp
        // takes that lock: the polling thread defers it, or it would deadlock.
        let polled_here = [&self.send, &self.recv]
            .map(|attachment| Arc::clone(attachment.cq()))
            .into_iter()
            .find(|cq| cq.is_polled_here());
        if let Some(cq) = polled_here {
            // SAFETY: the four fields are moved out, not used after, not dropped with `self`.
            let (pd, send, recv, lender) = unsafe {
                (
                    ManuallyDrop::new(ManuallyDrop::take(&mut self.pd)),
                    ManuallyDrop::new(ManuallyDrop::take(&mut self.send)),
                    ManuallyDrop::new(ManuallyDrop::take(&mut self.recv)),
                    ManuallyDrop::new(ManuallyDrop::take(&mut self.lender)),
                )
            };
            let (raw, qpn, transport) = (self.raw, self.qpn, self.transport);
            cq.defer_destroy(Self {
                raw,
                qpn,
                transport,
                pd,
                send,
                recv,
                lender,
                groups: Mutex::default(),
            });
            return;
        }
        let result = if self.lender.is_some() {
            // In RESET the device has discarded all posted requests (IBTA vol 1, 10.3.1.1).
            attr.qp_state = sys::IBV_QPS_RESET;
            // SAFETY: the queue pair is live.
            unsafe { (api.modify_qp)(self.raw, &mut attr, sys::IBV_QP_STATE.cast_signed()) }
        } else {
            // SAFETY: of create_qp of this Api, destroyed once, here; posting needs this object.
            unsafe { (api.destroy_qp)(self.raw) }
        };
        if result == 0 {
            self.pd.handles.remove_send_queue(&self.pd.context, self.send.ring());
        }
        match check(result) {
            // SAFETY: dropped once, here. The device is done with the contents of its rings.
            Ok(()) => unsafe {
                ManuallyDrop::drop(&mut self.send);
                ManuallyDrop::drop(&mut self.recv);
                ManuallyDrop::drop(&mut self.pd);
                ManuallyDrop::drop(&mut self.lender);
            },
            Err(error) => {
                tracing::error!(qp = %self.name(), %error, "ibv_destroy_qp failed; it is leaked with all it has in flight");
            }
        }
    }
}
