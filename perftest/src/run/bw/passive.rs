//! The server of tests that its processor takes no part in: it lends memory and waits. `bw write` without `--verify`, `bw` and `lat read`, `bw`
//! and `lat atomic`.

use std::sync::atomic::Ordering;

use doorbell_verbs::{Buffer, Memory, Opaque, ProtectionDomain, RemoteAtomic, RemoteRead, RemoteWrite};

use super::super::gpu::{Cut, Messages};
use super::super::pattern::Pattern;
use super::super::station::{Grants, Keys, Needs, Own, Test, refused};
use crate::device::Gpu;
use crate::failure::Failure;
use crate::plan::Verb;

/// The memory lent on one lane.
#[derive(Debug)]
pub(crate) enum Lent {
    /// To be written to: one slot.
    Target(Buffer<RemoteWrite>),
    /// To be read from: as many slots as there are patterns.
    Source(Buffer<RemoteRead>, u32),
    /// The same two in a GPU's memory.
    GpuTarget(Buffer<Opaque<RemoteWrite>>),
    /// As above.
    GpuSource(Buffer<Opaque<RemoteRead>>, u32),
    /// To be counted in.
    Counter(Buffer<RemoteAtomic>),
}

impl Own for Lent {
    fn needs(test: &Test<'_>) -> Needs {
        let grants = match test.plan.verb {
            Verb::Read => Grants::Read,
            Verb::Atomic(_) => Grants::Atomic,
            Verb::Write | Verb::Send => Grants::Write,
        };
        Needs {
            send: 1,
            receive: 1,
            inline: 0,
            grants,
        }
    }

    fn new(test: &Test<'_>, pd: &ProtectionDomain, lane: usize) -> Result<Self, Failure> {
        let len = test.len();
        if let Some(gpu) = &test.device.gpu {
            return Lent::of_gpu(test, pd, gpu, lane);
        }
        match test.plan.verb {
            Verb::Read => {
                let slots = if test.plan.verify { test.window() } else { 1 };
                let mut memory = test.memory(len * slots as usize)?;
                if test.plan.verify {
                    for (slot, payload) in (0..).zip(memory.chunks_exact_mut(len)) {
                        Pattern::new(test.plan.seed, lane, slot).fill(payload);
                    }
                }
                Ok(Lent::Source(pd.register(memory, RemoteRead).map_err(refused)?, slots))
            }
            Verb::Atomic(_) => Ok(Lent::Counter(
                pd.register(Memory::zeroed(8), RemoteAtomic).map_err(refused)?,
            )),
            Verb::Write | Verb::Send => Ok(Lent::Target(
                pd.register(test.memory(len)?, RemoteWrite).map_err(refused)?,
            )),
        }
    }

    fn keys(&self) -> Keys {
        let (slots, data) = match self {
            Lent::Target(memory) => (1, memory.remote().to_bytes()),
            Lent::Source(memory, slots) => (*slots, memory.remote().to_bytes()),
            Lent::GpuTarget(memory) => (1, memory.remote().to_bytes()),
            Lent::GpuSource(memory, slots) => (*slots, memory.remote().to_bytes()),
            Lent::Counter(memory) => (1, memory.remote().to_bytes()),
        };
        Keys {
            slots,
            data: Some(data),
            counter: None,
        }
    }
}

impl Lent {
    /// What has been counted, where that is the test.
    pub(crate) fn counted(&self) -> Option<u64> {
        match self {
            Lent::Counter(word) => Some(word.load_u64(0, Ordering::Acquire)),
            Lent::Target(_) | Lent::Source(..) | Lent::GpuTarget(_) | Lent::GpuSource(..) => None,
        }
    }

    fn of_gpu(test: &Test<'_>, pd: &ProtectionDomain, gpu: &Gpu, lane: usize) -> Result<Self, Failure> {
        let len = test.len();
        let none = || Failure::test("a GPU's memory was registered as nothing");
        if test.plan.verb != Verb::Read {
            let (_, mut memory) = Messages::new(gpu, pd, (len, 1), Cut::Whole, RemoteWrite)?;
            return memory.pop().map(Lent::GpuTarget).ok_or_else(none);
        }
        let slots = if test.plan.verify { test.window() } else { 1 };
        let (mut messages, mut memory) = Messages::new(gpu, pd, (len, slots as usize), Cut::Whole, RemoteRead)?;
        let mut payload = vec![0; len];
        for slot in 0..slots {
            Pattern::new(test.plan.seed, lane, slot.into()).fill(&mut payload);
            messages.write(slot as usize, &payload)?;
        }
        memory
            .pop()
            .map(|memory| Lent::GpuSource(memory, slots))
            .ok_or_else(none)
    }
}
