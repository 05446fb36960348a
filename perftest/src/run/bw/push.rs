//! The client of `bw write` and `bw send`.
//!
//! Without `--verify` every message comes from the same memory, through as many handles as may be in flight, and a write always goes to the
//! same place; a message is done when it is acknowledged. With `--verify` every message has bytes of its own, and a write a slot of its own at
//! the peer until the peer has looked at it; a message is done when the peer says so.
//!
//! The peer says so in a counter, a word of this side's memory that it writes: messages looked at (verified write) or receives posted again
//! (send). Either way that many messages more than it has slots may be sent, so a sender never meets a receiver that is not ready.

use std::sync::atomic::Ordering;

use doorbell_verbs::{
    Batch, Buffer, Completion, Frozen, Local, Memory, Opaque, ProtectionDomain, Remote, RemoteWrite, Write as MayWrite,
};

use super::super::gpu::{Content, Pool};
use super::super::pattern::Pattern;
use super::super::station::{Grants, Keys, Needs, Own, Test, Theirs, refused};
use super::stream::{Flow, Pace, Wrong};
use crate::failure::Failure;
use crate::plan::Verb;

/// One lane.
#[derive(Debug)]
pub(crate) struct Push {
    seed: u64,
    lane: usize,
    bytes: u64,
    verify: bool,
    sources: Sources,
    /// Where the peer counts; without it there is no limit but the window.
    counter: Option<Buffer<RemoteWrite>>,
    /// Where a write goes.
    target: Option<Remote<MayWrite>>,
    /// Where to count for the peer.
    notice: Option<Remote<MayWrite>>,
    slots: u64,
}

/// What is sent.
#[derive(Debug)]
enum Sources {
    /// Handles to the same bytes.
    Same(Vec<Buffer<Frozen>>),
    /// Buffers to be filled for each message.
    Different(Vec<Buffer<Local>>),
    /// Buffers in a GPU's memory, filled for each message with `--verify`.
    Gpu(Box<Pool>),
    /// Nothing: messages travel inline.
    Inline,
}

/// Whether the peer counts in this test.
fn is_counted(test: &Test<'_>) -> bool {
    test.plan.verify || test.plan.verb == Verb::Send
}

impl Own for Push {
    fn needs(test: &Test<'_>) -> Needs {
        let grants = if is_counted(test) {
            Grants::Write
        } else {
            Grants::Nothing
        };
        Needs {
            send: Pace::new(test, Self::requests_per_list(test)).depth(),
            receive: 1,
            inline: 8,
            grants,
        }
    }

    fn new(test: &Test<'_>, pd: &ProtectionDomain, lane: usize) -> Result<Self, Failure> {
        let (len, window) = (test.len(), test.window() as usize);
        let sources = if let Some(gpu) = &test.device.gpu {
            Sources::Gpu(Box::new(Pool::new(gpu, pd, len, window)?))
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
            .then(|| pd.register(Memory::zeroed(8), RemoteWrite))
            .transpose()
            .map_err(refused)?;
        Ok(Push {
            seed: test.plan.seed,
            lane,
            bytes: test.bytes,
            verify: test.plan.verify,
            sources,
            counter,
            target: None,
            notice: None,
            slots: 0,
        })
    }

    fn keys(&self) -> Keys {
        Keys {
            slots: 0,
            data: None,
            counter: self.counter.as_ref().map(|counter| counter.remote().to_bytes()),
        }
    }
}

impl Flow for Push {
    fn requests_per_list(test: &Test<'_>) -> u32 {
        u32::from(test.plan.verify && test.plan.verb == Verb::Write)
    }

    fn attach(&mut self, test: &Test<'_>, theirs: &Theirs) -> Result<(), Failure> {
        self.slots = theirs.slots.into();
        if self.slots == 0 {
            return Err(Failure::test(format!(
                "{theirs} has no room for a message: are both ends the same doorbell?"
            )));
        }
        if test.plan.verb == Verb::Write {
            self.target = Some(theirs.data(self.slots * self.bytes)?);
            if self.verify {
                self.notice = Some(theirs.counter()?);
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
        Pattern::new(self.seed, self.lane, index).fill(into);
    }

    #[inline]
    fn stage<'d>(&mut self, batch: &mut Batch<'_, 'd>, index: u64, inline: Option<&'d [u8]>, signal: bool) {
        let target = self
            .target
            .and_then(|target| target.slice(index % self.slots * self.bytes, self.bytes));
        macro_rules! post {
            ($request:expr) => {{
                $request.signalled_if(signal);
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
                    Pattern::new(self.seed, self.lane, index).fill(&mut buffer);
                    match target {
                        Some(target) => post!(batch.write(buffer, target)),
                        None => post!(batch.send(buffer)),
                    }
                }
            }
            (Sources::Gpu(pool), None, target) => {
                let content = if self.verify {
                    Content::Right(Pattern::new(self.seed, self.lane, index))
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
            batch.write_inline(posted, notice).signalled_if(signal);
        }
    }

    #[inline]
    fn retire(&mut self, mut done: Completion<'_>) -> Result<(), Wrong> {
        match &mut self.sources {
            Sources::Same(free) => free.extend(done.take::<Frozen>()),
            Sources::Different(free) => free.extend(done.take::<Local>()),
            Sources::Gpu(pool) => {
                if let Some(buffer) = done.take::<Opaque<Local>>() {
                    pool.give(buffer);
                }
                if let Some(failure) = pool.failed() {
                    return Err(Wrong::Gpu(failure.to_string()));
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
