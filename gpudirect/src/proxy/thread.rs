//! The proxy's thread.

use core::sync::atomic::Ordering;
use core::time::Duration;
use std::fmt;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Instant;

use super::{Door, Proxy, ProxyError};

/// What a thread does that finds nothing to do. Kernels cannot wake it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Idle {
    /// How long it goes on looking without a break.
    pub spin: Duration,
    /// How long it then sleeps between looks: what comes meanwhile is late by so much. The system adds some 50 µs.
    pub nap: Duration,
}

impl Default for Idle {
    /// 10 ms, and 50 µs.
    fn default() -> Self {
        Self {
            spin: Duration::from_millis(10),
            nap: Duration::from_micros(50),
        }
    }
}

/// How often it looks before it looks at the time, or lets others run.
const LOOKS: u32 = 64;

/// Calls `progress`, which says whether there was anything to do, until `stop`.
pub(crate) fn drive(idle: Idle, mut progress: impl FnMut() -> bool, stop: impl Fn() -> bool) {
    let mut since: Option<Instant> = None;
    let mut looks = 0;
    while !stop() {
        if progress() {
            (since, looks) = (None, 0);
            continue;
        }
        looks += 1;
        if looks < LOOKS {
            core::hint::spin_loop();
            continue;
        }
        looks = 0;
        if since.get_or_insert_with(Instant::now).elapsed() < idle.spin {
            thread::yield_now();
        } else {
            thread::sleep(idle.nap);
        }
    }
}

/// A proxy that a thread drives. Dropping it ends the thread: what is under way fails.
pub struct Running {
    door: Arc<Door>,
    thread: Option<JoinHandle<()>>,
}

impl Proxy {
    /// Has a thread of its own drive it.
    ///
    /// # Errors
    /// When there is no thread to be had.
    pub fn spawn(mut self, idle: Idle) -> Result<Running, ProxyError> {
        let door = Arc::clone(self.door());
        let stop = Arc::clone(&door);
        let thread = thread::Builder::new()
            .name("doorbell-proxy".to_owned())
            .spawn(move || drive(idle, || self.progress(), || stop.stop.load(Ordering::Acquire)))
            .map_err(ProxyError::Thread)?;
        Ok(Running {
            door,
            thread: Some(thread),
        })
    }
}

impl Running {
    pub(crate) fn door(&self) -> &Arc<Door> {
        &self.door
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.door.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the proxy's thread has panicked");
        }
    }
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running").finish_non_exhaustive()
    }
}
