//! Shared receive queues (SRQ): one receive queue for many queue pairs (IBTA vol 1, 10.2.9).
//!
//! A queue pair takes the oldest receive when a message needs one, and holds it in a one-slot queue
//! until it completes: flushed in the error state, discarded at reset.

use crate::AsyncEvent;
use crate::memory::PdId;
use crate::outbox::Outbox;
use crate::qp::receive_queue::ReceiveQueue;
use crate::wire::XrcEth;
use crate::work::{CqId, PostError, ReceiveRequest, SrqId, XrcDomain};

/// Creation attributes of a shared receive queue (ibv_create_srq(3)).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SrqInit {
    /// The protection domain of its receives.
    pub pd: PdId,
    /// Maximum queued receives.
    pub max_wr: u32,
    /// Maximum SGEs per receive.
    pub max_sge: u32,
    /// Of an XRC queue: for the XRC targets of its domain.
    pub xrc: Option<XrcSrq>,
}

/// What an XRC shared receive queue has in addition (IBTA vol 1, annex A14).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct XrcSrq {
    /// Its domain.
    pub domain: XrcDomain,
    /// CQ of its receives.
    pub cq: CqId,
}

/// Attributes of a shared receive queue (ibv_query_srq(3)).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SrqAttributes {
    /// Maximum queued receives.
    pub max_wr: u32,
    /// Maximum SGEs per receive.
    pub max_sge: u32,
    /// The armed limit, 0 if none.
    pub limit: u32,
}

/// Why a shared receive queue was not modified or destroyed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SrqError {
    /// No such shared receive queue (`EINVAL`).
    Unknown,
    /// A size below the number of queued receives, or a limit above the size (`EINVAL`).
    Value,
    /// Queue pairs use it (`EBUSY`).
    InUse,
}

#[derive(Debug)]
pub(crate) struct SharedQueue {
    init: SrqInit,
    queue: ReceiveQueue,
    /// The limit event is reported when fewer receives are queued; 0 if not armed.
    limit: u32,
    users: u32,
}

impl SharedQueue {
    fn new(init: SrqInit) -> Self {
        Self {
            init,
            queue: ReceiveQueue::new(init.max_wr, init.max_sge),
            limit: 0,
            users: 0,
        }
    }

    pub(crate) const fn pd(&self) -> PdId {
        self.init.pd
    }

    pub(crate) fn holding_queue(&self) -> ReceiveQueue {
        ReceiveQueue::new(1, self.init.max_sge)
    }

    /// Whether a receive of it fits into a one-slot queue.
    pub(crate) const fn fits(&self, holding: &ReceiveQueue) -> bool {
        self.init.max_sge as usize <= holding.max_sge()
    }

    pub(crate) const fn attributes(&self) -> SrqAttributes {
        SrqAttributes {
            max_wr: self.init.max_wr,
            max_sge: self.init.max_sge,
            limit: self.limit,
        }
    }

    pub(crate) fn post(&mut self, request: &ReceiveRequest<'_>) -> Result<(), PostError> {
        self.queue.post(request)
    }

    fn modify(&mut self, max_wr: Option<u32>, limit: Option<u32>) -> Result<(), SrqError> {
        let size = max_wr.unwrap_or(self.init.max_wr);
        if u64::from(size) < self.queue.len() || limit.unwrap_or(self.limit) > size {
            return Err(SrqError::Value);
        }
        if size != self.init.max_wr {
            let mut resized = ReceiveQueue::new(size, self.init.max_sge);
            while self.queue.move_to(&mut resized) {}
            self.queue = resized;
            self.init.max_wr = size;
        }
        self.limit = limit.unwrap_or(self.limit);
        Ok(())
    }

    /// Whether fewer receives are queued than the armed limit, which is disarmed then.
    fn disarm_if_below_limit(&mut self) -> bool {
        let below = self.queue.len() < u64::from(self.limit);
        if below {
            self.limit = 0;
        }
        below
    }
}

/// The shared receive queues by id. Ids are reused; the endpoint's owner tracks which are valid.
#[derive(Debug, Default)]
pub(crate) struct SrqTable {
    slots: Vec<Option<SharedQueue>>,
}

impl SrqTable {
    pub(crate) fn insert(&mut self, init: SrqInit) -> SrqId {
        let index = self.slots.iter().position(Option::is_none).unwrap_or(self.slots.len());
        if index == self.slots.len() {
            self.slots.push(None);
        }
        self.slots[index] = Some(SharedQueue::new(init));
        SrqId(index as u32)
    }

    pub(crate) fn get(&self, id: SrqId) -> Option<&SharedQueue> {
        self.slots.get(id.0 as usize)?.as_ref()
    }

    pub(crate) fn get_mut(&mut self, id: SrqId) -> Option<&mut SharedQueue> {
        self.slots.get_mut(id.0 as usize)?.as_mut()
    }

    /// The XRC queue that a peer names, if it is of this domain.
    pub(crate) fn find_xrc(&self, named: XrcEth, domain: XrcDomain) -> Option<(SrqId, &SharedQueue, CqId)> {
        let id = SrqId(named.srq);
        let srq = self.get(id)?;
        let xrc = srq.init.xrc.filter(|xrc| xrc.domain == domain)?;
        Some((id, srq, xrc.cq))
    }

    pub(crate) fn attach(&mut self, id: SrqId) -> Option<&SharedQueue> {
        let srq = self.get_mut(id)?;
        srq.users += 1;
        Some(srq)
    }

    pub(crate) fn detach(&mut self, id: SrqId) {
        if let Some(srq) = self.get_mut(id) {
            srq.users -= 1;
        }
    }

    pub(crate) fn remove(&mut self, id: SrqId) -> Result<(), SrqError> {
        let slot = self.slots.get_mut(id.0 as usize).ok_or(SrqError::Unknown)?;
        match slot {
            None => return Err(SrqError::Unknown),
            Some(srq) if srq.users > 0 => return Err(SrqError::InUse),
            Some(_) => *slot = None,
        }
        Ok(())
    }
}

impl Outbox {
    /// Into a queue pair's one-slot queue; false when there is none.
    pub(crate) fn take_receive(&mut self, id: SrqId, holding: &mut ReceiveQueue) -> bool {
        let Some(srq) = self.srqs.get_mut(id) else {
            return false;
        };
        let moved = srq.queue.move_to(holding);
        if srq.disarm_if_below_limit() {
            self.event(AsyncEvent::SrqLimitReached(id));
        }
        moved
    }

    pub(crate) fn modify_srq(&mut self, id: SrqId, max_wr: Option<u32>, limit: Option<u32>) -> Result<(), SrqError> {
        let srq = self.srqs.get_mut(id).ok_or(SrqError::Unknown)?;
        srq.modify(max_wr, limit)?;
        if srq.disarm_if_below_limit() {
            self.event(AsyncEvent::SrqLimitReached(id));
        }
        Ok(())
    }
}
