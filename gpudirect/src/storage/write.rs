//! Writes: copies fill blocks, and the disk empties them, or reads the request's own memory. A
//! block of the file that is written in part goes through the page cache, after all others.
#![expect(unsafe_code, reason = "blocks are filled from memory by address")]

use std::slice;

use super::Storage;
use super::engine::{Batch, io_error};
use super::error::StorageError;
use super::pieces::{Piece, pieces};
use super::request::{Place, Request};

pub(super) fn run(storage: &mut Storage, requests: &[Request<'_>]) -> Result<(), StorageError> {
    let size = storage.block;
    let all = || {
        requests.iter().enumerate().flat_map(|(index, request)| {
            pieces(request.offset, request.len, request.file.alignment(), size, true).map(move |piece| (index, piece))
        })
    };
    // Taken before anything is written, as the alignment changes where O_DIRECT is refused.
    let edges: Vec<(usize, Piece)> = all().filter(|(_, piece)| !piece.is_whole()).collect();
    let mut whole = all().filter(|(_, piece)| piece.is_whole());
    let mut batch = Batch::new(storage, requests)?;
    let mut last = None;
    loop {
        while batch.may_start() {
            let Some((index, piece)) = whole.next() else { break };
            last = Some(requests[index].file);
            fill(&mut batch, requests, index, piece)?;
        }
        // A copy that is done becomes a write; the oldest is waited for where nothing else is left.
        while let Some(block) = batch.copied(batch.in_flight == 0)? {
            let work = batch.work[block].take().expect("a copy has its block until it is done");
            batch.start(block, requests[work.request].file, work, true)?;
        }
        match last {
            Some(file) if batch.in_flight > 0 => batch.wait(file, true)?,
            _ => break,
        }
        while let Some(done) = batch.storage.queue.next() {
            let work = batch.take(done.tag);
            let file = requests[work.request].file;
            batch.complete(file, &work, done.result, work.piece.len, true)?;
            batch.free.push(done.tag);
        }
    }
    edges
        .into_iter()
        .try_for_each(|(index, piece)| write_edge(&mut batch, &requests[index], piece))
}

/// Starts the write of a piece, or the copy before it.
fn fill(batch: &mut Batch<'_>, requests: &[Request<'_>], index: usize, piece: Piece) -> Result<(), StorageError> {
    let request = &requests[index];
    let block = batch.free.pop().expect("may_start has seen it");
    let work = batch.piecework(block, index, request, piece);
    match request.place {
        Place::Gpu(_) => {
            copy(batch, block, request, piece)?;
            batch.work[block] = Some(work);
            return Ok(());
        }
        // SAFETY: the block is free, and the request's memory has these bytes.
        Place::Host(start) if work.is_staged => unsafe {
            batch.storage.staging.copy_in(block, start.add(piece.at), piece.take);
        },
        Place::Host(_) => {}
    }
    batch.start(block, request.file, work, true)
}

/// Has the GPU copy the bytes of a piece to the start of a block.
fn copy(batch: &mut Batch<'_>, block: usize, request: &Request<'_>, piece: Piece) -> Result<(), StorageError> {
    let Place::Gpu(span) = request.place else {
        return Err(StorageError::NoGpu);
    };
    let from = span.span(piece.at..piece.at + piece.take)?;
    let storage = &batch.storage;
    let into = storage
        .staging
        .span(block, 0, piece.take)
        .ok_or(StorageError::NoGpu)??;
    storage.stream.as_ref().ok_or(StorageError::NoGpu)?.copy(into, from)?;
    batch.record(block)
}

/// Writes a first or last block of the file in part.
fn write_edge(batch: &mut Batch<'_>, request: &Request<'_>, piece: Piece) -> Result<(), StorageError> {
    let memory = match request.place {
        // SAFETY: the request's memory has the bytes of its pieces.
        Place::Host(start) => unsafe { start.add(piece.at) },
        Place::Gpu(_) => {
            let block = batch.free.pop().ok_or(StorageError::NoGpu)?;
            copy(batch, block, request, piece)?;
            batch.copied(true)?;
            batch.free.push(block);
            batch.storage.staging.block(block)
        }
    };
    // SAFETY: the bytes are the request's, borrowed for reading; or a block's, which nothing has.
    let bytes = unsafe { slice::from_raw_parts(memory.cast_const(), piece.take) };
    let written = request.file.write_cached(bytes, piece.offset());
    written.map_err(|error| io_error(true, request.file, piece.offset(), piece.take, error))
}
