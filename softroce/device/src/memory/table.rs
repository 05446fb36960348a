//! The table of memory regions and windows, and the checks of key, domain, range and right (IBTA vol 1, 10.6).

mod window;

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::ptr;

use doorbell_roce_proto::memory::{AccessError, AtomicOp, Bind, Invalidator, Memory, PdId, RemoteRight, Sge, Via};
use doorbell_roce_proto::{LKey, RKey};

use self::window::Window;
use super::{Bound, HostRange, Rights, copy};
use crate::capacity;

/// A registered range.
#[derive(Debug)]
pub(crate) struct Region {
    /// Null for a region of no memory.
    base: *mut u8,
    len: u64,
    iova: u64,
    pd: PdId,
    rights: Rights,
    /// How many windows are bound to it.
    windows: usize,
}

// SAFETY: whoever registered it promised memory that stays mapped until the region is dropped, for the whole process: the pointer is as good on
// one thread as on another, and is used only through `&mut Table`, by one thread at a time.
unsafe impl Send for Region {}

impl Region {
    /// A region of `len` bytes at `base`. That they are usable until it is dropped is the promise made to [`Pd::register`](crate::Pd::register).
    pub(super) fn new(base: *mut u8, len: u64, iova: u64, pd: PdId, rights: Rights) -> Self {
        Self {
            base,
            len,
            iova,
            pd,
            rights,
            windows: 0,
        }
    }

    /// A region of every address and no memory, for local use.
    pub(super) fn null(pd: PdId) -> Self {
        let rights = Rights {
            local_write: true,
            ..Rights::default()
        };
        Self::new(ptr::null_mut(), u64::MAX, 0, pd, rights)
    }

    /// Where `len` bytes at `addr` lie, when they lie inside.
    fn locate(&self, addr: u64, len: u64) -> Result<*mut u8, AccessError> {
        let offset = addr.checked_sub(self.iova).ok_or(AccessError)?;
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(AccessError);
        }
        // Below `self.len`, which came from a usize.
        Ok(self.base.wrapping_add(offset as usize))
    }

    fn grants(&self, right: RemoteRight) -> bool {
        match right {
            RemoteRight::Read => self.rights.remote_read,
            RemoteRight::Write => self.rights.remote_write,
            RemoteRight::Atomic => self.rights.remote_atomic,
        }
    }
}

#[derive(Debug)]
enum Object {
    Nothing,
    Region(Region),
    Window(Window),
}

#[derive(Debug)]
struct Slot {
    key: u32,
    object: Object,
}

/// The regions and windows of a device. A key is the index of its slot in the upper 16 bits, and below them a tag that nobody can predict, new for each
/// registration. Of a window's key the lower 8 bits are the consumer's, new for each binding.
#[derive(Debug)]
pub(crate) struct Table {
    slots: Vec<Slot>,
    free: Vec<u16>,
    tags: RandomState,
    registrations: u64,
    regions: usize,
    windows: usize,
    /// How many of the windows are bound.
    bindings: usize,
}

impl Table {
    pub(crate) fn new() -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            tags: RandomState::new(),
            registrations: 0,
            regions: 0,
            windows: 0,
            bindings: 0,
        }
    }

    /// Adds a region and gives its key; `None` when there are too many.
    pub(super) fn add_region(&mut self, region: Region) -> Option<u32> {
        if self.regions == capacity::REGIONS {
            return None;
        }
        let key = self.insert(Object::Region(region))?;
        self.regions += 1;
        Some(key)
    }

    /// Takes a region out, and unbinds what windows are bound to it.
    pub(super) fn remove(&mut self, key: u32) {
        let index = (key >> 16) as u16;
        if let Some(Slot {
            object: Object::Region(region),
            ..
        }) = self.slots.get(usize::from(index)).filter(|slot| slot.key == key)
        {
            if region.windows > 0 {
                self.unbind_from(index);
            }
            self.free(index);
            self.regions -= 1;
        }
    }

    /// Takes the region's memory away, unless windows are bound to it. The slot is its owner's until it is [removed](Self::remove).
    pub(super) fn deregister(&mut self, key: u32) -> Result<(), Bound> {
        let slot = self.slots.get_mut((key >> 16) as usize).filter(|slot| slot.key == key);
        if let Some(Slot {
            object: Object::Region(region),
            ..
        }) = slot
        {
            if region.windows > 0 {
                return Err(Bound);
            }
            // No address is inside, and no window can be bound.
            region.len = 0;
            region.rights = Rights::default();
        }
        Ok(())
    }

    fn region_mut(&mut self, key: u32) -> Option<&mut Region> {
        let slot = self
            .slots
            .get_mut((key >> 16) as usize)
            .filter(|slot| slot.key == key)?;
        match &mut slot.object {
            Object::Region(region) => Some(region),
            _ => None,
        }
    }

    /// The rights of a region; none of what is none.
    pub(super) fn rights(&mut self, key: u32) -> Rights {
        self.region_mut(key).map_or(Rights::default(), |region| region.rights)
    }

    /// Gives a region another domain, other rights, and other memory when `range` says so, unless windows are bound to it.
    pub(super) fn change(&mut self, key: u32, range: Option<HostRange>, pd: PdId, rights: Rights) -> Result<(), Bound> {
        let Some(region) = self.region_mut(key) else {
            return Ok(());
        };
        if region.windows > 0 {
            return Err(Bound);
        }
        if let Some(range) = range {
            (region.base, region.len, region.iova) = (range.addr, range.len as u64, range.iova);
        }
        (region.pd, region.rights) = (pd, rights);
        Ok(())
    }

    fn insert(&mut self, object: Object) -> Option<u32> {
        let index = match self.free.pop() {
            Some(index) => index,
            None => u16::try_from(self.slots.len()).ok()?,
        };
        self.registrations += 1;
        let tag = self.tags.hash_one(self.registrations) as u16;
        // Never 0, whatever a window's lower 8 bits are: some programs take a key of 0 for none.
        let key = u32::from(index) << 16 | u32::from(tag.max(0x100));
        let slot = Slot { key, object };
        match self.slots.get_mut(usize::from(index)) {
            Some(old) => *old = slot,
            None => self.slots.push(slot),
        }
        Some(key)
    }

    fn free(&mut self, index: u16) {
        self.slots[usize::from(index)].object = Object::Nothing;
        self.free.push(index);
    }

    fn region(&self, pd: PdId, key: u32) -> Result<&Region, AccessError> {
        let slot = self.slots.get((key >> 16) as usize).filter(|slot| slot.key == key);
        match slot.map(|slot| &slot.object) {
            Some(Object::Region(region)) if region.pd == pd => Ok(region),
            _ => Err(AccessError),
        }
    }

    /// Where a local range is; `None` when it is of no memory.
    fn local(&self, pd: PdId, key: LKey, addr: u64, len: usize, write: bool) -> Result<Option<*mut u8>, AccessError> {
        let region = self.region(pd, key.0)?;
        if write && !region.rights.local_write {
            return Err(AccessError);
        }
        let place = region.locate(addr, len as u64)?;
        Ok((!region.base.is_null()).then_some(place))
    }

    fn remote(&self, via: Via, key: RKey, addr: u64, len: u64, right: RemoteRight) -> Result<*mut u8, AccessError> {
        let slot = self.slots.get((key.0 >> 16) as usize).filter(|slot| slot.key == key.0);
        match slot.map(|slot| &slot.object) {
            Some(Object::Region(region)) if region.pd == via.pd && region.grants(right) => region.locate(addr, len),
            Some(Object::Window(window)) => {
                let (index, addr) = window.translate(via, addr, len, right)?;
                match self.slots.get(usize::from(index)).map(|slot| &slot.object) {
                    Some(Object::Region(region)) => region.locate(addr, len),
                    _ => Err(AccessError),
                }
            }
            _ => Err(AccessError),
        }
    }
}

impl Memory for Table {
    fn gather(&mut self, pd: PdId, lkey: LKey, addr: u64, dst: &mut [u8]) -> Result<(), AccessError> {
        if dst.is_empty() {
            return Ok(());
        }
        match self.local(pd, lkey, addr, dst.len(), false)? {
            // SAFETY: inside a region, thus readable; `dst` is the device's own memory, never registered.
            Some(src) => unsafe { copy::from(src, dst) },
            None => dst.fill(0),
        }
        Ok(())
    }

    fn check_local(&mut self, pd: PdId, sge: &Sge, write: bool) -> Result<(), AccessError> {
        if sge.len == 0 {
            return Ok(());
        }
        self.local(pd, sge.lkey, sge.addr, sge.len as usize, write).map(drop)
    }

    fn scatter(&mut self, pd: PdId, lkey: LKey, addr: u64, src: &[u8]) -> Result<(), AccessError> {
        if src.is_empty() {
            return Ok(());
        }
        if let Some(dst) = self.local(pd, lkey, addr, src.len(), true)? {
            // SAFETY: inside a region with LOCAL_WRITE, thus writable; `src` is the device's own memory.
            unsafe { copy::to_peer_visible(src, dst) };
        }
        Ok(())
    }

    fn check_remote(
        &mut self,
        via: Via,
        rkey: RKey,
        addr: u64,
        len: u64,
        right: RemoteRight,
    ) -> Result<(), AccessError> {
        if len == 0 {
            return Ok(());
        }
        self.remote(via, rkey, addr, len, right).map(drop)
    }

    fn remote_read(&mut self, via: Via, rkey: RKey, addr: u64, dst: &mut [u8]) -> Result<(), AccessError> {
        if dst.is_empty() {
            return Ok(());
        }
        let src = self.remote(via, rkey, addr, dst.len() as u64, RemoteRight::Read)?;
        // SAFETY: as in `gather`.
        unsafe { copy::from(src, dst) };
        Ok(())
    }

    fn remote_write(&mut self, via: Via, rkey: RKey, addr: u64, src: &[u8]) -> Result<(), AccessError> {
        if src.is_empty() {
            return Ok(());
        }
        let dst = self.remote(via, rkey, addr, src.len() as u64, RemoteRight::Write)?;
        // SAFETY: inside a region with REMOTE_WRITE, or a window with it; registration and binding grant that only with LOCAL_WRITE, thus writable; `src` is the
        // device's own.
        unsafe { copy::to_peer_visible(src, dst) };
        Ok(())
    }

    fn remote_atomic(&mut self, via: Via, rkey: RKey, addr: u64, op: AtomicOp) -> Result<u64, AccessError> {
        let word = self.remote(via, rkey, addr, 8, RemoteRight::Atomic)?;
        // The engine checked the address; with an I/O virtual address of its own, the memory may lie otherwise.
        if !word.addr().is_multiple_of(8) {
            return Err(AccessError);
        }
        // SAFETY: eight bytes inside a region or window with REMOTE_ATOMIC, which needs LOCAL_WRITE: readable and writable; aligned as checked.
        Ok(unsafe { copy::atomic(word, op) })
    }

    fn bind(&mut self, via: Via, bind: &Bind) -> Result<(), AccessError> {
        self.bind_window(via, bind)
    }

    fn invalidate(&mut self, via: Via, rkey: RKey, by: Invalidator) -> Result<(), AccessError> {
        self.invalidate_window(via, rkey, by)
    }
}

#[cfg(test)]
mod tests;
