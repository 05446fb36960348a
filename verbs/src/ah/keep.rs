//! Keeps address handles that were dropped until the device is done with them.
//!
//! An address handle must not be destroyed before the completions of all sends with it have been polled (ibv_post_send(3)): some devices copy the address when posting,
//! others refer to it. To count the sends of each handle would cost every one of them something. Instead a handle that is dropped is kept until every queue
//! pair of its protection domain that sends datagrams has retired all that it had posted by then, or is gone: which sends were with it does not matter.

use core::ptr;
use std::sync::Arc;

use doorbell_verbs_sys as sys;

use crate::context::ContextInner;
use crate::error::check;
use crate::qp::Ring;
use crate::raw::Lender;
use crate::sync::{self, Mutex, MutexGuard};

/// What a protection domain knows of its address handles.
#[derive(Default)]
pub(crate) struct Handles {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The send queues that address handles may be in flight on.
    senders: Vec<Arc<Ring>>,
    kept: Vec<Kept>,
}

/// A handle that was dropped, and the queues that may still need it, each until it has retired so many requests.
struct Kept {
    raw: *mut sys::ibv_ah,
    needed: Vec<(Arc<Ring>, u64)>,
    lender: Lender,
}

// SAFETY: `raw` is only passed to verbs, which may be called from any thread; a ring is Send and Sync.
unsafe impl Send for State {}

impl State {
    /// Takes out the handles that nothing needs any more.
    fn take_free(&mut self) -> Vec<Kept> {
        for kept in &mut self.kept {
            kept.needed.retain(|(ring, posted)| ring.retired() < *posted);
        }
        self.kept.extract_if(.., |kept| kept.needed.is_empty()).collect()
    }
}

impl Handles {
    fn state(&self) -> MutexGuard<'_, State> {
        sync::lock(&self.state)
    }

    /// A queue pair that sends datagrams has been made, with this send queue.
    pub(crate) fn enlist(&self, ring: &Arc<Ring>) {
        self.state().senders.push(Arc::clone(ring));
    }

    /// The queue pair with this send queue has been destroyed: it needs no handle any more.
    pub(crate) fn dismiss(&self, context: &ContextInner, ring: &Arc<Ring>) {
        let mut state = self.state();
        let before = state.senders.len();
        state.senders.retain(|sender| !Arc::ptr_eq(sender, ring));
        if state.senders.len() == before {
            return;
        }
        for kept in &mut state.kept {
            kept.needed.retain(|(needed_by, _)| !Arc::ptr_eq(needed_by, ring));
        }
        let free = state.take_free();
        drop(state);
        destroy(context, free);
    }

    /// Destroys `raw` now, if nothing needs it, or else later; or lets go of its lender then.
    ///
    /// # Safety
    /// It was made in this domain, and no post with it is under way or follows.
    pub(crate) unsafe fn retire(&self, context: &ContextInner, raw: *mut sys::ibv_ah, lender: Lender) {
        let mut state = self.state();
        let needed = state
            .senders
            .iter()
            .filter(|ring| ring.in_flight() != 0)
            .map(|ring| (Arc::clone(ring), ring.posted()))
            .collect();
        state.kept.push(Kept { raw, needed, lender });
        let free = state.take_free();
        drop(state);
        destroy(context, free);
    }

    /// Destroys those kept that nothing needs any more.
    pub(crate) fn sweep(&self, context: &ContextInner) {
        let free = self.state().take_free();
        destroy(context, free);
    }

    /// Destroys all that are left: the domain is about to go, and with it no queue pair is left.
    pub(crate) fn close(&mut self, context: &ContextInner) {
        let mut state = self.state();
        let left: Vec<_> = state.kept.drain(..).collect();
        drop(state);
        destroy(context, left);
    }
}

/// Destroys handles that were taken out of a domain's list. Outside its lock: these are calls of the kernel, and of whoever lent them.
fn destroy(context: &ContextInner, handles: Vec<Kept>) {
    for Kept { raw, lender, .. } in handles {
        debug_assert_ne!(raw, ptr::null_mut());
        if lender.is_some() {
            continue;
        }
        // A library that makes them destroys them.
        let Some(destroy_ah) = context.api.destroy_ah else {
            continue;
        };
        // SAFETY: made by this Api and destroyed once: it is in no list any more, and its last owner is gone. The device is done with all sends with it.
        if let Err(error) = check(unsafe { destroy_ah(raw) }) {
            tracing::error!(device = %context.name, %error, "ibv_destroy_ah failed; the address handle is leaked");
        }
    }
}
