//! Which requests cuFile carries out; the others, and those that it refuses, go through blocks.

use super::cufile::TransferError;
use super::engine::io_error;
use super::error::StorageError;
use super::path::StoragePath;
use super::request::{Place, Request};
use super::{Storage, read, write};

pub(super) fn read(storage: &mut Storage, requests: &[Request<'_>]) -> Result<Vec<usize>, StorageError> {
    let mut counts: Vec<Option<usize>> = carry_out(storage, requests, false)?;
    let rest = remaining(requests, &counts);
    let mut read = read::run(storage, &rest)?.into_iter();
    let counts = counts
        .iter_mut()
        .map(|count| count.take().or_else(|| read.next()).unwrap_or(0));
    Ok(counts.collect())
}

pub(super) fn write(storage: &mut Storage, requests: &[Request<'_>]) -> Result<(), StorageError> {
    let written = carry_out(storage, requests, true)?;
    write::run(storage, &remaining(requests, &written))
}

fn remaining<'a>(requests: &[Request<'a>], done: &[Option<usize>]) -> Vec<Request<'a>> {
    let pairs = requests.iter().zip(done);
    pairs
        .filter(|(_, done)| done.is_none())
        .map(|(request, _)| *request)
        .collect()
}

/// Has cuFile carry out the requests that it can: the bytes of each, and `None` of the others.
fn carry_out(storage: &Storage, requests: &[Request<'_>], write: bool) -> Result<Vec<Option<usize>>, StorageError> {
    let mut is_waited_for = false;
    let mut one = |request: &Request<'_>| {
        let (Ok(_), Some(stream), Place::Gpu(span)) = (&storage.cufile, &storage.stream, request.place) else {
            return Ok(None);
        };
        let handle = match request.file.cufile() {
            Ok(handle) => handle,
            Err(why) => return refused(storage, why),
        };
        if !is_waited_for {
            // cuFile knows nothing of streams: earlier work uses the memory until it is done.
            stream.synchronize()?;
            is_waited_for = true;
        }
        let moved = stream
            .context()
            .with_current(|| handle.transfer(write, span, request.offset))?;
        match moved {
            Ok(moved) => Ok(Some(moved)),
            Err((_, TransferError::Refused(why))) => {
                request.file.refuse_cufile(why.clone());
                refused(storage, &why)
            }
            Err((done, TransferError::Io(error))) => {
                let (offset, len) = (request.offset + done as u64, request.len - done);
                Err(io_error(write, request.file, offset, len, error))
            }
        }
    };
    requests.iter().map(&mut one).collect()
}

/// Another path takes the request, unless cuFile is forced.
fn refused(storage: &Storage, why: &str) -> Result<Option<usize>, StorageError> {
    match storage.forced {
        Some(path @ StoragePath::CuFile) => Err(StorageError::Refused {
            path,
            why: why.to_owned(),
        }),
        _ => Ok(None),
    }
}
