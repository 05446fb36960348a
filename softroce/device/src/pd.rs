//! Protection domains: which memory a queue pair may access.

use std::sync::Arc;

use doorbell_roce_proto::memory::PdId;

use crate::device::{Device, LimitError};

/// A protection domain (ibv_alloc_pd(3)). Clones name the same one.
#[derive(Clone, Debug)]
pub struct Pd(Arc<PdHandle>);

#[derive(Debug)]
struct PdHandle {
    device: Arc<Device>,
    id: PdId,
    /// Of a parent domain: the one whose identity it has, which it keeps allocated.
    of: Option<Pd>,
}

impl Device {
    /// A new protection domain.
    ///
    /// # Errors
    /// When the device has no more.
    pub fn protection_domain(self: &Arc<Self>) -> Result<Pd, LimitError> {
        let id = self
            .shared()
            .core
            .lock()
            .objects
            .add_pd()
            .ok_or(LimitError::Exhausted)?;
        Ok(Pd(Arc::new(PdHandle {
            device: Arc::clone(self),
            id,
            of: None,
        })))
    }
}

impl Pd {
    /// Its device.
    pub fn device(&self) -> &Arc<Device> {
        &self.0.device
    }

    /// A parent domain (ibv_alloc_parent_domain(3)): the same domain, with users of its own.
    pub fn parent_domain(&self) -> Self {
        Self(Arc::new(PdHandle {
            device: Arc::clone(self.device()),
            id: self.id(),
            of: Some(self.clone()),
        }))
    }

    /// Whether anything else, such as a memory region or a queue pair, holds this domain.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    pub(crate) fn id(&self) -> PdId {
        self.0.id
    }
}

impl Drop for PdHandle {
    fn drop(&mut self) {
        if self.of.is_none() {
            self.device.shared().core.lock().objects.remove_pd();
        }
    }
}
