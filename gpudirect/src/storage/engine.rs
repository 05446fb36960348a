//! What reads and writes share: blocks and the requests and copies that have them.
#![expect(unsafe_code, reason = "requests access memory by address")]

use std::collections::VecDeque;
use std::io;

use super::error::{Action, StorageError};
use super::file::File;
use super::pieces::Piece;
use super::queue::{Operation, Queue};
use super::request::{Place, Request};
use super::staging::Staging;
use super::{Storage, sys};

/// Registers the blocks, so that the kernel pins their pages once: why not, in words. Works
/// without.
pub(super) fn register(queue: &mut Queue, staging: &Staging) -> Option<String> {
    let (memory, len) = staging.range();
    // SAFETY: `Storage` drops the queue before the blocks.
    let error = unsafe { queue.register(memory, len) }.err()?;
    let limit = match error.raw_os_error() {
        Some(libc::ENOMEM) => format!(
            "{len} bytes are beyond the limit of locked memory ({}; ulimit -l): ",
            locked_limit()
        ),
        _ => String::new(),
    };
    Some(format!("{limit}{error}"))
}

fn locked_limit() -> String {
    match nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_MEMLOCK) {
        Ok((soft, _)) => format!("{soft} bytes"),
        Err(errno) => errno.to_string(),
    }
}

/// A piece in flight.
#[derive(Clone, Copy)]
pub(super) struct Piecework {
    /// Index of its request.
    pub(super) request: usize,
    pub(super) piece: Piece,
    /// Where the disk reads and writes: the request's own memory, or the block.
    pub(super) memory: *mut u8,
    pub(super) is_staged: bool,
}

/// A batch in progress. Dropping it waits for requests and copies in flight, so that nothing uses
/// the memory of the batch afterwards.
pub(super) struct Batch<'s> {
    pub(super) storage: &'s mut Storage,
    /// What has each block.
    pub(super) work: Vec<Option<Piecework>>,
    pub(super) free: Vec<usize>,
    /// Requests of the disk in flight.
    pub(super) in_flight: usize,
    /// Blocks that copies of the GPU have, in the order of the stream.
    pub(super) copies: VecDeque<usize>,
}

impl<'s> Batch<'s> {
    pub(super) fn new(storage: &'s mut Storage, requests: &[Request<'_>]) -> Result<Self, StorageError> {
        if storage.stream.is_none() && requests.iter().any(Request::is_gpu) {
            return Err(StorageError::NoGpu);
        }
        let blocks = storage.blocks();
        Ok(Self {
            storage,
            work: vec![None; blocks],
            free: (0..blocks).rev().collect(),
            in_flight: 0,
            copies: VecDeque::new(),
        })
    }

    /// Whether another request of the disk may be started: without io_uring each is carried out as
    /// it is started, and what follows it (a copy) begins at once.
    pub(super) fn may_start(&self) -> bool {
        let depth = if self.storage.queue.is_concurrent() {
            self.storage.depth
        } else {
            1
        };
        self.in_flight < depth && !self.free.is_empty()
    }

    /// Where the disk accesses a piece: in the request's memory where it is aligned and all its
    /// bytes are the request's, else in a block.
    pub(super) fn piecework(&self, block: usize, index: usize, request: &Request<'_>, piece: Piece) -> Piecework {
        let own = match request.place {
            // SAFETY: the piece's bytes lie within the request's memory.
            Place::Host(start) if piece.is_whole() => Some(unsafe { start.add(piece.at) })
                .filter(|memory| memory.addr().is_multiple_of(request.file.alignment())),
            _ => None,
        };
        Piecework {
            request: index,
            piece,
            memory: own.unwrap_or_else(|| self.storage.staging.block(block)),
            is_staged: own.is_none(),
        }
    }

    /// Starts the read or write of the piece that has `block`.
    pub(super) fn start(
        &mut self,
        block: usize,
        file: &File,
        work: Piecework,
        write: bool,
    ) -> Result<(), StorageError> {
        self.work[block] = Some(work);
        let operation = Operation {
            fd: file.bulk_fd(),
            write,
            memory: work.memory,
            len: work.piece.len,
            offset: work.piece.start,
            staged: work.is_staged,
            tag: block,
        };
        // SAFETY: a block has one user at a time, and a piece's own memory is borrowed by its
        // request; both, and the file, outlive this batch, whose drop waits for the operation.
        let started = unsafe { self.storage.queue.start(operation) };
        started.map_err(|error| io_error(write, file, work.piece.start, work.piece.len, error))?;
        self.in_flight += 1;
        Ok(())
    }

    /// The piece of a block whose operation is done.
    pub(super) fn take(&mut self, block: usize) -> Piecework {
        self.in_flight -= 1;
        self.work[block]
            .take()
            .expect("an operation has its block until it is done")
    }

    pub(super) fn wait(&mut self, file: &File, write: bool) -> Result<(), StorageError> {
        let entered = self.storage.queue.wait();
        entered.map_err(|error| StorageError::file(action(write), file.path(), error))
    }

    /// Continues a piece that ended early, or was refused, through the page cache, from its byte
    /// `done` on: the count of bytes of the piece that are read or written then.
    pub(super) fn finish(
        &self,
        file: &File,
        work: &Piecework,
        mut done: usize,
        until: usize,
        write: bool,
    ) -> Result<usize, StorageError> {
        while done < until {
            let offset = work.piece.start + done as u64;
            // SAFETY: the piece's memory has these bytes, and its operation is done.
            let more = unsafe { sys::transfer(file.cached_fd(), write, work.memory.add(done), until - done, offset) };
            match more {
                Ok(0) if write => {
                    let error = io::ErrorKind::WriteZero.into();
                    return Err(io_error(write, file, offset, until - done, error));
                }
                Ok(0) => break,
                Ok(more) => done += more,
                Err(error) => return Err(io_error(write, file, offset, until - done, error)),
            }
        }
        Ok(done)
    }

    /// The bytes of a piece after an operation of the disk, up to its byte `until`.
    pub(super) fn complete(
        &self,
        file: &File,
        work: &Piecework,
        result: io::Result<usize>,
        until: usize,
        write: bool,
    ) -> Result<usize, StorageError> {
        let done = match result {
            Ok(done) => done.min(work.piece.len),
            Err(error) => match error.raw_os_error() {
                // Some file systems accept the flag, and refuse reads and writes.
                Some(libc::EINVAL) if file.direct_fd().is_ok() => {
                    file.refuse_direct();
                    0
                }
                Some(libc::EINTR | libc::EAGAIN) => 0,
                _ => return Err(io_error(write, file, work.piece.offset(), work.piece.take, error)),
            },
        };
        self.finish(file, work, done, until, write)
    }

    /// Records the end of the copy that has `block`.
    pub(super) fn record(&mut self, block: usize) -> Result<(), StorageError> {
        let stream = self.storage.stream.as_ref().ok_or(StorageError::NoGpu)?;
        stream.record(&self.storage.events[block])?;
        self.copies.push_back(block);
        Ok(())
    }

    /// A block whose copy is done; waits for the oldest if `wait`.
    pub(super) fn copied(&mut self, wait: bool) -> Result<Option<usize>, StorageError> {
        let Some(block) = self.copies.front().copied() else {
            return Ok(None);
        };
        let event = &self.storage.events[block];
        if wait {
            event.synchronize()?;
        } else if !event.is_done()? {
            return Ok(None);
        }
        self.copies.pop_front();
        Ok(Some(block))
    }
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        self.storage.queue.drain();
        // Of a stream whose work has failed nothing runs any more.
        if let Some(block) = self.copies.back()
            && let Err(error) = self.storage.events[*block].synchronize()
        {
            tracing::debug!("copies of a failed batch: {error}");
        }
    }
}

/// An error of a read or write.
pub(super) fn io_error(write: bool, file: &File, offset: u64, len: usize, error: io::Error) -> StorageError {
    StorageError::Io {
        action: action(write),
        file: file.path().to_owned(),
        offset,
        len,
        error,
    }
}

fn action(write: bool) -> Action {
    if write { Action::Write } else { Action::Read }
}
