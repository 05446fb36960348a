//! A [`Registry`] behind a lock, and a flag that spares the poller the lock.
//!
//! The flag is proved in `cq/model.rs`: its order of steps carries it, the lock orders the memory.

use std::sync::Arc;

use super::table::Registry;
use crate::qp::Ring;
use crate::sync::{self, AtomicBool, Mutex, MutexGuard, Ordering};

pub(crate) struct LockedRegistry {
    registry: Mutex<Registry>,
    /// Whether the registry holds departures that the poller has not processed.
    changed: AtomicBool,
}

impl LockedRegistry {
    pub(crate) fn new(capacity: u32) -> Self {
        Self {
            registry: Mutex::new(Registry::new(capacity)),
            changed: AtomicBool::new(false),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Registry> {
        sync::lock(&self.registry)
    }

    /// Err: the number of free entries.
    pub(super) fn attach(&self, ring: &Arc<Ring>) -> Result<u32, u32> {
        self.lock().attach(ring)
    }

    pub(super) fn detach(&self, key: u32, ring: &Ring) {
        if self.lock().detach(key, ring) {
            self.set_changed();
        }
    }

    /// After a change: were the flag set before, the poller could clear it and find nothing.
    pub(super) fn set_changed(&self) {
        self.changed.store(true, Ordering::Release);
    }

    #[inline(always)]
    pub(super) fn has_changed(&self) -> bool {
        self.changed.load(Ordering::Acquire)
    }

    /// Poller: before it reads the registry, so that a change made meanwhile sets it again.
    pub(super) fn clear_changed(&self) {
        self.changed.store(false, Ordering::Relaxed);
    }
}
