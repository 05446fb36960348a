//! What is measured: limits of the machine, what programs do without Doorbell, and Doorbell.

use std::fs;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use doorbell_cuda::{HostMemory, Memory as _, Span, Stream};
use doorbell_gpudirect::GpuMemory;
use doorbell_gpudirect::storage::{File, Read, Storage};
use doorbell_verbs::{HugePage, Memory};
use nix::fcntl::{OFlag, PosixFadviseAdvice, posix_fadvise};

use crate::failure::{Failure, refused};

type Spanned<'a> = Result<Span<'a>, doorbell_cuda::Error>;

/// Where the bytes are read into and written from.
pub(super) enum Place {
    Host(Memory),
    Gpu {
        memory: GpuMemory,
        stream: Stream,
        /// A block, for copies that Doorbell's blocks are not used for.
        pinned: HostMemory,
    },
}

/// A window of the file, and how it is read and written.
#[derive(Clone, Copy)]
pub(super) struct Window {
    pub(super) offset: u64,
    pub(super) len: usize,
    pub(super) block: usize,
}

impl Window {
    /// The blocks, as offsets in it and lengths.
    fn blocks(self) -> impl Iterator<Item = (usize, usize)> {
        (0..self.len)
            .step_by(self.block)
            .map(move |at| (at, self.block.min(self.len - at)))
    }
}

/// Opens with O_DIRECT where the file system has it.
fn open_direct(path: &Path, write: bool) -> io::Result<fs::File> {
    let open = |flags| {
        let mut options = fs::OpenOptions::new();
        options.read(true).write(write).custom_flags(flags).open(path)
    };
    open(OFlag::O_DIRECT.bits()).or_else(|_| open(0))
}

/// A block for each request in flight, made before anything is measured.
pub(super) fn disk_blocks(block: usize, depth: usize) -> Vec<Memory> {
    let make = |_| {
        let mut memory = Memory::transparent_huge(block.max(HugePage::Size2M.bytes()));
        memory.fill(1);
        memory
    };
    (0..depth).map(make).collect()
}

/// The disk's limit: a thread for each request in flight reads or writes blocks with O_DIRECT.
pub(super) fn disk(path: &Path, window: Window, write: bool, blocks: &mut [Memory]) -> Result<(), Failure> {
    let file = open_direct(path, write).map_err(refused)?;
    let next = AtomicU64::new(0);
    let thread = |memory: &mut Memory| -> io::Result<()> {
        loop {
            let at = next.fetch_add(window.block as u64, Ordering::Relaxed);
            if at >= window.len as u64 {
                return Ok(());
            }
            transfer(&file, &mut memory[..window.block], window.offset + at, write)?;
        }
    };
    let outcome = thread::scope(|scope| {
        let needed = window.len.div_ceil(window.block);
        let threads: Vec<_> = blocks
            .iter_mut()
            .take(needed)
            .map(|memory| scope.spawn(move || thread(memory)))
            .collect();
        threads.into_iter().try_for_each(|thread| {
            thread
                .join()
                .unwrap_or_else(|_| Err(io::Error::other("a thread failed")))
        })
    });
    outcome.and_then(|()| synced(&file, write)).map_err(refused)
}

/// As dd(1) with `iflag=direct`: one block after the other.
pub(super) fn dd(path: &Path, window: Window, write: bool) -> Result<(), Failure> {
    let file = open_direct(path, write).map_err(refused)?;
    let mut block = Memory::zeroed(window.block);
    for (at, _) in window.blocks() {
        transfer(&file, &mut block, window.offset + at as u64, write).map_err(refused)?;
    }
    synced(&file, write).map_err(refused)
}

fn transfer(file: &fs::File, block: &mut [u8], offset: u64, write: bool) -> io::Result<()> {
    if write {
        return file.write_all_at(block, offset);
    }
    // Of the file's last block less than a block is read.
    file.read_at(block, offset).map(drop)
}

fn synced(file: &fs::File, write: bool) -> io::Result<()> {
    if write { file.sync_data() } else { Ok(()) }
}

/// Drops the file from the page cache, so that the disk is read.
pub(super) fn drop_cache(path: &Path) -> io::Result<()> {
    let file = fs::File::open(path)?;
    posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?;
    Ok(())
}

impl Place {
    /// The limit of the bus: copies of pinned memory by the copy engines, block by block.
    pub(super) fn bus(&self, window: Window, from_gpu: bool) -> Result<(), Failure> {
        let Place::Gpu { memory, stream, pinned } = self else {
            return Ok(());
        };
        let copied = window.blocks().try_for_each(|(at, len)| {
            let (here, there) = (pinned.span(..len)?, memory.span(at..at + len)?);
            if from_gpu {
                stream.copy(here, there)
            } else {
                stream.copy(there, here)
            }
        });
        copied.and_then(|()| stream.synchronize()).map_err(refused)
    }

    /// read(2) through the page cache, and for a GPU into pinned memory, which is then copied: one
    /// copy less than `cudaMemcpy` of other memory makes.
    pub(super) fn read_copy(&mut self, path: &Path, window: Window) -> Result<(), Failure> {
        let file = fs::File::open(path).map_err(refused)?;
        for (at, len) in window.blocks() {
            let offset = window.offset + at as u64;
            match self {
                Place::Host(memory) => file.read_exact_at(&mut memory[at..at + len], offset).map_err(refused)?,
                Place::Gpu { memory, stream, pinned } => {
                    let bytes = pinned.bytes_mut().map_err(refused)?;
                    file.read_exact_at(&mut bytes[..len], offset).map_err(refused)?;
                    copy(stream, memory.span(at..at + len), pinned.span(..len)).map_err(refused)?;
                }
            }
        }
        Ok(())
    }

    /// A copy from the GPU, then write(2) through the page cache, and at the end fdatasync(2).
    pub(super) fn copy_write(&mut self, path: &Path, window: Window) -> Result<(), Failure> {
        let file = fs::OpenOptions::new().write(true).open(path).map_err(refused)?;
        for (at, len) in window.blocks() {
            let offset = window.offset + at as u64;
            match self {
                Place::Host(memory) => file.write_all_at(&memory[at..at + len], offset).map_err(refused)?,
                Place::Gpu { memory, stream, pinned } => {
                    copy(stream, pinned.span(..len), memory.span(at..at + len)).map_err(refused)?;
                    let bytes = pinned.bytes_mut().map_err(refused)?;
                    file.write_all_at(&bytes[..len], offset).map_err(refused)?;
                }
            }
        }
        synced(&file, true).map_err(refused)
    }

    pub(super) fn read(&mut self, storage: &mut Storage, file: &File, window: Window) -> Result<(), Failure> {
        let outcome = match self {
            Place::Host(memory) => storage.read_exact_at(file, window.offset, &mut memory[..window.len]),
            Place::Gpu { memory, .. } => {
                let span = memory.span(..window.len).map_err(refused)?;
                storage.read_exact_at(file, window.offset, span)
            }
        };
        outcome.map_err(refused)
    }

    /// The same bytes as a batch of reads, none of which begins where a block of the disk does.
    pub(super) fn read_in_parts(&mut self, storage: &mut Storage, file: &File, window: Window) -> Result<(), Failure> {
        const PARTS: usize = 7;
        let part = (window.len / PARTS).max(1);
        let offset = |at: usize| window.offset + at as u64;
        let mut reads: Vec<Read<'_>> = match self {
            Place::Host(memory) => memory[..window.len]
                .chunks_mut(part)
                .enumerate()
                .map(|(index, into)| Read {
                    file,
                    offset: offset(index * part),
                    into: into.into(),
                })
                .collect(),
            Place::Gpu { memory, .. } => (0..window.len)
                .step_by(part)
                .map(|at| {
                    let into = memory.span(at..window.len.min(at + part)).map_err(refused)?;
                    Ok(Read {
                        file,
                        offset: offset(at),
                        into: into.into(),
                    })
                })
                .collect::<Result<_, Failure>>()?,
        };
        let counts = storage.read_batch(&mut reads).map_err(refused)?;
        match counts.iter().sum::<usize>() {
            all if all == window.len => Ok(()),
            fewer => Err(Failure::test(format!(
                "{}: ends at offset {}, before {}",
                file.path().display(),
                offset(fewer),
                offset(window.len)
            ))),
        }
    }

    pub(super) fn write(&self, storage: &mut Storage, file: &File, window: Window) -> Result<(), Failure> {
        let outcome = match self {
            Place::Host(memory) => storage.write_at(file, window.offset, &memory[..window.len]),
            Place::Gpu { memory, .. } => {
                let span = memory.span(..window.len).map_err(refused)?;
                storage.write_at(file, window.offset, span)
            }
        };
        outcome.and_then(|()| file.sync()).map_err(refused)
    }

    /// Compares its bytes with those that read(2) gives.
    pub(super) fn check(&self, path: &Path, window: Window) -> Result<(), Failure> {
        compare(path, window, |at, bytes| match self {
            Place::Host(memory) => {
                bytes.copy_from_slice(&memory[at..at + bytes.len()]);
                Ok(())
            }
            Place::Gpu { memory, stream, pinned } => {
                let len = bytes.len();
                copy(stream, pinned.span(..len), memory.span(at..at + len))?;
                pinned.copy_out(0, bytes)
            }
        })
    }
}

/// Compares a window of a file, as read(2) gives it, with what `get` returns of it, block by block.
pub(super) fn compare(
    path: &Path,
    window: Window,
    get: impl Fn(usize, &mut [u8]) -> Result<(), doorbell_cuda::Error>,
) -> Result<(), Failure> {
    let file = fs::File::open(path).map_err(refused)?;
    let (mut expected, mut got) = (vec![0; window.block], vec![0; window.block]);
    for (at, len) in window.blocks() {
        let offset = window.offset + at as u64;
        file.read_exact_at(&mut expected[..len], offset).map_err(refused)?;
        get(at, &mut got[..len]).map_err(refused)?;
        if let Some(wrong) = (0..len).find(|byte| expected[*byte] != got[*byte]) {
            return Err(Failure::test(format!(
                "{}: wrong data at offset {}",
                path.display(),
                offset + wrong as u64
            )));
        }
    }
    Ok(())
}

/// A copy that is done.
fn copy(stream: &Stream, into: Spanned<'_>, from: Spanned<'_>) -> Result<(), doorbell_cuda::Error> {
    stream.copy(into?, from?)?;
    stream.synchronize()
}
