//! What the table knows of memory of GPUs, and does with it for packets of UDP.

use std::sync::Arc;

use doorbell_roce_proto::memory::AccessError;

use super::{Object, Spot, Table};
use crate::gpu::{self, Failed};

impl Table {
    /// From now on what is written to memory of GPUs may wait for [`store`](Self::store).
    pub(crate) fn put_by(&mut self) {
        if self.knows_devices {
            self.ahead.put_by();
        }
    }

    /// How many writes have ever waited for [`store`](Self::store).
    pub(crate) fn count_put(&self) -> u64 {
        self.ahead.count()
    }

    /// Has what was written to memory of GPUs be there.
    pub(crate) fn store(&mut self) -> Result<(), Failed> {
        self.ahead.store()
    }

    /// Has what waits be there before memory is looked at or written otherwise: writes are seen in their order (IBTA vol 1, 9.5), wherever they go.
    pub(super) fn settle_put(&mut self) -> Result<(), AccessError> {
        if !self.ahead.puts_by() {
            return Ok(());
        }
        self.ahead.settle().map_err(|Failed| AccessError)
    }

    /// From now on memory of GPUs is read ahead, while nobody else may have it written; or it may be written from now on.
    pub(crate) fn read_ahead(&mut self, reads: bool) {
        if self.knows_devices {
            self.ahead.read_ahead(reads);
        }
    }

    /// The range of a GPU's memory, and where in it, that `spot` is, when there ever was any.
    pub(super) fn on_device(
        &self,
        spot: impl FnOnce(&Self) -> Result<Spot<'_>, AccessError>,
    ) -> Option<(gpu::Range, usize)> {
        if !self.knows_devices {
            return None;
        }
        match spot(self) {
            Ok(Spot::Device(range, at)) => Some((range.clone(), at)),
            _ => None,
        }
    }

    /// The memory of a region; none where there is no such.
    pub(crate) fn bounds(&self, key: u32) -> gpu::Bounds {
        let slot = self.slots.get((key >> 16) as usize).filter(|slot| slot.key == key);
        let (start, len) = match slot.map(|slot| &slot.object) {
            Some(Object::Region(region)) => (region.base.addr(), region.len as usize),
            _ => (0, 0),
        };
        gpu::Bounds { start, len }
    }

    /// The allocation of a GPU's memory in which a region lies.
    pub(crate) fn allocation(&self, key: u32) -> Option<&Arc<gpu::Allocation>> {
        let slot = self.slots.get((key >> 16) as usize).filter(|slot| slot.key == key)?;
        match &slot.object {
            Object::Region(region) => region.device.as_ref().map(|range| &range.allocation),
            _ => None,
        }
    }
}
