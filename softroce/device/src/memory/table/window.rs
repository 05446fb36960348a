//! Memory windows in the table: binding, invalidating and access (IBTA vol 1, 10.6.7.2). Windows
//! share the table's slots with regions, so that no key is ever both; a bound region cannot be
//! deregistered.

use doorbell_roce_proto::memory::{AccessContext, AccessError, Bind, Invalidator, PdId, RemoteRight};
use doorbell_roce_proto::qp::RemoteAccess;
use doorbell_roce_proto::{Qpn, RKey};

use super::{Object, Slot, Table};
use crate::capacity;
use crate::memory::WindowKind;

#[derive(Debug)]
pub(super) struct Window {
    pd: PdId,
    kind: WindowKind,
    bound: Option<Binding>,
}

#[derive(Clone, Copy, Debug)]
struct Binding {
    /// The slot of the region, which outlives the binding.
    region: u16,
    /// The first byte, as an address of the region.
    start: u64,
    len: u64,
    access: RemoteAccess,
    zero_based: bool,
    qpn: Qpn,
}

impl Window {
    /// The slot of the bound region, for a peer of this queue pair.
    pub(super) fn region(&self, via: AccessContext) -> Option<u16> {
        let bound = self.bound.as_ref()?;
        let ours = match self.kind {
            WindowKind::One => self.pd == via.pd,
            WindowKind::Two => bound.qpn == via.qpn,
        };
        ours.then_some(bound.region)
    }

    /// The slot of the region and the address in it, if the window permits the access.
    pub(super) fn translate(
        &self,
        via: AccessContext,
        addr: u64,
        len: u64,
        right: RemoteRight,
    ) -> Result<(u16, u64), AccessError> {
        let bound = self.bound.as_ref().ok_or(AccessError)?;
        let ours = match self.kind {
            WindowKind::One => self.pd == via.pd,
            WindowKind::Two => bound.qpn == via.qpn,
        };
        let granted = match right {
            RemoteRight::Read => bound.access.read,
            RemoteRight::Write => bound.access.write,
            RemoteRight::Atomic => bound.access.atomic,
        };
        let offset = if bound.zero_based {
            addr
        } else {
            addr.checked_sub(bound.start).ok_or(AccessError)?
        };
        let inside = offset.checked_add(len).is_some_and(|end| end <= bound.len);
        if ours && granted && inside {
            // Within the region, whose range does not wrap.
            Ok((bound.region, bound.start + offset))
        } else {
            Err(AccessError)
        }
    }
}

impl Table {
    /// Adds a window and returns its key; `None` when there are too many.
    pub(in crate::memory) fn add_window(&mut self, pd: PdId, kind: WindowKind) -> Option<u32> {
        if self.windows == capacity::WINDOWS {
            return None;
        }
        let bound = None;
        let key = self.insert(Object::Window(Window { pd, kind, bound }))?;
        self.windows += 1;
        Some(key)
    }

    /// Removes a window, whatever its current key.
    pub(in crate::memory) fn remove_window(&mut self, key: u32) {
        if let Some(index) = self.keys.find(key)
            && self.window(key).is_some()
        {
            self.unbind(index);
            self.free(index);
            self.windows -= 1;
        }
    }

    /// A queue pair is destroyed or reset: unbinds the windows of type 2 that it bound.
    pub(crate) fn release_windows_of(&mut self, qpn: Qpn) {
        self.unbind_where(|kind, bound| kind == WindowKind::Two && bound.qpn == qpn);
    }

    pub(super) fn unbind_from(&mut self, index: u16) {
        self.unbind_where(|_, bound| bound.region == index);
    }

    fn unbind_where(&mut self, which: impl Fn(WindowKind, &Binding) -> bool) {
        if self.bindings == 0 {
            return;
        }
        for index in 0..self.slots.len() {
            if let Object::Window(Window {
                kind,
                bound: Some(bound),
                ..
            }) = &self.slots[index].object
                && which(*kind, bound)
            {
                // The table has no more slots than a u16 counts.
                self.unbind(index as u16);
            }
        }
    }

    /// The window of a key, whatever the key's lower 8 bits.
    fn window(&mut self, key: u32) -> Option<&mut Window> {
        let index = self.keys.find(key)?;
        let slot = self.slots.get_mut(usize::from(index))?;
        match &mut slot.object {
            Object::Window(window) if slot.key >> 8 == key >> 8 => Some(window),
            _ => None,
        }
    }

    fn unbind(&mut self, index: u16) {
        let Some(Object::Window(window)) = self.slots.get_mut(usize::from(index)).map(|slot| &mut slot.object) else {
            return;
        };
        let Some(bound) = window.bound.take() else {
            return;
        };
        self.bindings -= 1;
        if let Some(Slot {
            key,
            object: Object::Region(region),
        }) = self.slots.get_mut(usize::from(bound.region))
        {
            region.windows -= 1;
            self.revoked_regions.push(*key);
        }
    }

    /// As [`Memory::bind`](doorbell_roce_proto::memory::Memory::bind).
    pub(super) fn bind_window(&mut self, via: AccessContext, bind: &Bind) -> Result<(), AccessError> {
        let window = self.window(bind.rkey.0).ok_or(AccessError)?;
        // C10-72: one protection domain for all. A window of type 2 is bound once, to a range of at
        // least one byte, until it is invalidated.
        let (two, free) = (window.kind == WindowKind::Two, window.bound.is_none());
        if window.pd != via.pd || two && (bind.len == 0 || !free) || !two && bind.zero_based {
            return Err(AccessError);
        }
        let binding = match bind.len {
            0 => None,
            _ => Some(self.binding(via, bind)?),
        };
        let index = self.keys.find(bind.rkey.0).ok_or(AccessError)?;
        self.unbind(index);
        self.slots[usize::from(index)].key = bind.rkey.0;
        let Some(bound) = binding else {
            return Ok(());
        };
        if let Object::Region(region) = &mut self.slots[usize::from(bound.region)].object {
            region.windows += 1;
        }
        if let Object::Window(window) = &mut self.slots[usize::from(index)].object {
            window.bound = Some(bound);
        }
        self.bindings += 1;
        Ok(())
    }

    /// The requested binding, if the region allows it.
    fn binding(&self, via: AccessContext, bind: &Bind) -> Result<Binding, AccessError> {
        let region = self.region(via.pd, bind.region.0)?;
        let writes = bind.access.write || bind.access.atomic;
        // C10-73 and C10-74.
        if !region.rights.bind || writes && !region.rights.local_write {
            return Err(AccessError);
        }
        // C10-75.
        region.locate(bind.addr, bind.len)?;
        Ok(Binding {
            region: self.keys.find(bind.region.0).ok_or(AccessError)?,
            start: bind.addr,
            len: bind.len,
            access: bind.access,
            zero_based: bind.zero_based,
            qpn: via.qpn,
        })
    }

    /// As [`Memory::invalidate`](doorbell_roce_proto::memory::Memory::invalidate).
    pub(super) fn invalidate_window(
        &mut self,
        via: AccessContext,
        rkey: RKey,
        by: Invalidator,
    ) -> Result<(), AccessError> {
        let index = self.keys.find(rkey.0).ok_or(AccessError)?;
        let current = self
            .slots
            .get(usize::from(index))
            .is_some_and(|slot| slot.key == rkey.0);
        let window = self.window(rkey.0).filter(|_| current).ok_or(AccessError)?;
        // The owner may invalidate an invalid key, as it cannot know whether the peer has done so.
        let ours = match window.bound {
            Some(bound) => bound.qpn == via.qpn,
            None => window.pd == via.pd && by == Invalidator::Local,
        };
        if window.kind != WindowKind::Two || !ours {
            return Err(AccessError);
        }
        self.unbind(index);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
