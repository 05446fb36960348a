//! Messages in GPU memory: filled and checked by copies of the GPU, each waited for; only what is
//! between them is RDMA.
//!
//! Where the memory is staged, a message is copied to the host mirror before it is sent, and from
//! the mirror after it has arrived, so the results include these copies. The target of a WRITE is
//! only written: its end does not know when.

use doorbell_cuda::{HostMemory, Memory, Stream};
use doorbell_gpudirect::{Arrivals, GpuMemory, GpuRegion, Scope};
use doorbell_verbs::{Buffer, Local, MemoryKind, Opaque, ProtectionDomain, Rights};

use super::pattern::Pattern;
use crate::device::Gpu;
use crate::failure::{Failure, refused};

#[derive(Debug)]
pub(crate) struct GpuMessages {
    region: GpuRegion,
    arrivals: Arrivals,
    stream: Stream,
    /// Pinned host memory for one message, to copy from or to.
    pinned: HostMemory,
    len: usize,
}

type Buffers<R> = Vec<Buffer<Opaque<R>>>;

impl GpuMessages {
    /// Memory for `slots` messages of `len` bytes, as one buffer, which the peer accesses.
    pub(crate) fn in_one<R: Rights>(
        gpu: &Gpu,
        pd: &ProtectionDomain,
        (len, slots): (usize, usize),
        rights: R,
    ) -> Result<(GpuMessages, Buffer<Opaque<R>>), Failure> {
        let (messages, mut buffers) = GpuMessages::new(gpu, pd, (len, slots), len * slots, rights)?;
        let none = || Failure::test("the registration of GPU memory returned no buffer");
        Ok((messages, buffers.pop().ok_or_else(none)?))
    }

    /// Memory for `slots` messages of `len` bytes, as buffers of `chunk` bytes.
    fn new<R: Rights>(
        gpu: &Gpu,
        pd: &ProtectionDomain,
        (len, slots): (usize, usize),
        chunk: usize,
        rights: R,
    ) -> Result<(GpuMessages, Buffers<R>), Failure> {
        let memory = GpuMemory::alloc(&gpu.context, len * slots).map_err(refused)?;
        let stream = Stream::new(&gpu.context).map_err(refused)?;
        stream
            .fill(memory.all(), 0x5a)
            .and_then(|()| stream.synchronize())
            .map_err(refused)?;
        let (chunks, region) = gpu
            .registration(pd)?
            .register_chunks(&memory, chunk, rights)
            .map_err(refused)?;
        let messages = GpuMessages {
            arrivals: Arrivals::new(pd, &region, Scope::Owner).map_err(refused)?,
            region,
            stream,
            pinned: HostMemory::alloc(&gpu.context, len).map_err(refused)?,
            len,
        };
        Ok((messages, chunks.collect()))
    }

    pub(crate) fn write(&mut self, slot: usize, bytes: &[u8]) -> Result<(), Failure> {
        let at = slot * self.len;
        let copy = || {
            self.pinned.copy_in(0, bytes)?;
            self.stream
                .copy(self.region.memory().span(at..at + self.len)?, self.pinned.all())?;
            self.region.push(at..at + self.len, &self.stream)?.wait()
        };
        copy().map_err(refused)
    }

    pub(crate) fn read(&mut self, slot: usize, bytes: &mut [u8]) -> Result<(), Failure> {
        let at = slot * self.len;
        self.arrivals
            .publish(at..at + self.len, &self.stream)
            .map_err(refused)?;
        let mut copy = || {
            self.stream
                .copy(self.pinned.all(), self.region.memory().span(at..at + self.len)?)?;
            self.stream.synchronize()?;
            self.pinned.copy_out(0, bytes)
        };
        copy().map_err(refused)
    }

    /// Copies message `slot` to the mirror if it is staged.
    fn push(&self, slot: usize) -> Result<(), Failure> {
        if self.region.path().is_direct() {
            return Ok(());
        }
        let at = slot * self.len;
        let pushed = self.region.push(at..at + self.len, &self.stream);
        pushed.and_then(doorbell_gpudirect::Transfer::wait).map_err(refused)
    }

    /// Makes message `slot`, which has arrived, visible to kernels.
    pub(crate) fn pull(&mut self, slot: usize) -> Result<(), Failure> {
        if self.region.path().is_direct() && !self.arrivals.needs_flush() {
            return Ok(());
        }
        let at = slot * self.len;
        self.arrivals
            .publish(at..at + self.len, &self.stream)
            .map_err(refused)?;
        self.stream.synchronize().map_err(refused)
    }

    fn slot<K: MemoryKind>(&self, buffer: &Buffer<K>) -> usize {
        self.region.range_of(buffer).start / self.len
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Content {
    /// Any content, to be sent as it is.
    Any,
    /// Any content, to be overwritten by a receive.
    Nothing,
    /// A pattern, to be sent.
    Pattern(Pattern),
    /// The inverse of a pattern, to be overwritten by a receive.
    Inverse(Pattern),
}

/// A pool of message buffers in GPU memory.
///
/// The first error of the GPU is kept for [`GpuPool::take_error`], since a batch that is being
/// built cannot fail.
#[derive(Debug)]
pub(crate) struct GpuPool {
    messages: GpuMessages,
    free: Vec<Buffer<Opaque<Local>>>,
    scratch: Vec<u8>,
    failure: Option<Failure>,
}

impl GpuPool {
    /// `slots` messages of `len` bytes.
    pub(crate) fn new(gpu: &Gpu, pd: &ProtectionDomain, len: usize, slots: usize) -> Result<GpuPool, Failure> {
        let (messages, mut free) = GpuMessages::new(gpu, pd, (len, slots), len, Local)?;
        // Buffers are popped from the end: the first one shall come first.
        free.reverse();
        Ok(GpuPool {
            messages,
            free,
            scratch: vec![0; len],
            failure: None,
        })
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.free.len()
    }

    #[inline]
    pub(crate) fn take(&mut self, content: Content) -> Option<Buffer<Opaque<Local>>> {
        let buffer = self.free.pop()?;
        let slot = self.messages.slot(&buffer);
        let done = match content {
            Content::Any => self.messages.push(slot),
            Content::Nothing => Ok(()),
            Content::Pattern(pattern) => {
                pattern.fill(&mut self.scratch);
                self.messages.write(slot, &self.scratch)
            }
            Content::Inverse(pattern) => {
                pattern.fill_inverse(&mut self.scratch);
                self.messages.write(slot, &self.scratch)
            }
        };
        if let Err(failure) = done {
            self.failure.get_or_insert(failure);
        }
        Some(buffer)
    }

    /// Checks a received message. Returns the first byte that differs from the pattern.
    #[inline]
    pub(crate) fn check(
        &mut self,
        buffer: &Buffer<Opaque<Local>>,
        pattern: Option<Pattern>,
    ) -> Result<Option<(u64, u8, u8)>, Failure> {
        let slot = self.messages.slot(buffer);
        match pattern {
            None => self.messages.pull(slot).map(|()| None),
            Some(pattern) => {
                self.messages.read(slot, &mut self.scratch)?;
                Ok(pattern.check(&self.scratch))
            }
        }
    }

    #[inline]
    pub(crate) fn release(&mut self, buffer: Buffer<Opaque<Local>>) {
        self.free.push(buffer);
    }

    /// The first error of the GPU, once.
    #[inline]
    pub(crate) fn take_error(&mut self) -> Option<Failure> {
        self.failure.take()
    }
}
