//! Reads: the disk fills blocks, or the request's own memory, and copies empty the blocks.
#![expect(unsafe_code, reason = "blocks are copied to memory by address")]

use super::Storage;
use super::engine::{Batch, Piecework};
use super::error::StorageError;
use super::pieces::pieces;
use super::queue::Done;
use super::request::{Place, Request};

/// Carries out all reads; the count of each.
pub(super) fn run(storage: &mut Storage, requests: &[Request<'_>]) -> Result<Vec<usize>, StorageError> {
    let size = storage.block;
    let mut work = requests.iter().enumerate().flat_map(|(index, request)| {
        // An edge of its own, so that all between goes into host memory without a copy.
        let edges = !request.is_gpu();
        pieces(request.offset, request.len, request.file.alignment(), size, edges).map(move |piece| (index, piece))
    });
    let mut counts: Vec<usize> = requests.iter().map(|request| request.len).collect();
    let mut batch = Batch::new(storage, requests)?;
    let mut last = None;
    loop {
        while let Some(block) = batch.copied(false)? {
            batch.free.push(block);
        }
        while batch.may_start() {
            let Some((index, piece)) = work.next() else { break };
            let request = &requests[index];
            let block = batch.free.pop().expect("may_start has seen it");
            let piecework = batch.piecework(block, index, request, piece);
            batch.start(block, request.file, piecework, false)?;
            last = Some(request.file);
        }
        match last {
            Some(file) if batch.in_flight > 0 => batch.wait(file, false)?,
            _ => match batch.copied(true)? {
                Some(block) => batch.free.push(block),
                None => return Ok(counts),
            },
        }
        while let Some(done) = batch.storage.queue.next() {
            finish(&mut batch, requests, &mut counts, done)?;
        }
    }
}

/// Checks what was read, and has it copied to where it belongs.
fn finish(
    batch: &mut Batch<'_>,
    requests: &[Request<'_>],
    counts: &mut [usize],
    done: Done,
) -> Result<(), StorageError> {
    let block = done.tag;
    let work = batch.take(block);
    let Piecework {
        request: index, piece, ..
    } = work;
    let request = &requests[index];
    let until = piece.skip + piece.take;
    let have = batch
        .complete(request.file, &work, done.result, until, false)?
        .min(until);
    let got = have.saturating_sub(piece.skip);
    if got < piece.take {
        counts[index] = counts[index].min(piece.at + got);
    }
    if work.is_staged && got > 0 {
        match request.place {
            // SAFETY: the read is done, and the request's memory has these bytes.
            Place::Host(start) => unsafe {
                let into = start.add(piece.at);
                batch.storage.staging.copy_out(block, piece.skip, into, got);
            },
            Place::Gpu(span) => {
                let into = span.span(piece.at..piece.at + got)?;
                let storage = &batch.storage;
                let from = storage
                    .staging
                    .span(block, piece.skip, got)
                    .ok_or(StorageError::NoGpu)??;
                storage.stream.as_ref().ok_or(StorageError::NoGpu)?.copy(into, from)?;
                return batch.record(block);
            }
        }
    }
    batch.free.push(block);
    Ok(())
}
