//! What each operation does on one queue pair: staging a work request, and reclaiming its buffer on
//! completion.

use doorbell_verbs::{
    AtomicAccess, AtomicWord, Batch, Buffer, Completion, Connected, Frozen, Local, MemoryKind, ReadAccess, Reliable,
    Remote, Scratch, WriteAccess,
};

use super::super::settings::{Atomic, Settings};
use super::super::test_end::{Cycle, TestEnd, TestQp, TestTransport, allocate, frozen, scratch, slots};
use crate::failure::{Failure, refused};
use crate::run::gpu::{Content, GpuPool};

/// The requester's part of an operation, on one queue pair and for one message size.
pub(super) trait Requester<T: TestTransport>: Sized {
    /// For messages of `bytes` on the queue pair with this index, up to `window` in flight.
    fn new(
        settings: &Settings,
        test_end: &TestEnd<T>,
        qp_index: usize,
        bytes: u64,
        window: u32,
    ) -> Result<Self, Failure>;

    /// Adds message `index` to a post list, with the payload `inline` if that is given. A buffer is
    /// always free, since at most `window` messages are in flight.
    fn stage<'d>(
        &mut self,
        batch: &mut Batch<'_, 'd, T>,
        to: &'d T::Destination,
        inline: Option<&'d [u8]>,
        index: u64,
        signal: bool,
    );

    fn retire(&mut self, done: Completion<'_>);

    /// The first error of the GPU, once, where messages lie in its memory.
    fn take_gpu_error(&mut self) -> Option<Failure> {
        None
    }
}

/// Buffers that no request uses: in host memory, or in a GPU's.
#[derive(Debug)]
enum FreeBuffers<K: MemoryKind> {
    Host(Vec<Buffer<K>>),
    Gpu(GpuPool),
}

impl<K: MemoryKind> FreeBuffers<K> {
    fn take_gpu_error(&mut self) -> Option<Failure> {
        match self {
            FreeBuffers::Host(_) => None,
            FreeBuffers::Gpu(pool) => pool.take_error(),
        }
    }
}

impl FreeBuffers<Frozen> {
    #[inline]
    fn reclaim(&mut self, mut done: Completion<'_>) {
        match self {
            FreeBuffers::Host(free) => free.extend(done.take::<Frozen>()),
            FreeBuffers::Gpu(pool) => done.take().into_iter().for_each(|buffer| pool.release(buffer)),
        }
    }
}

impl FreeBuffers<Scratch> {
    #[inline]
    fn reclaim_filled(&mut self, mut done: Completion<'_>) {
        match self {
            FreeBuffers::Host(free) => free.extend(done.take::<Scratch>()),
            FreeBuffers::Gpu(pool) => done.take().into_iter().for_each(|buffer| pool.release_received(buffer)),
        }
    }
}

/// Buffers to send from, as many as may be in flight; none where messages are sent inline.
fn sources<T: TestTransport>(
    settings: &Settings,
    test_end: &TestEnd<T>,
    cycle: &Cycle,
    window: u32,
) -> Result<FreeBuffers<Frozen>, Failure> {
    if let Some(gpu) = &test_end.gpu {
        return slots(gpu, &test_end.pd, cycle.bytes, window).map(FreeBuffers::Gpu);
    }
    if test_end.is_inline(cycle.bytes) {
        return Ok(FreeBuffers::Host(Vec::new()));
    }
    frozen(settings, &test_end.pd, cycle, window as usize).map(FreeBuffers::Host)
}

#[derive(Debug)]
pub(super) struct WriteRequester {
    free: FreeBuffers<Frozen>,
    cycle: Cycle,
    target: Remote<WriteAccess>,
}

impl<T: TestTransport + Connected> Requester<T> for WriteRequester {
    fn new(
        settings: &Settings,
        test_end: &TestEnd<T>,
        qp_index: usize,
        bytes: u64,
        window: u32,
    ) -> Result<Self, Failure> {
        let cycle = test_end.cycle(bytes);
        Ok(WriteRequester {
            free: sources(settings, test_end, &cycle, window)?,
            cycle,
            target: test_end.qps[qp_index].remote(&cycle),
        })
    }

    #[inline]
    fn stage<'d>(
        &mut self,
        batch: &mut Batch<'_, 'd, T>,
        _: &'d T::Destination,
        inline: Option<&'d [u8]>,
        index: u64,
        signal: bool,
    ) {
        let Some(target) = self.target.slice(self.cycle.offset(index), self.cycle.bytes) else {
            return;
        };
        if let Some(bytes) = inline {
            batch.write_inline(bytes, target).signaled_if(signal);
            return;
        }
        match &mut self.free {
            FreeBuffers::Host(free) => {
                if let Some(buffer) = free.pop() {
                    batch.write(buffer, target).signaled_if(signal);
                }
            }
            FreeBuffers::Gpu(pool) => {
                if let Some(buffer) = pool.take(Content::Any) {
                    batch.write(buffer, target).signaled_if(signal);
                }
            }
        }
    }

    #[inline]
    fn retire(&mut self, done: Completion<'_>) {
        self.free.reclaim(done);
    }

    fn take_gpu_error(&mut self) -> Option<Failure> {
        self.free.take_gpu_error()
    }
}

#[derive(Debug)]
pub(super) struct SendRequester {
    free: FreeBuffers<Frozen>,
}

impl<T: TestTransport> Requester<T> for SendRequester {
    fn new(settings: &Settings, test_end: &TestEnd<T>, _: usize, bytes: u64, window: u32) -> Result<Self, Failure> {
        let free = sources(settings, test_end, &test_end.cycle(bytes), window)?;
        Ok(SendRequester { free })
    }

    #[inline]
    fn stage<'d>(
        &mut self,
        batch: &mut Batch<'_, 'd, T>,
        to: &'d T::Destination,
        inline: Option<&'d [u8]>,
        _: u64,
        signal: bool,
    ) {
        if let Some(bytes) = inline {
            T::send_inline(batch, to, bytes, signal);
            return;
        }
        match &mut self.free {
            FreeBuffers::Host(free) => {
                if let Some(buffer) = free.pop() {
                    T::send(batch, to, buffer, signal);
                }
            }
            FreeBuffers::Gpu(pool) => {
                if let Some(buffer) = pool.take(Content::Any) {
                    T::send(batch, to, buffer, signal);
                }
            }
        }
    }

    #[inline]
    fn retire(&mut self, done: Completion<'_>) {
        self.free.reclaim(done);
    }

    fn take_gpu_error(&mut self) -> Option<Failure> {
        self.free.take_gpu_error()
    }
}

#[derive(Debug)]
pub(super) struct ReadRequester {
    free: FreeBuffers<Scratch>,
    cycle: Cycle,
    source: Remote<ReadAccess>,
}

impl<T: TestTransport + Reliable> Requester<T> for ReadRequester {
    fn new(
        settings: &Settings,
        test_end: &TestEnd<T>,
        qp_index: usize,
        bytes: u64,
        window: u32,
    ) -> Result<Self, Failure> {
        let cycle = test_end.cycle(bytes);
        Ok(ReadRequester {
            free: match &test_end.gpu {
                Some(gpu) => FreeBuffers::Gpu(slots(gpu, &test_end.pd, bytes, window)?),
                None => FreeBuffers::Host(scratch(settings, &test_end.pd, &cycle, 0, window as usize)?),
            },
            cycle,
            source: test_end.qps[qp_index].remote(&cycle),
        })
    }

    #[inline]
    fn stage<'d>(
        &mut self,
        batch: &mut Batch<'_, 'd, T>,
        _: &'d T::Destination,
        _: Option<&'d [u8]>,
        index: u64,
        signal: bool,
    ) {
        let Some(source) = self.source.slice(self.cycle.offset(index), self.cycle.bytes) else {
            return;
        };
        match &mut self.free {
            FreeBuffers::Host(free) => {
                if let Some(buffer) = free.pop() {
                    batch.read(buffer, source).signaled_if(signal);
                }
            }
            FreeBuffers::Gpu(pool) => {
                if let Some(buffer) = pool.take(Content::Nothing) {
                    batch.read(buffer, source).signaled_if(signal);
                }
            }
        }
    }

    #[inline]
    fn retire(&mut self, done: Completion<'_>) {
        self.free.reclaim_filled(done);
    }

    fn take_gpu_error(&mut self) -> Option<Failure> {
        self.free.take_gpu_error()
    }
}

/// Atomics: all requests of a queue pair in flight target one word after the other, as the cycle
/// buffer goes.
#[derive(Debug)]
pub(super) struct AtomicRequester {
    free: Vec<AtomicWord>,
    operation: Atomic,
    cycle: Cycle,
    target: Remote<AtomicAccess>,
}

impl<T: TestTransport + Reliable> Requester<T> for AtomicRequester {
    fn new(
        settings: &Settings,
        test_end: &TestEnd<T>,
        qp_index: usize,
        bytes: u64,
        window: u32,
    ) -> Result<Self, Failure> {
        let cycle = test_end.cycle(bytes);
        let target: Remote<AtomicAccess> = test_end.qps[qp_index].remote(&cycle);
        if target.word(0).is_none() {
            return Err(Failure::test(format!(
                "{}: the address it sent is not aligned to 8 bytes",
                test_end.qps[qp_index]
            )));
        }
        let words = test_end
            .pd
            .register_chunks(allocate(settings, 8 * window as usize)?, 8, Local)
            .map_err(refused)?;
        Ok(AtomicRequester {
            free: words.filter_map(|buffer| buffer.into_word().ok()).collect(),
            operation: settings.atomic,
            cycle,
            target,
        })
    }

    #[inline]
    fn stage<'d>(
        &mut self,
        batch: &mut Batch<'_, 'd, T>,
        _: &'d T::Destination,
        _: Option<&'d [u8]>,
        index: u64,
        signal: bool,
    ) {
        let (Some(target), Some(word)) = (self.target.word(self.cycle.offset(index)), self.free.pop()) else {
            return;
        };
        match self.operation {
            Atomic::FetchAdd => {
                batch.fetch_add(word, target, 1).signaled_if(signal);
            }
            Atomic::CompareSwap => {
                batch.compare_swap(word, target, index, index + 1).signaled_if(signal);
            }
        }
    }

    #[inline]
    fn retire(&mut self, mut done: Completion<'_>) {
        self.free.extend(done.take_word());
    }
}

/// The responder's receives on one queue pair or on the shared receive queue.
#[derive(Debug)]
pub(super) struct Receiver {
    /// Buffers that are not posted.
    free: FreeBuffers<Scratch>,
    /// Receives posted with one call.
    list: usize,
}

impl Receiver {
    pub(super) fn new<T: TestTransport>(
        settings: &Settings,
        test_end: &TestEnd<T>,
        bytes: u64,
        count: u32,
    ) -> Result<Receiver, Failure> {
        let free = match &test_end.gpu {
            Some(gpu) => FreeBuffers::Gpu(slots(gpu, &test_end.pd, bytes + T::HEADER, count)?),
            None => FreeBuffers::Host(scratch(
                settings,
                &test_end.pd,
                &test_end.cycle(bytes),
                T::HEADER,
                count as usize,
            )?),
        };
        Ok(Receiver {
            free,
            list: settings.recv_post_list.max(1) as usize,
        })
    }

    #[inline]
    pub(super) fn retire(&mut self, done: Completion<'_>) {
        self.free.reclaim_filled(done);
    }

    /// The first error of the GPU, once, where messages are received into its memory.
    pub(super) fn take_gpu_error(&mut self) -> Option<Failure> {
        self.free.take_gpu_error()
    }

    #[inline]
    pub(super) fn post<T: TestTransport>(
        &mut self,
        test_qp: &mut TestQp<T>,
        shared: Option<&mut doorbell_verbs::SharedReceiveQueue>,
    ) -> Result<(), Failure> {
        let free = match &self.free {
            FreeBuffers::Host(free) => free.len(),
            FreeBuffers::Gpu(pool) => pool.len(),
        };
        if free < self.list {
            return Ok(());
        }
        let whole = free / self.list * self.list;
        let result = match &mut self.free {
            FreeBuffers::Host(buffers) => T::receive(&mut test_qp.qp, shared, buffers.drain(free - whole..)),
            FreeBuffers::Gpu(pool) => {
                let buffers = std::iter::from_fn(|| pool.take(Content::Nothing));
                T::receive(&mut test_qp.qp, shared, buffers.take(whole))
            }
        };
        result.map_err(|e| test_qp.refused(&e))
    }
}
