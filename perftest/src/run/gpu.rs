//! Messages in the memory of a GPU: filled and looked at by copies of the GPU's, which are waited for; only what is between them is RDMA.
//!
//! Where the memory is staged, what is sent is copied to its mirror first and what has come is copied from it, one after the other, so that a figure has the copies in it; but the target of a
//! WRITE is only written: its end does not know when.

use doorbell_cuda::{HostMemory, Memory, Stream};
use doorbell_gpudirect::{Arrivals, GpuMemory, GpuRegion, Scope};
use doorbell_verbs::{Buffer, Kind, Local, Opaque, ProtectionDomain, Rights};

use super::pattern::Pattern;
use super::station::refused;
use crate::device::Gpu;
use crate::failure::Failure;

/// Memory for messages.
#[derive(Debug)]
pub(crate) struct Messages {
    region: GpuRegion,
    arrivals: Arrivals,
    stream: Stream,
    /// One message, on its way to or from the GPU.
    pinned: HostMemory,
    len: usize,
}

impl Messages {
    /// Memory for `slots` messages of `len` bytes, and its buffers: of one message each, or one of all.
    ///
    /// # Errors
    /// [`Failure::Test`] when the GPU or the device refuses.
    pub(crate) fn new<R: Rights>(
        gpu: &Gpu,
        pd: &ProtectionDomain,
        (len, slots): (usize, usize),
        cut: Cut,
        rights: R,
    ) -> Result<(Messages, Buffers<R>), Failure> {
        let memory = GpuMemory::alloc(&gpu.context, len * slots).map_err(refused)?;
        let stream = Stream::new(&gpu.context).map_err(refused)?;
        stream
            .fill(memory.all(), 0x5a)
            .and_then(|()| stream.synchronize())
            .map_err(refused)?;
        let chunk = match cut {
            Cut::Each => len,
            Cut::Whole => len * slots,
        };
        let (chunks, region) = gpu
            .registration(pd)?
            .register_chunks(&memory, chunk, rights)
            .map_err(refused)?;
        let messages = Messages {
            arrivals: Arrivals::new(pd, &region, Scope::Owner).map_err(refused)?,
            region,
            stream,
            pinned: HostMemory::alloc(&gpu.context, len).map_err(refused)?,
            len,
        };
        Ok((messages, chunks.collect()))
    }

    /// Writes message `slot`, for the device to send.
    ///
    /// # Errors
    /// [`Failure::Test`] when the GPU refuses.
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

    /// Reads message `slot`, which has come.
    ///
    /// # Errors
    /// [`Failure::Test`] when the GPU or the device refuses.
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

    /// Has message `slot`, as it is, ready to be sent.
    fn push(&self, slot: usize) -> Result<(), Failure> {
        if self.region.path().is_direct() {
            return Ok(());
        }
        let at = slot * self.len;
        let pushed = self.region.push(at..at + self.len, &self.stream);
        pushed.and_then(doorbell_gpudirect::Transfer::wait).map_err(refused)
    }

    /// Has message `slot`, which has come, where kernels find it.
    ///
    /// # Errors
    /// [`Failure::Test`] when the GPU or the device refuses.
    pub(crate) fn pull(&mut self, slot: usize) -> Result<(), Failure> {
        if self.region.path().is_direct() && !self.arrivals.flushes() {
            return Ok(());
        }
        let at = slot * self.len;
        self.arrivals
            .publish(at..at + self.len, &self.stream)
            .map_err(refused)?;
        self.stream.synchronize().map_err(refused)
    }

    fn slot<K: Kind>(&self, buffer: &Buffer<K>) -> usize {
        self.region.range_of(buffer).start / self.len
    }
}

/// Buffers in a GPU's memory.
pub(crate) type Buffers<R> = Vec<Buffer<Opaque<R>>>;

/// How memory for messages is cut into buffers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Cut {
    /// A buffer for each message.
    Each,
    /// One buffer, which the peer reaches.
    Whole,
}

/// What a message is to hold before it is posted.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Content {
    /// Anything, to be sent as it is.
    Any,
    /// Anything, to be received over.
    Nothing,
    /// A pattern, to be sent.
    Right(Pattern),
    /// Bytes that differ from a pattern, to be received over.
    Wrong(Pattern),
}

/// Messages of a GPU that nothing is done with just now.
///
/// The first failure of the GPU is kept, and told by [`Pool::failed`]: a batch that is being built cannot end early.
#[derive(Debug)]
pub(crate) struct Pool {
    messages: Messages,
    free: Vec<Buffer<Opaque<Local>>>,
    scratch: Vec<u8>,
    failure: Option<Failure>,
}

impl Pool {
    /// `slots` messages of `len` bytes.
    ///
    /// # Errors
    /// As [`Messages::new`].
    pub(crate) fn new(gpu: &Gpu, pd: &ProtectionDomain, len: usize, slots: usize) -> Result<Pool, Failure> {
        let (messages, mut free) = Messages::new(gpu, pd, (len, slots), Cut::Each, Local)?;
        // They are taken from the end: the first is to come first.
        free.reverse();
        Ok(Pool {
            messages,
            free,
            scratch: vec![0; len],
            failure: None,
        })
    }

    /// How many there are.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.free.len()
    }

    /// Takes one to be sent or received into, with this content.
    #[inline]
    pub(crate) fn take(&mut self, content: Content) -> Option<Buffer<Opaque<Local>>> {
        let buffer = self.free.pop()?;
        let slot = self.messages.slot(&buffer);
        let done = match content {
            Content::Any => self.messages.push(slot),
            Content::Nothing => Ok(()),
            Content::Right(pattern) => {
                pattern.fill(&mut self.scratch);
                self.messages.write(slot, &self.scratch)
            }
            Content::Wrong(pattern) => {
                pattern.fill_wrong(&mut self.scratch);
                self.messages.write(slot, &self.scratch)
            }
        };
        if let Err(failure) = done {
            self.failure.get_or_insert(failure);
        }
        Some(buffer)
    }

    /// Looks at a message that has come: the first byte that is not the pattern's.
    ///
    /// # Errors
    /// [`Failure::Test`] when the GPU refuses.
    #[inline]
    pub(crate) fn look(
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

    /// Gives one back.
    #[inline]
    pub(crate) fn give(&mut self, buffer: Buffer<Opaque<Local>>) {
        self.free.push(buffer);
    }

    /// Gives one back that something has come into: what the GPU refuses of it, [`Pool::failed`] tells.
    #[inline]
    pub(crate) fn give_filled(&mut self, buffer: Buffer<Opaque<Local>>) {
        let slot = self.messages.slot(&buffer);
        if let Err(failure) = self.messages.pull(slot) {
            self.failure.get_or_insert(failure);
        }
        self.free.push(buffer);
    }

    /// What the GPU has refused, once.
    #[inline]
    pub(crate) fn failed(&mut self) -> Option<Failure> {
        self.failure.take()
    }
}
