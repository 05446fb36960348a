//! Handles of communicators: numbers that are assigned once, so that one that was destroyed, or
//! never was, is recognized without reading through it.

use std::collections::BTreeMap;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use crate::abi::Opaque;
use crate::communicator::Communicator;
use crate::failure::Failure;

static LIVE: RwLock<BTreeMap<usize, Arc<Communicator>>> = RwLock::new(BTreeMap::new());
/// Not in the first page, as a null pointer with an offset would be.
static NEXT: AtomicUsize = AtomicUsize::new(0xd00b_0000);
const STEP: usize = 16;

pub(crate) fn insert(communicator: Arc<Communicator>) -> Opaque {
    let handle = NEXT.fetch_add(STEP, Ordering::Relaxed);
    let mut live = LIVE.write().unwrap_or_else(PoisonError::into_inner);
    live.insert(handle, communicator);
    ptr::without_provenance_mut(handle)
}

pub(crate) fn get(handle: Opaque) -> Result<Arc<Communicator>, Failure> {
    let live = LIVE.read().unwrap_or_else(PoisonError::into_inner);
    live.get(&handle.addr()).cloned().ok_or_else(|| unknown(handle))
}

pub(crate) fn remove(handle: Opaque) -> Result<Arc<Communicator>, Failure> {
    let mut live = LIVE.write().unwrap_or_else(PoisonError::into_inner);
    live.remove(&handle.addr()).ok_or_else(|| unknown(handle))
}

fn unknown(handle: Opaque) -> Failure {
    Failure::invalid_argument(match handle.is_null() {
        true => "the communicator is NULL",
        false => "this is no communicator, or one that was destroyed or aborted",
    })
}
