//! Memory windows as objects. Binding and invalidating are work requests, performed by the table.

use doorbell_roce_proto::RKey;

use crate::capacity;
use crate::device::{Device, LimitError};
use crate::pd::Pd;
use std::sync::Arc;

/// Windows are bound to the region (`EBUSY`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("memory windows are bound to the memory region")]
pub struct WindowsBound;

/// The type of a memory window (IBTA vol 1, 10.6.7.2).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum WindowKind {
    /// Type 1: usable by all queue pairs of its domain, and rebound without invalidation.
    One,
    /// Type 2B: usable by the queue pair that bound it; the owner or the peer may invalidate it.
    /// The consumer chooses the lower 8 bits of its keys.
    Two,
}

/// A memory window (ibv_alloc_mw(3)). Dropping it unbinds it.
#[derive(Debug)]
pub struct Mw {
    pd: Pd,
    key: u32,
}

impl Pd {
    /// An unbound window.
    ///
    /// # Errors
    /// When the device has [`capacity::WINDOWS`] already.
    pub fn window(&self, kind: WindowKind) -> Result<Mw, LimitError> {
        let mut core = self.device().shared().core.lock();
        let key = core.memory.add_window(self.id(), kind).ok_or(LimitError::Exhausted)?;
        drop(core);
        Ok(Mw { pd: self.clone(), key })
    }
}

impl Mw {
    /// The initial key; each binding gives it another one.
    pub fn initial_rkey(&self) -> RKey {
        RKey(self.key)
    }

    /// Whether this may be a key of the window: all bits but the lower 8 match.
    pub fn owns(&self, rkey: RKey) -> bool {
        rkey.0 >> 8 == self.key >> 8
    }

    /// Its device.
    pub fn device(&self) -> &Arc<Device> {
        self.pd.device()
    }
}

impl Drop for Mw {
    fn drop(&mut self) {
        self.device().shared().core.lock().memory.remove_window(self.key);
    }
}

const _: () = assert!(capacity::REGIONS + capacity::WINDOWS <= 1 << 16);
