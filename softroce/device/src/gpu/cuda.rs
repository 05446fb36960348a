//! The part of CUDA that the device uses: resolving, sharing and importing memory; asynchronous and
//! synchronous copies.

use std::os::fd::AsFd;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;

pub(crate) use doorbell_cuda::FreesDeferred;
use doorbell_cuda::{
    Context, DeviceMemory, DevicePtr, Driver, Error, Event, Foreign, HostMemory, IpcHandle, Memory as _, MemoryType,
    SmallCopies, SmallSource, Span, Stream,
};
use parking_lot::Mutex;

pub(crate) use super::contexts::separate_contexts;
use super::contexts::{self, context, is_primary_of};
use super::copies::CopyOp;
use super::small::{Block, SmallCopyDevice, SmallCopyDevices, start_small_copies};
use super::udp_staging::{StagedWrite, UdpPinned};
use super::{Handle, Located, RING};

#[derive(Debug, thiserror::Error)]
pub(crate) enum NoMemory {
    #[error(transparent)]
    NoDriver(#[from] doorbell_cuda::LoadError),
    #[error("the address is neither mapped here nor known to CUDA")]
    Unknown,
    /// Managed memory that the CPU cannot access now.
    #[error("it is managed memory, which cannot be registered")]
    Managed,
    #[error(transparent)]
    Cuda(#[from] Error),
}

pub(crate) type DriverError = Error;

/// GPU memory: an allocation of this process, or an imported one. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Memory {
    backing: Backing,
    context: Context,
    /// The driver's unique id of the allocation, unless imported.
    identity: Option<u64>,
    /// It is one whole allocation, which can be shared.
    whole: bool,
    /// Mapped by `cuMemMap`: shared by file descriptor.
    is_mapped: bool,
}

#[derive(Clone, Debug)]
enum Backing {
    Ours(Foreign),
    Imported(DeviceMemory),
}

/// Whether CUDA is installed. Loads the driver.
pub(crate) fn is_possible() -> bool {
    Driver::load().is_ok()
}

/// Resolves an address that the CPU cannot access. Loads the driver only now.
pub(crate) fn find(addr: u64, len: usize) -> Result<Located, NoMemory> {
    let driver = Driver::load()?;
    let address = DevicePtr(addr);
    let located = driver.locate(address).or_else(|_| {
        // The query may need a current context.
        let info = driver.device(0)?.context()?.pointer_info(address)?;
        Ok::<_, Error>(info.map(|info| (info.memory_type, info.device)))
    });
    let ordinal = match located? {
        None => return Err(NoMemory::Unknown),
        Some((MemoryType::Host, _)) => return Ok(Located::Host),
        Some((MemoryType::Managed, _)) => return Err(NoMemory::Managed),
        Some((MemoryType::Device, ordinal)) => ordinal,
    };
    let primary = context(driver, ordinal, true)?;
    let info = primary.pointer_info(address)?.ok_or(NoMemory::Unknown)?;
    let context = if is_primary_of(info.is_mapped) {
        primary
    } else {
        context(driver, ordinal, false)?
    };
    let around = info.allocation.filter(|(base, size)| {
        let offset = addr.wrapping_sub(base.0);
        offset.checked_add(len as u64).is_some_and(|end| end <= *size as u64)
    });
    let (base, size) = around.unwrap_or((address, len));
    // SAFETY: registered memory stays until it is deregistered, and this is kept no longer.
    let memory = unsafe { Foreign::wrap(&context, base, size, Arc::new(()))? };
    let memory = Memory {
        backing: Backing::Ours(memory),
        context,
        identity: Some(info.buffer_id),
        whole: around.is_some(),
        is_mapped: info.is_mapped,
    };
    Ok(Located::Device(memory, (addr - base.0) as usize))
}

impl Memory {
    pub(super) fn span(&self, offset: usize, len: usize) -> Result<Span<'_>, Error> {
        let range = offset..offset.saturating_add(len);
        match &self.backing {
            Backing::Ours(memory) => memory.span(range),
            Backing::Imported(memory) => memory.span(range),
        }
    }

    pub(crate) fn len(&self) -> usize {
        match &self.backing {
            Backing::Ours(memory) => memory.len(),
            Backing::Imported(memory) => memory.len(),
        }
    }

    pub(super) fn context(&self) -> &Context {
        &self.context
    }

    fn address(&self) -> u64 {
        match &self.backing {
            Backing::Ours(memory) => memory.device_ptr().0,
            Backing::Imported(memory) => memory.device_ptr().0,
        }
    }

    pub(crate) fn is(&self, other: &Self) -> bool {
        self.address() == other.address()
    }

    /// Whether both are the same allocation, not only the same addresses.
    pub(crate) fn is_same_allocation(&self, other: &Self) -> bool {
        self.identity.is_some() && self.identity == other.identity && self.is(other) && self.len() == other.len()
    }

    pub(crate) fn device(&self) -> usize {
        self.context.device().ordinal()
    }

    /// The handle by which another process imports it; `None` where it is no whole allocation.
    pub(crate) fn share(&self) -> Result<Option<Handle>, DriverError> {
        match &self.backing {
            Backing::Ours(memory) if self.whole && self.is_mapped => {
                Ok(Some(Handle::Descriptor(memory.export_fd()?.0)))
            }
            Backing::Ours(memory) if self.whole => Ok(Some(Handle::Ipc(memory.ipc_handle()?.0.0))),
            _ => Ok(None),
        }
    }

    /// Imports another process's memory for copies on `device`, or on the first with registered
    /// memory; `None` where there is none.
    pub(crate) fn import(handle: &Handle, len: usize, device: Option<usize>) -> Result<Option<Self>, DriverError> {
        let Some(first) = contexts::first() else {
            return Ok(None);
        };
        let ordinal = device.unwrap_or(first.ordinal());
        let context = &context(
            first.driver(),
            ordinal,
            is_primary_of(matches!(handle, Handle::Descriptor(_))),
        )?;
        let (backing, is_mapped) = match handle {
            Handle::Descriptor(fd) => (Backing::Imported(DeviceMemory::import(context, fd.as_fd(), len)?), true),
            Handle::Ipc(bytes) => {
                // SAFETY: the other process reports when it withdraws the memory, and has it until
                // then: it is registered. Each is opened once for a device.
                let memory = unsafe { Foreign::open(context, &IpcHandle(*bytes))? };
                (Backing::Ours(memory), false)
            }
        };
        let memory = Self {
            backing,
            context: context.clone(),
            identity: None,
            whole: false,
            is_mapped,
        };
        if memory.len() < len {
            // Copies are checked against the actual length.
            tracing::debug!("imported {} bytes of GPU memory, not {len}", memory.len());
        }
        Ok(Some(memory))
    }

    /// Copies from it to the host, synchronously.
    ///
    /// # Safety
    /// `to` is writable for `len` bytes.
    pub(crate) unsafe fn read(&self, offset: usize, to: *mut u8, len: usize) -> Result<(), DriverError> {
        self.staged(len, |stage, at, part| {
            let source = self.span(offset + at, part)?;
            copy_at_once(&stage.stream, &mut stage.small, stage.pinned.span(..part)?, source)?;
            // SAFETY: the stage has as many bytes, which no work uses now; `to` has them by
            // contract, and is none of them.
            unsafe { to.add(at).copy_from_nonoverlapping(stage.pinned.as_ptr(), part) };
            Ok(())
        })
    }

    /// Copies from the host to it, synchronously.
    ///
    /// # Safety
    /// `from` is readable for `len` bytes.
    pub(crate) unsafe fn write(&self, offset: usize, from: *const u8, len: usize) -> Result<(), DriverError> {
        self.staged(len, |stage, at, part| {
            // SAFETY: as in `read`, the other way.
            unsafe { stage.pinned.as_ptr().copy_from_nonoverlapping(from.add(at), part) };
            let into = self.span(offset + at, part)?;
            copy_at_once(&stage.stream, &mut stage.small, into, stage.pinned.span(..part)?)
        })
    }

    /// Copies `len` bytes part by part through the device's stage, under its lock.
    fn staged(
        &self,
        len: usize,
        mut copy: impl FnMut(&mut Stage, usize, usize) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut stages = STAGES.lock();
        let stage = Stage::of(&mut stages, self)?;
        (0..len)
            .step_by(STAGE)
            .try_for_each(|at| copy(stage, at, STAGE.min(len - at)))
    }
}

/// A synchronous copy: a small one by kernel, any other by copy engine.
fn copy_at_once(stream: &Stream, small: &mut Option<Block>, into: Span<'_>, from: Span<'_>) -> Result<(), Error> {
    let _deferred = FreesDeferred::on_this_thread();
    if let Some(Block { copies: small, .. }) = small
        && SmallCopies::supports(into, from)
        && small.is_available()?
        // SAFETY: one is pinned and the other of the same context; the caller keeps both until this
        // returns, and has no slice of them.
        && let Some(number) = unsafe { small.copy(into, SmallSource::Memory(from))? }
        && small.wait(number)?
    {
        return Ok(());
    }
    stream.copy(into, from)?;
    stream.synchronize()
}

/// What the data path uses of a device.
#[derive(Debug)]
pub(crate) struct PreparedDevice {
    small: SmallCopyDevice,
    stream: Option<Stream>,
    ring: Option<HostMemory>,
    pub(crate) udp: Option<UdpPinned>,
}

impl PreparedDevice {
    /// Made when the first memory of a device is registered: the driver may let it wait for running
    /// kernels, which may wait for the data path. Takes tens of milliseconds: only without a lock.
    pub(crate) fn new(memory: &Memory) -> Self {
        let failed = |error: &Error| tracing::warn!("copies of {} are not prepared: {error}", memory.context.device());
        let _ = Stage::of(&mut STAGES.lock(), memory).map(drop).inspect_err(failed);
        Self {
            small: start_small_copies(memory),
            stream: Stream::new(&memory.context).inspect_err(failed).ok(),
            ring: HostMemory::alloc(&memory.context, RING).inspect_err(failed).ok(),
            udp: UdpPinned::new(memory).inspect_err(failed).ok(),
        }
    }
}

const STAGE: usize = 256 << 10;

/// The most bytes that are written word by word, which takes as long as a tenth of a turn.
const MAX_WRITTEN: usize = 1024;

/// Pinned memory for synchronous copies.
struct Stage {
    stream: Stream,
    pinned: HostMemory,
    small: Option<Block>,
}

impl Stage {
    fn of<'a>(stages: &'a mut Vec<Self>, memory: &Memory) -> Result<&'a mut Self, Error> {
        let context = &memory.context;
        let index = match stages.iter().position(|stage| stage.stream.context() == context) {
            Some(index) => index,
            None => {
                stages.push(Self {
                    stream: Stream::new(context)?,
                    pinned: HostMemory::alloc(context, STAGE)?,
                    small: start_small_copies(memory).1,
                });
                stages.len() - 1
            }
        };
        Ok(&mut stages[index])
    }
}

static STAGES: Mutex<Vec<Stage>> = Mutex::new(Vec::new());

fn stream_of(memory: &Memory) -> Result<Stream, Error> {
    Stage::of(&mut STAGES.lock(), memory).map(|stage| stage.stream.clone())
}

#[derive(Debug)]
pub(crate) struct Pinned(HostMemory);

impl Pinned {
    /// `len` bytes, allocated through the memory's device and usable by all.
    pub(crate) fn new(memory: &Memory, len: usize) -> Result<Self, DriverError> {
        HostMemory::alloc(&memory.context, len).map(Self)
    }

    pub(crate) fn start(&self) -> *mut u8 {
        self.0.as_ptr()
    }

    pub(crate) fn fetch(&self, (memory, offset): (&Memory, usize), len: usize) -> Result<(), DriverError> {
        let mut stages = STAGES.lock();
        let Stage { stream, small, .. } = Stage::of(&mut stages, memory)?;
        copy_at_once(stream, small, self.0.span(..len)?, memory.span(offset, len)?)
    }

    /// Copies pieces of it to GPU memory synchronously, in order for each device.
    pub(crate) fn store(&self, pieces: &[StagedWrite]) -> Result<(), DriverError> {
        if let [StagedWrite { memory, start, at, len }] = pieces {
            let mut stages = STAGES.lock();
            let Stage { stream, small, .. } = Stage::of(&mut stages, memory)?;
            return copy_at_once(stream, small, memory.span(*start, *len)?, self.0.span(*at..at + len)?);
        }
        let _deferred = FreesDeferred::on_this_thread();
        let mut used: Vec<Stream> = Vec::new();
        for StagedWrite { memory, start, at, len } in pieces {
            let stream = stream_of(memory)?;
            stream.copy(memory.span(*start, *len)?, self.0.span(*at..at + len)?)?;
            if !used.iter().any(|other| other.context() == stream.context()) {
                used.push(stream);
            }
        }
        used.iter().try_for_each(Stream::synchronize)
    }
}

/// Registered host memory that is pinned. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Pin(HostMemory);

impl Pin {
    /// Pins `len` bytes from `start` on, through the memory's device and usable by all.
    ///
    /// # Safety
    /// They stay mapped until this is [released](Self::release), or dropped and no copy uses it any
    /// more.
    pub(crate) unsafe fn new(memory: &Memory, start: usize, len: usize) -> Result<Self, DriverError> {
        let Some(host) = NonNull::new(ptr::with_exposed_provenance_mut(start)) else {
            return Err(Error::Empty);
        };
        // SAFETY: mapped by contract; registered memory is accessed by raw copies only.
        unsafe { HostMemory::register_raw(&memory.context, host, len, Arc::new(())) }.map(Self)
    }

    pub(crate) fn start(&self) -> usize {
        self.0.as_ptr().addr()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn is(&self, other: &Self) -> bool {
        self.start() == other.start()
    }

    /// Unpins it, after all copies that use it.
    pub(crate) fn release(self) {
        if let Err(error) = self.0.free() {
            tracing::warn!("registered memory could not be unpinned: {error}");
        }
    }
}

#[derive(Debug)]
pub(crate) enum Mark {
    Event(Event),
    /// The last small copy of a device, by the device's index and the copy's number.
    Small(usize, u64),
}

impl Mark {
    pub(crate) fn is_small(&self, of: usize) -> bool {
        matches!(self, Self::Small(index, _) if *index == of)
    }
}

/// A stream for each device, and a ring of pinned memory.
#[derive(Debug, Default)]
pub(crate) struct Engine {
    streams: Vec<CopyStream>,
    spare: Vec<Event>,
    ring: Option<HostMemory>,
    pub(super) small: SmallCopyDevices,
}

#[derive(Debug)]
struct CopyStream {
    stream: Stream,
    touched: bool,
}

impl Engine {
    pub(crate) fn is_prepared(&self, memory: &Memory) -> bool {
        self.small.has(memory)
    }

    pub(crate) fn add(&mut self, device: PreparedDevice) {
        let PreparedDevice {
            small, stream, ring, ..
        } = device;
        if !self.small.add(small) {
            // Two threads may have prepared one concurrently.
            return;
        }
        self.streams
            .extend(stream.map(|stream| CopyStream { stream, touched: false }));
        if self.ring.is_none() {
            self.ring = ring;
        }
    }

    fn stream(&mut self, memory: &Memory) -> Result<&Stream, Error> {
        let context = &memory.context;
        let index = self.streams.iter().position(|entry| entry.stream.context() == context);
        let index = match index {
            Some(index) => index,
            None => {
                let stream = Stream::new(context)?;
                self.streams.push(CopyStream { stream, touched: false });
                self.streams.len() - 1
            }
        };
        let entry = &mut self.streams[index];
        entry.touched = true;
        Ok(&entry.stream)
    }

    /// The ring of pinned memory; allocated now where that failed when the device was prepared.
    pub(crate) fn ring(&mut self, memory: &Memory) -> Result<NonNull<u8>, DriverError> {
        let ring = match &mut self.ring {
            Some(ring) => ring,
            none => none.insert(HostMemory::alloc(&memory.context, RING)?),
        };
        Ok(NonNull::new(ring.as_ptr()).unwrap_or(NonNull::dangling()))
    }

    pub(crate) fn ring_start(&self) -> Option<*mut u8> {
        self.ring.as_ref().map(HostMemory::as_ptr)
    }

    pub(crate) fn are_small(&self, moves: &[CopyOp]) -> bool {
        self.small.take(moves, self.ring.as_ref())
    }

    /// `moves` [are small](Self::are_small); their memory is kept until they are done.
    pub(crate) fn copy_small(&mut self, moves: &[CopyOp], marks: &mut Vec<Mark>) -> Result<(), DriverError> {
        self.small.copy(moves, self.ring.as_ref(), marks)
    }

    /// Starts a copy within GPU memory; ranges outside it are an error.
    pub(crate) fn copy(
        &mut self,
        into: (&Memory, usize),
        from: (&Memory, usize),
        len: usize,
    ) -> Result<(), DriverError> {
        if into.0.is(from.0) && into.1 == from.1 {
            return Ok(());
        }
        let (to, source) = (into.0.span(into.1, len)?, from.0.span(from.1, len)?);
        let stream = self.stream(into.0)?;
        if into.0.context == from.0.context {
            stream.copy(to, source)
        } else {
            stream.copy_peer(to, source)
        }
    }

    pub(crate) fn copy_up(&mut self, into: (&Memory, usize), at: usize, len: usize) -> Result<(), DriverError> {
        let (memory, offset) = into;
        let in_words = [memory.address() as usize + offset, len]
            .iter()
            .all(|at| at.is_multiple_of(4));
        if len <= MAX_WRITTEN && in_words && self.small.wait_for_turns(memory) {
            self.ring(memory)?;
            let Some(ring) = self.ring.clone() else { return Ok(()) };
            let from = ring.span(at..at.saturating_add(len))?;
            // SAFETY: the span lies in the ring, where the source was written, and nothing else is
            // until it has been copied.
            let bytes = unsafe { slice::from_raw_parts(ring.as_ptr().add(at), from.len()) };
            return self.stream(memory)?.write_words(memory.span(offset, len)?, bytes);
        }
        self.by_ring(into, at, len, |stream, device, ring| stream.copy(device, ring))
    }

    pub(crate) fn copy_down(&mut self, from: (&Memory, usize), at: usize, len: usize) -> Result<(), DriverError> {
        self.by_ring(from, at, len, |stream, device, ring| stream.copy(ring, device))
    }

    pub(crate) fn copy_out(
        &mut self,
        from: (&Memory, usize),
        (pin, at): (&Pin, usize),
        len: usize,
    ) -> Result<(), DriverError> {
        let (to, source) = (pin.0.span(at..at.saturating_add(len))?, from.0.span(from.1, len)?);
        self.stream(from.0)?.copy(to, source)
    }

    fn by_ring(
        &mut self,
        (memory, offset): (&Memory, usize),
        at: usize,
        len: usize,
        copy: impl FnOnce(&Stream, Span<'_>, Span<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.ring(memory)?;
        let Some(ring) = self.ring.clone() else { return Ok(()) };
        let device = memory.span(offset, len)?;
        copy(self.stream(memory)?, device, ring.span(at..at.saturating_add(len))?)
    }

    pub(crate) fn mark(&mut self, marks: &mut Vec<Mark>) -> Result<(), DriverError> {
        for entry in self.streams.iter_mut().filter(|entry| entry.touched) {
            entry.touched = false;
            let context = entry.stream.context();
            let spare = self.spare.iter().position(|event| event.context() == context);
            let event = match spare {
                Some(index) => self.spare.swap_remove(index),
                None => Event::new(context)?,
            };
            entry.stream.record(&event)?;
            marks.push(Mark::Event(event));
        }
        Ok(())
    }

    /// Whether the copies before a mark are done. An error: they failed, or it is unknown.
    pub(crate) fn is_done(&mut self, mark: &Mark) -> Result<bool, DriverError> {
        match mark {
            Mark::Event(event) => event.is_done(),
            Mark::Small(index, number) => self.small.is_done(*index, *number),
        }
    }

    pub(crate) fn recycle(&mut self, mark: Mark) {
        if let Mark::Event(event) = mark {
            self.spare.push(event);
        }
    }
}
