//! The table of memory regions and windows, and the checks of accesses (IBTA vol 1, 10.6).

mod device;
mod keys;
mod placement;
mod registration;
mod window;

use std::sync::Arc;
use std::{mem, ptr};

use doorbell_roce_proto::memory::{
    AccessContext, AccessError, AtomicOp, Bind, Flush, Invalidator, Memory, PdId, RemoteRight, Sge,
};
use doorbell_roce_proto::{LKey, LinkCapabilities, Qpn, RKey};

use self::keys::Keys;
use self::window::Window;
use super::{Rights, copy};
use crate::direct::Published;
use crate::gpu::{self, Failed};
use crate::links::shm_ring::segment::{Segment, SegmentId};

#[derive(Debug)]
pub(crate) struct Region {
    base: *mut u8,
    len: u64,
    iova: u64,
    pd: PdId,
    rights: Rights,
    windows: usize,
    /// No memory (ibv_alloc_null_mr(3)).
    is_null: bool,
    /// Peers may map all of it.
    segment: Option<Arc<Segment>>,
    /// GPU memory: `base` is then a device address, and no pointer.
    device: Option<gpu::Range>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Location<'a> {
    /// A null region: reads give zeroes, writes are dropped.
    Null,
    Host(*mut u8),
    /// GPU memory, from this byte of the registered range on.
    Device(&'a gpu::Range, usize),
}

// SAFETY: registered memory is the application's until the region is dropped, for the whole
// process; the pointer is used only through `&mut Table`, by one thread at a time.
unsafe impl Send for Region {}

impl Region {
    /// Usable until dropped, by the contract of [`Pd::register`](crate::Pd::register).
    pub(super) fn new(base: *mut u8, len: u64, iova: u64, pd: PdId, rights: Rights) -> Self {
        Self {
            base,
            len,
            iova,
            pd,
            rights,
            windows: 0,
            is_null: false,
            segment: None,
            device: None,
        }
    }

    pub(super) fn on_device(self, device: Option<gpu::Range>) -> Self {
        Self { device, ..self }
    }

    pub(super) fn in_segment(self, segment: Option<Arc<Segment>>) -> Self {
        Self { segment, ..self }
    }

    fn payload_ref(&self, key: u32, at: *mut u8, len: usize) -> PayloadRef {
        let offset = (at.addr() - self.base.addr()) as u64;
        let segment = self.segment.as_ref();
        PayloadRef {
            key,
            at,
            len,
            segment: segment.map(|segment| (segment.id(), offset)),
            device: self.device.as_ref().map(|range| range.offset as u64 + offset),
        }
    }

    /// The same for the CPU's memory, if it is mapped: a fault of a later copy loses the packet,
    /// and the error is found here when it is sent again. Of a segment peers have a mapping of
    /// their own.
    fn mapped_ref(&self, key: u32, at: *mut u8, len: usize) -> Result<PayloadRef, AccessError> {
        if self.segment.is_none() && len > 0 {
            // SAFETY: inside the region, by `locate`.
            unsafe { copy::probe(at, len)? };
        }
        Ok(self.payload_ref(key, at, len))
    }

    /// The location of a pointer from `locate`.
    fn location(&self, at: *mut u8) -> Location<'_> {
        match &self.device {
            Some(range) => Location::Device(range, at.addr() - self.base.addr()),
            None if self.is_null => Location::Null,
            None => Location::Host(at),
        }
    }

    /// A null region, of every address, for local use.
    pub(super) fn null(pd: PdId) -> Self {
        let rights = Rights {
            local_write: true,
            ..Rights::default()
        };
        Self {
            is_null: true,
            ..Self::new(ptr::null_mut(), u64::MAX, 0, pd, rights)
        }
    }

    fn locate(&self, addr: u64, len: u64) -> Result<*mut u8, AccessError> {
        let offset = addr.checked_sub(self.iova).ok_or(AccessError)?;
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(AccessError);
        }
        // Below `self.len`, which is from a usize.
        Ok(self.base.wrapping_add(offset as usize))
    }
}

/// What other processes may have mapped of a region.
#[derive(Debug, Default)]
pub(crate) struct SharedBacking {
    pub(crate) segment: Option<Arc<Segment>>,
    pub(crate) allocation: Option<Arc<gpu::Allocation>>,
}

/// Memory that a packet for another process of this host refers to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PayloadRef {
    pub(crate) key: u32,
    pub(crate) at: *const u8,
    pub(crate) len: usize,
    /// Its segment, and the offset there.
    pub(crate) segment: Option<(SegmentId, u64)>,
    /// The offset in an allocation of GPU memory: `at` is no pointer then.
    pub(crate) device: Option<u64>,
}

/// What a null region reads as, for the largest packet.
static ZEROS: [u8; LinkCapabilities::MTU] = [0; LinkCapabilities::MTU];

#[derive(Debug)]
enum Object {
    Free,
    Region(Region),
    Window(Window),
}

#[derive(Debug)]
struct Slot {
    key: u32,
    object: Object,
}

/// The objects by key. A key is new for each registration; the lower 8 bits of a window's key are
/// the consumer's, new for each binding.
#[derive(Debug)]
// fields: the objects and their keys, the payload of one packet, GPU memory, what is published
pub(crate) struct Table {
    slots: Vec<Slot>,
    free: Vec<u16>,
    keys: Keys,
    regions: usize,
    windows: usize,
    bindings: usize,
    payload_refs: Vec<PayloadRef>,
    /// Queue pairs with GPU copies of READ responses in flight: their sends may read that memory.
    reads_pending: Vec<Qpn>,
    /// GPU memory was registered: without it no packet needs the check.
    has_device_memory: bool,
    udp_staging: gpu::UdpStaging,
    /// Regions that lost a window: references made through it are to be revoked.
    revoked_regions: Vec<u32>,
    /// Where regions are published to peers that access them directly.
    published: Option<Arc<Published>>,
}

// SAFETY: the pointers in `payload_refs` are to registered memory, as those of the regions are.
unsafe impl Send for Table {}

impl Table {
    pub(crate) fn new() -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            keys: Keys::new(),
            regions: 0,
            windows: 0,
            bindings: 0,
            payload_refs: Vec::new(),
            reads_pending: Vec::new(),
            has_device_memory: false,
            udp_staging: gpu::UdpStaging::default(),
            revoked_regions: Vec::new(),
            published: None,
        }
    }

    /// Before the first registration.
    pub(crate) fn publish_in(&mut self, published: Arc<Published>) {
        self.published = Some(published);
    }

    pub(crate) fn payload_refs(&self) -> &[PayloadRef] {
        &self.payload_refs
    }

    pub(crate) fn clear_payload_refs(&mut self) {
        self.payload_refs.clear();
    }

    pub(crate) fn mark_reads_pending(&mut self, qpn: Qpn) {
        if !self.reads_pending.contains(&qpn) {
            self.reads_pending.push(qpn);
        }
    }

    /// Removes and returns those of which `is_pending` is false: their READs are in memory.
    pub(crate) fn take_reads_done(&mut self, is_pending: impl Fn(Qpn) -> bool) -> Vec<Qpn> {
        let (pending, done) = mem::take(&mut self.reads_pending)
            .into_iter()
            .partition(|qpn| is_pending(*qpn));
        self.reads_pending = pending;
        done
    }

    pub(crate) fn has_revoked(&self) -> bool {
        !self.revoked_regions.is_empty()
    }

    pub(crate) fn poll_revoked(&mut self) -> Option<u32> {
        self.revoked_regions.pop()
    }

    pub(crate) fn segment(&self, key: u32) -> Option<&Arc<Segment>> {
        self.region_of(key)?.segment.as_ref()
    }

    pub(crate) fn restore_payload_refs(&mut self, payload_refs: Vec<PayloadRef>) {
        self.payload_refs = payload_refs;
    }

    fn object(&self, key: u32) -> Option<&Object> {
        let slot = self.slots.get(usize::from(self.keys.find(key)?))?;
        (slot.key == key).then_some(&slot.object)
    }

    fn region_of(&self, key: u32) -> Option<&Region> {
        match self.object(key)? {
            Object::Region(region) => Some(region),
            _ => None,
        }
    }

    fn region(&self, pd: PdId, key: u32) -> Result<&Region, AccessError> {
        let region = self.region_of(key).filter(|region| region.pd == pd);
        region.ok_or(AccessError)
    }

    pub(crate) fn local(
        &self,
        pd: PdId,
        key: LKey,
        addr: u64,
        len: usize,
        write: bool,
    ) -> Result<Location<'_>, AccessError> {
        let region = self.region(pd, key.0)?;
        if write && !region.rights.local_write {
            return Err(AccessError);
        }
        Ok(region.location(region.locate(addr, len as u64)?))
    }

    /// The CPU's memory that an element names, if that is what it names.
    pub(super) fn host_address(&self, pd: PdId, sge: &Sge) -> Option<*mut u8> {
        match self.local(pd, sge.lkey, sge.addr, sge.len as usize, false) {
            Ok(Location::Host(at)) => Some(at),
            _ => None,
        }
    }

    fn remote(
        &self,
        via: AccessContext,
        key: RKey,
        addr: u64,
        len: u64,
        right: RemoteRight,
    ) -> Result<Location<'_>, AccessError> {
        self.remote_keyed(via, key, addr, len, right)
            .map(|(_, location)| location)
    }

    /// Checks a peer's access, and returns the region's key and the location.
    fn remote_keyed(
        &self,
        via: AccessContext,
        key: RKey,
        addr: u64,
        len: u64,
        right: RemoteRight,
    ) -> Result<(u32, Location<'_>), AccessError> {
        let (region, key, addr) = self.remote_region(via, key, addr, len, right)?;
        Ok((key, region.location(region.locate(addr, len)?)))
    }

    fn remote_region(
        &self,
        via: AccessContext,
        key: RKey,
        addr: u64,
        len: u64,
        right: RemoteRight,
    ) -> Result<(&Region, u32, u64), AccessError> {
        match self.object(key.0) {
            Some(Object::Region(region)) if region.pd == via.pd && region.grants(right) => Ok((region, key.0, addr)),
            Some(Object::Window(window)) => {
                let (index, addr) = window.translate(via, addr, len, right)?;
                match self.slots.get(usize::from(index)) {
                    Some(Slot {
                        key,
                        object: Object::Region(region),
                    }) => Ok((region, *key, addr)),
                    _ => Err(AccessError),
                }
            }
            _ => Err(AccessError),
        }
    }

    /// The location for a peer's WRITE, and the key of its region.
    pub(crate) fn write_target(
        &self,
        via: AccessContext,
        rkey: RKey,
        addr: u64,
        len: usize,
    ) -> Result<(u32, Location<'_>), AccessError> {
        self.remote_keyed(via, rkey, addr, len as u64, RemoteRight::Write)
    }
}

impl Location<'_> {
    fn read(self, dst: &mut [u8]) -> Result<(), AccessError> {
        match self {
            Self::Null => {
                dst.fill(0);
                Ok(())
            }
            Self::Host(src) => {
                // SAFETY: inside a region; `dst` is never registered.
                Ok(unsafe { copy::from(src, dst) }?)
            }
            Self::Device(range, at) => {
                // SAFETY: a unique reference, writable for its length.
                let read = unsafe { range.read(at, dst.as_mut_ptr(), dst.len()) };
                read.map_err(|Failed| AccessError)
            }
        }
    }

    /// # Safety
    /// The application lets it be written for the length of `src`, which is the device's own.
    unsafe fn write(self, src: &[u8]) -> Result<(), AccessError> {
        match self {
            Self::Null => Ok(()),
            Self::Host(dst) => {
                // SAFETY: the same contract.
                Ok(unsafe { copy::to_peer_visible(src, dst) }?)
            }
            Self::Device(range, at) => {
                // SAFETY: a reference, readable for its length.
                let written = unsafe { range.write(at, src.as_ptr(), src.len()) };
                written.map_err(|Failed| AccessError)
            }
        }
    }
}

impl Memory for Table {
    fn gather(&mut self, pd: PdId, lkey: LKey, addr: u64, dst: &mut [u8]) -> Result<(), AccessError> {
        if dst.is_empty() {
            return Ok(());
        }
        self.flush_staged_writes()?;
        self.local(pd, lkey, addr, dst.len(), false)?.read(dst)
    }

    fn gather_ahead(
        &mut self,
        pd: PdId,
        lkey: LKey,
        addr: u64,
        dst: &mut [u8],
        behind: usize,
    ) -> Result<(), AccessError> {
        let len = dst.len().saturating_add(behind);
        match self.on_device(|table| table.local(pd, lkey, addr, len, false)) {
            Some((range, at)) => {
                let read = self.udp_staging.read(&range, at, dst, behind);
                read.map_err(|Failed| AccessError)
            }
            None => self.gather(pd, lkey, addr, dst),
        }
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
        if self.udp_staging.is_write_behind()
            && let Some((range, at)) = self.on_device(|table| table.local(pd, lkey, addr, src.len(), true))
        {
            return self.udp_staging.write(&range, at, src).map_err(|Failed| AccessError);
        }
        self.flush_staged_writes()?;
        // SAFETY: inside a region with LOCAL_WRITE, thus to be written.
        unsafe { self.local(pd, lkey, addr, src.len(), true)?.write(src) }
    }

    fn check_remote(
        &mut self,
        via: AccessContext,
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

    fn remote_read(&mut self, via: AccessContext, rkey: RKey, addr: u64, dst: &mut [u8]) -> Result<(), AccessError> {
        if dst.is_empty() {
            return Ok(());
        }
        self.flush_staged_writes()?;
        self.remote(via, rkey, addr, dst.len() as u64, RemoteRight::Read)?
            .read(dst)
    }

    fn remote_read_ahead(
        &mut self,
        via: AccessContext,
        rkey: RKey,
        addr: u64,
        dst: &mut [u8],
        behind: usize,
    ) -> Result<(), AccessError> {
        let len = dst.len().saturating_add(behind);
        match self.on_device(|table| table.remote(via, rkey, addr, len as u64, RemoteRight::Read)) {
            Some((range, at)) => {
                let read = self.udp_staging.read(&range, at, dst, behind);
                read.map_err(|Failed| AccessError)
            }
            None => self.remote_read(via, rkey, addr, dst),
        }
    }

    fn remote_write(&mut self, via: AccessContext, rkey: RKey, addr: u64, src: &[u8]) -> Result<(), AccessError> {
        if src.is_empty() {
            return Ok(());
        }
        if self.udp_staging.is_write_behind()
            && let Some((range, at)) =
                self.on_device(|table| table.remote(via, rkey, addr, src.len() as u64, RemoteRight::Write))
        {
            return self.udp_staging.write(&range, at, src).map_err(|Failed| AccessError);
        }
        self.flush_staged_writes()?;
        let target = self.remote(via, rkey, addr, src.len() as u64, RemoteRight::Write)?;
        // SAFETY: inside a region with REMOTE_WRITE, or a window with it; registration and binding
        // grant that only with LOCAL_WRITE, thus to be written.
        unsafe { target.write(src) }
    }

    fn remote_atomic(&mut self, via: AccessContext, rkey: RKey, addr: u64, op: AtomicOp) -> Result<u64, AccessError> {
        self.flush_staged_writes()?;
        let word = match self.remote(via, rkey, addr, 8, RemoteRight::Atomic)? {
            Location::Host(word) => word,
            Location::Null => return Err(AccessError),
            Location::Device(..) => {
                tracing::debug!("an atomic on GPU memory is refused: the soft device does not support them");
                return Err(AccessError);
            }
        };
        // The engine checked the I/O virtual address; the memory may be aligned differently.
        if !word.addr().is_multiple_of(8) {
            return Err(AccessError);
        }
        // SAFETY: eight bytes inside a region or window with REMOTE_ATOMIC, which needs
        // LOCAL_WRITE; aligned as checked.
        Ok(unsafe { copy::atomic(word, op) }?)
    }

    fn remote_atomic_write(
        &mut self,
        via: AccessContext,
        rkey: RKey,
        addr: u64,
        word: [u8; 8],
    ) -> Result<(), AccessError> {
        self.store_word(via, rkey, addr, word)
    }

    fn remote_flush(&mut self, via: AccessContext, flush: &Flush) -> Result<(), AccessError> {
        self.flush(via, flush)
    }

    fn bind(&mut self, via: AccessContext, bind: &Bind) -> Result<(), AccessError> {
        self.bind_window(via, bind)
    }

    fn invalidate(&mut self, via: AccessContext, rkey: RKey, by: Invalidator) -> Result<(), AccessError> {
        self.invalidate_window(via, rkey, by)
    }

    fn is_device_memory(&mut self, pd: PdId, sges: &[Sge]) -> bool {
        let is_device = |sge: &Sge| self.region(pd, sge.lkey.0).is_ok_and(|region| region.device.is_some());
        self.has_device_memory && sges.iter().any(is_device)
    }

    fn is_remote_device_memory(&mut self, via: AccessContext, rkey: RKey) -> bool {
        if !self.has_device_memory {
            return false;
        }
        match self.object(rkey.0) {
            Some(Object::Region(region)) => region.device.is_some(),
            Some(Object::Window(window)) => window
                .region(via)
                .and_then(|index| self.slots.get(usize::from(index)))
                .is_some_and(|slot| matches!(&slot.object, Object::Region(region) if region.device.is_some())),
            _ => false,
        }
    }

    fn has_pending_copies(&self, qpn: Qpn) -> bool {
        !self.reads_pending.is_empty() && self.reads_pending.contains(&qpn)
    }

    fn add_local_ref(&mut self, pd: PdId, sge: &Sge) -> Result<(), AccessError> {
        let len = sge.len as usize;
        let payload_ref = match self.local(pd, sge.lkey, sge.addr, len, false)? {
            Location::Host(at) => self.region(pd, sge.lkey.0)?.mapped_ref(sge.lkey.0, at, len)?,
            Location::Device(_, offset) => {
                let region = self.region(pd, sge.lkey.0)?;
                region.payload_ref(sge.lkey.0, region.base.wrapping_add(offset), len)
            }
            Location::Null => PayloadRef {
                key: sge.lkey.0,
                at: ZEROS.as_ptr(),
                // No packet is longer.
                len: len.min(ZEROS.len()),
                segment: None,
                device: None,
            },
        };
        self.payload_refs.push(payload_ref);
        Ok(())
    }

    fn add_remote_ref(&mut self, via: AccessContext, rkey: RKey, addr: u64, len: u32) -> Result<(), AccessError> {
        let (region, key, addr) = self.remote_region(via, rkey, addr, u64::from(len), RemoteRight::Read)?;
        let at = region.locate(addr, u64::from(len))?;
        let payload_ref = match region.location(at) {
            Location::Host(at) => region.mapped_ref(key, at, len as usize)?,
            _ => region.payload_ref(key, at, len as usize),
        };
        self.payload_refs.push(payload_ref);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
