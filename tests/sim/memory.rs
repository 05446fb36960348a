//! Registered memory as plain vectors, with the checks a device makes.

use doorbell_roce_proto::memory::{
    AccessContext, AccessError, AtomicOp, Bind, Invalidator, Memory, PdId, RemoteRight, Sge,
};
use doorbell_roce_proto::{LKey, RKey};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rights {
    pub(crate) local_write: bool,
    pub(crate) read: bool,
    pub(crate) write: bool,
    pub(crate) atomic: bool,
}

impl Rights {
    pub(crate) const LOCAL: Self = Self {
        local_write: true,
        read: false,
        write: false,
        atomic: false,
    };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct RegionId(usize);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Region {
    pub(crate) pd: PdId,
    pub(crate) base: u64,
    pub(crate) rights: Rights,
    pub(crate) bytes: Vec<u8>,
}

/// Keys are an index and a tag: lkey and rkey of a region differ, and neither is 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SimMemory {
    regions: Vec<Region>,
}

const LKEY_TAG: u32 = 0x1d;
const RKEY_TAG: u32 = 0xa7;

impl SimMemory {
    pub(crate) fn register(&mut self, pd: PdId, base: u64, rights: Rights, bytes: Vec<u8>) -> RegionId {
        self.regions.push(Region {
            pd,
            base,
            rights,
            bytes,
        });
        RegionId(self.regions.len() - 1)
    }

    pub(crate) fn lkey(&self, id: RegionId) -> LKey {
        LKey((id.0 as u32 + 1) << 8 | LKEY_TAG)
    }

    pub(crate) fn rkey(&self, id: RegionId) -> RKey {
        RKey((id.0 as u32 + 1) << 8 | RKEY_TAG)
    }

    pub(crate) fn region(&self, id: RegionId) -> &Region {
        &self.regions[id.0]
    }

    fn find(&self, key: u32, tag: u32) -> Option<usize> {
        let index = ((key >> 8) as usize).checked_sub(1)?;
        (key & 0xff == tag && index < self.regions.len()).then_some(index)
    }

    fn range(
        &mut self,
        pd: PdId,
        index: Option<usize>,
        addr: u64,
        len: u64,
        allowed: impl Fn(&Rights) -> bool,
    ) -> Result<&mut [u8], AccessError> {
        if len == 0 {
            return Ok(&mut []);
        }
        let region = &mut self.regions[index.ok_or(AccessError)?];
        let start = addr.checked_sub(region.base).ok_or(AccessError)?;
        let end = start.checked_add(len).ok_or(AccessError)?;
        if region.pd != pd || end > region.bytes.len() as u64 || !allowed(&region.rights) {
            return Err(AccessError);
        }
        Ok(&mut region.bytes[start as usize..end as usize])
    }

    fn remote(
        &mut self,
        pd: PdId,
        rkey: RKey,
        addr: u64,
        len: u64,
        right: RemoteRight,
    ) -> Result<&mut [u8], AccessError> {
        let index = self.find(rkey.0, RKEY_TAG);
        self.range(pd, index, addr, len, |rights| match right {
            RemoteRight::Read => rights.read,
            RemoteRight::Write => rights.write,
            RemoteRight::Atomic => rights.atomic,
        })
    }
}

impl Memory for SimMemory {
    fn gather(&mut self, pd: PdId, lkey: LKey, addr: u64, dst: &mut [u8]) -> Result<(), AccessError> {
        let index = self.find(lkey.0, LKEY_TAG);
        dst.copy_from_slice(self.range(pd, index, addr, dst.len() as u64, |_| true)?);
        Ok(())
    }

    fn check_local(&mut self, pd: PdId, sge: &Sge, write: bool) -> Result<(), AccessError> {
        let index = self.find(sge.lkey.0, LKEY_TAG);
        self.range(pd, index, sge.addr, sge.len.into(), |rights| {
            !write || rights.local_write
        })
        .map(drop)
    }

    fn scatter(&mut self, pd: PdId, lkey: LKey, addr: u64, src: &[u8]) -> Result<(), AccessError> {
        let index = self.find(lkey.0, LKEY_TAG);
        self.range(pd, index, addr, src.len() as u64, |rights| rights.local_write)?
            .copy_from_slice(src);
        Ok(())
    }

    fn check_remote(
        &mut self,
        via: AccessContext,
        rkey: RKey,
        addr: u64,
        len: u64,
        right: RemoteRight,
    ) -> Result<(), AccessError> {
        self.remote(via.pd, rkey, addr, len, right).map(drop)
    }

    fn remote_read(&mut self, via: AccessContext, rkey: RKey, addr: u64, dst: &mut [u8]) -> Result<(), AccessError> {
        dst.copy_from_slice(self.remote(via.pd, rkey, addr, dst.len() as u64, RemoteRight::Read)?);
        Ok(())
    }

    fn remote_write(&mut self, via: AccessContext, rkey: RKey, addr: u64, src: &[u8]) -> Result<(), AccessError> {
        self.remote(via.pd, rkey, addr, src.len() as u64, RemoteRight::Write)?
            .copy_from_slice(src);
        Ok(())
    }

    fn remote_atomic(&mut self, via: AccessContext, rkey: RKey, addr: u64, op: AtomicOp) -> Result<u64, AccessError> {
        let word = self
            .remote(via.pd, rkey, addr, 8, RemoteRight::Atomic)?
            .first_chunk_mut::<8>()
            .ok_or(AccessError)?;
        let before = u64::from_ne_bytes(*word);
        *word = apply(op, before).to_ne_bytes();
        Ok(before)
    }

    fn bind(&mut self, _: AccessContext, _: &Bind) -> Result<(), AccessError> {
        Err(AccessError)
    }

    fn invalidate(&mut self, _: AccessContext, _: RKey, _: Invalidator) -> Result<(), AccessError> {
        Err(AccessError)
    }
}

pub(crate) fn apply(op: AtomicOp, before: u64) -> u64 {
    match op {
        AtomicOp::FetchAdd { add } => before.wrapping_add(add),
        AtomicOp::CompareSwap { compare, swap } => {
            if before == compare {
                swap
            } else {
                before
            }
        }
    }
}
