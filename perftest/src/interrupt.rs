//! Ctrl-C and SIGTERM as a flag that loops poll, so that a test stops cleanly, prints its results
//! and exits with 130.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};

use crate::failure::Failure;

#[derive(Clone, Debug, Default)]
pub(crate) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Catches SIGINT and SIGTERM. A second signal ends the process at once, for tests that do not
    /// poll.
    ///
    /// # Errors
    /// [`Failure::Test`] when the signals cannot be caught.
    pub(crate) fn catch() -> Result<Interrupt, Failure> {
        let interrupt = Interrupt::default();
        for signal in [SIGINT, SIGTERM] {
            signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(&interrupt.0))
                .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&interrupt.0)))
                .map_err(|e| Failure::test(format!("cannot catch signal {signal}: {e}")))?;
        }
        Ok(interrupt)
    }

    /// Ignores SIGINT, for a child process that shares the terminal with its parent, which ends it.
    ///
    /// # Errors
    /// [`Failure::Test`] when the signal cannot be caught.
    pub(crate) fn leave_to_parent() -> Result<Interrupt, Failure> {
        signal_hook::flag::register(SIGINT, Arc::new(AtomicBool::new(false)))
            .map_err(|e| Failure::test(format!("cannot catch signal {SIGINT}: {e}")))?;
        Ok(Interrupt::default())
    }

    /// Requests a stop, in a child process on behalf of its parent.
    pub(crate) fn request(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn requested(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
