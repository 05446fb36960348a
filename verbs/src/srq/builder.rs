//! Making a shared receive queue, and queue pairs on it.

use super::{SharedReceiveError, SharedReceiveQueue};
use crate::error::QueuePairError;
use crate::pd::ProtectionDomain;
use crate::qp::{Backend, PostList, PreparedQueuePair, QueuePair, QueuePairBuilder, Rc, SharedReceive, Uc, Ud};

/// Builds a shared receive queue; made by [`ProtectionDomain::shared_receive_queue`] (ibv_create_srq(3)).
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing until create() is called"]
pub struct SharedReceiveBuilder<'a> {
    pd: &'a ProtectionDomain,
    depth: u32,
    max_sge: u32,
}

impl<'a> SharedReceiveBuilder<'a> {
    pub(crate) fn new(pd: &'a ProtectionDomain, depth: u32) -> Self {
        Self { pd, depth, max_sge: 1 }
    }

    /// How many buffers a receive may have (default 1).
    pub fn max_sge(mut self, buffers: u32) -> Self {
        self.max_sge = buffers;
        self
    }

    /// Makes it (ibv_create_srq(3), IBTA vol 1, 11.2.3).
    ///
    /// # Errors
    /// When the device has no such queues, none as large, or no more of them.
    pub fn create(self) -> Result<SharedReceiveQueue, SharedReceiveError> {
        let context = self.pd.context();
        let attr = *context.attr();
        let limits = [
            ("a depth of", self.depth, attr.max_shared_receive_depth),
            ("max_sge", self.max_sge, attr.max_shared_receive_sge),
        ];
        if limits.iter().any(|&(_, _, max)| max == 0) {
            return Err(SharedReceiveError::Unsupported {
                device: context.name().to_owned(),
            });
        }
        for (what, asked, max) in limits {
            if !(1..=max).contains(&asked) {
                return Err(SharedReceiveError::Limit {
                    device: context.name().to_owned(),
                    what,
                    asked,
                    max,
                });
            }
        }
        SharedReceiveQueue::new(self.pd.inner(), self.depth, self.max_sge)
    }
}

/// Builds a queue pair whose receives come from a shared receive queue: a [`QueuePairBuilder`] at its end, made by its
/// [`shared_receive`](QueuePairBuilder::shared_receive).
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing until rc(), uc() or ud() is called"]
pub struct SharedQueuePairBuilder<'a, B: Backend = PostList> {
    builder: QueuePairBuilder<'a, B>,
}

impl<'a, B: Backend> SharedQueuePairBuilder<'a, B> {
    pub(crate) fn new(builder: QueuePairBuilder<'a, B>) -> Self {
        Self { builder }
    }

    /// As [`QueuePairBuilder::rc`].
    ///
    /// # Errors
    /// As there, and when the completion queue of receives has not as many entries free as the shared receive queue holds receives.
    pub fn rc(self) -> Result<PreparedQueuePair<SharedReceive<Rc>, B>, QueuePairError> {
        self.builder.prepare()
    }

    /// As [`QueuePairBuilder::uc`].
    ///
    /// # Errors
    /// As there, and as for [`rc`](Self::rc).
    pub fn uc(self) -> Result<PreparedQueuePair<SharedReceive<Uc>, B>, QueuePairError> {
        self.builder.prepare_unreliable()
    }

    /// As [`QueuePairBuilder::ud`].
    ///
    /// # Errors
    /// As there, and as for [`rc`](Self::rc).
    pub fn ud(self) -> Result<QueuePair<SharedReceive<Ud>, B>, QueuePairError> {
        self.builder.create_ready()
    }
}
