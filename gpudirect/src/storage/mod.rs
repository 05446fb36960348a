//! Files read into and written from GPU and host memory (GPUDirect Storage).
//!
//! [`Storage`] reads and writes by the best path that works, and keeps the reasons why better ones
//! were refused ([`Storage::refused`]). Paths, best first:
//!
//! 1. *cufile*: NVIDIA's cuFile, where the library, its driver and the file system have it: the
//!    disk's controller writes into GPU memory. In its compatibility mode it copies through host
//!    memory, so that is used only where cuFile is requested by name.
//! 2. *io_uring*: several requests in flight, past the page cache (`O_DIRECT`), of registered
//!    memory. Bytes for a GPU go through pinned blocks, which its copy engines empty while the
//!    disk fills others; those for host memory go there at once where it is aligned.
//! 3. *pread*: pread(2) and pwrite(2), where io_uring is forbidden; copies of the GPU overlap.
//!
//! Offsets, lengths and addresses may be any: what O_DIRECT cannot do goes through an aligned
//! block, or through the page cache. File systems without O_DIRECT are read through the page
//! cache, and [`File::buffered`] says so.
//!
//! A read ends early only at the end of the file, and returns the count of bytes up to there. Bytes
//! that change meanwhile are read as they were before or after, block by block, which
//! [`File::check_unchanged`] detects. After an error of a write any of its bytes may be written; a
//! [`Save`] replaces a file by a whole one or not at all. [`FileServer`] serves files to peers.
//!
//! ```no_run
//! use doorbell_gpudirect::{GpuMemory, storage::{File, Storage}};
//!
//! /// Loads weights into GPU memory, for kernels launched on `stream` from now on.
//! fn load(stream: &doorbell_cuda::Stream) -> Result<GpuMemory, Box<dyn std::error::Error>> {
//!     let file = File::open("weights.bin")?;
//!     let memory = GpuMemory::alloc(stream.context(), usize::try_from(file.len()?)?)?;
//!     Storage::on_stream(stream)?.read_exact_at(&file, 0, memory.all())?;
//!     Ok(memory)
//! }
//! ```

mod cufile;
mod direct;
mod engine;
mod error;
mod file;
mod path;
mod pieces;
mod queue;
mod read;
mod request;
mod save;
mod serve;
mod staging;
mod survey;
mod sys;
mod write;

use core::fmt;

use doorbell_cuda::{Event, Stream};

pub use error::{Action, StorageError};
pub use file::{File, Stamp};
pub use path::{InvalidStoragePath, RefusedStorage, StoragePath};
pub use request::{Read, Source, Target, Write};
pub use save::Save;
pub use serve::{FileClient, FileServer, ServeError};
pub use survey::{StorageSurvey, survey};

use queue::Queue;
use request::Request;
use staging::Staging;

/// The maximum alignment that a file system may need; blocks are multiples of it.
const MAX_ALIGNMENT: usize = 64 << 10;
/// The maximum of all blocks: one registered buffer of an io_uring.
const MAX_STAGING: usize = 1 << 30;

/// Options of a [`Storage`].
#[derive(Debug, Clone, Copy)]
#[must_use = "nothing is opened until host() or on_stream() is called"]
pub struct StorageOptions {
    block: usize,
    depth: usize,
    forced: Option<StoragePath>,
    /// cuFile's compatibility mode may be used.
    compatibility: bool,
}

impl Default for StorageOptions {
    fn default() -> Self {
        Self {
            block: 4 << 20,
            depth: 16,
            forced: None,
            compatibility: false,
        }
    }
}

impl StorageOptions {
    /// Blocks of 4 MiB, 16 requests in flight, by the best path that works.
    pub fn new() -> Self {
        Self::default()
    }

    /// The same, by the path that `DOORBELL_STORAGE_PATH` names if it is set.
    ///
    /// # Errors
    /// [`StorageError::InvalidPath`].
    pub fn from_environment() -> Result<Self, StorageError> {
        Ok(match StoragePath::from_environment()? {
            Some(path) => Self::default().path(path),
            None => Self::default(),
        })
    }

    /// Bytes of a request to the disk: a multiple of 64 KiB, at most 64 MiB.
    pub fn block(mut self, bytes: usize) -> Self {
        self.block = bytes;
        self
    }

    /// Requests in flight: 1 to 256. There are twice as many blocks where a GPU copies, so that as
    /// many requests are in flight meanwhile.
    pub fn depth(mut self, requests: usize) -> Self {
        self.depth = requests;
        self
    }

    /// By this path only: cuFile in its compatibility mode, too, where it has no better
    /// ([`Storage::compatibility`]).
    pub fn path(mut self, path: StoragePath) -> Self {
        self.forced = Some(path);
        self.compatibility = true;
        self
    }

    /// By this path only, as without a choice of the user: not in a compatibility mode.
    fn only(mut self, path: StoragePath) -> Self {
        self.forced = Some(path);
        self
    }

    /// For host memory.
    ///
    /// # Errors
    /// [`StorageError::Option`], [`StorageError::Refused`].
    pub fn host(self) -> Result<Storage, StorageError> {
        self.open(None)
    }

    /// For memory of the GPU of `stream`, whose order copies are in, and for host memory.
    ///
    /// # Errors
    /// As [`host`](Self::host); the CUDA driver's.
    pub fn on_stream(self, stream: &Stream) -> Result<Storage, StorageError> {
        self.open(Some(stream))
    }

    fn open(self, stream: Option<&Stream>) -> Result<Storage, StorageError> {
        let blocks = self.depth.saturating_mul(if stream.is_some() { 2 } else { 1 });
        let option = |option, value, allowed| StorageError::Option { option, value, allowed };
        if self.block == 0 || !self.block.is_multiple_of(MAX_ALIGNMENT) || self.block > 64 << 20 {
            return Err(option("block", self.block, "a multiple of 65536, up to 64 MiB"));
        }
        if self.depth == 0 || self.depth > 256 || blocks * self.block > MAX_STAGING {
            return Err(option("depth", self.depth, "1 to 256, and up to 1 GiB of blocks"));
        }
        let context = stream.map(Stream::context);
        let staging = Staging::new(self.block, blocks, context)?;
        let cufile = self.cufile(stream.is_some());
        if let (Some(path @ StoragePath::CuFile), Err(why)) = (self.forced, &cufile) {
            return Err(StorageError::Refused { path, why: why.clone() });
        }
        let mut refused = Vec::new();
        let mut queue = self.queue(&mut refused)?;
        let unregistered = engine::register(&mut queue, &staging);
        let events = (0..context.map_or(0, |_| blocks))
            .map(|_| context.map_or(Err(doorbell_cuda::Error::Empty), Event::new))
            .collect::<Result<_, _>>()?;
        Ok(Storage {
            queue,
            staging,
            events,
            stream: stream.cloned(),
            cufile,
            refused,
            unregistered,
            forced: self.forced,
            block: self.block,
            depth: self.depth,
        })
    }

    fn cufile(&self, has_gpu: bool) -> Result<cufile::Mode, String> {
        match self.forced {
            Some(forced) if forced != StoragePath::CuFile => Err(format!("{forced} is forced")),
            _ if !has_gpu => Err("it is for GPU memory alone".to_owned()),
            _ => cufile::available(self.compatibility),
        }
    }

    fn queue(&self, refused: &mut Vec<RefusedStorage>) -> Result<Queue, StorageError> {
        let path = StoragePath::IoUring;
        let why = match self.forced {
            Some(StoragePath::Pread) => format!("{} is forced", StoragePath::Pread),
            forced => match Queue::ring(self.depth) {
                Ok(queue) => return Ok(queue),
                Err(why) if forced == Some(path) => return Err(StorageError::Refused { path, why }),
                Err(why) => why,
            },
        };
        refused.push(RefusedStorage { path, why });
        Ok(Queue::calls())
    }
}

/// Reads and writes files; several requests of a batch are in flight at once.
pub struct Storage {
    // Before `staging`, whose bytes it has registered.
    queue: Queue,
    staging: Staging,
    /// One for each block, of the copy that has it.
    events: Vec<Event>,
    stream: Option<Stream>,
    cufile: Result<cufile::Mode, String>,
    /// By host memory.
    refused: Vec<RefusedStorage>,
    unregistered: Option<String>,
    forced: Option<StoragePath>,
    block: usize,
    depth: usize,
}

impl Storage {
    /// For host memory, by the path of `DOORBELL_STORAGE_PATH` or the best.
    ///
    /// # Errors
    /// [`StorageError::InvalidPath`], [`StorageError::Refused`].
    pub fn host() -> Result<Self, StorageError> {
        StorageOptions::from_environment()?.host()
    }

    /// For memory of the GPU of `stream`, and for host memory.
    ///
    /// # Errors
    /// As [`Storage::host`]; the CUDA driver's.
    pub fn on_stream(stream: &Stream) -> Result<Self, StorageError> {
        StorageOptions::from_environment()?.on_stream(stream)
    }

    /// The path of `file` and GPU memory; of host memory without a GPU.
    #[must_use]
    pub fn path_of(&self, file: &File) -> StoragePath {
        if self.cufile.is_ok() && file.cufile().is_ok() {
            StoragePath::CuFile
        } else {
            self.path()
        }
    }

    /// The paths better than [`path_of`](Self::path_of), each with the reason why it is not used.
    #[must_use]
    pub fn refused_of(&self, file: &File) -> Vec<RefusedStorage> {
        let cufile = self.cufile.as_ref().map_err(Clone::clone);
        let why = match cufile.and_then(|_| file.cufile().map(drop).map_err(str::to_owned)) {
            Ok(()) => return Vec::new(),
            Err(why) => why,
        };
        let path = StoragePath::CuFile;
        let others = self.refused.iter().cloned();
        std::iter::once(RefusedStorage { path, why }).chain(others).collect()
    }

    /// Why cuFile, which was requested by name, is in its compatibility mode: its POSIX calls and
    /// copies through host memory read and write GPU memory. `None` where it is not.
    #[must_use]
    pub fn compatibility(&self) -> Option<&str> {
        match &self.cufile {
            Ok(cufile::Mode::Compatibility(why)) => Some(why),
            _ => None,
        }
    }

    /// The path of host memory, and of GPU memory where cuFile is not used.
    #[must_use]
    pub fn path(&self) -> StoragePath {
        if self.queue.is_concurrent() {
            StoragePath::IoUring
        } else {
            StoragePath::Pread
        }
    }

    /// The paths better than [`path`](Self::path), each with the reason why it is not used.
    #[must_use]
    pub fn refused(&self) -> &[RefusedStorage] {
        &self.refused
    }

    /// Why the blocks are not registered with io_uring, as beyond RLIMIT_MEMLOCK: the kernel then
    /// pins and unpins their pages for each request. `None` where they are, and without io_uring.
    #[must_use]
    #[doc(alias("RLIMIT_MEMLOCK", "io_uring_register_buffers"))]
    pub fn unregistered(&self) -> Option<&str> {
        self.unregistered.as_deref()
    }

    /// Reads from `offset` of `file` until `into` is full or the file ends, and returns the count
    /// of bytes read. Those of `into` beyond it may have changed.
    ///
    /// # Errors
    /// [`StorageError::Io`]; any byte of `into` may have changed.
    pub fn read_at<'a>(
        &mut self,
        file: &'a File,
        offset: u64,
        into: impl Into<Target<'a>>,
    ) -> Result<usize, StorageError> {
        let into = into.into();
        let counts = self.read_batch(&mut [Read { file, offset, into }])?;
        Ok(counts.first().copied().unwrap_or(0))
    }

    /// The same, of a file that has all the bytes.
    ///
    /// # Errors
    /// [`StorageError::EndOfFile`] where it has not; [`StorageError::Io`].
    pub fn read_exact_at<'a>(
        &mut self,
        file: &'a File,
        offset: u64,
        into: impl Into<Target<'a>>,
    ) -> Result<(), StorageError> {
        let into = into.into();
        let len = match &into {
            Target::Host(bytes) => bytes.len(),
            Target::Gpu(span) => span.len(),
        };
        match self.read_at(file, offset, into)? {
            count if count == len => Ok(()),
            count => Err(StorageError::EndOfFile {
                file: file.path().to_owned(),
                end: offset + count as u64,
                wanted: offset + len as u64,
            }),
        }
    }

    /// Carries out all reads, and returns the count of each, as [`read_at`](Self::read_at).
    ///
    /// # Errors
    /// The first error; any byte of any read may have changed.
    pub fn read_batch(&mut self, reads: &mut [Read<'_>]) -> Result<Vec<usize>, StorageError> {
        let requests = reads.iter_mut().map(Request::read).collect::<Result<Vec<_>, _>>()?;
        direct::read(self, &requests)
    }

    /// Writes all of `from` to `file` at `offset`, and extends the file if it ends before. The
    /// bytes are on the disk after [`File::sync`].
    ///
    /// # Errors
    /// [`StorageError::Io`], as with `ENOSPC`; any of the bytes may have been written.
    pub fn write_at<'a>(
        &mut self,
        file: &'a File,
        offset: u64,
        from: impl Into<Source<'a>>,
    ) -> Result<(), StorageError> {
        let from = from.into();
        self.write_batch(&[Write { file, offset, from }])
    }

    fn blocks(&self) -> usize {
        self.staging.blocks()
    }

    /// Carries out all writes, whose ranges of a file must not overlap: else either's bytes stay.
    ///
    /// # Errors
    /// The first error; any byte of any write may have been written.
    pub fn write_batch(&mut self, writes: &[Write<'_>]) -> Result<(), StorageError> {
        let requests = writes.iter().map(Request::write).collect::<Result<Vec<_>, _>>()?;
        direct::write(self, &requests)
    }
}

impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Storage")
            .field("path", &self.path())
            .field("block", &self.block)
            .field("depth", &self.depth)
            .field("refused", &self.refused)
            .finish_non_exhaustive()
    }
}
