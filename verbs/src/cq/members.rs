//! Whose completions come to a queue, as the threads that make and drop queue pairs tell its poller: a [`Registry`] behind a lock, and a flag that spares the poller that lock.

use std::sync::Arc;

use super::table::{Registry, Table};
use crate::qp::Ring;
use crate::sync::{self, AtomicBool, Mutex, MutexGuard, Ordering};

pub(crate) struct Members {
    registry: Mutex<Registry>,
    /// Whether the registry tells of queue pairs gone.
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

    /// Poller: whether there is something to [`settle`](Self::settle).
    #[inline(always)]
    pub(super) fn is_told(&self) -> bool {
        self.departed.load(Ordering::Acquire)
    }

    /// Poller: brings its table up to date. Returns the rings of queue pairs gone, to be dropped when no lock is held, and how many completions they may have left in the queue.
    pub(super) fn settle(&self, table: &mut Table) -> (Vec<Arc<Ring>>, u32) {
        // First: what is told of while the registry is read is looked at next time.
        self.departed.store(false, Ordering::Relaxed);
        self.registry().settle(table)
    }
}
