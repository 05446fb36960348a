//! The table of memory regions, and the checks of key, domain, range and right (IBTA vol 1, 10.6).

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

use doorbell_roce_proto::memory::{AccessError, AtomicOp, Memory, PdId, RemoteRight, Sge};
use doorbell_roce_proto::{LKey, RKey};

use super::{Rights, copy};
use crate::capacity;

/// A registered range.
#[derive(Debug)]
pub(crate) struct Region {
    base: *mut u8,
    len: u64,
    iova: u64,
    pd: PdId,
    rights: Rights,
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
        }
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
struct Slot {
    key: u32,
    region: Option<Region>,
}

/// The regions of a device. A key is the index of its slot in the upper 16 bits, and below them a tag that nobody can predict, new for each
/// registration.
#[derive(Debug)]
pub(crate) struct Table {
    slots: Vec<Slot>,
    free: Vec<u16>,
    tags: RandomState,
    registrations: u64,
}

impl Table {
    pub(crate) fn new() -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            tags: RandomState::new(),
            registrations: 0,
        }
    }

    /// Adds a region and gives its key; `None` when the table is full.
    pub(super) fn insert(&mut self, region: Region) -> Option<u32> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.slots.len() < capacity::REGIONS => self.slots.len() as u16,
            None => return None,
        };
        self.registrations += 1;
        let tag = self.tags.hash_one(self.registrations) as u16;
        // Never 0: some programs take a key of 0 for none.
        let key = u32::from(index) << 16 | u32::from(tag.max(1));
        let slot = Slot {
            key,
            region: Some(region),
        };
        match self.slots.get_mut(usize::from(index)) {
            Some(old) => *old = slot,
            None => self.slots.push(slot),
        }
        Some(key)
    }

    /// Takes a region out.
    pub(super) fn remove(&mut self, key: u32) {
        let index = (key >> 16) as u16;
        if let Some(slot) = self.slots.get_mut(usize::from(index))
            && slot.key == key
            && slot.region.take().is_some()
        {
            self.free.push(index);
        }
    }

    fn region(&self, pd: PdId, key: u32) -> Result<&Region, AccessError> {
        let slot = self.slots.get((key >> 16) as usize).filter(|slot| slot.key == key);
        let region = slot.and_then(|slot| slot.region.as_ref());
        region.filter(|region| region.pd == pd).ok_or(AccessError)
    }

    fn local(&self, pd: PdId, key: LKey, addr: u64, len: usize, write: bool) -> Result<*mut u8, AccessError> {
        let region = self.region(pd, key.0)?;
        if write && !region.rights.local_write {
            return Err(AccessError);
        }
        region.locate(addr, len as u64)
    }

    fn remote(&self, pd: PdId, key: RKey, addr: u64, len: u64, right: RemoteRight) -> Result<*mut u8, AccessError> {
        let region = self.region(pd, key.0)?;
        if !region.grants(right) {
            return Err(AccessError);
        }
        region.locate(addr, len)
    }
}

impl Memory for Table {
    fn gather(&mut self, pd: PdId, lkey: LKey, addr: u64, dst: &mut [u8]) -> Result<(), AccessError> {
        if dst.is_empty() {
            return Ok(());
        }
        let src = self.local(pd, lkey, addr, dst.len(), false)?;
        // SAFETY: inside a region, thus readable; `dst` is the device's own memory, never registered.
        unsafe { copy::from(src, dst) };
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
        let dst = self.local(pd, lkey, addr, src.len(), true)?;
        // SAFETY: inside a region with LOCAL_WRITE, thus writable; `src` is the device's own memory.
        unsafe { copy::to_peer_visible(src, dst) };
        Ok(())
    }

    fn check_remote(
        &mut self,
        pd: PdId,
        rkey: RKey,
        addr: u64,
        len: u64,
        right: RemoteRight,
    ) -> Result<(), AccessError> {
        if len == 0 {
            return Ok(());
        }
        self.remote(pd, rkey, addr, len, right).map(drop)
    }

    fn remote_read(&mut self, pd: PdId, rkey: RKey, addr: u64, dst: &mut [u8]) -> Result<(), AccessError> {
        if dst.is_empty() {
            return Ok(());
        }
        let src = self.remote(pd, rkey, addr, dst.len() as u64, RemoteRight::Read)?;
        // SAFETY: as in `gather`.
        unsafe { copy::from(src, dst) };
        Ok(())
    }

    fn remote_write(&mut self, pd: PdId, rkey: RKey, addr: u64, src: &[u8]) -> Result<(), AccessError> {
        if src.is_empty() {
            return Ok(());
        }
        let dst = self.remote(pd, rkey, addr, src.len() as u64, RemoteRight::Write)?;
        // SAFETY: inside a region with REMOTE_WRITE, which registration grants only with LOCAL_WRITE, thus writable; `src` is the device's own.
        unsafe { copy::to_peer_visible(src, dst) };
        Ok(())
    }

    fn remote_atomic(&mut self, pd: PdId, rkey: RKey, addr: u64, op: AtomicOp) -> Result<u64, AccessError> {
        let word = self.remote(pd, rkey, addr, 8, RemoteRight::Atomic)?;
        // The engine checked the address; with an I/O virtual address of its own, the memory may lie otherwise.
        if !word.addr().is_multiple_of(8) {
            return Err(AccessError);
        }
        // SAFETY: eight bytes inside a region with REMOTE_ATOMIC, which needs LOCAL_WRITE: readable and writable; aligned as checked.
        Ok(unsafe { copy::atomic(word, op) })
    }
}

#[cfg(test)]
mod tests;
