//! Registered memory, as the engine sees it while it handles a packet of a lane: the table, and the packet's payload.

use std::ops::Range;

use doorbell_roce_proto::memory::{
    AccessError, AtomicOp, Bind, CopyError, Invalidator, Memory, PdId, RemoteRight, Sge, Via,
};
use doorbell_roce_proto::{LKey, RKey};

use crate::local::Body;
use crate::memory::Table;

/// The table and a payload.
pub(crate) struct Reach<'a> {
    pub(crate) table: &'a mut Table,
    pub(crate) body: Body<'a>,
}

impl Memory for Reach<'_> {
    fn gather(&mut self, pd: PdId, lkey: LKey, addr: u64, dst: &mut [u8]) -> Result<(), AccessError> {
        self.table.gather(pd, lkey, addr, dst)
    }

    fn check_local(&mut self, pd: PdId, sge: &Sge, write: bool) -> Result<(), AccessError> {
        self.table.check_local(pd, sge, write)
    }

    fn scatter(&mut self, pd: PdId, lkey: LKey, addr: u64, src: &[u8]) -> Result<(), AccessError> {
        self.table.scatter(pd, lkey, addr, src)
    }

    fn check_remote(
        &mut self,
        via: Via,
        rkey: RKey,
        addr: u64,
        len: u64,
        right: RemoteRight,
    ) -> Result<(), AccessError> {
        self.table.check_remote(via, rkey, addr, len, right)
    }

    fn remote_read(&mut self, via: Via, rkey: RKey, addr: u64, dst: &mut [u8]) -> Result<(), AccessError> {
        self.table.remote_read(via, rkey, addr, dst)
    }

    fn remote_write(&mut self, via: Via, rkey: RKey, addr: u64, src: &[u8]) -> Result<(), AccessError> {
        self.table.remote_write(via, rkey, addr, src)
    }

    fn remote_atomic(&mut self, via: Via, rkey: RKey, addr: u64, op: AtomicOp) -> Result<u64, AccessError> {
        self.table.remote_atomic(via, rkey, addr, op)
    }

    fn bind(&mut self, via: Via, bind: &Bind) -> Result<(), AccessError> {
        self.table.bind(via, bind)
    }

    fn invalidate(&mut self, via: Via, rkey: RKey, by: Invalidator) -> Result<(), AccessError> {
        self.table.invalidate(via, rkey, by)
    }

    fn scatter_referred(&mut self, pd: PdId, lkey: LKey, addr: u64, part: Range<usize>) -> Result<(), CopyError> {
        if part.is_empty() {
            return Ok(());
        }
        let Some(dst) = self.table.local_target(pd, lkey, addr, part.len())? else {
            return Ok(());
        };
        // SAFETY: inside a region with LOCAL_WRITE, thus writable. No region is part of a lane, whose mapping nobody is told of; where it overlaps with what is copied, both are this process's
        // memory or shared with the sender, and the bytes are as undefined as the application's doing is.
        unsafe { self.body.copy_to(part.start, part.len(), dst) }.map_err(|_| CopyError::Gone)
    }

    fn remote_write_referred(&mut self, via: Via, rkey: RKey, addr: u64, len: usize) -> Result<(), CopyError> {
        if len == 0 {
            return Ok(());
        }
        let dst = self.table.write_target(via, rkey, addr, len)?;
        // SAFETY: inside a region with REMOTE_WRITE, or a window with it, thus writable; otherwise as above.
        unsafe { self.body.copy_to(0, len, dst) }.map_err(|_| CopyError::Gone)
    }
}
