//! Shared receive queues: one queue of receives for many queue pairs (IBTA vol 1, 10.2.9).

use std::sync::Arc;

use doorbell_roce_proto::work::{PostError, ReceiveRequest, SrqId};
use doorbell_roce_proto::{Endpoint, SrqAttributes, SrqError, SrqInit};

use crate::capacity;
use crate::device::{Device, LimitError};
use crate::event::Owner;
use crate::pd::Pd;

/// What a shared receive queue is created with (ibv_create_srq(3)).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SrqConfig {
    /// Receives queued at most.
    pub max_wr: u32,
    /// Elements per receive at most.
    pub max_sge: u32,
}

/// A shared receive queue. Clones name the same queue; it goes away with the last of them and the last queue pair on it, and what is queued is forgotten.
#[derive(Clone, Debug)]
pub struct Srq(Arc<SrqHandle>);

#[derive(Debug)]
struct SrqHandle {
    pd: Pd,
    id: SrqId,
}

impl Pd {
    /// A shared receive queue, its limit not armed, its events told to `owner`.
    ///
    /// # Errors
    /// When a size is out of range, or the device has no more queues.
    pub fn shared_receive_queue(&self, config: SrqConfig, owner: Owner) -> Result<Srq, LimitError> {
        check(config.max_wr)?;
        if config.max_sge > capacity::SGES {
            return Err(LimitError::Size);
        }
        let init = SrqInit {
            pd: self.id(),
            max_wr: config.max_wr,
            max_sge: config.max_sge,
        };
        let added = self.device().shared().core.lock().add_srq(init, owner);
        let pd = self.clone();
        added
            .map(|id| Srq(Arc::new(SrqHandle { pd, id })))
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
    /// Queues a receive.
    ///
    /// # Errors
    /// When it is refused; nothing of it was queued.
    pub fn receive(&mut self, request: &ReceiveRequest<'_>) -> Result<(), PostError> {
        self.endpoint.post_shared_receive(self.srq, request)
    }
}

impl Srq {
    /// Posts receives, whatever states the queue pairs are in. Nothing is sent for them, and nothing completes by it.
    pub fn post_receive<R>(&self, requests: impl FnOnce(&mut SharedPosting<'_>) -> R) -> R {
        let mut core = self.device().shared().core.lock();
        requests(&mut SharedPosting {
            endpoint: &mut core.endpoint,
            srq: self.0.id,
        })
    }

    /// Changes the size where `max_wr` is given, and arms the limit where `limit` is; 0 disarms it (ibv_modify_srq(3)).
    ///
    /// # Errors
    /// When the size is out of range or less than what is queued, or the limit is beyond the size; nothing changed then.
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

    /// Its size, and the limit that is armed. `None` never happens while the handle lives.
    pub fn query(&self) -> Option<SrqAttributes> {
        self.device().shared().core.lock().endpoint.query_srq(self.0.id)
    }

    /// The device it is of.
    pub fn device(&self) -> &Arc<Device> {
        self.0.pd.device()
    }

    /// Whether anything else, such as a queue pair, holds this queue.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
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
