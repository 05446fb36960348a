//! A stream that waits, with so much work behind it that the next call waits for space.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};
use doorbell_cuda::{Driver, HostMemory, Memory as _, Stream, WaitCondition};

/// More than a driver's queue holds, which is some thousands with one hardware connection.
const OPERATIONS: u64 = 20_000;
/// A call that takes longer waits for space.
const WAITING: Duration = Duration::from_millis(200);
/// After this time the stream goes on in any case, so that what waits for it ends.
const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) struct FullQueue {
    word: Arc<HostMemory>,
    released: Arc<AtomicBool>,
    launcher: JoinHandle<Result<()>>,
    guard: JoinHandle<Result<bool>>,
}

impl FullQueue {
    /// `None` where the queue takes all operations.
    pub(crate) fn start(gpu: usize) -> Result<Option<Self>> {
        let context = Driver::load()?.device(gpu)?.context()?;
        let word = Arc::new(HostMemory::alloc(&context, 8)?);
        word.atomic_u64(0)?.store(0, Ordering::SeqCst);
        let stream = Stream::new(&context)?;
        stream.wait_value64(word.all(), WaitCondition::Equal(1))?;
        let bytes = HostMemory::alloc(&context, 8)?;
        let enqueued = Arc::new(AtomicU64::new(0));
        let launcher = {
            let enqueued = Arc::clone(&enqueued);
            thread::spawn(move || -> Result<()> {
                for _ in 0..OPERATIONS {
                    stream.fill(bytes.all(), 0)?;
                    enqueued.fetch_add(1, Ordering::Relaxed);
                }
                stream.synchronize()?;
                Ok(())
            })
        };
        let released = Arc::new(AtomicBool::new(false));
        let guard = {
            let (word, released) = (Arc::clone(&word), Arc::clone(&released));
            thread::spawn(move || -> Result<bool> {
                let since = Instant::now();
                while !released.load(Ordering::Relaxed) && since.elapsed() < PATIENCE {
                    thread::sleep(Duration::from_millis(5));
                }
                word.atomic_u64(0)?.store(1, Ordering::SeqCst);
                Ok(released.load(Ordering::Relaxed))
            })
        };
        let queue = Self {
            word,
            released,
            launcher,
            guard,
        };
        let mut last = (0, Instant::now());
        while last.1.elapsed() < WAITING {
            thread::sleep(Duration::from_millis(1));
            let now = enqueued.load(Ordering::Relaxed);
            if now == OPERATIONS {
                queue.release()?;
                return Ok(None);
            }
            if now != last.0 {
                last = (now, Instant::now());
            }
        }
        Ok(Some(queue))
    }

    /// Lets the stream go on; whether it had not done so already, after the time above.
    pub(crate) fn release(self) -> Result<bool> {
        self.released.store(true, Ordering::Relaxed);
        let failed = |_| anyhow!("a thread panicked");
        let in_time = self.guard.join().map_err(failed)?.context("the word")?;
        self.launcher.join().map_err(failed)?.context("the launches")?;
        drop(self.word);
        Ok(in_time)
    }
}
