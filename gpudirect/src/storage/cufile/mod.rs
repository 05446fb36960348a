//! NVIDIA's cuFile: the disk's controller reads and writes GPU memory. It divides long requests
//! among threads of its own, so that a request is one call.

mod sys;

use std::io;
use std::os::fd::RawFd;
use std::sync::OnceLock;

use doorbell_cuda::Span;

use sys::{RawHandle, Table};

/// The maximum of a call; others follow.
const MAX_CALL: usize = 1 << 30;

/// The opened library; it stays open.
static LIBRARY: OnceLock<Result<Table, String>> = OnceLock::new();

fn library() -> Result<&'static Table, &'static str> {
    let opened = LIBRARY.get_or_init(|| {
        let table = Table::load()?;
        table.open().map(|()| table)
    });
    opened.as_ref().map_err(String::as_str)
}

/// Whether the library and its driver are here, or why not.
pub(super) fn available() -> Result<(), &'static str> {
    library().map(drop)
}

/// A file's registration, whose descriptor must stay open as long as it exists.
#[derive(Debug)]
pub(super) struct Handle {
    raw: RawHandle,
}

// SAFETY: cuFile's functions may be called by any thread.
#[expect(unsafe_code, reason = "a pointer of a library")]
unsafe impl Send for Handle {}
// SAFETY: as above.
#[expect(unsafe_code, reason = "a pointer of a library")]
unsafe impl Sync for Handle {}

/// A failed transfer.
#[derive(Debug)]
pub(super) enum TransferError {
    /// The system's error, of the file.
    Io(io::Error),
    /// cuFile refuses the file or the memory: other paths may work.
    Refused(String),
}

impl Handle {
    /// Registers a file.
    ///
    /// # Errors
    /// In words why cuFile cannot read it.
    pub(super) fn new(fd: RawFd) -> Result<Self, String> {
        Ok(Self {
            raw: library()?.register(fd)?,
        })
    }

    /// Reads into GPU memory, or writes from it, until all is done or the file ends; the count of
    /// bytes. The thread's context is that of the memory.
    ///
    /// # Errors
    /// With the count of bytes before it.
    #[expect(unsafe_code, reason = "the disk accesses the memory")]
    pub(super) fn transfer(&self, write: bool, span: Span<'_>, offset: u64) -> Result<usize, (usize, TransferError)> {
        let library = library().map_err(|why| (0, TransferError::Refused(why.to_owned())))?;
        let mut done = 0;
        while done < span.len() {
            let len = (span.len() - done).min(MAX_CALL);
            let memory = span.device_ptr().0 + done as u64;
            // SAFETY: registered, and the span's bytes are borrowed until this returns.
            let moved = unsafe { library.transfer(self.raw, write, memory, len, offset + done as u64) };
            match usize::try_from(moved) {
                Ok(0) if write => return Err((done, TransferError::Io(io::ErrorKind::WriteZero.into()))),
                Ok(0) => break,
                Ok(moved) => done += moved.min(len),
                Err(_) if moved == -1 => return Err((done, TransferError::Io(io::Error::last_os_error()))),
                Err(_) => {
                    let code = i32::try_from(moved).unwrap_or(i32::MIN);
                    return Err((done, TransferError::Refused(sys::describe(code, 0))));
                }
            }
        }
        Ok(done)
    }
}

impl Drop for Handle {
    #[expect(unsafe_code, reason = "a handle of a library")]
    fn drop(&mut self) {
        if let Ok(library) = library() {
            // SAFETY: registered by `new`, and this is its last use.
            unsafe { library.deregister(self.raw) }
        }
    }
}
