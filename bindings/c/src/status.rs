//! Statuses, the text of the last error, and what all functions share.

use core::cell::RefCell;
use core::ffi::{CStr, c_char};
use core::fmt::Display;
use std::any::Any;
use std::ffi::CString;
use std::panic::{AssertUnwindSafe, catch_unwind};

use doorbell::CompletionStatus;
use doorbell::collectives::CollectiveError;
use doorbell::collectives::bootstrap::BootstrapError;
use doorbell::collectives::executor::EngineError;
use doorbell::collectives::failure::Cause;
use doorbell::exchange::ExchangeError;
use doorbell::{MemoryError, OpenError, PostError};

/// A timeout_ms that does not pass.
pub const DOORBELL_FOREVER: u32 = u32::MAX;

/// What a call came to.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum doorbell_status {
    /// It has done what it should.
    DOORBELL_OK = 0,
    /// An argument, or a variable of the environment, is invalid; nothing was begun.
    DOORBELL_INVALID_ARGUMENT = 1,
    /// There is no such device, or it cannot be opened.
    DOORBELL_NO_DEVICE = 2,
    /// Memory cannot be allocated or registered.
    DOORBELL_NO_MEMORY = 3,
    /// No connection could be made: nothing listens there, it is another program, or the secrets
    /// of the ranks differ.
    DOORBELL_CONNECTION_FAILED = 4,
    /// The time has passed.
    DOORBELL_TIMED_OUT = 5,
    /// A peer has left, died, stopped or cannot be reached any more.
    DOORBELL_PEER_FAILED = 6,
    /// A rank has aborted the communicator.
    DOORBELL_ABORTED = 7,
    /// The ranks of a communicator have begun different operations, or with different lengths.
    DOORBELL_MISMATCH = 8,
    /// The device, or the peer's, has refused a request or failed to execute it.
    DOORBELL_DEVICE_ERROR = 9,
    /// A defect of the library.
    DOORBELL_INTERNAL_ERROR = 10,
}
use self::doorbell_status::*;

/// Why a call has failed.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    status: doorbell_status,
    text: String,
}

const VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
    Ok(version) => version,
    Err(_) => panic!("a version has no NUL"),
};

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// The version of the library, such as "0.1.0". Valid for ever.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_version() -> *const c_char {
    VERSION.as_ptr()
}

/// What was wrong in the last call of this thread that has failed, in one line of UTF-8; "" if none
/// has. Valid until the next one that fails in this thread.
#[unsafe(no_mangle)]
pub extern "C" fn doorbell_last_error() -> *const c_char {
    // A thread that is ending may have lost its text.
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// Runs a call, whose failure or panic becomes a status and the thread's last error.
pub(crate) fn run(call: impl FnOnce() -> Result<(), Failure>) -> doorbell_status {
    // What a call has changed when it panics is behind locks that check, or dropped.
    let result = catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| Err(Failure::panicked(&*panic)));
    let Err(failure) = result else {
        return DOORBELL_OK;
    };
    let text = CString::new(failure.text.replace('\0', " ")).unwrap_or_default();
    let _ = LAST.try_with(|last| last.replace(text));
    failure.status
}

impl Failure {
    pub(crate) fn new(status: doorbell_status, text: impl Display) -> Self {
        let text = text.to_string();
        Self { status, text }
    }

    pub(crate) fn invalid(text: impl Display) -> Self {
        Self::new(DOORBELL_INVALID_ARGUMENT, text)
    }

    /// The same, for a later call.
    pub(crate) fn before(&self, what: &str) -> Self {
        Self::new(self.status, format_args!("{what}: {}", self.text))
    }

    /// A time-out, if no connection was made and the time has passed.
    pub(crate) fn or_timed_out(self, has_passed: bool) -> Self {
        match self.status {
            DOORBELL_CONNECTION_FAILED if has_passed => Self {
                status: DOORBELL_TIMED_OUT,
                ..self
            },
            _ => self,
        }
    }

    fn panicked(panic: &(dyn Any + Send)) -> Self {
        let text = panic.downcast_ref::<&str>().copied();
        let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        let text = text.unwrap_or("a panic without a message");
        Self::new(DOORBELL_INTERNAL_ERROR, format_args!("a defect of libdoorbell: {text}"))
    }
}

impl From<OpenError> for Failure {
    fn from(error: OpenError) -> Self {
        match error {
            OpenError::Options { .. } => Self::invalid(error),
            error => Self::new(DOORBELL_NO_DEVICE, error),
        }
    }
}

impl From<MemoryError> for Failure {
    fn from(error: MemoryError) -> Self {
        match error {
            MemoryError::Empty | MemoryError::TooLong { .. } => Self::invalid(error),
            error => Self::new(DOORBELL_NO_MEMORY, error),
        }
    }
}

impl From<PostError> for Failure {
    fn from(error: PostError) -> Self {
        Self::invalid(error)
    }
}

impl From<ExchangeError> for Failure {
    fn from(error: ExchangeError) -> Self {
        use CompletionStatus::{RetryExceeded, RnrRetryExceeded};
        let status = match &error {
            ExchangeError::Post(_) | ExchangeError::DataTooLong { .. } => DOORBELL_INVALID_ARGUMENT,
            ExchangeError::TimedOut { .. } => DOORBELL_TIMED_OUT,
            ExchangeError::Broken { .. } | ExchangeError::Closed { .. } | ExchangeError::Left { .. } => {
                DOORBELL_PEER_FAILED
            }
            ExchangeError::Request(failed) if matches!(failed.status, RetryExceeded | RnrRetryExceeded) => {
                DOORBELL_PEER_FAILED
            }
            ExchangeError::Request(_)
            | ExchangeError::Transition(_)
            | ExchangeError::Queue(_)
            | ExchangeError::Event(_) => DOORBELL_DEVICE_ERROR,
            _ => DOORBELL_CONNECTION_FAILED,
        };
        Self::new(status, error)
    }
}

impl From<CollectiveError> for Failure {
    fn from(error: CollectiveError) -> Self {
        let status = match (&error, error.failure()) {
            (_, Some(failure)) => of_cause(&failure.verdict.cause),
            (CollectiveError::Bootstrap(error), _) => of_bootstrap(error),
            (CollectiveError::Failed(_) | CollectiveError::Exchange(_), _) => DOORBELL_PEER_FAILED,
            (CollectiveError::Engine(EngineError::Memory(_)), _) => DOORBELL_NO_MEMORY,
            (CollectiveError::Engine(_) | CollectiveError::Thread(_), _) => DOORBELL_DEVICE_ERROR,
            _ => DOORBELL_INVALID_ARGUMENT,
        };
        Self::new(status, error)
    }
}

fn of_cause(cause: &Cause) -> doorbell_status {
    match cause {
        Cause::Aborted { .. } => DOORBELL_ABORTED,
        Cause::Mismatch { .. } => DOORBELL_MISMATCH,
        Cause::Absent { .. } | Cause::Idle { .. } | Cause::Slow { .. } => DOORBELL_TIMED_OUT,
        _ => DOORBELL_PEER_FAILED,
    }
}

fn of_bootstrap(error: &BootstrapError) -> doorbell_status {
    match error {
        BootstrapError::NotLaunched
        | BootstrapError::Variable { .. }
        | BootstrapError::Id { .. }
        | BootstrapError::Rank { .. }
        | BootstrapError::NoSecret(_) => DOORBELL_INVALID_ARGUMENT,
        BootstrapError::NoRendezvous { .. } | BootstrapError::Missing { .. } => DOORBELL_TIMED_OUT,
        _ => DOORBELL_CONNECTION_FAILED,
    }
}
