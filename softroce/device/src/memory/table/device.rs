//! GPU memory in the table, and its staging for UDP packets.

use std::sync::Arc;

use doorbell_roce_proto::memory::AccessError;

use super::{Location, Table};
use crate::gpu::{self, Failed, UdpPinned};

impl Table {
    /// Stages writes to GPU memory until [`end_write_behind`](Self::end_write_behind).
    pub(crate) fn begin_write_behind(&mut self) {
        if self.has_device_memory {
            self.udp_staging.begin_write_behind();
        }
    }

    /// Uses `pinned` memory for staging, unless there is some.
    pub(crate) fn prepare_udp_staging(&mut self, pinned: Option<UdpPinned>) {
        if let Some(pinned) = pinned {
            self.udp_staging.prepare(pinned);
        }
    }

    pub(crate) fn staged_write_count(&self) -> u64 {
        self.udp_staging.write_count()
    }

    pub(crate) fn end_write_behind(&mut self) -> Result<(), Failed> {
        self.udp_staging.end_write_behind()
    }

    /// Called before other accesses: writes become visible in order (IBTA vol 1, 9.5).
    pub(super) fn flush_staged_writes(&mut self) -> Result<(), AccessError> {
        if !self.udp_staging.is_write_behind() {
            return Ok(());
        }
        self.udp_staging.flush().map_err(|Failed| AccessError)
    }

    /// Enables read-ahead from GPU memory, while its content may not change; or disables it.
    pub(crate) fn set_read_ahead(&mut self, reads: bool) {
        if self.has_device_memory {
            self.udp_staging.set_read_ahead(reads);
        }
    }

    /// The GPU memory range and the offset in it of `location`, if any was ever registered.
    pub(super) fn on_device(
        &self,
        location: impl FnOnce(&Self) -> Result<Location<'_>, AccessError>,
    ) -> Option<(gpu::Range, usize)> {
        if !self.has_device_memory {
            return None;
        }
        match location(self) {
            Ok(Location::Device(range, at)) => Some((range.clone(), at)),
            _ => None,
        }
    }

    /// The memory bounds of a region; empty without one.
    pub(crate) fn bounds(&self, key: u32) -> gpu::Bounds {
        let region = self.region_of(key);
        let (start, len) = region.map_or((0, 0), |region| (region.base.addr(), region.len as usize));
        gpu::Bounds { start, len }
    }

    pub(crate) fn allocation(&self, key: u32) -> Option<&Arc<gpu::Allocation>> {
        let range = self.region_of(key)?.device.as_ref()?;
        Some(&range.allocation)
    }
}
