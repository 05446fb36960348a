//! Whose completions come to a queue, as the threads that make and drop queue pairs tell its poller: a [`Registry`] behind a lock, and a flag that spares the poller that lock.

use std::sync::Arc;

use super::table::Registry;
use crate::qp::Ring;
use crate::sync::{self, AtomicBool, Mutex, MutexGuard, Ordering};

pub(crate) struct Members {
    registry: Mutex<Registry>,
    /// Whether the registry tells of queue pairs gone, and the poller has not heard so.
    departed: AtomicBool,
}

impl Members {
    pub(crate) fn new(capacity: u32) -> Self {
        Self {
            registry: Mutex::new(Registry::new(capacity)),
            departed: AtomicBool::new(false),
        }
    }

    pub(super) fn registry(&self) -> MutexGuard<'_, Registry> {
        sync::lock(&self.registry)
    }

    /// Reserves the entries that `ring` needs, and gives it a key.
    ///
    /// # Errors
    /// How many entries there are, when they are too few.
    pub(super) fn enlist(&self, ring: &Arc<Ring>) -> Result<u32, u32> {
        self.registry().enlist(ring)
    }

    /// The queue pair with this ring has been destroyed.
    pub(super) fn strike(&self, key: u32, ring: &Ring) {
        if self.registry().strike(key, ring) {
            self.tell();
        }
    }

    /// Has the poller look at the registry, which says by now what there is to see: were the flag set before, the poller might clear it and find nothing.
    pub(super) fn tell(&self) {
        self.departed.store(true, Ordering::Release);
    }

    /// Poller: whether it has been told of something since it last heard.
    #[inline(always)]
    pub(super) fn is_told(&self) -> bool {
        self.departed.load(Ordering::Acquire)
    }

    /// Poller: is about to look at the registry. It says so first: what it is told of while it looks makes it look again.
    pub(super) fn hear(&self) {
        self.departed.store(false, Ordering::Relaxed);
    }
}
