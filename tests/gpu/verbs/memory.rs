//! An endpoint's memory: filled with a pattern and compared, by several threads if it is large.

use std::cell::UnsafeCell;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use anyhow::{Result, ensure};
use doorbell_cuda::{Context, HostMemory, Memory as _, Stream};
use doorbell_gpudirect::GpuMemory;
use doorbell_tests::gpu::foreign;

/// Selects the allocation of GPU memory: `older` is `cuMemAlloc`. Child processes inherit it.
const KIND: &str = "GPU_VERBS_MEMORY";

pub(crate) fn is_copied_in_the_programs_context() -> bool {
    std::env::var(KIND).as_deref() == Ok("older") || std::env::var("DOORBELL_GPU_CONTEXT").as_deref() != Ok("separate")
}

/// Bytes that a thread processes at a time, and the size of its staging buffer.
const STAGE: usize = 4 << 20;
/// The maximum number of threads: their work is memory-bound.
const THREADS: usize = 8;

/// Registered memory, which only its methods access.
pub(crate) enum Memory {
    Host(Box<[UnsafeCell<u8>]>),
    Gpu { memory: GpuMemory, stagings: Vec<Staging> },
}

pub(crate) struct Staging {
    stream: Stream,
    stage: HostMemory,
}

fn byte(seed: u64, index: usize) -> u8 {
    let word = (index as u64 / 8 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed.wrapping_mul(0xff51_afd7_ed55_8ccd);
    word.to_le_bytes()[index % 8]
}

fn pattern(seed: u64, start: usize, bytes: &mut [u8]) {
    let head = (8 - start % 8) % 8;
    let head = head.min(bytes.len());
    let (first, rest) = bytes.split_at_mut(head);
    for (at, to) in first.iter_mut().enumerate() {
        *to = byte(seed, start + at);
    }
    let start = start + head;
    let mixed = seed.wrapping_mul(0xff51_afd7_ed55_8ccd);
    let (words, tail) = rest.as_chunks_mut::<8>();
    let count = words.len();
    for (at, word) in (start as u64 / 8 + 1..).zip(words) {
        *word = (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ mixed).to_le_bytes();
    }
    for (at, to) in tail.iter_mut().enumerate() {
        *to = byte(seed, start + 8 * count + at);
    }
}

fn threads(len: usize) -> usize {
    let most = thread::available_parallelism().map_or(1, usize::from).min(THREADS);
    len.div_ceil(STAGE).clamp(1, most)
}

impl Memory {
    pub(crate) fn host(len: usize) -> Self {
        let bytes: Box<[u8]> = vec![0; len].into_boxed_slice();
        // SAFETY: UnsafeCell has the same memory layout as its content (documented).
        Self::Host(unsafe { Box::from_raw(Box::into_raw(bytes) as *mut [UnsafeCell<u8>]) })
    }

    pub(crate) fn gpu(context: &Context, len: usize) -> Result<Self> {
        let memory = match std::env::var(KIND).as_deref() {
            Ok("older") => {
                let theirs = foreign::alloc(context, len, 0)?;
                // SAFETY: the owner is memory that contains these bytes.
                unsafe { GpuMemory::wrap(context, theirs.device_ptr(), len, Arc::new(theirs))? }
            }
            _ => GpuMemory::alloc(context, len)?,
        };
        let staging = || -> Result<Staging> {
            Ok(Staging {
                stream: Stream::new(context)?,
                stage: HostMemory::alloc(context, STAGE)?,
            })
        };
        Ok(Self::Gpu {
            memory,
            stagings: (0..threads(len)).map(|_| staging()).collect::<Result<_>>()?,
        })
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Host(bytes) => bytes.len(),
            Self::Gpu { memory, .. } => memory.len(),
        }
    }

    pub(crate) fn addr(&self) -> u64 {
        match self {
            Self::Host(bytes) => bytes.as_ptr().expose_provenance() as u64,
            Self::Gpu { memory, .. } => memory.device_ptr().0,
        }
    }

    pub(crate) fn fill(&self, at: usize, len: usize, seed: u64) -> Result<()> {
        self.in_parts(at, len, |part, start, bytes| {
            pattern(seed, start, bytes);
            part.write(at + start, bytes)?;
            Ok(None)
        })
        .map(drop)
    }

    /// Compares the pattern's first `len` bytes with those at `at`; returns the first difference.
    pub(crate) fn differs(&self, at: usize, len: usize, seed: u64) -> Result<Option<usize>> {
        self.in_parts(at, len, |part, start, bytes| {
            part.read(at + start, bytes)?;
            let mut wanted = vec![0; bytes.len()];
            pattern(seed, start, &mut wanted);
            if bytes == &wanted[..] {
                return Ok(None);
            }
            let other = bytes.iter().zip(&wanted).position(|(one, other)| one != other);
            Ok(other.map(|at| start + at))
        })
    }

    /// Runs `work` on several threads, with a part's offset and a buffer; returns the least result.
    fn in_parts(
        &self,
        at: usize,
        len: usize,
        work: impl Fn(&Part<'_>, usize, &mut [u8]) -> Result<Option<usize>> + Sync,
    ) -> Result<Option<usize>> {
        ensure!(at + len <= self.len(), "{len} bytes at {at} of {}", self.len());
        let next = AtomicUsize::new(0);
        let turns = |part: Part<'_>| -> Result<Option<usize>> {
            let mut room = vec![0; len.min(STAGE)];
            let mut least = None;
            loop {
                let start = next.fetch_add(STAGE, Ordering::Relaxed);
                if start >= len {
                    return Ok(least);
                }
                let said = work(&part, start, &mut room[..STAGE.min(len - start)])?;
                least = least.into_iter().chain(said).min();
            }
        };
        let mut parts = self.parts(threads(len));
        let Some(own) = parts.pop() else { return Ok(None) };
        thread::scope(|scope| {
            let turns = &turns;
            let others: Vec<_> = parts.into_iter().map(|part| scope.spawn(move || turns(part))).collect();
            let mut least = turns(own)?;
            for other in others {
                match other.join() {
                    Ok(said) => least = least.into_iter().chain(said?).min(),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            Ok(least)
        })
    }

    fn parts(&self, count: usize) -> Vec<Part<'_>> {
        match self {
            Self::Host(bytes) => vec![Part::Host(bytes.as_ptr().expose_provenance()); count],
            Self::Gpu { memory, stagings } => stagings
                .iter()
                .take(count)
                .map(|staging| Part::Gpu(memory, staging))
                .collect(),
        }
    }
}

/// Memory as accessed by one thread: within bounds, and at disjoint ranges.
#[derive(Clone)]
enum Part<'a> {
    /// By its exposed address.
    Host(usize),
    Gpu(&'a GpuMemory, &'a Staging),
}

impl Part<'_> {
    fn write(&self, at: usize, bytes: &[u8]) -> Result<()> {
        match self {
            Self::Host(start) => {
                let to = ptr::with_exposed_provenance_mut::<u8>(start + at);
                // SAFETY: within the memory, as checked; no reference to its bytes is ever made,
                // and each part is accessed by one thread.
                unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
            }
            Self::Gpu(memory, Staging { stream, stage }) => {
                stage.copy_in(0, bytes)?;
                stream.copy(memory.span(at..at + bytes.len())?, stage.span(..bytes.len())?)?;
                stream.synchronize()?;
            }
        }
        Ok(())
    }

    fn read(&self, at: usize, bytes: &mut [u8]) -> Result<()> {
        match self {
            Self::Host(start) => {
                let from = ptr::with_exposed_provenance::<u8>(start + at);
                // SAFETY: as in `write`.
                unsafe { from.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
            }
            Self::Gpu(memory, Staging { stream, stage }) => {
                stream.copy(stage.span(..bytes.len())?, memory.span(at..at + bytes.len())?)?;
                stream.synchronize()?;
                stage.copy_out(0, bytes)?;
            }
        }
        Ok(())
    }
}
