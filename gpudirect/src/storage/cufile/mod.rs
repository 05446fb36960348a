//! NVIDIA's cuFile: the disk's controller reads and writes GPU memory, or in its compatibility mode
//! POSIX calls and copies do. It divides long requests among threads of its own, so that a request
//! is one call.

mod sys;

use std::io;
use std::os::fd::RawFd;
use std::sync::OnceLock;

use doorbell_cuda::Span;
use parking_lot::Mutex;

use sys::{RawHandle, Table};

/// The maximum of a call; others follow.
const MAX_CALL: usize = 1 << 30;

/// The library, which stays loaded.
static LIBRARY: OnceLock<Result<Table, String>> = OnceLock::new();
static DRIVER: Mutex<Driver> = Mutex::new(Driver {
    direct: None,
    compatibility: None,
});

fn library() -> Result<&'static Table, &'static str> {
    LIBRARY.get_or_init(Table::load).as_ref().map_err(String::as_str)
}

/// How cuFile's driver, of which a process has one, carries out reads and writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Mode {
    /// The disk's controller accesses GPU memory.
    Direct,
    /// cuFile's compatibility mode, with the reason for it: POSIX calls, and copies.
    Compatibility(String),
}

/// What opening the driver gave, without and with its compatibility mode allowed.
struct Driver {
    direct: Option<Result<Mode, String>>,
    compatibility: Option<Result<(), String>>,
}

/// The mode of the driver, or why there is none. The compatibility mode copies through host memory
/// as this crate does, so only a caller that has requested cuFile by name allows it.
pub(super) fn available(allow_compatibility: bool) -> Result<Mode, String> {
    let library = library()?;
    let mut driver = DRIVER.lock();
    let direct = driver.direct.get_or_insert_with(|| library.open()).clone();
    match direct {
        Ok(Mode::Compatibility(why)) if !allow_compatibility => Err(format!("compatibility mode: {why}")),
        Err(why) if allow_compatibility => {
            let opened = driver
                .compatibility
                .get_or_insert_with(|| library.open_in_compatibility_mode());
            opened
                .clone()
                .map(|()| Mode::Compatibility(why.clone()))
                .map_err(|also| format!("{why}; in its compatibility mode: {also}"))
        }
        outcome => outcome,
    }
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
