//! Shared receive queues (IBTA vol 1, 10.2.9).

use std::sync::Arc;

use doorbell_roce_proto::work::{PostError, ReceiveRequest, SrqId};
use doorbell_roce_proto::{Endpoint, SrqAttributes, SrqError, SrqInit, XrcSrq};

use crate::capacity;
use crate::device::{Device, LimitError};
use crate::event::EventOwner;
use crate::pd::Pd;
use crate::xrc::XrcSrqConfig;

/// What a shared receive queue is created with (ibv_create_srq(3)).
#[derive(Clone, Debug)]
pub struct SrqConfig {
    /// Outstanding receives at most.
    pub max_wr: u32,
    /// Elements per receive at most.
    pub max_sge: u32,
    /// Of an XRC queue.
    pub xrc: Option<XrcSrqConfig>,
}

/// A shared receive queue; destroyed with its last clone and queue pair.
#[derive(Clone, Debug)]
pub struct Srq(Arc<SrqHandle>);

#[derive(Debug)]
struct SrqHandle {
    pd: Pd,
    id: SrqId,
    /// Kept until the queue is gone.
    xrc: Option<XrcSrqConfig>,
}

impl Pd {
    /// A shared receive queue with an unarmed limit, whose events go to `owner`.
    ///
    /// # Errors
    /// When a size is out of range, an object of another device, or the device has no more queues.
    pub fn shared_receive_queue(&self, config: SrqConfig, owner: EventOwner) -> Result<Srq, LimitError> {
        check(config.max_wr)?;
        let is_of_this =
            |xrc: &XrcSrqConfig| xrc.cq.is_of(self.device()) && Arc::ptr_eq(xrc.xrcd.device(), self.device());
        if config.max_sge > capacity::SGES || !config.xrc.as_ref().is_none_or(is_of_this) {
            return Err(LimitError::Size);
        }
        let init = SrqInit {
            pd: self.id(),
            max_wr: config.max_wr,
            max_sge: config.max_sge,
            xrc: config.xrc.as_ref().map(|xrc| XrcSrq {
                domain: xrc.xrcd.id(),
                cq: xrc.cq.id(),
            }),
        };
        let added = self.device().shared().core.lock().add_srq(init, owner);
        let (pd, xrc) = (self.clone(), config.xrc);
        added
            .map(|id| Srq(Arc::new(SrqHandle { pd, id, xrc })))
            .ok_or(LimitError::Exhausted)
    }
}

fn check(max_wr: u32) -> Result<(), LimitError> {
    if (1..=capacity::WORK_REQUESTS).contains(&max_wr) {
        Ok(())
    } else {
        Err(LimitError::Size)
    }
}

/// Receives being posted: the device's lock is held.
pub struct SharedPosting<'a> {
    endpoint: &'a mut Endpoint,
    srq: SrqId,
}

impl SharedPosting<'_> {
    /// Posts a receive.
    ///
    /// # Errors
    /// When it is refused; nothing of it was queued.
    pub fn receive(&mut self, request: &ReceiveRequest<'_>) -> Result<(), PostError> {
        self.endpoint.post_shared_receive(self.srq, request)
    }
}

impl Srq {
    /// Posts receives, whatever the queue pairs' states. Nothing is sent or completed by that.
    pub fn post_receive<R>(&self, requests: impl FnOnce(&mut SharedPosting<'_>) -> R) -> R {
        let mut core = self.device().shared().core.lock();
        requests(&mut SharedPosting {
            endpoint: &mut core.endpoint,
            srq: self.0.id,
        })
    }

    /// Resizes it to `max_wr`, and arms the limit `limit`; 0 disarms (ibv_modify_srq(3)).
    ///
    /// # Errors
    /// When the size is out of range or less than what is queued, or the limit exceeds it.
    pub fn modify(&self, max_wr: Option<u32>, limit: Option<u32>) -> Result<(), SrqError> {
        if max_wr.is_some_and(|max_wr| check(max_wr).is_err()) {
            return Err(SrqError::Value);
        }
        let shared = self.device().shared();
        let mut core = shared.core.lock();
        let result = core.endpoint.modify_srq(self.0.id, max_wr, limit);
        // The limit may be reached at once.
        shared.deliver(core);
        result
    }

    /// Its size, and the armed limit. `None` never happens while the handle lives.
    pub fn query(&self) -> Option<SrqAttributes> {
        self.device().shared().core.lock().endpoint.query_srq(self.0.id)
    }

    /// Its device.
    pub fn device(&self) -> &Arc<Device> {
        self.0.pd.device()
    }

    /// Whether anything else, such as a queue pair, holds this queue.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// Its number, which a peer names to send to it as an XRC queue; `None` if it is not one.
    pub fn xrc_number(&self) -> Option<u32> {
        self.0.xrc.as_ref().map(|_| self.0.id.number().srq)
    }

    pub(crate) fn id(&self) -> SrqId {
        self.0.id
    }

    pub(crate) fn is_of(&self, device: &Arc<Device>) -> bool {
        Arc::ptr_eq(self.device(), device)
    }
}

impl Drop for SrqHandle {
    fn drop(&mut self) {
        self.pd.device().shared().core.lock().remove_srq(self.id);
    }
}
