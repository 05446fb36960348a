//! Rights of peers on a region, and the operations of the memory placement extensions (IBTA vol 1,
//! annex A19).

use std::sync::atomic::{Ordering, fence};

use doorbell_roce_proto::RKey;
use doorbell_roce_proto::memory::{AccessContext, AccessError, Flush, Placement, RemoteRight};

use super::{Location, Region, Table};
use crate::memory::copy::WORD;

impl Region {
    pub(super) fn grants(&self, right: RemoteRight) -> bool {
        match right {
            RemoteRight::Read => self.rights.remote_read,
            RemoteRight::Write => self.rights.remote_write,
            RemoteRight::Atomic => self.rights.remote_atomic,
        }
    }

    /// Persistence is never granted: the kernel does not say of which memory it is a property.
    const fn placement(&self) -> Placement {
        Placement {
            global: self.rights.flush_global,
            persistent: false,
        }
    }
}

impl Table {
    pub(super) fn store_word(
        &mut self,
        via: AccessContext,
        rkey: RKey,
        addr: u64,
        word: [u8; 8],
    ) -> Result<(), AccessError> {
        self.flush_staged_writes()?;
        let (_, target) = self.word_target(via, rkey, addr)?;
        // SAFETY: inside a region or window with REMOTE_WRITE, which needs LOCAL_WRITE.
        unsafe { target.write(&word) }
    }

    /// The location for a peer's atomic WRITE, and the key of its region: where one store of the
    /// CPU does it, as for the atomics.
    pub(crate) fn word_target(
        &self,
        via: AccessContext,
        rkey: RKey,
        addr: u64,
    ) -> Result<(u32, Location<'_>), AccessError> {
        match self.write_target(via, rkey, addr, WORD)? {
            (key, Location::Host(at)) if at.addr().is_multiple_of(WORD) => Ok((key, Location::Host(at))),
            _ => Err(AccessError),
        }
    }

    /// What was written before is in memory, but for GPU copies of writes over UDP; a fence orders
    /// it before the response. No window grants a FLUSH, as on rxe unless a bind requests it.
    pub(super) fn flush(&mut self, via: AccessContext, flush: &Flush) -> Result<(), AccessError> {
        let region = self.region(via.pd, flush.rkey.0)?;
        if !flush.placement.is_within(region.placement()) {
            return Err(AccessError);
        }
        if !flush.whole_region {
            region.locate(flush.addr, flush.len.into())?;
        }
        self.flush_staged_writes()?;
        fence(Ordering::SeqCst);
        Ok(())
    }
}
