//! The server's side.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use doorbell_verbs::exchange::{Connection, Exchange};
use doorbell_verbs::{
    Buffer, Completion, CompletionError, Local, Memory, ProtectionDomain, Remote, Success, WriteAccess,
};
use nix::fcntl::{AT_FDCWD, OFlag, OpenHow, ResolveFlag, openat2};

use super::ServeError;
use super::message::{Answer, MAX_ANSWER, MAX_REQUEST, Request};
use crate::storage::error::{Action, StorageError};
use crate::storage::{File, Read, Stamp, Storage, StorageOptions};

/// Bytes of a read of the disk, and of a WRITE.
const BLOCK: usize = 1 << 20;
/// Blocks that are read at once, while as many are WRITten.
const BATCH: usize = 8;
/// Time for the peer's device to acknowledge a block.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Serves the files below a folder, or one file.
pub struct FileServer {
    folder: OwnedFd,
    path: PathBuf,
    only: Option<Only>,
    data: Vec<u8>,
}

/// The one file that is served: the name that clients use, and the one in the folder, which differ
/// where the first is a symbolic link.
#[derive(Debug)]
struct Only {
    name: OsString,
    real: OsString,
}

impl FileServer {
    /// Serves the files below `folder`, by any user that may reach this process.
    ///
    /// # Errors
    /// [`ServeError::Folder`].
    #[doc(alias("openat2", "RESOLVE_BENEATH"))]
    pub fn new(folder: impl AsRef<Path>) -> Result<Self, ServeError> {
        let path = folder.as_ref();
        let how = OpenHow::new().flags(OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC);
        let folder = openat2(AT_FDCWD, path, how).map_err(|errno| ServeError::Folder {
            folder: path.to_owned(),
            error: errno.into(),
        })?;
        Ok(Self {
            folder,
            path: path.to_owned(),
            only: None,
            data: Vec::new(),
        })
    }

    /// Serves `file` alone, by the last part of its path.
    ///
    /// # Errors
    /// [`ServeError::Folder`].
    pub fn one_file(file: impl AsRef<Path>) -> Result<Self, ServeError> {
        let path = file.as_ref();
        let failed = |error| ServeError::Folder {
            folder: path.to_owned(),
            error,
        };
        let resolved = fs::canonicalize(path).map_err(failed)?;
        let (Some(name), Some(real), Some(folder)) = (path.file_name(), resolved.file_name(), resolved.parent()) else {
            return Err(failed(io::ErrorKind::InvalidFilename.into()));
        };
        let only = Only {
            name: name.to_owned(),
            real: real.to_owned(),
        };
        let server = Self {
            only: Some(only),
            ..Self::new(folder)?
        };
        server.open(name)?;
        Ok(server)
    }

    /// What clients get when they connect, as [`FileClient::data`](super::FileClient::data): up to
    /// [`MAX_DATA`](doorbell_verbs::exchange::MAX_DATA) bytes.
    #[must_use]
    pub fn data(mut self, data: Vec<u8>) -> Self {
        self.data = data;
        self
    }

    /// Opens a file below the folder.
    ///
    /// # Errors
    /// [`StorageError::File`]: with `EXDEV` for a name that leads out of the folder.
    pub fn open(&self, name: &OsStr) -> Result<File, StorageError> {
        // Not to wait for the other end of a pipe.
        let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
        let resolve = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_MAGICLINKS;
        let real = match &self.only {
            Some(only) if only.name != name => {
                let error = io::Error::other(format!("{} alone is served", only.name.display()));
                return Err(StorageError::file(Action::Open, Path::new(name), error));
            }
            Some(only) => &only.real,
            None => name,
        };
        let opened = openat2(&self.folder, real, OpenHow::new().flags(flags).resolve(resolve));
        let name = Path::new(name);
        let opened = opened.map_err(|errno| StorageError::file(Action::Open, name, errno))?;
        File::of(name, fs::File::from(opened))
    }

    /// Serves one client until it leaves: the bytes that were sent. It takes 24 MiB of memory, and
    /// the calling thread: a program has a thread for each client, and limits their number.
    ///
    /// # Errors
    /// Of the connection, and for what is no message of the protocol. Errors of files are the
    /// client's.
    pub fn serve(&self, pd: &ProtectionDomain, exchange: Exchange) -> Result<u64, ServeError> {
        let blocks = pd.register_chunks(Memory::transparent_huge(2 * BATCH * BLOCK), BLOCK, Local)?;
        let inboxes = pd.register_chunks(vec![0; 2 * MAX_REQUEST], MAX_REQUEST, Local)?;
        let options = StorageOptions::from_environment()?.block(BLOCK).depth(BATCH);
        let peer = exchange.connection(pd, |qp| qp.max_inline_data(MAX_ANSWER as u32), inboxes, &self.data)?;
        let mut session = Session {
            server: self,
            storage: options.host()?,
            peer,
            free: blocks.collect(),
            requests: VecDeque::new(),
            stamped: None,
            sent: 0,
        };
        session.run()?;
        // One that has dropped its end waits for nothing.
        if let Err(error) = session.peer.finish() {
            tracing::debug!("a client has left without finish(): {error}");
        }
        Ok(session.sent)
    }
}

impl fmt::Debug for FileServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FileServer").field(&self.path).finish()
    }
}

/// A client, and the blocks of its files.
struct Session<'a> {
    server: &'a FileServer,
    storage: Storage,
    peer: Connection,
    free: Vec<Buffer>,
    /// Received, and not answered yet.
    requests: VecDeque<Result<Request, ServeError>>,
    /// The file whose length was requested last, as it was then: reads of it must find it so.
    stamped: Option<(OsString, Stamp)>,
    sent: u64,
}

impl Session<'_> {
    fn run(&mut self) -> Result<(), ServeError> {
        loop {
            while let Some(request) = self.requests.pop_front() {
                let answer = match self.carry_out(&request?) {
                    Ok(value) => Answer::Done(value),
                    Err(ServeError::Storage(error)) => failed(&error),
                    Err(error) => return Err(error),
                };
                self.peer.send_inline(&answer.to_bytes())?;
            }
            if !self.next(None)? {
                return Ok(());
            }
        }
    }

    fn carry_out(&mut self, request: &Request) -> Result<u64, ServeError> {
        match request {
            Request::Length { name } => {
                let file = self.server.open(name)?;
                let (len, stamp) = (file.len()?, file.stamp()?);
                self.stamped = Some((name.clone(), stamp));
                Ok(len)
            }
            Request::Read { name, offset, into } => {
                let sent = self.read_and_send(name, *offset, *into);
                // Errors of the file are the client's to report.
                sent.map_err(|error| match error {
                    ServeError::Storage(_) => error,
                    error => error.of(name, *offset, into.len()),
                })
            }
        }
    }

    fn read_and_send(&mut self, name: &OsStr, offset: u64, into: Remote<WriteAccess>) -> Result<u64, ServeError> {
        let file = self.server.open(name)?;
        self.check_unchanged(name, &file)?;
        let sent = self.send(&file, offset, into);
        // Also after an error: the blocks are of the next request.
        while self.free.len() < 2 * BATCH {
            self.acknowledged()?;
        }
        self.sent += sent.as_ref().copied().unwrap_or(0);
        let sent = sent?;
        self.check_unchanged(name, &file)?;
        Ok(sent)
    }

    fn check_unchanged(&self, name: &OsStr, file: &File) -> Result<(), StorageError> {
        match &self.stamped {
            Some((stamped, stamp)) if stamped == name => file.check_unchanged(stamp),
            _ => Ok(()),
        }
    }

    /// Reads a batch of blocks while the one before is WRITten.
    fn send(&mut self, file: &File, offset: u64, into: Remote<WriteAccess>) -> Result<u64, ServeError> {
        let mut done = 0;
        while done < into.len() {
            while self.free.len() < BATCH {
                self.acknowledged()?;
            }
            let rest = usize::try_from(into.len() - done).unwrap_or(usize::MAX);
            let mut blocks = self.free.split_off(self.free.len() - BATCH.min(rest.div_ceil(BLOCK)));
            let counts = self.read(file, offset.saturating_add(done), rest, &mut blocks);
            let counts = counts.inspect_err(|_| self.free.append(&mut blocks))?;
            let mut is_whole = true;
            for (block, count) in blocks.into_iter().zip(counts) {
                let target = into.slice(done, count as u64).filter(|_| count > 0 && is_whole);
                let Some(target) = target else {
                    is_whole = false;
                    self.free.push(block);
                    continue;
                };
                // What follows a block that is not full begins behind the end of the file.
                is_whole = count == BLOCK;
                self.peer.write(block.part(..count), target)?;
                done += count as u64;
            }
            if !is_whole {
                break;
            }
        }
        Ok(done)
    }

    /// Fills blocks with up to `rest` bytes of the file: the count of each.
    fn read(&mut self, file: &File, offset: u64, rest: usize, blocks: &mut [Buffer]) -> Result<Vec<usize>, ServeError> {
        let mut reads: Vec<Read<'_>> = blocks
            .iter_mut()
            .enumerate()
            .map(|(index, block)| {
                let at = index * BLOCK;
                let len = BLOCK.min(rest - at);
                Read {
                    file,
                    offset: offset.saturating_add(at as u64),
                    into: (&mut block[..len]).into(),
                }
            })
            .collect();
        Ok(self.storage.read_batch(&mut reads)?)
    }

    /// Waits for a completion; a block is free then. An error when the client has left.
    fn acknowledged(&mut self) -> Result<(), ServeError> {
        match self.next(Some(TIMEOUT))? {
            true => Ok(()),
            false => Err(ServeError::Protocol(
                "nothing more: it has left before its file was sent",
            )),
        }
    }

    /// Handles a completion; false once the client has left.
    fn next(&mut self, timeout: Option<Duration>) -> Result<bool, ServeError> {
        let Some((success, buffer)) = self.peer.next_with(timeout, with_buffer)? else {
            return Ok(false);
        };
        match success {
            Success::Receive { len, .. } => {
                self.requests.push_back(Request::from_bytes(&buffer[..len as usize]));
                self.peer.receive(buffer)?;
                // Of a client that does not wait for answers.
                if self.requests.len() > 1 {
                    return Err(ServeError::Protocol("a request before the answer to the last"));
                }
            }
            _ => self.free.push(buffer),
        }
        Ok(true)
    }
}

/// A completion with a buffer; others are only checked.
fn with_buffer(mut done: Completion<'_>) -> Result<Option<(Success, Buffer)>, CompletionError> {
    let success = done.result()?;
    Ok(done.take().map(|buffer| (success, buffer)))
}

fn failed(error: &StorageError) -> Answer {
    let errno = match error {
        StorageError::File { error, .. } | StorageError::Io { error, .. } => error.raw_os_error(),
        _ => None,
    };
    let advice = match errno {
        // Of RESOLVE_BENEATH: the error's own words are of hard links.
        Some(libc::EXDEV) => ": it is outside of what is served",
        _ => "",
    };
    Answer::Failed {
        errno: errno.unwrap_or(0),
        text: format!("{error}{advice}"),
    }
}
