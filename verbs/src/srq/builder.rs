//! Creating a shared receive queue, and queue pairs on it.

use super::{SharedReceiveQueue, SharedReceiveQueueError};
use crate::error::QueuePairError;
use crate::pd::ProtectionDomain;
use crate::qp::{
    Backend, PostList, PreparedQueuePair, QueuePair, QueuePairBuilder, ReliableConnection, UnreliableConnection,
    UnreliableDatagram, WithSrq,
};

/// Builds a shared receive queue: see [`ProtectionDomain::shared_receive_queue`].
#[doc(alias = "ibv_srq_init_attr")]
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing until create() is called"]
pub struct SharedReceiveQueueBuilder<'a> {
    pd: &'a ProtectionDomain,
    depth: u32,
    max_sge: u32,
}

impl<'a> SharedReceiveQueueBuilder<'a> {
    pub(crate) fn new(pd: &'a ProtectionDomain, depth: u32) -> Self {
        Self { pd, depth, max_sge: 1 }
    }

    /// Maximum number of buffers (SGEs) of a receive (default 1).
    pub fn max_sge(mut self, buffers: u32) -> Self {
        self.max_sge = buffers;
        self
    }

    /// Creates the queue (ibv_create_srq(3), IBTA vol 1, 11.2.3).
    ///
    /// # Errors
    /// When the device has no shared receive queues, none as large, or no more of them.
    #[doc(alias = "ibv_create_srq")]
    pub fn create(self) -> Result<SharedReceiveQueue, SharedReceiveQueueError> {
        let context = self.pd.context();
        let attr = *context.attr();
        let limits = [
            ("a depth of", self.depth, attr.max_srq_wr),
            ("max_sge", self.max_sge, attr.max_srq_sge),
        ];
        if limits.iter().any(|&(_, _, max)| max == 0) {
            return Err(SharedReceiveQueueError::Unsupported {
                device: context.name().to_owned(),
            });
        }
        for (what, requested, max) in limits {
            if !(1..=max).contains(&requested) {
                return Err(SharedReceiveQueueError::Limit {
                    device: context.name().to_owned(),
                    what,
                    requested,
                    max,
                });
            }
        }
        SharedReceiveQueue::new(self.pd.inner(), self.depth, self.max_sge)
    }
}

/// Builds a queue pair on a shared receive queue: [`QueuePairBuilder::shared_receive_queue`].
#[doc(alias = "ibv_create_qp")]
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing until rc(), uc() or ud() is called"]
pub struct SrqQueuePairBuilder<'a, B: Backend = PostList> {
    builder: QueuePairBuilder<'a, B>,
}

impl<'a, B: Backend> SrqQueuePairBuilder<'a, B> {
    pub(crate) fn new(builder: QueuePairBuilder<'a, B>) -> Self {
        Self { builder }
    }

    /// As [`QueuePairBuilder::rc`].
    ///
    /// # Errors
    /// As there, and when the receive completion queue has fewer free entries than receives here.
    pub fn rc(self) -> Result<PreparedQueuePair<WithSrq<ReliableConnection>, B>, QueuePairError> {
        self.builder.prepare()
    }

    /// As [`QueuePairBuilder::uc`].
    ///
    /// # Errors
    /// As there, and as for [`rc`](Self::rc).
    pub fn uc(self) -> Result<PreparedQueuePair<WithSrq<UnreliableConnection>, B>, QueuePairError> {
        self.builder.prepare_unreliable()
    }

    /// As [`QueuePairBuilder::ud`].
    ///
    /// # Errors
    /// As there, and as for [`rc`](Self::rc).
    pub fn ud(self) -> Result<QueuePair<WithSrq<UnreliableDatagram>, B>, QueuePairError> {
        self.builder.create_ready()
    }
}
