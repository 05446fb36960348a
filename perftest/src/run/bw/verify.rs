//! The target of a verified `bw write`: checks every byte of every message in its slot, inverts the
//! slot, and returns it as a credit.
//!
//! The sender writes its message count after each list, on the same queue pair: when the count
//! arrives, so have the messages before it. A slot is filled with the inverse of its next message,
//! so that a byte that is never written is found.

use std::sync::atomic::Ordering;

use doorbell_verbs::{Buffer, Connected, Memory, Opaque, PeerWrite, ProtectionDomain};

use super::super::test_end::{AdvertisedMemory, Peer, QpMemory, QpRequirements, Test};
use super::credit::{self, CreditWriter};
use super::memory::{Served, Service};
use crate::engine::gpu::GpuMessages;
use crate::engine::pattern::{Mismatch, Pattern};
use crate::engine::receiver::Receiver;
use crate::engine::setup::RemoteAccess;
use crate::engine::test_end::TestQp;
use crate::engine::transport::TestTransport;
use crate::failure::{Failure, refused};

#[derive(Debug)]
pub(crate) struct VerifiedSlots {
    memory: SlotMemory,
    notice: Buffer<PeerWrite>,
    slots: u32,
    qp_index: usize,
}

#[derive(Debug)]
enum SlotMemory {
    Host(Buffer<PeerWrite>),
    Gpu(Box<GpuMessages>, Buffer<Opaque<PeerWrite>>),
}

impl QpMemory for VerifiedSlots {
    type Connected = Served<CheckedSlots>;

    fn requirements(_test: &Test<'_>) -> QpRequirements {
        QpRequirements::new(credit::DEPTH, 1, 8, RemoteAccess::Write)
    }

    fn new(test: &Test<'_>, pd: &ProtectionDomain, qp_index: usize) -> Result<Self, Failure> {
        let (len, slots) = (test.len(), test.window());
        let spoil = |index, slot: &mut [u8]| Pattern::new(test.plan.seed, qp_index, index).fill_inverse(slot);
        let memory = if let Some(gpu) = &test.device.gpu {
            let (mut messages, memory) = GpuMessages::in_one(gpu, pd, (len, slots as usize), PeerWrite)?;
            let mut message = vec![0; len];
            for slot in 0..slots {
                spoil(slot.into(), &mut message);
                messages.write(slot as usize, &message)?;
            }
            SlotMemory::Gpu(Box::new(messages), memory)
        } else {
            let mut memory = test.memory(len * slots as usize)?;
            for (index, slot) in (0..).zip(memory.chunks_exact_mut(len)) {
                spoil(index, slot);
            }
            SlotMemory::Host(pd.register(memory, PeerWrite).map_err(refused)?)
        };
        Ok(VerifiedSlots {
            memory,
            notice: pd.register(Memory::zeroed(8), PeerWrite).map_err(refused)?,
            slots,
            qp_index,
        })
    }

    fn advertised_memory(&self) -> AdvertisedMemory {
        AdvertisedMemory {
            slots: self.slots,
            data: Some(match &self.memory {
                SlotMemory::Host(memory) => memory.remote().to_bytes(),
                SlotMemory::Gpu(_, memory) => memory.remote().to_bytes(),
            }),
            notice: Some(self.notice.remote().to_bytes()),
            credit: None,
        }
    }

    fn connect<T: TestTransport>(self, peer: Peer<'_, T>) -> Result<Self::Connected, Failure> {
        let checked = CheckedSlots {
            credit: CreditWriter::new(peer.test, peer.keys, self.slots)?,
            qp_index: self.qp_index,
            message: vec![0; peer.test.len()],
            slots: self,
        };
        Ok((None, checked))
    }
}

/// The slots of a connected queue pair.
#[derive(Debug)]
pub(crate) struct CheckedSlots {
    slots: VerifiedSlots,
    credit: CreditWriter,
    qp_index: usize,
    /// A copy of the message being checked.
    message: Vec<u8>,
}

impl<T: TestTransport + Connected> Service<T> for CheckedSlots {
    fn step(
        &mut self,
        test: &Test<'_>,
        test_qp: &mut TestQp<T>,
        _: Option<&Receiver>,
        _: bool,
    ) -> Result<bool, Failure> {
        let CheckedSlots {
            slots,
            credit,
            qp_index,
            message,
        } = self;
        let mut has_arrived = false;
        let there = u64::from_le(slots.notice.load_u64(0, Ordering::Acquire));
        // A count beyond what the peer may have written is invalid; its test then fails by itself.
        let there = there.min(credit.done() + u64::from(slots.slots));
        while credit.done() < there {
            has_arrived = true;
            if let Some(wrong) = check_slot(test, slots, *qp_index, credit.done(), message)? {
                return Err(Failure::test(format!("{}: {wrong}", test_qp.peer)));
            }
            credit.set_done(credit.done() + 1);
            credit.advertise(test_qp, false)?;
        }
        credit.advertise(test_qp, true)?;
        Ok(has_arrived)
    }

    fn done(&self) -> Option<u64> {
        Some(self.credit.done())
    }

    fn is_done(&self, sent: u64) -> bool {
        self.credit.has_advertised(sent)
    }
}

/// Checks one message and fills its slot with the inverse of the next one there.
fn check_slot(
    test: &Test<'_>,
    memory: &mut VerifiedSlots,
    qp_index: usize,
    iteration: u64,
    message: &mut [u8],
) -> Result<Option<Mismatch>, Failure> {
    let slots = u64::from(memory.slots);
    let slot = (iteration % slots) as usize;
    match &mut memory.memory {
        SlotMemory::Host(memory) => memory.read_at(slot * message.len(), message),
        SlotMemory::Gpu(messages, _) => messages.read(slot, message)?,
    }
    if let Some(wrong) = Pattern::new(test.plan.seed, qp_index, iteration).check(message) {
        return Ok(Some(Mismatch::at(test.bytes, qp_index, iteration, wrong)));
    }
    Pattern::new(test.plan.seed, qp_index, iteration + slots).fill_inverse(message);
    match &mut memory.memory {
        SlotMemory::Host(memory) => memory.write_at(slot * message.len(), message),
        SlotMemory::Gpu(messages, _) => messages.write(slot, message)?,
    }
    Ok(None)
}
