//! A [`Memory`] of plain vectors, with guard bytes around every region.

use std::mem;
use std::ops::Range;

use doorbell_roce_proto::memory::{
    AccessContext, AccessError, AtomicOp, Bind, CopyError, Flush, Invalidator, Memory, PdId, Placement, RemoteRight,
    Sge,
};
use doorbell_roce_proto::{LKey, RKey};

const GUARD: usize = 64;
const GUARD_BYTE: u8 = 0xa5;

pub(crate) const EVERYWHERE: Placement = Placement {
    global: true,
    persistent: true,
};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Rights {
    pub(crate) local_write: bool,
    pub(crate) read: bool,
    pub(crate) write: bool,
    pub(crate) atomic: bool,
    pub(crate) flush: Placement,
}

impl Rights {
    pub(crate) const ALL: Self = Self {
        local_write: true,
        read: true,
        write: true,
        atomic: true,
        flush: EVERYWHERE,
    };
    pub(crate) const NONE: Self = Self {
        local_write: false,
        read: false,
        write: false,
        atomic: false,
        flush: Placement::NONE,
    };
}

struct Region {
    pd: PdId,
    base: u64,
    rights: Rights,
    gone: bool,
    /// Guard, bytes, guard.
    bytes: Vec<u8>,
}

struct Window {
    rkey: RKey,
    bound: Option<(AccessContext, Bind)>,
}

/// All regions and windows of a node; the key of each is its number and a constant.
pub(crate) struct Regions {
    pd: PdId,
    regions: Vec<Region>,
    windows: Vec<Window>,
    /// The key of each bind and invalidation.
    pub(crate) log: Vec<RKey>,
    /// Each FLUSH, with the bytes that it found.
    pub(crate) flushed: Vec<(Flush, Vec<u8>)>,
    by_ref: Vec<u8>,
    /// The payload of the current packet; `None` when it is unreadable.
    arrived: Option<Vec<u8>>,
    /// After this many packets, one payload is unreadable.
    pub(crate) unreadable_after: Option<usize>,
}

const KEY: u32 = 0x5000;
const WINDOW_KEY: u32 = 0x9000_0000;

fn window_index(rkey: RKey) -> usize {
    ((rkey.0 ^ WINDOW_KEY) >> 8) as usize
}

pub(crate) fn rkey(sge: Sge) -> RKey {
    RKey(sge.lkey.0)
}

impl Regions {
    pub(crate) fn new(pd: PdId) -> Self {
        Self {
            pd,
            regions: Vec::new(),
            windows: Vec::new(),
            log: Vec::new(),
            flushed: Vec::new(),
            by_ref: Vec::new(),
            arrived: None,
            unreadable_after: None,
        }
    }

    pub(crate) fn take_by_ref(&mut self) -> Vec<u8> {
        mem::take(&mut self.by_ref)
    }

    pub(crate) fn arrive(&mut self, payload: &[u8]) {
        let gone = self.unreadable_after == Some(0);
        self.unreadable_after = self.unreadable_after.and_then(|after| after.checked_sub(1));
        self.arrived = (!gone).then(|| payload.to_vec());
    }

    pub(crate) fn window(&mut self) -> RKey {
        let rkey = RKey(WINDOW_KEY | (self.windows.len() as u32) << 8);
        self.windows.push(Window { rkey, bound: None });
        rkey
    }

    pub(crate) fn register(&mut self, bytes: Vec<u8>, rights: Rights) -> Sge {
        self.register_in(self.pd, bytes, rights)
    }

    pub(crate) fn register_in(&mut self, pd: PdId, bytes: Vec<u8>, rights: Rights) -> Sge {
        let (key, len) = (self.regions.len() as u32 | KEY, bytes.len());
        let base = 0x7000_0000 + (u64::from(key) << 32);
        let mut guarded = vec![GUARD_BYTE; len + 2 * GUARD];
        guarded[GUARD..GUARD + len].copy_from_slice(&bytes);
        self.regions.push(Region {
            pd,
            base,
            rights,
            gone: false,
            bytes: guarded,
        });
        Sge {
            addr: base,
            len: len as u32,
            lkey: LKey(key),
        }
    }

    pub(crate) fn region_of(&self, number: usize) -> Sge {
        let region = &self.regions[number];
        Sge {
            addr: region.base,
            len: (region.bytes.len() - 2 * GUARD) as u32,
            lkey: LKey(number as u32 | KEY),
        }
    }

    pub(crate) fn deregister(&mut self, sge: Sge) {
        self.regions[(sge.lkey.0 ^ KEY) as usize].gone = true;
    }

    /// The bytes of an SGE; checks the guards of its region.
    pub(crate) fn bytes(&self, sge: Sge) -> &[u8] {
        let region = &self.regions[(sge.lkey.0 ^ KEY) as usize];
        let end = region.bytes.len() - GUARD;
        assert!(
            region.bytes[..GUARD]
                .iter()
                .chain(&region.bytes[end..])
                .all(|byte| *byte == GUARD_BYTE)
        );
        let start = GUARD + (sge.addr - region.base) as usize;
        &region.bytes[start..start + sge.len as usize]
    }

    fn find_remote(
        &mut self,
        context: AccessContext,
        rkey: RKey,
        addr: u64,
        len: u64,
        right: RemoteRight,
    ) -> Result<&mut [u8], AccessError> {
        let granted = |read, write, atomic| match right {
            RemoteRight::Read => read,
            RemoteRight::Write => write,
            RemoteRight::Atomic => atomic,
        };
        let window = self.windows.get(window_index(rkey));
        let Some((to, bind)) = window
            .filter(|window| window.rkey == rkey)
            .and_then(|window| window.bound)
        else {
            let right = |rights: Rights| granted(rights.read, rights.write, rights.atomic);
            return self.find(context.pd, rkey.0, addr, len, right);
        };
        let ends_inside = |end| end <= bind.addr + bind.len;
        let inside = addr >= bind.addr && addr.checked_add(len).is_some_and(ends_inside);
        if to != context || !inside || !granted(bind.access.read, bind.access.write, bind.access.atomic) {
            return Err(AccessError);
        }
        self.find(context.pd, bind.region.0, addr, len, |_| true)
    }

    fn find(
        &mut self,
        pd: PdId,
        key: u32,
        addr: u64,
        len: u64,
        right: impl Fn(Rights) -> bool,
    ) -> Result<&mut [u8], AccessError> {
        if len == 0 {
            return Ok(&mut []);
        }
        let region = self.regions.get_mut((key ^ KEY) as usize).ok_or(AccessError)?;
        let room = (region.bytes.len() - 2 * GUARD) as u64;
        let start = addr.checked_sub(region.base).ok_or(AccessError)?;
        let end = start.checked_add(len).ok_or(AccessError)?;
        if pd != region.pd || region.gone || end > room || !right(region.rights) {
            return Err(AccessError);
        }
        Ok(&mut region.bytes[GUARD + start as usize..GUARD + end as usize])
    }
}

impl Memory for Regions {
    fn gather(&mut self, pd: PdId, lkey: LKey, addr: u64, dst: &mut [u8]) -> Result<(), AccessError> {
        dst.copy_from_slice(self.find(pd, lkey.0, addr, dst.len() as u64, |_| true)?);
        Ok(())
    }

    fn check_local(&mut self, pd: PdId, sge: &Sge, write: bool) -> Result<(), AccessError> {
        self.find(pd, sge.lkey.0, sge.addr, u64::from(sge.len), |rights| {
            rights.local_write || !write
        })
        .map(drop)
    }

    fn scatter(&mut self, pd: PdId, lkey: LKey, addr: u64, src: &[u8]) -> Result<(), AccessError> {
        self.find(pd, lkey.0, addr, src.len() as u64, |rights| rights.local_write)?
            .copy_from_slice(src);
        Ok(())
    }

    fn check_remote(
        &mut self,
        context: AccessContext,
        rkey: RKey,
        addr: u64,
        len: u64,
        right: RemoteRight,
    ) -> Result<(), AccessError> {
        self.find_remote(context, rkey, addr, len, right).map(drop)
    }

    fn remote_read(
        &mut self,
        context: AccessContext,
        rkey: RKey,
        addr: u64,
        dst: &mut [u8],
    ) -> Result<(), AccessError> {
        dst.copy_from_slice(self.find_remote(context, rkey, addr, dst.len() as u64, RemoteRight::Read)?);
        Ok(())
    }

    fn remote_write(&mut self, context: AccessContext, rkey: RKey, addr: u64, src: &[u8]) -> Result<(), AccessError> {
        self.find_remote(context, rkey, addr, src.len() as u64, RemoteRight::Write)?
            .copy_from_slice(src);
        Ok(())
    }

    fn remote_atomic(
        &mut self,
        context: AccessContext,
        rkey: RKey,
        addr: u64,
        op: AtomicOp,
    ) -> Result<u64, AccessError> {
        let word = self.find_remote(context, rkey, addr, 8, RemoteRight::Atomic)?;
        let mut bytes = [0; 8];
        bytes.copy_from_slice(word);
        let before = u64::from_ne_bytes(bytes);
        let after = match op {
            AtomicOp::FetchAdd { add } => before.wrapping_add(add),
            AtomicOp::CompareSwap { compare, swap } if before == compare => swap,
            AtomicOp::CompareSwap { .. } => before,
        };
        word.copy_from_slice(&after.to_ne_bytes());
        Ok(before)
    }

    fn remote_flush(&mut self, context: AccessContext, flush: &Flush) -> Result<(), AccessError> {
        let number = (flush.rkey.0 ^ KEY) as usize;
        let whole = flush.whole_region && number < self.regions.len();
        let (addr, len) = match whole.then(|| self.region_of(number)) {
            Some(region) => (region.addr, region.len),
            None => (flush.addr, flush.len),
        };
        let granted = |rights: Rights| flush.placement.is_within(rights.flush);
        let found = self.find(context.pd, flush.rkey.0, addr, len.into(), granted)?.to_vec();
        self.flushed.push((*flush, found));
        Ok(())
    }

    fn bind(&mut self, context: AccessContext, bind: &Bind) -> Result<(), AccessError> {
        self.find(context.pd, bind.region.0, bind.addr, bind.len, |_| true)?;
        let window = self.windows.get_mut(window_index(bind.rkey)).ok_or(AccessError)?;
        if window.bound.is_some() {
            return Err(AccessError);
        }
        window.rkey = bind.rkey;
        window.bound = Some((context, *bind));
        self.log.push(bind.rkey);
        Ok(())
    }

    fn invalidate(&mut self, context: AccessContext, rkey: RKey, by: Invalidator) -> Result<(), AccessError> {
        let window = self.windows.get_mut(window_index(rkey)).ok_or(AccessError)?;
        let ours = window.bound.is_none_or(|(to, _)| to == context);
        if window.rkey != rkey || !ours || by == Invalidator::Peer && window.bound.is_none() {
            return Err(AccessError);
        }
        window.bound = None;
        self.log.push(rkey);
        Ok(())
    }

    fn add_local_ref(&mut self, pd: PdId, sge: &Sge) -> Result<(), AccessError> {
        let mut bytes = vec![0; sge.len as usize];
        self.gather(pd, sge.lkey, sge.addr, &mut bytes)?;
        self.by_ref.append(&mut bytes);
        Ok(())
    }

    fn add_remote_ref(&mut self, context: AccessContext, rkey: RKey, addr: u64, len: u32) -> Result<(), AccessError> {
        let mut bytes = vec![0; len as usize];
        self.remote_read(context, rkey, addr, &mut bytes)?;
        self.by_ref.append(&mut bytes);
        Ok(())
    }

    fn scatter_by_ref(&mut self, pd: PdId, lkey: LKey, addr: u64, part: Range<usize>) -> Result<(), CopyError> {
        let bytes = self.arrived.clone().ok_or(CopyError::Gone)?;
        self.scatter(pd, lkey, addr, &bytes[part]).map_err(CopyError::from)
    }

    fn remote_write_by_ref(
        &mut self,
        context: AccessContext,
        rkey: RKey,
        addr: u64,
        len: usize,
    ) -> Result<(), CopyError> {
        let bytes = self.arrived.clone().ok_or(CopyError::Gone)?;
        assert_eq!(bytes.len(), len);
        self.remote_write(context, rkey, addr, &bytes).map_err(CopyError::from)
    }
}
