//! Ctrl-C and SIGTERM as a flag that loops look at, so a test stops cleanly, prints what it has and exits 130.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};

use crate::failure::Failure;

/// Whether the user asked to stop.
#[derive(Clone, Debug, Default)]
pub(crate) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Catches SIGINT and SIGTERM. A second one ends the process at once, so a test that does not look can still be stopped.
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

    /// Ignores SIGINT: for a process whose parent shares its terminal and ends it when the time comes.
    ///
    /// # Errors
    /// [`Failure::Test`] when the signal cannot be caught.
    pub(crate) fn leave_to_parent() -> Result<Interrupt, Failure> {
        signal_hook::flag::register(SIGINT, Arc::new(AtomicBool::new(false)))
            .map_err(|e| Failure::test(format!("cannot catch signal {SIGINT}: {e}")))?;
        Ok(Interrupt::default())
    }

    /// Asks to stop, as the user does: for a process that its parent tells of it.
    pub(crate) fn request(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether the user asked to stop.
    #[inline]
    pub(crate) fn requested(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
