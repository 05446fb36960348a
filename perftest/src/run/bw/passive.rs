//! The passive end of one-sided tests: it provides memory and waits. `bw write` without
//! `--verify`, `bw` and `lat read`, `bw` and `lat atomic`.

use std::sync::atomic::Ordering;

use doorbell_verbs::{Buffer, Memory, Opaque, PeerAtomic, PeerRead, PeerWrite, ProtectionDomain};

use super::super::test_end::{AdvertisedMemory, Peer, QpMemory, QpRequirements, Test};
use super::client::read_slots;
use super::memory::{Served, Service};
use crate::device::Gpu;
use crate::engine::gpu::GpuMessages;
use crate::engine::pattern::Pattern;
use crate::engine::receiver::Receiver;
use crate::engine::setup::RemoteAccess;
use crate::engine::test_end::TestQp;
use crate::engine::transport::TestTransport;
use crate::failure::{Failure, refused};
use crate::plan::Verb;

#[derive(Debug)]
pub(crate) enum PassiveMemory {
    /// One slot to be written to.
    Target(Buffer<PeerWrite>),
    /// Slots to be read from: as many as there are patterns.
    Source(Buffer<PeerRead>, u32),
    /// One slot in a GPU's memory to be written to.
    GpuTarget(Buffer<Opaque<PeerWrite>>),
    /// Slots in a GPU's memory to be read from.
    GpuSource(Buffer<Opaque<PeerRead>>, u32),
    /// A word for atomics.
    Counter(Buffer<PeerAtomic>),
}

impl QpMemory for PassiveMemory {
    type Connected = Served<PassiveMemory>;

    fn requirements(test: &Test<'_>) -> QpRequirements {
        let access = match test.plan.verb {
            Verb::Read => RemoteAccess::Read,
            Verb::Atomic(_) => RemoteAccess::Atomic,
            Verb::Write | Verb::Send => RemoteAccess::Write,
        };
        QpRequirements::new(1, 1, 0, access)
    }

    fn new(test: &Test<'_>, pd: &ProtectionDomain, qp_index: usize) -> Result<Self, Failure> {
        let len = test.len();
        if let Some(gpu) = &test.device.gpu {
            return PassiveMemory::of_gpu(test, pd, gpu, qp_index);
        }
        match test.plan.verb {
            Verb::Read => {
                let slots = read_slots(test);
                let mut memory = test.memory(len * slots as usize)?;
                if test.plan.verify {
                    for (slot, payload) in (0..).zip(memory.chunks_exact_mut(len)) {
                        Pattern::new(test.plan.seed, qp_index, slot).fill(payload);
                    }
                }
                Ok(PassiveMemory::Source(
                    pd.register(memory, PeerRead).map_err(refused)?,
                    slots,
                ))
            }
            Verb::Atomic(_) => Ok(PassiveMemory::Counter(
                pd.register(Memory::zeroed(8), PeerAtomic).map_err(refused)?,
            )),
            Verb::Write | Verb::Send => Ok(PassiveMemory::Target(
                pd.register(test.memory(len)?, PeerWrite).map_err(refused)?,
            )),
        }
    }

    fn advertised_memory(&self) -> AdvertisedMemory {
        let (slots, data) = match self {
            PassiveMemory::Target(memory) => (1, memory.remote().to_bytes()),
            PassiveMemory::Source(memory, slots) => (*slots, memory.remote().to_bytes()),
            PassiveMemory::GpuTarget(memory) => (1, memory.remote().to_bytes()),
            PassiveMemory::GpuSource(memory, slots) => (*slots, memory.remote().to_bytes()),
            PassiveMemory::Counter(memory) => (1, memory.remote().to_bytes()),
        };
        AdvertisedMemory {
            slots,
            data: Some(data),
            ..AdvertisedMemory::default()
        }
    }

    fn connect<T: TestTransport>(self, _: Peer<'_, T>) -> Result<Self::Connected, Failure> {
        Ok((None, self))
    }
}

impl<T: TestTransport> Service<T> for PassiveMemory {
    const IS_PASSIVE: bool = true;

    #[inline]
    fn step(&mut self, _: &Test<'_>, _: &mut TestQp<T>, _: Option<&Receiver>, _: bool) -> Result<bool, Failure> {
        Ok(false)
    }

    /// The final value of the word, in a test of atomics.
    fn done(&self) -> Option<u64> {
        match self {
            PassiveMemory::Counter(word) => Some(word.load_u64(0, Ordering::Acquire)),
            PassiveMemory::Target(_)
            | PassiveMemory::Source(..)
            | PassiveMemory::GpuTarget(_)
            | PassiveMemory::GpuSource(..) => None,
        }
    }

    fn is_done(&self, _: u64) -> bool {
        true
    }
}

impl PassiveMemory {
    fn of_gpu(test: &Test<'_>, pd: &ProtectionDomain, gpu: &Gpu, qp_index: usize) -> Result<Self, Failure> {
        let len = test.len();
        if test.plan.verb != Verb::Read {
            let (_, memory) = GpuMessages::in_one(gpu, pd, (len, 1), PeerWrite)?;
            return Ok(PassiveMemory::GpuTarget(memory));
        }
        let slots = read_slots(test);
        let (mut messages, memory) = GpuMessages::in_one(gpu, pd, (len, slots as usize), PeerRead)?;
        let mut payload = vec![0; len];
        for slot in 0..slots {
            Pattern::new(test.plan.seed, qp_index, slot.into()).fill(&mut payload);
            messages.write(slot as usize, &payload)?;
        }
        Ok(PassiveMemory::GpuSource(memory, slots))
    }
}
