//! Registering, changing and deregistering the regions of the table, and its keys.

use std::mem;
use std::sync::Arc;

use doorbell_roce_proto::memory::PdId;

use super::{Object, Region, SharedBacking, Slot, Table};
use crate::capacity;
use crate::direct::{DirectRights, Place, PublishedRegion};
use crate::gpu;
use crate::links::shm_ring::segment::Segment;
use crate::memory::{HostRange, Rights, WindowsBound};

impl Table {
    /// Adds a region and returns its key; `None` when there are too many.
    pub(in crate::memory) fn add_region(&mut self, region: Region) -> Option<u32> {
        if self.regions == capacity::REGIONS {
            return None;
        }
        let is_device = region.device.is_some();
        let key = self.insert(Object::Region(region))?;
        self.has_device_memory |= is_device;
        self.regions += 1;
        self.publish(key);
        Some(key)
    }

    fn publish(&self, key: u32) {
        if let Some(published) = &self.published
            && let Some(region) = self.accessible(key)
        {
            let place = match &region.segment {
                Some(segment) => Place::Segment(segment.id(), 0),
                None => Place::Process(region.base.addr() as u64),
            };
            let region = PublishedRegion {
                pd: region.pd,
                rights: DirectRights::of(region.rights),
                iova: region.iova,
                len: region.len,
                place,
            };
            published.publish_region(key, &region);
        }
    }

    /// A region of the CPU's memory with a remote right.
    fn accessible(&self, key: u32) -> Option<&Region> {
        let region = self.region_of(key)?;
        (region.device.is_none() && DirectRights::of(region.rights).any()).then_some(region)
    }

    /// The segment to give to peers for direct access to a region, and whether to write.
    pub(crate) fn exposed_segment(&self, key: u32) -> Option<(Arc<Segment>, bool)> {
        let region = self.accessible(key)?;
        let segment = region.segment.as_ref()?;
        let writable = region.rights.remote_write || region.rights.remote_atomic;
        Some((Arc::clone(segment), writable))
    }

    /// Peers begin no direct access to the region from here on; those in progress may last.
    pub(crate) fn withdraw(&self, key: u32) {
        if let Some(published) = &self.published {
            published.withdraw_region(key);
        }
    }

    /// Removes a region, unbinds its windows, and returns what others may have mapped of it.
    pub(in crate::memory) fn remove(&mut self, key: u32) -> SharedBacking {
        self.withdraw(key);
        if let Some(index) = self.keys.find(key)
            && let Some(region) = self.region_of(key)
        {
            if region.windows > 0 {
                self.unbind_from(index);
            }
            self.regions -= 1;
            return match self.free(index) {
                Object::Region(region) => SharedBacking {
                    segment: region.segment,
                    allocation: region.device.map(|range| range.allocation),
                },
                _ => SharedBacking::default(),
            };
        }
        SharedBacking::default()
    }

    /// Fails while windows are bound. The slot stays taken until it is [removed](Self::remove).
    pub(in crate::memory) fn deregister(&mut self, key: u32) -> Result<(), WindowsBound> {
        if let Some(region) = self.region_mut(key) {
            if region.windows > 0 {
                return Err(WindowsBound);
            }
            // No address is inside, and no window can be bound.
            region.len = 0;
            region.rights = Rights::default();
        }
        self.withdraw(key);
        Ok(())
    }

    fn region_mut(&mut self, key: u32) -> Option<&mut Region> {
        let index = self.keys.find(key)?;
        let slot = self.slots.get_mut(usize::from(index)).filter(|slot| slot.key == key)?;
        match &mut slot.object {
            Object::Region(region) => Some(region),
            _ => None,
        }
    }

    /// The rights of a region; none without one.
    pub(in crate::memory) fn rights(&mut self, key: u32) -> Rights {
        self.region_mut(key).map_or(Rights::default(), |region| region.rights)
    }

    /// Changes a region that was [withdrawn](Self::withdraw), and publishes it again. Fails while
    /// windows are bound. Returns what others may have mapped, if that changed.
    pub(in crate::memory) fn change(
        &mut self,
        key: u32,
        range: Option<(HostRange, Option<gpu::Range>)>,
        pd: PdId,
        rights: Rights,
    ) -> Result<SharedBacking, WindowsBound> {
        let is_device = matches!(&range, Some((_, Some(_))));
        let Some(region) = self.region_mut(key) else {
            return Ok(SharedBacking::default());
        };
        if region.windows > 0 {
            self.publish(key);
            return Err(WindowsBound);
        }
        let mut before = SharedBacking::default();
        if let Some((range, device)) = range {
            // Of the same memory, the rights alone change.
            if (region.base, region.len) != (range.addr, range.len as u64) {
                before.segment = region.segment.take();
            }
            (region.base, region.len, region.iova) = (range.addr, range.len as u64, range.iova);
            before.allocation = mem::replace(&mut region.device, device).map(|range| range.allocation);
        }
        (region.pd, region.rights) = (pd, rights);
        self.has_device_memory |= is_device;
        self.publish(key);
        Ok(before)
    }

    pub(super) fn insert(&mut self, object: Object) -> Option<u32> {
        let index = match self.free.pop() {
            Some(index) => index,
            None => u16::try_from(self.slots.len()).ok()?,
        };
        let key = self.keys.take(index)?;
        let slot = Slot { key, object };
        match self.slots.get_mut(usize::from(index)) {
            Some(old) => *old = slot,
            None => self.slots.push(slot),
        }
        Some(key)
    }

    pub(super) fn free(&mut self, index: u16) -> Object {
        self.free.push(index);
        let slot = &mut self.slots[usize::from(index)];
        self.keys.free(slot.key);
        mem::replace(&mut slot.object, Object::Free)
    }
}
