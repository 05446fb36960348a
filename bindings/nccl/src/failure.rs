//! Results of functions, their texts, and the boundary to C.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use doorbell_collectives::CollectiveError;
use doorbell_collectives::bootstrap::{BootstrapError, ExchangeError};
use doorbell_collectives::executor::EngineError;
use doorbell_collectives::gpu::GpuError;

use crate::abi::Status;

/// Why a function failed.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    pub(crate) status: Status,
    pub(crate) text: String,
}

impl Failure {
    pub(crate) fn new(status: Status, text: impl Into<String>) -> Self {
        let text = text.into();
        Self { status, text }
    }

    pub(crate) fn invalid_argument(text: impl Into<String>) -> Self {
        Self::new(Status::InvalidArgument, text)
    }

    pub(crate) fn invalid_usage(text: impl Into<String>) -> Self {
        Self::new(Status::InvalidUsage, text)
    }

    pub(crate) fn system(text: impl Into<String>) -> Self {
        Self::new(Status::SystemError, text)
    }

    fn of_panic(panic: &(dyn Any + Send)) -> Self {
        let text = panic
            .downcast_ref::<&str>()
            .copied()
            .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        let text = text.unwrap_or("without a text");
        Self::new(Status::InternalError, format!("a defect of this library: {text}"))
    }
}

impl From<GpuError> for Failure {
    fn from(error: GpuError) -> Self {
        let status = match &error {
            GpuError::Collective(error) => status_of(error),
            GpuError::Driver(_) | GpuError::Reduce(_) => Status::UnhandledCudaError,
            GpuError::Misuse { .. } | GpuError::NoScalar { .. } => Status::InvalidArgument,
            GpuError::Thread(_) => Status::SystemError,
            _ => Status::InvalidUsage,
        };
        Self::new(status, error.to_string())
    }
}

impl From<CollectiveError> for Failure {
    fn from(error: CollectiveError) -> Self {
        Self::new(status_of(&error), error.to_string())
    }
}

impl From<BootstrapError> for Failure {
    fn from(error: BootstrapError) -> Self {
        CollectiveError::from(error).into()
    }
}

impl From<doorbell_cuda::Error> for Failure {
    fn from(error: doorbell_cuda::Error) -> Self {
        Self::new(Status::UnhandledCudaError, error.to_string())
    }
}

fn status_of(error: &CollectiveError) -> Status {
    match error {
        CollectiveError::Failed(_)
        | CollectiveError::Shrink(_)
        | CollectiveError::Bootstrap(
            BootstrapError::Lost { .. } | BootstrapError::Ended { .. } | BootstrapError::Closed { .. },
        )
        | CollectiveError::Exchange(
            ExchangeError::Failed(_) | ExchangeError::Left { .. } | ExchangeError::Late { .. },
        )
        | CollectiveError::Engine(EngineError::Exchange(_)) => Status::RemoteError,
        CollectiveError::Misuse { .. } | CollectiveError::Bootstrap(BootstrapError::Rank { .. }) => {
            Status::InvalidArgument
        }
        CollectiveError::Bootstrap(BootstrapError::Refused { .. } | BootstrapError::Variable { .. })
        | CollectiveError::Exchange(ExchangeError::Misuse { .. })
        | CollectiveError::Environment(_)
        | CollectiveError::Tuning(_)
        | CollectiveError::NoChoice(_)
        | CollectiveError::Unsupported(_)
        | CollectiveError::Unfit(_) => Status::InvalidUsage,
        _ => Status::SystemError,
    }
}

/// The text of the process's last failure, in any thread.
static LAST: Mutex<String> = Mutex::new(String::new());

thread_local! {
    /// What `ncclGetLastError` gave to this thread, until it gives the next.
    static SHOWN: RefCell<CString> = RefCell::default();
}

/// Runs the body of a function. A failure's text becomes the last one; a panic is a failure.
pub(crate) fn boundary(work: impl FnOnce() -> Result<Status, Failure>) -> c_int {
    let done = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(Failure::of_panic(&*panic)));
    match done {
        Ok(status) => status as c_int,
        Err(failure) => {
            let status = failure.status as c_int;
            *LAST.lock().unwrap_or_else(PoisonError::into_inner) = failure.text;
            status
        }
    }
}

/// Runs part of the work in a thread: a panic there is its failure.
pub(crate) fn caught<T>(work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(Failure::of_panic(&*panic)))
}

/// A text for C, valid until the thread's next call of this; by default the process's last one.
pub(crate) fn show(text: Option<String>) -> *const c_char {
    let text = text.unwrap_or_else(|| LAST.lock().unwrap_or_else(PoisonError::into_inner).clone());
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    // A thread that is ending has no place for it any more.
    let shown = SHOWN.try_with(|shown| {
        let mut shown = shown.borrow_mut();
        *shown = text;
        shown.as_ptr()
    });
    shown.unwrap_or(c"".as_ptr())
}

/// `ncclGetErrorString`.
pub(crate) fn describe(status: c_int) -> *const c_char {
    let text = match status {
        0 => c"no error",
        1 => c"unhandled CUDA error: ncclGetLastError says which",
        2 => c"unhandled system error: ncclGetLastError says which",
        3 => c"internal error: ncclGetLastError says which",
        4 => c"invalid argument: ncclGetLastError says which",
        5 => c"invalid usage: ncclGetLastError says which",
        6 => c"remote error: a rank has exited or failed, and ncclGetLastError says which",
        7 => c"in progress",
        8 => c"timeout",
        _ => c"there is no such result",
    };
    text.as_ptr()
}
