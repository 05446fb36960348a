//! Memory windows as objects. Binding and invalidating are work requests of a queue pair; what they do is in the table.

use doorbell_roce_proto::RKey;

use crate::capacity;
use crate::device::{Device, LimitError};
use crate::pd::Pd;
use std::sync::Arc;

/// Windows are bound to the region (`EBUSY`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("memory windows are bound to the memory region")]
pub struct Bound;

/// The type of a memory window (IBTA vol 1, 10.6.7.2).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum WindowKind {
    /// Type 1: good for every queue pair of its protection domain; bound again without being invalidated first, and by binding only.
    One,
    /// Type 2B: good for the queue pair that bound it, which its owner or the peer may invalidate. Its keys are the consumer's choice, as far as the lower 8 bits go.
    Two,
}

/// A memory window (ibv_alloc_mw(3)). Dropping it takes what is bound away.
#[derive(Debug)]
pub struct Mw {
    pd: Pd,
    /// The key it was made with.
    key: u32,
}

impl Pd {
    /// A window that is bound to nothing.
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
    /// The key it was made with; each binding gives it another one.
    pub fn first_rkey(&self) -> RKey {
        RKey(self.key)
    }

    /// Whether this may be a key of the window: all bits but the lower 8 are its own.
    pub fn owns(&self, rkey: RKey) -> bool {
        rkey.0 >> 8 == self.key >> 8
    }

    /// The device it is of.
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
