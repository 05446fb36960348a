//! The client of `bw write` and `bw send`.
//!
//! Without `--verify` all messages share a source buffer, writes a target, and a message is done
//! when it is acknowledged. With `--verify` every message has its own payload, a write its own
//! slot, and a message is done when the peer has advertised it.
//!
//! The peer advertises credits in a counter, a word of this end's memory that it writes: messages
//! checked (verified write) or receives reposted (send). At most that many messages plus the number
//! of slots may be sent, so a SEND always finds a posted receive (no RNR NAK).

use std::sync::atomic::Ordering;

use doorbell_verbs::{
    Batch, Buffer, Completion, Frozen, Local, Memory, Opaque, PeerWrite, ProtectionDomain, Remote, WriteAccess,
};

use super::super::gpu::{Content, GpuPool};
use super::super::pattern::Pattern;
use super::super::test_end::{AdvertisedMemory, PeerQp, QpMemory, QpRequirements, RemoteAccess, Test};
use super::bw_loop::{BwRequester, DataError, PostParams};
use crate::failure::{Failure, refused};
use crate::plan::Verb;

#[derive(Debug)]
pub(crate) struct WriteSendRequester {
    seed: u64,
    qp_index: usize,
    bytes: u64,
    verify: bool,
    sources: Sources,
    /// The counter that the peer writes; without one only the window limits.
    counter: Option<Buffer<PeerWrite>>,
    target: Option<Remote<WriteAccess>>,
    /// The peer's word for the message count of a verified write.
    notice: Option<Remote<WriteAccess>>,
    slots: u64,
}

#[derive(Debug)]
enum Sources {
    /// Handles of the same buffer.
    Same(Vec<Buffer<Frozen>>),
    /// Buffers to be filled for each message.
    Different(Vec<Buffer<Local>>),
    /// Buffers in a GPU's memory, filled for each message with `--verify`.
    Gpu(Box<GpuPool>),
    /// None: messages are sent inline.
    Inline,
}

fn is_counted(test: &Test<'_>) -> bool {
    test.plan.verify || test.plan.verb == Verb::Send
}

impl QpMemory for WriteSendRequester {
    fn requirements(test: &Test<'_>) -> QpRequirements {
        let access = if is_counted(test) {
            RemoteAccess::Write
        } else {
            RemoteAccess::Nothing
        };
        QpRequirements {
            send: PostParams::new(test, Self::requests_per_list(test)).depth(),
            receive: 1,
            inline: 8,
            access,
        }
    }

    fn new(test: &Test<'_>, pd: &ProtectionDomain, qp_index: usize) -> Result<Self, Failure> {
        let (len, window) = (test.len(), test.window() as usize);
        let sources = if let Some(gpu) = &test.device.gpu {
            Sources::Gpu(Box::new(GpuPool::new(gpu, pd, len, window)?))
        } else if test.is_inline() {
            Sources::Inline
        } else if test.plan.verify {
            Sources::Different(
                pd.register_chunks(test.memory(len * window)?, len, Local)
                    .map_err(refused)?
                    .collect(),
            )
        } else {
            let frozen = pd.register(test.memory(len)?, Local).map_err(refused)?.freeze();
            Sources::Same(std::iter::repeat_n(frozen, window).collect())
        };
        let counter = is_counted(test)
            .then(|| pd.register(Memory::zeroed(8), PeerWrite))
            .transpose()
            .map_err(refused)?;
        Ok(WriteSendRequester {
            seed: test.plan.seed,
            qp_index,
            bytes: test.bytes,
            verify: test.plan.verify,
            sources,
            counter,
            target: None,
            notice: None,
            slots: 0,
        })
    }

    fn advertised_memory(&self) -> AdvertisedMemory {
        AdvertisedMemory {
            slots: 0,
            data: None,
            counter: self.counter.as_ref().map(|counter| counter.remote().to_bytes()),
        }
    }
}

impl BwRequester for WriteSendRequester {
    fn requests_per_list(test: &Test<'_>) -> u32 {
        u32::from(test.plan.verify && test.plan.verb == Verb::Write)
    }

    fn attach(&mut self, test: &Test<'_>, peer: &PeerQp) -> Result<(), Failure> {
        self.slots = peer.slots.into();
        if self.slots == 0 {
            return Err(Failure::test(format!(
                "{peer} has no slot for a message: are both ends the same doorbell?"
            )));
        }
        if test.plan.verb == Verb::Write {
            self.target = Some(peer.data(self.slots * self.bytes)?);
            if self.verify {
                self.notice = Some(peer.counter()?);
            }
        }
        Ok(())
    }

    #[inline]
    fn allowance(&self) -> u64 {
        match &self.counter {
            Some(counter) => u64::from_le(counter.load_u64(0, Ordering::Acquire)).saturating_add(self.slots),
            None => u64::MAX,
        }
    }

    #[inline]
    fn free(&self) -> usize {
        match &self.sources {
            Sources::Same(free) => free.len(),
            Sources::Different(free) => free.len(),
            Sources::Gpu(pool) => pool.len(),
            Sources::Inline => usize::MAX,
        }
    }

    fn payload(&self, index: u64, into: &mut [u8]) {
        Pattern::new(self.seed, self.qp_index, index).fill(into);
    }

    #[inline]
    fn stage<'d>(&mut self, batch: &mut Batch<'_, 'd>, index: u64, inline: Option<&'d [u8]>, signal: bool) {
        let target = self
            .target
            .and_then(|target| target.slice(index % self.slots * self.bytes, self.bytes));
        macro_rules! post {
            ($request:expr) => {{
                $request.signaled_if(signal);
            }};
        }
        match (&mut self.sources, inline, target) {
            (_, Some(bytes), Some(target)) => post!(batch.write_inline(bytes, target)),
            (_, Some(bytes), None) => post!(batch.send_inline(bytes)),
            (Sources::Same(free), None, target) => {
                if let Some(buffer) = free.pop() {
                    match target {
                        Some(target) => post!(batch.write(buffer, target)),
                        None => post!(batch.send(buffer)),
                    }
                }
            }
            (Sources::Different(free), None, target) => {
                if let Some(mut buffer) = free.pop() {
                    Pattern::new(self.seed, self.qp_index, index).fill(&mut buffer);
                    match target {
                        Some(target) => post!(batch.write(buffer, target)),
                        None => post!(batch.send(buffer)),
                    }
                }
            }
            (Sources::Gpu(pool), None, target) => {
                let content = if self.verify {
                    Content::Pattern(Pattern::new(self.seed, self.qp_index, index))
                } else {
                    Content::Any
                };
                if let Some(buffer) = pool.take(content) {
                    match target {
                        Some(target) => post!(batch.write(buffer, target)),
                        None => post!(batch.send(buffer)),
                    }
                }
            }
            (Sources::Inline, None, _) => {}
        }
    }

    #[inline]
    fn end_list<'d>(&mut self, batch: &mut Batch<'_, 'd>, posted: &'d [u8; 8], signal: bool) {
        if let Some(notice) = self.notice {
            batch.write_inline(posted, notice).signaled_if(signal);
        }
    }

    #[inline]
    fn retire(&mut self, mut done: Completion<'_>) -> Result<(), DataError> {
        match &mut self.sources {
            Sources::Same(free) => free.extend(done.take::<Frozen>()),
            Sources::Different(free) => free.extend(done.take::<Local>()),
            Sources::Gpu(pool) => {
                if let Some(buffer) = done.take::<Opaque<Local>>() {
                    pool.release(buffer);
                }
                if let Some(failure) = pool.take_error() {
                    return Err(DataError::Gpu(failure.to_string()));
                }
            }
            Sources::Inline => {}
        }
        Ok(())
    }

    #[inline]
    fn done(&self, retired: u64) -> u64 {
        match &self.counter {
            Some(counter) if self.verify => u64::from_le(counter.load_u64(0, Ordering::Acquire)),
            _ => retired,
        }
    }
}
