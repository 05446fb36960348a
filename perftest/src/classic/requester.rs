//! The memory of each operation, as the C tools lay it out.

use doorbell_verbs::{Connected, Local, Reliable};

use super::settings::Settings;
use super::test_end::{TestEnd, allocate, frozen, scratch, slots};
use crate::engine::message::{Cycle, Sinks, Sources};
use crate::engine::receiver::Receiver;
use crate::engine::requester::{AtomicRequester, MessageRequester, ReadRequester, Requester, SendOp, WriteOp};
use crate::engine::transport::TestTransport;
use crate::failure::{Failure, refused};

/// A requester that is made from the settings.
pub(super) trait ClassicRequester<T: TestTransport>: Requester<T> + Sized {
    /// For messages that go through `cycle` on the queue pair with this index, up to `window` in
    /// flight.
    fn new(
        settings: &Settings,
        test_end: &TestEnd<T>,
        qp_index: usize,
        cycle: Cycle,
        window: u32,
    ) -> Result<Self, Failure>;
}

/// Sends messages by `op`; none is verified or counted by the peer.
fn messages<T: TestTransport, O>(
    settings: &Settings,
    test_end: &TestEnd<T>,
    op: O,
    cycle: &Cycle,
    window: u32,
) -> Result<MessageRequester<O>, Failure> {
    let sources = if let Some(gpu) = &test_end.gpu {
        Sources::Gpu(Box::new(slots(gpu, &test_end.pd, cycle.bytes, window)?), None)
    } else if test_end.is_inline(cycle.bytes) {
        Sources::Inline(None)
    } else {
        Sources::Frozen(frozen(settings, &test_end.pd, cycle, window as usize)?)
    };
    Ok(MessageRequester {
        op,
        sources,
        credits: None,
    })
}

/// Memory to read or receive `count` messages into, each behind `header` bytes.
fn sinks<T: TestTransport>(
    settings: &Settings,
    test_end: &TestEnd<T>,
    cycle: &Cycle,
    header: u64,
    count: u32,
) -> Result<Sinks, Failure> {
    Ok(match &test_end.gpu {
        Some(gpu) => Sinks::Gpu(Box::new(slots(gpu, &test_end.pd, cycle.bytes + header, count)?), None),
        None => Sinks::Scratch(scratch(settings, &test_end.pd, cycle, header, count as usize)?),
    })
}

impl<T: TestTransport + Connected> ClassicRequester<T> for MessageRequester<WriteOp> {
    fn new(
        settings: &Settings,
        test_end: &TestEnd<T>,
        qp_index: usize,
        cycle: Cycle,
        window: u32,
    ) -> Result<Self, Failure> {
        let op = WriteOp::new(test_end.links[qp_index].remote(&cycle), cycle, None);
        messages(settings, test_end, op, &cycle, window)
    }
}

impl<T: TestTransport> ClassicRequester<T> for MessageRequester<SendOp> {
    fn new(settings: &Settings, test_end: &TestEnd<T>, _: usize, cycle: Cycle, window: u32) -> Result<Self, Failure> {
        messages(settings, test_end, SendOp, &cycle, window)
    }
}

impl<T: TestTransport + Reliable> ClassicRequester<T> for ReadRequester {
    fn new(
        settings: &Settings,
        test_end: &TestEnd<T>,
        qp_index: usize,
        cycle: Cycle,
        window: u32,
    ) -> Result<Self, Failure> {
        let source = test_end.links[qp_index].remote(&cycle);
        let free = sinks(settings, test_end, &cycle, 0, window)?;
        Ok(ReadRequester::new(source, cycle, free))
    }
}

/// Atomics: all requests of a queue pair in flight target one word after the other, as the cycle
/// buffer goes.
impl<T: TestTransport + Reliable> ClassicRequester<T> for AtomicRequester {
    fn new(
        settings: &Settings,
        test_end: &TestEnd<T>,
        qp_index: usize,
        cycle: Cycle,
        window: u32,
    ) -> Result<Self, Failure> {
        let link = &test_end.links[qp_index];
        let words = test_end
            .pd
            .register_chunks(allocate(settings, 8 * window as usize)?, 8, Local)
            .map_err(refused)?;
        let words = words.filter_map(|buffer| buffer.into_word().ok()).collect();
        AtomicRequester::new(link.remote(&cycle), cycle, settings.atomic, words, false)
            .ok_or_else(|| Failure::test(format!("{link}: the address it sent is not aligned to 8 bytes")))
    }
}

/// `count` receives of up to `bytes`, for one queue pair or the shared receive queue.
pub(super) fn receiver<T: TestTransport>(
    settings: &Settings,
    test_end: &TestEnd<T>,
    bytes: u64,
    count: u32,
) -> Result<Receiver, Failure> {
    let free = sinks(settings, test_end, &test_end.cycle(bytes), T::HEADER, count)?;
    Ok(Receiver::new(free, settings.recv_post_list, None))
}
