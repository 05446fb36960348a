//! GPU memory that other processes share, imported to copy from it.

use doorbell_roce_proto::qp::LinkId;

use super::Copies;
use crate::gpu::{Handle, Memory, local_allocation};
use crate::links::shm_ring::segment::SegmentId;

#[derive(Debug)]
pub(super) struct Import {
    handle: Handle,
    len: usize,
    /// One mapping for each device that copies from it; the first also for copies to the host.
    mapped: Vec<Memory>,
}

impl Copies {
    /// Whether the `len` bytes can be copied from.
    pub(crate) fn add_import(&mut self, link: LinkId, id: SegmentId, handle: Handle, len: usize) -> bool {
        match Memory::import(&handle, len, None) {
            Ok(Some(memory)) => {
                let mapped = vec![memory];
                self.imports.insert((link, id), Import { handle, len, mapped });
                true
            }
            Ok(None) => false,
            Err(error) => {
                tracing::warn!(
                    "GPU memory of another process cannot be imported, and is copied through the host: {error}"
                );
                false
            }
        }
    }

    /// The same of one of this process's own allocations.
    pub(crate) fn add_local(&mut self, link: LinkId, id: SegmentId) -> bool {
        let Some(memory) = local_allocation(id) else {
            return false;
        };
        let import = Import {
            handle: Handle::Ipc([0; 64]),
            len: memory.len(),
            mapped: vec![memory],
        };
        self.imports.insert((link, id), import);
        true
    }

    pub(crate) fn remove_import(&mut self, link: LinkId, id: SegmentId) {
        self.imports.remove(&(link, id));
    }

    pub(crate) fn remove_imports(&mut self, link: LinkId) {
        self.imports.retain(|(of, _), _| *of != link);
    }

    /// The allocation that a record names, for copies on a device.
    pub(super) fn imported(&mut self, link: LinkId, id: SegmentId, device: Option<usize>) -> Option<Memory> {
        if self.loopback == Some(link) {
            return local_allocation(id);
        }
        let import = self.imports.get_mut(&(link, id))?;
        let fits = |memory: &&Memory| device.is_none_or(|device| memory.device() == device);
        if let Some(memory) = import.mapped.iter().find(fits) {
            return Some(memory.clone());
        }
        if let Some(own) = local_allocation(id)
            && import.mapped.first().is_some_and(|memory| memory.is(&own))
        {
            // The driver copies between any two devices of one process.
            return Some(own);
        }
        match Memory::import(&import.handle, import.len, device) {
            Ok(Some(memory)) => {
                import.mapped.push(memory.clone());
                Some(memory)
            }
            Ok(None) => None,
            Err(error) => {
                tracing::warn!("GPU memory of another process cannot be imported: {error}");
                None
            }
        }
    }
}
