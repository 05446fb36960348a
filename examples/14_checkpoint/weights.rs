//! The memory of all tensors of a checkpoint: of GPU 0, or of the host where there is no GPU.

use doorbell::Memory as HostBytes;
use doorbell::gpudirect::GpuMemory;
use doorbell::gpudirect::cuda::{Driver, HostMemory, Memory, Stream};
use doorbell::gpudirect::storage::{File, Storage};
use doorbell_examples::Error;

/// Bytes that are copied at once to be summed.
const PART: usize = 4 << 20;

pub(crate) enum Weights {
    Host(HostBytes),
    Gpu {
        memory: GpuMemory,
        stream: Stream,
        part: HostMemory,
    },
}

impl Weights {
    /// `len` bytes, and what reads and writes them.
    pub(crate) fn new(len: usize) -> Result<(Self, Storage), Error> {
        let Ok(driver) = Driver::load() else {
            return Ok((Self::Host(HostBytes::transparent_huge(len)), Storage::host()?));
        };
        let context = driver.device(0)?.context()?;
        let stream = Stream::new(&context)?;
        let storage = Storage::on_stream(&stream)?;
        let weights = Self::Gpu {
            memory: GpuMemory::alloc(&context, len)?,
            part: HostMemory::alloc(&context, PART)?,
            stream,
        };
        Ok((weights, storage))
    }

    /// Stands for training: different bytes everywhere.
    pub(crate) fn fill(&mut self) -> Result<(), Error> {
        let mut state = 1u32;
        let mut next = |part: &mut [u8]| {
            for word in part.chunks_mut(4) {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                word.copy_from_slice(&state.to_le_bytes()[..word.len()]);
            }
        };
        match self {
            Self::Host(bytes) => next(bytes),
            Self::Gpu { memory, stream, part } => {
                let mut bytes = vec![0; PART];
                for at in (0..memory.len()).step_by(PART) {
                    let len = PART.min(memory.len() - at);
                    next(&mut bytes[..len]);
                    part.copy_in(0, &bytes[..len])?;
                    stream.copy(memory.span(at..at + len)?, part.span(..len)?)?;
                    stream.synchronize()?;
                }
            }
        }
        Ok(())
    }

    pub(crate) fn read(&mut self, storage: &mut Storage, file: &File, offset: u64) -> Result<(), Error> {
        match self {
            Self::Host(bytes) => storage.read_exact_at(file, offset, &mut bytes[..])?,
            Self::Gpu { memory, .. } => storage.read_exact_at(file, offset, memory.all())?,
        }
        Ok(())
    }

    pub(crate) fn write(&self, storage: &mut Storage, file: &File, offset: u64) -> Result<(), Error> {
        match self {
            Self::Host(bytes) => storage.write_at(file, offset, &bytes[..])?,
            Self::Gpu { memory, .. } => storage.write_at(file, offset, memory.all())?,
        }
        Ok(())
    }

    /// The CRC-32 of `len` bytes at `start`, as they are in this memory.
    pub(crate) fn crc(&self, start: usize, len: usize) -> Result<u32, Error> {
        let (memory, stream, part) = match self {
            Self::Host(bytes) => return Ok(crc32fast::hash(&bytes[start..start + len])),
            Self::Gpu { memory, stream, part } => (memory, stream, part),
        };
        let mut crc = crc32fast::Hasher::new();
        let mut bytes = vec![0; PART];
        for at in (start..start + len).step_by(PART) {
            let len = PART.min(start + len - at);
            stream.copy(part.span(..len)?, memory.span(at..at + len)?)?;
            stream.synchronize()?;
            part.copy_out(0, &mut bytes[..len])?;
            crc.update(&bytes[..len]);
        }
        Ok(crc.finalize())
    }
}
