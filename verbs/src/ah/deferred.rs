//! Defers the destruction of address handles until the device is done with them: the completions of
//! all sends with one must have been polled (ibv_post_send(3)), as some devices refer to it.
//!
//! Counting each handle's sends would cost. Instead a dropped handle is kept until every UD queue
//! pair of its protection domain has retired all that it had posted by then, or is destroyed.

use core::ptr;
use std::sync::Arc;

use doorbell_verbs_sys as sys;

use crate::context::ContextInner;
use crate::error::check;
use crate::qp::Ring;
use crate::raw::Lender;
use crate::sync::{self, Mutex, MutexGuard};

#[derive(Default)]
pub(crate) struct DeferredHandles {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    senders: Vec<Arc<Ring>>,
    deferred: Vec<DeferredHandle>,
}

/// A dropped handle, and the queues that may use it until they have retired that many requests.
struct DeferredHandle {
    raw: *mut sys::ibv_ah,
    pending_on: Vec<(Arc<Ring>, u64)>,
    lender: Lender,
}

// SAFETY: `raw` is only passed to verbs, which any thread may call; a ring is Send and Sync.
unsafe impl Send for State {}

impl State {
    fn take_completed(&mut self) -> Vec<DeferredHandle> {
        for deferred in &mut self.deferred {
            deferred.pending_on.retain(|(ring, posted)| ring.retired() < *posted);
        }
        self.deferred
            .extract_if(.., |deferred| deferred.pending_on.is_empty())
            .collect()
    }
}

impl DeferredHandles {
    fn state(&self) -> MutexGuard<'_, State> {
        sync::lock(&self.state)
    }

    pub(crate) fn add_send_queue(&self, ring: &Arc<Ring>) {
        self.state().senders.push(Arc::clone(ring));
    }

    /// The queue pair with this send queue has been destroyed: it uses no handle any more.
    pub(crate) fn remove_send_queue(&self, context: &ContextInner, ring: &Arc<Ring>) {
        let mut state = self.state();
        let before = state.senders.len();
        state.senders.retain(|sender| !Arc::ptr_eq(sender, ring));
        if state.senders.len() == before {
            return;
        }
        for deferred in &mut state.deferred {
            deferred.pending_on.retain(|(sender, _)| !Arc::ptr_eq(sender, ring));
        }
        let free = state.take_completed();
        drop(state);
        destroy(context, free);
    }

    /// Destroys `raw` now if no queue uses it, otherwise later; with a lender, drops that instead.
    ///
    /// # Safety
    /// It was created in this domain, and no post with it is in progress or follows.
    pub(crate) unsafe fn destroy_or_defer(&self, context: &ContextInner, raw: *mut sys::ibv_ah, lender: Lender) {
        let mut state = self.state();
        let pending_on = state
            .senders
            .iter()
            .filter(|ring| ring.in_flight() != 0)
            .map(|ring| (Arc::clone(ring), ring.posted()))
            .collect();
        state.deferred.push(DeferredHandle {
            raw,
            pending_on,
            lender,
        });
        let free = state.take_completed();
        drop(state);
        destroy(context, free);
    }

    pub(crate) fn destroy_completed(&self, context: &ContextInner) {
        let free = self.state().take_completed();
        destroy(context, free);
    }

    /// Destroys all that are left: the domain is being deallocated, so no queue pair is left.
    pub(crate) fn close(&mut self, context: &ContextInner) {
        let mut state = self.state();
        let left: Vec<_> = state.deferred.drain(..).collect();
        drop(state);
        destroy(context, left);
    }
}

/// Outside the list's lock: this calls the kernel, and drops lenders.
fn destroy(context: &ContextInner, handles: Vec<DeferredHandle>) {
    for DeferredHandle { raw, lender, .. } in handles {
        debug_assert_ne!(raw, ptr::null_mut());
        if lender.is_some() {
            continue;
        }
        // A library with ibv_create_ah also has ibv_destroy_ah.
        let Some(destroy_ah) = context.api.destroy_ah else {
            continue;
        };
        // SAFETY: created by this Api and destroyed once: it is in no list any more, and its last
        // owner is dropped. The device is done with all sends with it.
        if let Err(error) = check(unsafe { destroy_ah(raw) }) {
            tracing::error!(device = %context.name, %error, "ibv_destroy_ah failed; the address handle is leaked");
        }
    }
}
