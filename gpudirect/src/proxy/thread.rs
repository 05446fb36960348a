//! The proxy thread.

use core::sync::atomic::Ordering;
use core::time::Duration;
use std::fmt;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Instant;

use doorbell_cuda::FreesDeferred;

use super::{Proxy, ProxyError, RingRegistry};

/// The idle policy of a polling thread. Kernels cannot wake it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdlePolicy {
    /// How long it busy-polls.
    pub spin: Duration,
    /// How long it then sleeps between polls, plus the system's some 50 µs: delays requests.
    pub sleep: Duration,
}

impl Default for IdlePolicy {
    /// 10 ms, and 50 µs.
    fn default() -> Self {
        Self {
            spin: Duration::from_millis(10),
            sleep: Duration::from_micros(50),
        }
    }
}

const POLLS_PER_CLOCK_READ: u32 = 64;

/// Calls `progress`, which returns whether there was anything to do, until `stop`.
pub(crate) fn run_until(idle: IdlePolicy, mut progress: impl FnMut() -> bool, stop: impl Fn() -> bool) {
    let mut since: Option<Instant> = None;
    let mut polls = 0;
    while !stop() {
        if progress() {
            (since, polls) = (None, 0);
            continue;
        }
        polls += 1;
        if polls < POLLS_PER_CLOCK_READ {
            core::hint::spin_loop();
            continue;
        }
        polls = 0;
        if since.get_or_insert_with(Instant::now).elapsed() < idle.spin {
            thread::yield_now();
        } else {
            thread::sleep(idle.sleep);
        }
    }
}

/// A proxy with its thread. Dropping it stops the thread: requests in flight fail.
pub struct ProxyThread {
    registry: Arc<RingRegistry>,
    thread: Option<JoinHandle<()>>,
}

impl Proxy {
    /// Starts a proxy thread.
    pub fn spawn(mut self, idle: IdlePolicy) -> Result<ProxyThread, ProxyError> {
        let registry = Arc::clone(self.registry());
        let stop = Arc::clone(&registry);
        let thread = doorbell_threads::spawn("doorbell-proxy", move || {
            // Kernels wait for this thread.
            let _deferred = FreesDeferred::on_this_thread();
            run_until(idle, || self.progress(), || stop.stop.load(Ordering::Acquire));
        })
        .map_err(ProxyError::Thread)?;
        Ok(ProxyThread {
            registry,
            thread: Some(thread),
        })
    }
}

impl ProxyThread {
    pub(crate) fn registry(&self) -> &Arc<RingRegistry> {
        &self.registry
    }
}

impl Drop for ProxyThread {
    fn drop(&mut self) {
        self.registry.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the proxy's thread has panicked");
        }
    }
}

impl fmt::Debug for ProxyThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running").finish_non_exhaustive()
    }
}
