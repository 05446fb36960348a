//! The memory of the end that sends, reads or does atomics, for each operation.
//!
//! Without `--verify` all messages share a source buffer, writes a target, and a message is done
//! when it is acknowledged. With `--verify` every message has its own payload, a write its own
//! slot, and a message is done when the peer has advertised it.
//!
//! The peer advertises credits in a counter, a word of this end's memory that it writes: messages
//! checked (verified write) or receives reposted (send). At most that many messages plus the number
//! of slots may be sent, so a SEND always finds a posted receive (no RNR NAK). A transport that may
//! lose SENDs has no credits.

use std::marker::PhantomData;

use doorbell_verbs::{AtomicWord, Buffer, Local, Memory, PeerWrite, ProtectionDomain};

use super::super::test_end::{AdvertisedMemory, Peer, PeerQp, QpMemory, QpRequirements, Test};
use super::bw_loop::{ends_with_count, post_params};
use crate::cli::AtomicOperation;
use crate::engine::gpu::GpuPool;
use crate::engine::message::{Cycle, Payloads, Sinks, Sources};
use crate::engine::requester::{
    AtomicRequester, Credits, MessageRequester, ReadRequester, SendOp, WriteImmOp, WriteOp,
};
use crate::engine::setup::RemoteAccess;
use crate::engine::transport::TestTransport;
use crate::failure::{Failure, refused};
use crate::plan::Verb;

/// An operation that carries messages, towards the peer's memory.
pub(crate) trait ConnectOp: Sized {
    fn connect(test: &Test<'_>, peer: &PeerQp) -> Result<Self, Failure>;
}

impl ConnectOp for WriteOp {
    fn connect(test: &Test<'_>, peer: &PeerQp) -> Result<WriteOp, Failure> {
        let slots = u64::from(peer.slots);
        let notice = ends_with_count(test).then(|| peer.notice()).transpose()?;
        let target = peer.data(slots * test.bytes)?;
        Ok(WriteOp::new(target, Cycle::dense(test.bytes, slots), notice))
    }
}

impl ConnectOp for WriteImmOp {
    fn connect(test: &Test<'_>, peer: &PeerQp) -> Result<WriteImmOp, Failure> {
        peer.data(test.bytes).map(WriteImmOp::new)
    }
}

impl ConnectOp for SendOp {
    fn connect(test: &Test<'_>, _: &PeerQp) -> Result<SendOp, Failure> {
        // After a lost message, the number identifies the next one.
        Ok(SendOp::new(test.counts_arrivals() && test.plan.verify))
    }
}

#[derive(Debug)]
pub(crate) struct MessageMemory<O> {
    sources: Sources,
    /// The counter that the peer writes; without one only the window limits.
    counter: Option<Buffer<PeerWrite>>,
    op: PhantomData<O>,
}

impl<O: ConnectOp> QpMemory for MessageMemory<O> {
    type Connected = MessageRequester<O>;

    fn requirements(test: &Test<'_>) -> QpRequirements {
        let access = if is_counted(test) {
            RemoteAccess::Write
        } else {
            RemoteAccess::Nothing
        };
        QpRequirements::new(post_params(test).depth(), 1, 8, access)
    }

    fn new(test: &Test<'_>, pd: &ProtectionDomain, qp_index: usize) -> Result<Self, Failure> {
        let (len, window) = (test.len(), test.window() as usize);
        let payloads = test.plan.verify.then(|| Payloads::new(test.plan.seed, qp_index));
        let sources = if let Some(gpu) = &test.device.gpu {
            Sources::Gpu(Box::new(GpuPool::new(gpu, pd, len, window)?), payloads)
        } else if test.is_inline() {
            Sources::Inline(payloads)
        } else if let Some(payloads) = payloads {
            Sources::Verified(buffers(test, pd, len, window)?, payloads)
        } else {
            let frozen = pd.register(test.memory(len)?, Local).map_err(refused)?.freeze();
            Sources::Frozen(std::iter::repeat_n(frozen, window).collect())
        };
        let counter = is_counted(test)
            .then(|| pd.register(Memory::zeroed(8), PeerWrite))
            .transpose()
            .map_err(refused)?;
        Ok(MessageMemory {
            sources,
            counter,
            op: PhantomData,
        })
    }

    fn advertised_memory(&self) -> AdvertisedMemory {
        AdvertisedMemory {
            credit: self.counter.as_ref().map(|counter| counter.remote().to_bytes()),
            ..AdvertisedMemory::default()
        }
    }

    fn connect<T: TestTransport>(self, Peer { test, keys, .. }: Peer<'_, T>) -> Result<MessageRequester<O>, Failure> {
        if keys.slots == 0 {
            return Err(Failure::test(format!(
                "{keys} has no slot for a message: are both ends the same doorbell?"
            )));
        }
        Ok(MessageRequester {
            op: O::connect(test, keys)?,
            sources: self.sources,
            credits: self.counter.map(|word| Credits {
                word,
                slots: keys.slots.into(),
                // Where messages go both ways, credits share their send queue, and completions
                // do not count messages.
                confirm: test.plan.verify || test.plan.mode.bidirectional,
            }),
        })
    }
}

/// Whether the peer counts messages, which it writes to a word of this end's memory. Where
/// messages may be lost, SENDs have no flow control, as in the C tools.
fn is_counted(test: &Test<'_>) -> bool {
    (test.plan.verify || test.plan.verb == Verb::Send) && !test.counts_arrivals()
}

/// `count` buffers of `len` bytes.
pub(crate) fn buffers(
    test: &Test<'_>,
    pd: &ProtectionDomain,
    len: usize,
    count: usize,
) -> Result<Vec<Buffer<Local>>, Failure> {
    let chunks = pd
        .register_chunks(test.memory(len * count)?, len, Local)
        .map_err(refused)?;
    Ok(chunks.collect())
}

/// Memory for `count` messages to be received or read, each behind the header of `payloads`;
/// checked with `--verify`.
pub(crate) fn sinks(
    test: &Test<'_>,
    pd: &ProtectionDomain,
    payloads: Payloads,
    count: usize,
) -> Result<Sinks, Failure> {
    let len = test.len() + payloads.header;
    let payloads = test.plan.verify.then_some(payloads);
    Ok(match (&test.device.gpu, payloads) {
        (Some(gpu), payloads) => Sinks::Gpu(Box::new(GpuPool::new(gpu, pd, test.len(), count)?), payloads),
        (None, Some(payloads)) => Sinks::Verified(buffers(test, pd, len, count)?, payloads),
        (None, None) => Sinks::Scratch(
            buffers(test, pd, len, count)?
                .into_iter()
                .map(Buffer::scratch)
                .collect(),
        ),
    })
}

/// The peer's slots of a READ test; with `--verify` each has its own payload.
pub(crate) fn read_slots(test: &Test<'_>) -> u32 {
    if test.plan.verify { test.window() } else { 1 }
}

#[derive(Debug)]
pub(crate) struct ReadMemory(Sinks);

impl QpMemory for ReadMemory {
    type Connected = ReadRequester;

    fn requirements(test: &Test<'_>) -> QpRequirements {
        QpRequirements::new(post_params(test).depth(), 1, 0, RemoteAccess::Nothing)
    }

    fn new(test: &Test<'_>, pd: &ProtectionDomain, qp_index: usize) -> Result<Self, Failure> {
        let payloads = Payloads {
            different: read_slots(test).into(),
            ..Payloads::new(test.plan.seed, qp_index)
        };
        sinks(test, pd, payloads, test.window() as usize).map(ReadMemory)
    }

    fn connect<T: TestTransport>(self, Peer { test, keys, .. }: Peer<'_, T>) -> Result<ReadRequester, Failure> {
        let cycle = Cycle::dense(test.bytes, read_slots(test).into());
        Ok(ReadRequester::new(keys.data(cycle.len())?, cycle, self.0))
    }
}

/// Every queue pair increments a word of its own.
#[derive(Debug)]
pub(crate) struct AtomicMemory(Vec<AtomicWord>);

impl QpMemory for AtomicMemory {
    type Connected = AtomicRequester;

    fn requirements(test: &Test<'_>) -> QpRequirements {
        ReadMemory::requirements(test)
    }

    fn new(test: &Test<'_>, pd: &ProtectionDomain, _: usize) -> Result<Self, Failure> {
        let words = pd
            .register_chunks(Memory::zeroed(8 * test.window() as usize), 8, Local)
            .map_err(refused)?;
        Ok(AtomicMemory(
            words.filter_map(|buffer| buffer.into_word().ok()).collect(),
        ))
    }

    fn connect<T: TestTransport>(self, Peer { test, keys, .. }: Peer<'_, T>) -> Result<AtomicRequester, Failure> {
        let operation = match test.plan.verb {
            Verb::Atomic(operation) => operation,
            Verb::Write | Verb::Read | Verb::Send => AtomicOperation::default(),
        };
        AtomicRequester::new(keys.data(8)?, Cycle::dense(8, 1), operation, self.0, test.plan.verify)
            .ok_or_else(|| Failure::test(format!("peer {}: its word is not aligned", test.control.peer())))
    }
}
