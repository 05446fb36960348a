//! Memory of one end: the host's or a GPU's, filled with a pattern and compared with it.

use std::cell::UnsafeCell;
use std::sync::Arc;

use anyhow::{Result, ensure};
use doorbell_cuda::{Context, HostMemory, Memory as _, Stream};
use doorbell_gpudirect::GpuMemory;
use doorbell_tests::gpu::foreign;

/// The variable that says what memory of GPUs is made by: `older` is `cuMemAlloc`. The far end's process has it, too.
const KIND: &str = "GPU_VERBS_MEMORY";
/// Bytes by which patterns go to a GPU and come back.
const STAGE: usize = 4 << 20;

/// Registered memory, which only its methods look at.
pub(crate) enum Memory {
    Host(Box<[UnsafeCell<u8>]>),
    Gpu {
        memory: GpuMemory,
        stream: Stream,
        stage: HostMemory,
    },
}

/// The byte of a pattern at `index`.
fn byte(seed: u64, index: usize) -> u8 {
    let word = (index as u64 / 8 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed.wrapping_mul(0xff51_afd7_ed55_8ccd);
    word.to_le_bytes()[index % 8]
}

/// The pattern from `start` on.
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

impl Memory {
    pub(crate) fn host(len: usize) -> Self {
        let bytes: Box<[u8]> = vec![0; len].into_boxed_slice();
        // SAFETY: UnsafeCell is its content in memory (its documentation promises so).
        Self::Host(unsafe { Box::from_raw(Box::into_raw(bytes) as *mut [UnsafeCell<u8>]) })
    }

    pub(crate) fn gpu(context: &Context, len: usize) -> Result<Self> {
        let memory = match std::env::var(KIND).as_deref() {
            Ok("older") => {
                let theirs = foreign::alloc(context, len, 0)?;
                // SAFETY: the owner is memory that has these bytes.
                unsafe { GpuMemory::wrap(context, theirs.device_ptr(), len, Arc::new(theirs))? }
            }
            _ => GpuMemory::alloc(context, len)?,
        };
        Ok(Self::Gpu {
            memory,
            stream: Stream::new(context)?,
            stage: HostMemory::alloc(context, STAGE)?,
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

    /// Writes the pattern's first `len` bytes to `at`.
    pub(crate) fn fill(&self, at: usize, len: usize, seed: u64) -> Result<()> {
        ensure!(at + len <= self.len(), "{len} bytes at {at} of {}", self.len());
        let mut part = vec![0; len.min(STAGE)];
        for start in (0..len).step_by(STAGE) {
            let part = &mut part[..STAGE.min(len - start)];
            pattern(seed, start, part);
            match self {
                Self::Host(bytes) => {
                    // SAFETY: in the memory, as was made sure; no reference to its bytes is ever made.
                    unsafe {
                        bytes[at + start]
                            .get()
                            .copy_from_nonoverlapping(part.as_ptr(), part.len());
                    }
                }
                Self::Gpu { memory, stream, stage } => {
                    stage.copy_in(0, part)?;
                    stream.copy(
                        memory.span(at + start..at + start + part.len())?,
                        stage.span(..part.len())?,
                    )?;
                    stream.synchronize()?;
                }
            }
        }
        Ok(())
    }

    /// Whether the pattern's first `len` bytes are at `at`; where the first other byte is, if not.
    pub(crate) fn differs(&self, at: usize, len: usize, seed: u64) -> Result<Option<usize>> {
        ensure!(at + len <= self.len(), "{len} bytes at {at} of {}", self.len());
        let (mut part, mut wanted) = (vec![0; len.min(STAGE)], vec![0; len.min(STAGE)]);
        for start in (0..len).step_by(STAGE) {
            let count = STAGE.min(len - start);
            let (part, wanted) = (&mut part[..count], &mut wanted[..count]);
            pattern(seed, start, wanted);
            match self {
                Self::Host(bytes) => {
                    // SAFETY: as in `fill`.
                    unsafe {
                        bytes[at + start].get().copy_to_nonoverlapping(part.as_mut_ptr(), count);
                    }
                }
                Self::Gpu { memory, stream, stage } => {
                    stream.copy(stage.span(..count)?, memory.span(at + start..at + start + count)?)?;
                    stream.synchronize()?;
                    stage.copy_out(0, part)?;
                }
            }
            if part != wanted {
                let other = part.iter().zip(wanted.iter()).position(|(one, other)| one != other);
                return Ok(other.map(|at| start + at));
            }
        }
        Ok(None)
    }
}
