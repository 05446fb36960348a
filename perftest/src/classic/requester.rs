//! The memory of each operation, as the C tools lay it out.

use doorbell_verbs::{Connected, Local, Reliable};

use super::settings::Settings;
use super::test_end::{TestEnd, allocate, frozen, scratch, slots};
use crate::engine::message::{Cycle, Sinks, Sources};
use crate::engine::receiver::Receiver;
use crate::engine::requester::{AtomicRequester, MessageRequester, ReadRequester, Requester, SendOp, WriteOp};
use crate::engine::transport::TestTransport;
use crate::failure::{Failure, refused};

/// What a requester is made of.
pub(super) struct Context<'a, T: TestTransport> {
    pub(super) settings: &'a Settings,
    pub(super) test_end: &'a TestEnd<T>,
    pub(super) qp_index: usize,
    /// Where messages go through.
    pub(super) cycle: Cycle,
    /// Messages in flight at most.
    pub(super) window: u32,
}

pub(super) trait ClassicRequester<T: TestTransport>: Requester<T> + Sized {
    fn new(of: &Context<'_, T>) -> Result<Self, Failure>;
}

/// Sends messages by `op`; none is verified or counted by the peer.
fn messages<T: TestTransport, O>(of: &Context<'_, T>, op: O) -> Result<MessageRequester<O>, Failure> {
    let (pd, bytes) = (&of.test_end.pd, of.cycle.bytes);
    let sources = if let Some(gpu) = &of.test_end.gpu {
        Sources::Gpu(Box::new(slots(gpu, pd, bytes, of.window)?), None)
    } else if of.test_end.is_inline(bytes) {
        Sources::Inline(None)
    } else {
        Sources::Frozen(frozen(of.settings, pd, &of.cycle, of.window as usize)?)
    };
    Ok(MessageRequester {
        op,
        sources,
        credits: None,
    })
}

/// Memory to read or receive messages into, each behind `header` bytes.
fn sinks<T: TestTransport>(of: &Context<'_, T>, header: u64) -> Result<Sinks, Failure> {
    let pd = &of.test_end.pd;
    Ok(match &of.test_end.gpu {
        Some(gpu) => Sinks::Gpu(Box::new(slots(gpu, pd, of.cycle.bytes + header, of.window)?), None),
        None => Sinks::Scratch(scratch(of.settings, pd, &of.cycle, header, of.window as usize)?),
    })
}

impl<T: TestTransport + Connected> ClassicRequester<T> for MessageRequester<WriteOp> {
    fn new(of: &Context<'_, T>) -> Result<Self, Failure> {
        let target = of.test_end.links[of.qp_index].remote(&of.cycle);
        messages(of, WriteOp::new(target, of.cycle, None))
    }
}

impl<T: TestTransport> ClassicRequester<T> for MessageRequester<SendOp> {
    fn new(of: &Context<'_, T>) -> Result<Self, Failure> {
        messages(of, SendOp::new(false))
    }
}

impl<T: TestTransport + Reliable> ClassicRequester<T> for ReadRequester {
    fn new(of: &Context<'_, T>) -> Result<Self, Failure> {
        let source = of.test_end.links[of.qp_index].remote(&of.cycle);
        Ok(ReadRequester::new(source, of.cycle, sinks(of, 0)?))
    }
}

/// Atomics: all requests of a queue pair in flight target one word after the other, as the cycle
/// buffer goes.
impl<T: TestTransport + Reliable> ClassicRequester<T> for AtomicRequester {
    fn new(of: &Context<'_, T>) -> Result<Self, Failure> {
        let link = &of.test_end.links[of.qp_index];
        let memory = allocate(of.settings, 8 * of.window as usize)?;
        let words = of.test_end.pd.register_chunks(memory, 8, Local).map_err(refused)?;
        let words = words.filter_map(|buffer| buffer.into_word().ok()).collect();
        AtomicRequester::new(link.remote(&of.cycle), of.cycle, of.settings.atomic, words, false)
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
    let of = Context {
        settings,
        test_end,
        qp_index: 0,
        cycle: test_end.cycle(bytes),
        window: count,
    };
    Ok(Receiver::new(sinks(&of, T::HEADER)?, settings.recv_post_list, None))
}
