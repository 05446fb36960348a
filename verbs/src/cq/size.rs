//! The number of entries of a queue, and its interrupt moderation.

use core::ffi::c_int;

use doorbell_verbs_sys::{self as sys, inline};

use super::{CompletionQueue, CqKind};
use crate::context::ContextInner;
use crate::error::{CompletionQueueError, check};

pub(super) fn checked(context: &ContextInner, entries: u32) -> Result<c_int, CompletionQueueError> {
    let max = context.attr.max_cqe;
    match i32::try_from(entries).ok().filter(|_| entries <= max) {
        Some(cqe) => Ok(cqe.max(1)),
        None => Err(CompletionQueueError::TooLarge {
            device: context.name.clone(),
            entries,
            max,
        }),
    }
}

impl<Q: CqKind> CompletionQueue<Q> {
    /// Resizes to `entries` or more, also in use (ibv_resize_cq(3), IBTA vol 1, 11.2.8.3).
    ///
    /// # Errors
    /// When its queue pairs have reserved more than that, the device has no queues as large, or
    /// cannot resize them. The queue is then unchanged.
    #[doc(alias = "ibv_resize_cq")]
    pub fn resize(&mut self, entries: u32) -> Result<(), CompletionQueueError> {
        let context = &self.inner().context;
        let cqe = checked(context, entries)?;
        // Locked throughout, so that no queue pair reserves entries that are about to be removed.
        let mut registry = self.inner().registry();
        let reserved = registry.reserved();
        if entries < reserved {
            return Err(CompletionQueueError::Reserved {
                device: context.name.clone(),
                entries,
                reserved,
            });
        }
        // SAFETY: the queue is live; nothing else polls or resizes it, by `&mut self`.
        let result = unsafe { (context.api.resize_cq)(self.inner().raw, cqe) };
        check(result).map_err(|error| CompletionQueueError::Resize {
            device: context.name.clone(),
            entries,
            error,
        })?;
        // SAFETY: live; written only by creation and resizing, which have returned.
        let capacity = unsafe { (*self.inner().raw).cqe };
        registry.resized(u32::try_from(capacity).unwrap_or(entries));
        Ok(())
    }

    /// Moderates completion events: the device raises an event only when `count` completions are
    /// there or the oldest is `period_us` microseconds old (ibv_modify_cq(3)). 0 and 0, the
    /// default, is no moderation. Polling is not affected.
    ///
    /// # Errors
    /// When the device has no moderation (an error of kind
    /// [`Unsupported`](std::io::ErrorKind::Unsupported)), or not as much.
    #[doc(alias("ibv_modify_cq", "ibv_moderate_cq", "IBV_CQ_ATTR_MODERATE"))]
    pub fn moderate(&mut self, count: u16, period_us: u16) -> Result<(), CompletionQueueError> {
        let mut attr = sys::ibv_modify_cq_attr {
            attr_mask: sys::IBV_CQ_ATTR_MODERATE,
            moderate: sys::ibv_moderate_cq {
                cq_count: count,
                cq_period: period_us,
            },
        };
        // SAFETY: the queue is live, and so is `attr`.
        let result = unsafe { inline::modify_cq(self.inner().raw, &mut attr) };
        check(result).map_err(|error| CompletionQueueError::Moderate {
            device: self.inner().context.name.clone(),
            count,
            period_us,
            error,
        })
    }
}
