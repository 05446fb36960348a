//! The memory of one end of a ping-pong, for messages of up to the longest size.

use doorbell_verbs::{Buffer, Connected, Local, Scratch};

use crate::classic::settings::Settings;
use crate::classic::test_end::{Target, TestEnd, allocate, registration, slots};
use crate::engine::message::{Cycle, Sinks};
use crate::engine::pingpong::{BUFFERS, PingPongMemory, SendBuffers, Written};
use crate::engine::receiver::Receiver;
use crate::engine::requester::{SendOp, WriteOp};
use crate::engine::test_end;
use crate::engine::transport::TestTransport;
use crate::failure::{Failure, refused};

/// Messages longer than this have only [`LARGE_BUFFERS`] buffers, to save memory.
const LARGE_MESSAGE: u64 = 1 << 20;
const LARGE_BUFFERS: u32 = 2;

/// For `ib_write_lat`: the peer writes to the memory of the queue pair.
///
/// # Errors
/// [`Failure::Test`] when there is none.
pub(super) fn of_write<T: TestTransport + Connected>(
    settings: &Settings,
    test_end: &mut TestEnd<T>,
) -> Result<PingPongMemory<WriteOp>, Failure> {
    let longest = longest(settings);
    let out = send_buffers(settings, test_end, longest)?;
    let cycle = test_end.cycle(longest);
    let link = &mut test_end.links[0];
    Ok(PingPongMemory {
        op: WriteOp::new(link.remote(&cycle), Cycle::dense(longest, 1), None),
        out,
        receiver: None,
        written: match std::mem::replace(&mut link.target, Target::Nothing) {
            Target::Write(written) => Written::Host(written),
            _ => Written::Nothing,
        },
        payloads: None,
    })
}

/// For `ib_send_lat`; the receives are posted.
///
/// # Errors
/// [`Failure::Test`] when there is none, or the receives are refused.
pub(super) fn of_send<T: TestTransport>(
    settings: &Settings,
    test_end: &mut TestEnd<T>,
) -> Result<PingPongMemory<SendOp>, Failure> {
    let longest = longest(settings);
    let received = longest.saturating_add(T::HEADER);
    let (out, receives) = match &test_end.gpu {
        Some(gpu) => (
            SendBuffers::Gpu(Box::new(slots(gpu, &test_end.pd, longest, BUFFERS)?)),
            Sinks::Gpu(Box::new(slots(gpu, &test_end.pd, received, BUFFERS)?), None),
        ),
        None => {
            let receives = buffers(settings, test_end, received)?;
            (
                send_buffers(settings, test_end, longest)?,
                Sinks::Scratch(
                    receives
                        .into_iter()
                        .map(Buffer::scratch)
                        .collect::<Vec<Buffer<Scratch>>>(),
                ),
            )
        }
    };
    let mut receiver = Receiver::new(receives, 1, None);
    let test_end::TestEnd { qps, shared, .. } = &mut test_end.end;
    receiver.post(&mut qps[0], shared.as_mut())?;
    Ok(PingPongMemory {
        op: SendOp::new(false),
        out,
        receiver: Some(receiver),
        written: Written::Nothing,
        payloads: None,
    })
}

fn longest(settings: &Settings) -> u64 {
    settings.sizes.iter().max().copied().unwrap_or(1)
}

/// Registered memory only for messages too long for inline.
fn send_buffers<T: TestTransport>(
    settings: &Settings,
    test_end: &TestEnd<T>,
    longest: u64,
) -> Result<SendBuffers, Failure> {
    Ok(SendBuffers::Host {
        free: if test_end.is_inline(longest) {
            Vec::new()
        } else {
            buffers(settings, test_end, longest)?
        },
        inline: vec![0; test_end.inline as usize],
    })
}

/// Buffers of at least `bytes` each.
fn buffers<T: TestTransport>(
    settings: &Settings,
    test_end: &TestEnd<T>,
    bytes: u64,
) -> Result<Vec<Buffer<Local>>, Failure> {
    // Each starts at a cache line, so that no two share one.
    let apart = bytes.checked_next_multiple_of(test_end.parameters.cache_line.into());
    let count = if bytes > LARGE_MESSAGE { LARGE_BUFFERS } else { BUFFERS };
    let too_long = || Failure::test(format!("{bytes} B exceed the address space"));
    let apart = apart
        .and_then(|apart| usize::try_from(apart).ok())
        .ok_or_else(too_long)?;
    let whole = apart.checked_mul(count as usize).ok_or_else(too_long)?;
    let chunks = registration(settings, &test_end.pd)
        .register_chunks(allocate(settings, whole)?, apart, Local)
        .map_err(refused)?;
    Ok(chunks.collect())
}
