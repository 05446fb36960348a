//! The client of `bw read`: each READ has its own buffer. With `--verify` the peer's slots hold a
//! pattern, and each buffer is filled with its inverse before, so that a byte that never arrived is
//! found.

use doorbell_verbs::{Batch, Buffer, Completion, Local, Opaque, ProtectionDomain, ReadAccess, Remote};

use super::super::gpu::{Content, GpuPool};
use super::super::pattern::{Mismatch, Pattern};
use super::super::test_end::{PeerQp, QpMemory, QpRequirements, RemoteAccess, Test};
use super::bw_loop::{BwRequester, DataError, PostParams};
use crate::failure::{Failure, refused};

#[derive(Debug)]
pub(crate) struct ReadRequester {
    seed: u64,
    qp_index: usize,
    bytes: u64,
    verify: bool,
    free: FreeBuffers,
    source: Option<Remote<ReadAccess>>,
    slots: u64,
}

#[derive(Debug)]
enum FreeBuffers {
    Host(Vec<Buffer<Local>>),
    Gpu(Box<GpuPool>),
}

impl QpMemory for ReadRequester {
    fn requirements(test: &Test<'_>) -> QpRequirements {
        QpRequirements {
            send: PostParams::new(test, 0).depth(),
            receive: 1,
            inline: 0,
            access: RemoteAccess::Nothing,
        }
    }

    fn new(test: &Test<'_>, pd: &ProtectionDomain, qp_index: usize) -> Result<Self, Failure> {
        let (len, window) = (test.len(), test.window() as usize);
        let free = match &test.device.gpu {
            Some(gpu) => FreeBuffers::Gpu(Box::new(GpuPool::new(gpu, pd, len, window)?)),
            None => FreeBuffers::Host(
                pd.register_chunks(test.memory(len * window)?, len, Local)
                    .map_err(refused)?
                    .collect(),
            ),
        };
        let plan = test.plan;
        Ok(ReadRequester {
            seed: plan.seed,
            qp_index,
            bytes: test.bytes,
            verify: plan.verify,
            free,
            source: None,
            slots: 0,
        })
    }
}

impl BwRequester for ReadRequester {
    fn requests_per_list(_test: &Test<'_>) -> u32 {
        0
    }

    fn attach(&mut self, _test: &Test<'_>, peer: &PeerQp) -> Result<(), Failure> {
        self.slots = u64::from(peer.slots).max(1);
        self.source = Some(peer.data(self.slots * self.bytes)?);
        Ok(())
    }

    fn allowance(&self) -> u64 {
        u64::MAX
    }

    #[inline]
    fn free(&self) -> usize {
        match &self.free {
            FreeBuffers::Host(free) => free.len(),
            FreeBuffers::Gpu(pool) => pool.len(),
        }
    }

    fn payload(&self, _index: u64, _into: &mut [u8]) {}

    #[inline]
    fn stage<'d>(&mut self, batch: &mut Batch<'_, 'd>, index: u64, _inline: Option<&'d [u8]>, signal: bool) {
        let source = self
            .source
            .and_then(|source| source.slice(index % self.slots * self.bytes, self.bytes));
        let Some(source) = source else { return };
        let pattern = Pattern::new(self.seed, self.qp_index, index % self.slots);
        macro_rules! post {
            ($request:expr) => {{
                $request.signaled_if(signal);
            }};
        }
        match &mut self.free {
            FreeBuffers::Host(free) => {
                let Some(mut buffer) = free.pop() else { return };
                if self.verify {
                    pattern.fill_inverse(&mut buffer);
                }
                post!(batch.read(buffer, source));
            }
            FreeBuffers::Gpu(pool) => {
                let content = if self.verify {
                    Content::Inverse(pattern)
                } else {
                    Content::Nothing
                };
                let Some(buffer) = pool.take(content) else { return };
                post!(batch.read(buffer, source));
            }
        }
    }

    fn end_list<'d>(&mut self, _batch: &mut Batch<'_, 'd>, _posted: &'d [u8; 8], _signal: bool) {}

    #[inline]
    fn retire(&mut self, mut done: Completion<'_>) -> Result<(), DataError> {
        let iteration = done.sequence();
        let pattern = self
            .verify
            .then(|| Pattern::new(self.seed, self.qp_index, iteration % self.slots));
        let wrong = match &mut self.free {
            FreeBuffers::Host(free) => {
                let Some(buffer) = done.take::<Local>() else {
                    return Ok(());
                };
                let wrong = pattern.and_then(|pattern| pattern.check(&buffer));
                free.push(buffer);
                wrong
            }
            FreeBuffers::Gpu(pool) => {
                let Some(buffer) = done.take::<Opaque<Local>>() else {
                    return Ok(());
                };
                let wrong = pool.check(&buffer, pattern);
                pool.release(buffer);
                if let Some(failure) = pool.take_error() {
                    return Err(DataError::Gpu(failure.to_string()));
                }
                wrong.map_err(|failure| DataError::Gpu(failure.to_string()))?
            }
        };
        match wrong {
            Some(wrong) => Err(DataError::Mismatch(Mismatch::at(
                self.bytes,
                self.qp_index,
                iteration,
                wrong,
            ))),
            None => Ok(()),
        }
    }

    #[inline]
    fn done(&self, retired: u64) -> u64 {
        retired
    }
}
