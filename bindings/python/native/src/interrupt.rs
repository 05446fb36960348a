//! Ctrl-C while a call waits. Python's handlers run only where the main thread calls them.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use crate::error;

/// How often a waiting call runs the handlers of signals that have come.
const INTERVAL: Duration = Duration::from_millis(20);

/// The exception of a signal's handler, in a thread that waits without the interpreter.
#[derive(Default)]
pub(crate) struct Interrupts {
    /// None before the first poll: most operations end before it, and need no clock.
    next: Option<Instant>,
    raised: Option<PyErr>,
}

impl Interrupts {
    /// Runs the handlers every [`INTERVAL`]. Returns whether one has raised an exception, which
    /// this returns once.
    pub(crate) fn poll(&mut self) -> bool {
        let now = Instant::now();
        if now < *self.next.get_or_insert(now + INTERVAL) || self.raised.is_some() {
            return false;
        }
        self.next = Some(now + INTERVAL);
        // None: the interpreter ends, and runs no handler any more.
        self.raised = Python::try_attach(|py| py.check_signals().err()).flatten();
        self.raised.is_some()
    }

    pub(crate) fn raised(self) -> Option<PyErr> {
        self.raised
    }
}

/// Runs what waits and cannot be interrupted in a thread of its own, and waits for its result.
/// After an exception of a signal's handler the thread goes on, and its result is dropped there.
pub(crate) fn wait<T: Send + 'static>(
    py: Python<'_>,
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    let (sender, mut receiver) = mpsc::channel();
    let thread = doorbell_threads::spawn(name, move || {
        // The receiver is gone after an exception.
        let _ = sender.send(work());
    });
    thread.map_err(error::of)?;
    loop {
        let received;
        (receiver, received) = py.detach(move || {
            let received = receiver.recv_timeout(INTERVAL);
            (receiver, received)
        });
        match received {
            Ok(result) => return Ok(result),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => return Err(error::of(format!("the thread {name} panicked"))),
        }
    }
}
