//! Groups of sends and receives, and all-to-all-v: contents, order, self-sends, empty messages,
//! lengths that differ, misuse, and graphs; among GPUs and staged through the host.

use std::time::{Duration, Instant};

use doorbell_collectives::gpu::{Executor, GpuCommunicator, GpuMessage, GpuOptions, Sizes};
use doorbell_collectives::plan::Collective;
use doorbell_collectives::reference::{Case, Number};
use doorbell_collectives::{Rank, ReduceOp};
use doorbell_cuda::{DeviceMemory, HostMemory, Memory, Span, Stream};
use doorbell_cuda_standin::{ExecutionMode, Standin};

use crate::gpus::{once, small};
use crate::many::ranks;

/// Few blocks with small slots, so that messages take many of them.
fn by(executor: Executor) -> GpuOptions {
    let sizes = small().sizes.unwrap();
    GpuOptions {
        executor: Some(executor),
        blocks: Some(16),
        sizes: Some(Sizes {
            exchange: 256 << 10,
            ..sizes
        }),
        ..small()
    }
}

fn all_to_all_v<T: Number>(executor: Executor) {
    let standin = Standin::load(ExecutionMode::Prompt);
    for p in [1, 2, 3, 5] {
        ranks(standin.driver().unwrap(), p, &by(executor), |gpu| {
            let stream = Stream::new(gpu.context()).unwrap();
            for count in [1, 3001, 50_000] {
                let case = Case {
                    collective: Collective::AllToAllV,
                    ranks: p,
                    root: Rank(0),
                    count,
                };
                once::<T>(&gpu, &stream, &case, ReduceOp::Sum, false, false);
            }
            gpu.destroy().unwrap();
        });
    }
    standin.assert_nothing_left("communicators");
}

#[test]
fn all_to_all_v_by_kernels() {
    all_to_all_v::<i32>(Executor::Kernel);
}

/// Parts begin at any byte.
#[test]
fn all_to_all_v_of_bytes_by_kernels() {
    all_to_all_v::<u8>(Executor::Kernel);
}

#[test]
fn all_to_all_v_staged_through_the_host() {
    all_to_all_v::<i32>(Executor::Staged);
}

/// More than all slots of a queue hold, and less than a channel's share.
const LENGTHS: [usize; 5] = [0, 5, 400_003, 1, 70_000];
const WHOLE: usize = 5 + 400_003 + 1 + 70_000;

fn pattern(from: Rank, to: Rank, seed: u8) -> Vec<u8> {
    let first = u64::from(from.0) * 7 + u64::from(to.0) * 13 + u64::from(seed) * 101;
    (0..WHOLE as u64)
        .map(|index| ((first + index).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8)
        .collect()
}

/// The messages' places in `WHOLE` bytes.
fn places() -> impl Iterator<Item = core::ops::Range<usize>> {
    LENGTHS.iter().scan(0, |end, len| {
        let start = *end;
        *end += len;
        Some(start..*end)
    })
}

fn write(memory: Span<'_>, bytes: &[u8], stream: &Stream) {
    let host = HostMemory::alloc(stream.context(), bytes.len()).unwrap();
    host.copy_in(0, bytes).unwrap();
    stream.copy(memory, host.all()).unwrap();
    stream.synchronize().unwrap();
}

fn read(memory: Span<'_>, stream: &Stream) -> Vec<u8> {
    let host = HostMemory::alloc(stream.context(), memory.len()).unwrap();
    stream.copy(host.all(), memory).unwrap();
    stream.synchronize().unwrap();
    let mut bytes = vec![0; memory.len()];
    host.copy_out(0, &mut bytes).unwrap();
    bytes
}

/// What a rank sends to and receives from each rank.
struct Traffic {
    sent: Vec<DeviceMemory>,
    received: Vec<DeviceMemory>,
}

impl Traffic {
    fn new(gpu: &GpuCommunicator) -> Self {
        let memories = || {
            (0..gpu.size())
                .map(|_| DeviceMemory::alloc(gpu.context(), WHOLE).unwrap())
                .collect()
        };
        Self {
            sent: memories(),
            received: memories(),
        }
    }

    fn fill(&self, gpu: &GpuCommunicator, seed: u8, stream: &Stream) {
        for (peer, memory) in (0..).map(Rank).zip(&self.sent) {
            write(memory.all(), &pattern(gpu.rank(), peer, seed), stream);
        }
        for memory in &self.received {
            stream.fill(memory.all(), 0x5a).unwrap();
        }
    }

    fn check(&self, gpu: &GpuCommunicator, seed: u8, stream: &Stream) {
        for (peer, memory) in (0..).map(Rank).zip(&self.received) {
            let right = read(memory.all(), stream) == pattern(peer, gpu.rank(), seed);
            assert!(right, "from rank {peer} to rank {}, seed {seed}", gpu.rank());
        }
    }

    fn sends(&self, peer: usize) -> impl Iterator<Item = GpuMessage<'_>> {
        let memory = &self.sent[peer];
        places().map(move |place| GpuMessage::send(memory.span(place).unwrap(), Rank(peer as u32)))
    }

    fn receives(&self, peer: usize) -> impl Iterator<Item = GpuMessage<'_>> {
        let memory = &self.received[peer];
        places().map(move |place| GpuMessage::receive(memory.span(place).unwrap(), Rank(peer as u32)))
    }

    /// All sends before all receives, which are in another order of peers.
    fn group(&self) -> Vec<GpuMessage<'_>> {
        let peers = self.sent.len();
        let sends = (0..peers).flat_map(|peer| self.sends(peer));
        let receives = (0..peers).rev().flat_map(|peer| self.receives(peer));
        sends.chain(receives).collect()
    }
}

fn messages_between_all_ranks(executor: Executor) {
    let standin = Standin::load(ExecutionMode::Prompt);
    for p in [1, 3] {
        ranks(standin.driver().unwrap(), p, &by(executor), |gpu| {
            let stream = Stream::new(gpu.context()).unwrap();
            let traffic = Traffic::new(&gpu);
            for seed in 0..2 {
                traffic.fill(&gpu, seed, &stream);
                gpu.group(&traffic.group(), &stream).unwrap();
                traffic.check(&gpu, seed, &stream);
            }
            gpu.destroy().unwrap();
        });
    }
    standin.assert_nothing_left("groups");
}

#[test]
fn messages_between_all_ranks_progress_together_and_in_order() {
    messages_between_all_ranks(Executor::Kernel);
}

#[test]
fn messages_between_all_ranks_staged_through_the_host() {
    messages_between_all_ranks(Executor::Staged);
}

/// Rank 0 exchanges all in one group; rank 1 has one for all sends and one for each receive, which
/// wait for nothing of rank 0 but the message; rank 2 has no part in it.
#[test]
fn ranks_group_the_same_messages_differently() {
    let standin = Standin::load(ExecutionMode::Prompt);
    ranks(standin.driver().unwrap(), 3, &by(Executor::Kernel), |gpu| {
        let stream = Stream::new(gpu.context()).unwrap();
        let traffic = Traffic::new(&gpu);
        traffic.fill(&gpu, 3, &stream);
        match gpu.rank() {
            Rank(0) => {
                let messages: Vec<_> = traffic.sends(1).chain(traffic.receives(1)).collect();
                gpu.group(&messages, &stream).unwrap();
            }
            Rank(1) => {
                let sends: Vec<_> = traffic.sends(0).collect();
                gpu.group(&sends, &stream).unwrap();
                for message in traffic.receives(0) {
                    gpu.group(&[message], &stream).unwrap();
                }
            }
            _ => {}
        }
        if gpu.rank() != Rank(2) {
            let peer = Rank(1 - gpu.rank().0);
            let got = read(traffic.received[peer.index()].all(), &stream);
            assert!(got == pattern(peer, gpu.rank(), 3), "from rank {peer}");
        }
        let case = Case {
            collective: Collective::AllGather,
            ranks: 3,
            root: Rank(0),
            count: 5003,
        };
        once::<i32>(&gpu, &stream, &case, ReduceOp::Sum, false, false);
        gpu.destroy().unwrap();
    });
    standin.assert_nothing_left("groups of some ranks");
}

#[test]
fn captured_group_can_be_relaunched() {
    let standin = Standin::load(ExecutionMode::Prompt);
    ranks(standin.driver().unwrap(), 2, &by(Executor::Kernel), |gpu| {
        let stream = Stream::new(gpu.context()).unwrap();
        let traffic = Traffic::new(&gpu);
        let graph = gpu.capture(&stream, || gpu.group(&traffic.group(), &stream)).unwrap();
        let exec = graph.instantiate().unwrap();
        for seed in 0..3 {
            traffic.fill(&gpu, seed, &stream);
            exec.launch(&stream).unwrap();
            traffic.check(&gpu, seed, &stream);
        }
        drop((exec, graph));
        gpu.destroy().unwrap();
    });
    standin.assert_nothing_left("a graph of a group");
}

/// The error of a communicator that fails soon.
fn failure(gpu: &GpuCommunicator) -> String {
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        match gpu.check() {
            Err(error) => return error.to_string(),
            Ok(()) if Instant::now() < until => std::thread::sleep(Duration::from_millis(1)),
            Ok(()) => panic!("rank {} has no error", gpu.rank()),
        }
    }
}

fn different_lengths(executor: Executor, sent: usize, expected: usize) {
    let standin = Standin::load(ExecutionMode::Prompt);
    ranks(standin.driver().unwrap(), 3, &by(executor), |gpu| {
        let stream = Stream::new(gpu.context()).unwrap();
        let memory = DeviceMemory::alloc(gpu.context(), sent.max(expected)).unwrap();
        stream.fill(memory.all(), 0x5a).unwrap();
        match gpu.rank() {
            Rank(0) => {
                let message = GpuMessage::send(memory.span(..sent).unwrap(), Rank(1));
                gpu.group(&[message], &stream).unwrap();
            }
            Rank(1) => {
                let message = GpuMessage::receive(memory.span(..expected).unwrap(), Rank(0));
                gpu.group(&[message], &stream).unwrap();
            }
            _ => {}
        }
        stream.synchronize().unwrap();
        // The receiver knows once its stream is done.
        if gpu.rank() == Rank(1) {
            gpu.check().unwrap_err();
            let got = read(memory.all(), &stream);
            assert!(
                executor == Executor::Staged || got.iter().all(|byte| *byte == 0x5a),
                "{sent} and {expected}: what was not expected was received"
            );
        }
        let error = failure(&gpu);
        for part in ["rank 0", "rank 1", &sent.to_string(), &expected.to_string()] {
            assert!(error.contains(part) && !error.contains('\n'), "{part}: {error}");
        }
    });
    standin.assert_nothing_left("lengths that differ");
}

#[test]
fn different_lengths_fail_all_ranks_and_nothing_is_written() {
    for (sent, expected) in [(1000, 1001), (0, 7), (7, 0), (900_000, 100), (100, 900_000)] {
        different_lengths(Executor::Kernel, sent, expected);
    }
}

#[test]
fn different_lengths_fail_all_ranks_staged_through_the_host() {
    different_lengths(Executor::Staged, 1000, 1001);
}

#[test]
fn invalid_groups_are_refused_before_enqueuing() {
    let standin = Standin::load(ExecutionMode::Prompt);
    ranks(standin.driver().unwrap(), 2, &by(Executor::Kernel), |gpu| {
        let stream = Stream::new(gpu.context()).unwrap();
        let memory = DeviceMemory::alloc(gpu.context(), 4096).unwrap();
        let at = |start: usize, end: usize| memory.span(start..end).unwrap();
        let (rank, peer) = (gpu.rank(), Rank(1 - gpu.rank().0));
        let refused = |messages: &[GpuMessage<'_>], why: &str| {
            let error = gpu.group(messages, &stream).unwrap_err().to_string();
            assert!(error.contains(why) && !error.contains('\n'), "{error}");
        };
        refused(&[GpuMessage::send(at(0, 8), Rank(2))], "no rank 2");
        refused(&[GpuMessage::send(at(0, 8), rank)], "to itself");
        refused(
            &[GpuMessage::send(at(0, 8), rank), GpuMessage::receive(at(8, 17), rank)],
            "to itself",
        );
        refused(
            &[GpuMessage::receive(at(0, 9), peer), GpuMessage::send(at(8, 16), peer)],
            "overlaps",
        );
        refused(
            &[
                GpuMessage::send(at(0, 64), peer),
                GpuMessage::send(at(1, 2), peer),
                GpuMessage::receive(at(32, 33), peer),
            ],
            "overlaps",
        );
        refused(&[GpuMessage::send(at(0, 8), peer); 225], "at most 224");
        let counts = |send: &[usize], receive: &[usize], why: &str| {
            let (input, output) = (at(0, 100), at(200, 300));
            let data = doorbell_collectives::DataType::I32;
            let result = gpu.all_to_all_v((input, send), (output, receive), data, &stream);
            let error = result.unwrap_err().to_string();
            assert!(error.contains(why) && !error.contains('\n'), "{error}");
        };
        counts(&[1], &[1, 1], "1 and 2 counts");
        counts(&[13, 13], &[13, 1], "more than 100 bytes");
        counts(&[1, usize::MAX], &[1, 1], "more than 100 bytes");
        let mut own = [1, 1];
        own[rank.index()] = 2;
        counts(&[1, 1], &own, "to itself");
        // The same memory may be sent twice, and the communicator is as before.
        let messages = [
            GpuMessage::send(at(0, 8), peer),
            GpuMessage::send(at(0, 8), peer),
            GpuMessage::receive(at(8, 16), peer),
            GpuMessage::receive(at(16, 24), peer),
        ];
        gpu.group(&messages, &stream).unwrap();
        gpu.destroy().unwrap();
    });
}
