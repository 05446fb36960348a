//! Memory of which only the access matters: payloads have no content.

use doorbell_roce_proto::memory::{
    AccessContext, AccessError, AtomicOp, Bind, Invalidator, Memory, PdId, RemoteRight, Sge,
};
use doorbell_roce_proto::{LKey, RKey};

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct NoContent;

impl Memory for NoContent {
    fn gather(&mut self, _: PdId, _: LKey, _: u64, _: &mut [u8]) -> Result<(), AccessError> {
        Ok(())
    }

    fn check_local(&mut self, _: PdId, _: &Sge, _: bool) -> Result<(), AccessError> {
        Ok(())
    }

    fn scatter(&mut self, _: PdId, _: LKey, _: u64, _: &[u8]) -> Result<(), AccessError> {
        Ok(())
    }

    fn check_remote(&mut self, _: AccessContext, _: RKey, _: u64, _: u64, _: RemoteRight) -> Result<(), AccessError> {
        Ok(())
    }

    fn remote_read(&mut self, _: AccessContext, _: RKey, _: u64, _: &mut [u8]) -> Result<(), AccessError> {
        Ok(())
    }

    fn remote_write(&mut self, _: AccessContext, _: RKey, _: u64, _: &[u8]) -> Result<(), AccessError> {
        Ok(())
    }

    fn remote_atomic(&mut self, _: AccessContext, _: RKey, _: u64, _: AtomicOp) -> Result<u64, AccessError> {
        Err(AccessError)
    }

    fn bind(&mut self, _: AccessContext, _: &Bind) -> Result<(), AccessError> {
        Err(AccessError)
    }

    fn invalidate(&mut self, _: AccessContext, _: RKey, _: Invalidator) -> Result<(), AccessError> {
        Err(AccessError)
    }
}
