//! Low-latency short copies by a resident thread block, `kernels/copy.cu` (docs/decisions/038).
//!
//! The block polls commands and reports completion in pinned memory: 4 µs without a driver call. It
//! exits when idle and after a maximum lifetime, and a graph launch (half the cost of a kernel's)
//! starts it. If staying resident does not pay off it exits at once: contexts of two processes
//! time-slice a GPU, so it can delay the very work it waits for.

use core::hint;
use core::sync::atomic::{Ordering, fence};
use std::thread;
use std::time::{Duration, Instant};

use crate::context::Context;
use crate::error::Error;
use crate::graph::{CaptureMode, GraphExec};
use crate::kernels::KernelFile;
use crate::loader::Loader;
use crate::memory::{HostMemory, Memory as _, Span};
use crate::module::Launch;
use crate::stream::Stream;

/// The maximum number of outstanding commands: a power of two.
const SLOTS: u64 = 64;
/// Words of a command, and the first of those that carry inline data.
const COMMAND_WORDS: usize = 8;
const INLINE_WORD: usize = 3;
/// Bytes of a command: a cache line.
const COMMAND_BYTES: usize = 8 * COMMAND_WORDS;
/// The highest lap number of the ring, from 1; it occupies the 8 bits above a word's 56-bit value.
const MAX_LAP: u64 = 255;
/// The launch header: five words, of which the first cancels the launch; and a first command.
const LAUNCH_HEADER: usize = SLOTS as usize * COMMAND_BYTES;
const FIRST_COMMAND: usize = LAUNCH_HEADER + 5 * 8;
/// The offsets of the words that the block writes: last command done, last launch exited, started.
const DONE: usize = LAUNCH_HEADER + 2 * COMMAND_BYTES;
const EXITED: usize = DONE + 8;
const STARTED: usize = DONE + 16;
const THREADS: u32 = 256;
/// Polls (of a microsecond) without a command, and in total, after which the block exits.
const MAX_IDLE_POLLS: u64 = 50;
const MAX_POLLS: u64 = 200;
/// A slower command was delayed: usual are 5 µs with a resident block, 10 µs with a launch.
const SLOW_COMMAND: Duration = Duration::from_micros(20);
/// The policy changes mode when slow outcomes (or idle stays) outnumber fast ones by this many, and
/// probes the mode again after launches or a time, doubled each time between these limits.
const POLICY_THRESHOLD: u32 = 4;
const RETRY_LAUNCHES: [u32; 2] = [64, 1024];
const BACKOFF: [Duration; 2] = [Duration::from_millis(10), Duration::from_secs(1)];
/// Fruitless polls before the driver is queried for a failed block, and between such queries.
const POLLS_BEFORE_QUERY: u32 = 64;
const QUERY_INTERVAL: u32 = 4;
/// A launch that has not started after this time is blocked: usually it starts within 10 µs.
const START_TIMEOUT: Duration = Duration::from_micros(100);

crate::kernel_arguments! {
    constants {}
    /// The launch argument of the resident block.
    #[derive(Clone, Copy)]
    struct Arguments as Small in "copy" {
        /// 64 bytes each.
        commands: u64,
        beginning: u64,
        /// `done`, the last executed command; at 8, `left`, the last exited launch; at 16, `begun`,
        /// set when a launch begins.
        words: u64,
        /// Slots of the ring: a power of two.
        slots: u64,
    }
}

/// Chooses between a resident block, a launch per command, and other copy mechanisms: a GPU that
/// two processes time-slice (in half milliseconds) delays blocks, but not copy engines.
#[derive(Debug)]
struct LaunchPolicy {
    /// Saturating scores up to [`POLICY_THRESHOLD`]: idle stays and slow commands minus fast ones
    /// with a resident block; slow minus fast commands with a launch.
    resident_score: u32,
    launch_score: u32,
    /// Launches since the last resident one, and the number after which the next is resident again.
    launches_since_resident: u32,
    retry_after: u32,
    /// The end of the backoff, during which other mechanisms copy, and the length of the next.
    backoff_until: Option<Instant>,
    backoff: Duration,
    /// The block and the program's kernels are in contexts that are time-sliced.
    is_time_sliced: bool,
}

impl LaunchPolicy {
    fn new(is_time_sliced: bool) -> Self {
        Self {
            resident_score: 0,
            launch_score: 0,
            launches_since_resident: 0,
            retry_after: RETRY_LAUNCHES[0],
            backoff_until: None,
            backoff: BACKOFF[0],
            is_time_sliced,
        }
    }

    fn stay_resident(&mut self) -> bool {
        let stay_resident = self.resident_score < POLICY_THRESHOLD || self.launches_since_resident >= self.retry_after;
        if stay_resident && self.resident_score >= POLICY_THRESHOLD {
            self.retry_after = (2 * self.retry_after).min(RETRY_LAUNCHES[1]);
        }
        self.launches_since_resident = if stay_resident {
            0
        } else {
            self.launches_since_resident + 1
        };
        stay_resident
    }

    fn record_idle_stay(&mut self) {
        self.resident_score = (self.resident_score + 1).min(POLICY_THRESHOLD);
    }

    fn record_latency(&mut self, time: Duration, was_resident: bool, now: Instant) {
        if self.is_time_sliced && time >= START_TIMEOUT {
            // It waited for its turn, and then delayed the kernels that run.
            self.backoff_until = Some(now + self.backoff);
            self.backoff = (8 * self.backoff).min(BACKOFF[1]);
            return;
        }
        match (time < SLOW_COMMAND, was_resident) {
            (true, true) => {
                (self.resident_score, self.retry_after) = (decrement(self.resident_score), RETRY_LAUNCHES[0])
            }
            (false, true) => self.record_idle_stay(),
            (true, false) => {
                self.launch_score = decrement(self.launch_score);
                // Kernels of time-sliced contexts come and go.
                let shorter = if self.is_time_sliced {
                    self.backoff / 2
                } else {
                    BACKOFF[0]
                };
                self.backoff = shorter.max(BACKOFF[0]);
            }
            (false, false) => {
                self.launch_score = (self.launch_score + 1).min(POLICY_THRESHOLD);
                if self.launch_score >= POLICY_THRESHOLD {
                    self.backoff_until = Some(now + self.backoff);
                    self.backoff = (2 * self.backoff).min(BACKOFF[1]);
                }
            }
        }
    }

    fn in_backoff(&self) -> bool {
        self.backoff_until
            .is_some_and(|backoff_until| Instant::now() < backoff_until)
    }
}

/// One fast outcome offsets one slow one: alternating outcomes are no gain.
fn decrement(count: u32) -> u32 {
    count.saturating_sub(1)
}

/// Short copies of a context, executed in order.
// fields: the counters of one ring, and the state of its last launch.
pub struct SmallCopies {
    stream: Stream,
    block: GraphExec,
    /// Commands, launch header and the block's words.
    ring: HostMemory,
    submitted: u64,
    launches: u64,
    /// The last launch: commands submitted by then, and whether it is resident.
    last_launch: (u64, bool),
    policy: LaunchPolicy,
    /// Time of the last progress, or first submission after idling; whether by a launch.
    progress_at: Instant,
    by_launch: bool,
    launched_at: Instant,
    /// At the last cancellation: commands up to this number were done or cancelled.
    cancelled: u64,
    launch_cancelled: bool,
    /// Consecutive polls without progress.
    idle_polls: u32,
    /// Commands done at the last progress.
    seen_done: u64,
}

/// The source of a short copy.
#[derive(Clone, Copy, Debug)]
pub enum SmallSource<'a> {
    /// Memory accessible to kernels of the context.
    Memory(Span<'a>),
    /// Inline data: at most [`SmallCopies::MAX_INLINE`] bytes.
    Bytes(&'a [u8]),
}

impl SmallSource<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Memory(span) => span.len(),
            Self::Bytes(bytes) => bytes.len(),
        }
    }
}

impl SmallCopies {
    /// The maximum bytes per copy.
    pub const MAX_BYTES: usize = 4096;
    /// The maximum bytes if addresses or length are not multiples of 8, which is slower.
    pub const MAX_UNALIGNED: usize = 512;
    /// The maximum bytes of inline data.
    pub const MAX_INLINE: usize = 4 * (COMMAND_WORDS - INLINE_WORD);

    /// Loads the kernel and runs it once, which takes tens of milliseconds.
    pub fn new(context: &Context) -> Result<Self, Error> {
        // The highest priority.
        let stream = Stream::with_priority(context, i32::MIN)?;
        let loader = Loader::new(context, KernelFile::Copy);
        let entry = loader.entries().find(|entry| entry.name == "small_copies");
        let kernel = loader.kernel(&entry.expect("copy.cu has this kernel"))?;
        let ring = HostMemory::alloc(context, STARTED + 8)?;
        let commands = ring.device_ptr().0;
        let arguments = Arguments {
            commands,
            beginning: commands + LAUNCH_HEADER as u64,
            words: commands + DONE as u64,
            slots: SLOTS,
        };
        let block = stream.capture(CaptureMode::ThreadLocal, &[], || {
            // SAFETY: this is the kernel's parameter, and all memory it names is in the ring, which
            // is kept; for memory that commands name, the submitter vouches.
            unsafe { kernel.launch(&stream, Launch::linear(1, THREADS), &[&arguments], &[ring.all()]) }
        })?;
        let block = block.instantiate()?;
        block.upload(&stream)?;
        let mut copies = Self {
            stream,
            block,
            ring,
            submitted: 0,
            launches: 0,
            last_launch: (0, false),
            launched_at: Instant::now(),
            cancelled: 0,
            launch_cancelled: false,
            policy: LaunchPolicy::new(!context.is_primary()),
            progress_at: Instant::now(),
            by_launch: false,
            idle_polls: 0,
            seen_done: 0,
        };
        copies.launch(false)?;
        Ok(copies)
    }

    /// Whether a copy of this length and alignment is supported.
    #[must_use]
    pub fn supports(into: Span<'_>, from: Span<'_>) -> bool {
        let bytes = into.len() as u64;
        let even = (into.device_ptr().0 | from.device_ptr().0 | bytes).is_multiple_of(8);
        into.len() <= if even { Self::MAX_BYTES } else { Self::MAX_UNALIGNED }
    }

    /// Submits a copy. Returns its number, as in [`done`](Self::done); `None` if too many wait.
    ///
    /// # Safety
    /// Both memories are kept until it is done, and kernels of this context can access them: they
    /// belong to this context, are mapped for its device, or are pinned host memory. No slice of
    /// them exists.
    ///
    /// # Errors
    /// [`Error::Lengths`], or the driver's error.
    pub unsafe fn copy(&mut self, into: Span<'_>, from: SmallSource<'_>) -> Result<Option<u64>, Error> {
        let fits = match from {
            SmallSource::Memory(from) => Self::supports(into, from),
            SmallSource::Bytes(bytes) => bytes.len() <= Self::MAX_INLINE,
        };
        if into.len() != from.len() || !fits {
            return Err(Error::Lengths {
                from: from.len(),
                into: into.len(),
            });
        }
        if self.submitted - self.done_or_cancelled()? >= SLOTS {
            return Ok(None);
        }
        let mut command = [0; COMMAND_WORDS];
        command[0] = into.device_ptr().0;
        command[2] = into.len() as u64;
        match from {
            SmallSource::Memory(from) => command[1] = from.device_ptr().0,
            SmallSource::Bytes(bytes) => {
                for (word, few) in command[INLINE_WORD..].iter_mut().zip(bytes.chunks(4)) {
                    let mut padded = [0; 4];
                    padded[..few.len()].copy_from_slice(few);
                    *word = u64::from(u32::from_le_bytes(padded));
                }
            }
        }
        let offset = (self.submitted % SLOTS) as usize * COMMAND_BYTES;
        let lap = (self.submitted / SLOTS) % MAX_LAP + 1;
        for (place, word) in command.iter().enumerate() {
            // Release: a reader of the word sees earlier writes to memory that the command names.
            self.ring
                .atomic_u64(offset + 8 * place)?
                .store(word | lap << 56, Ordering::Release);
        }
        if self.done_or_cancelled()? == self.submitted {
            self.progress_at = Instant::now();
            self.by_launch = false;
        }
        self.submitted += 1;
        self.ensure_running()?;
        Ok(Some(self.submitted))
    }

    /// The number of the last command done, with all earlier ones; their copies are visible.
    ///
    /// # Errors
    /// [`Error::Lost`] if the block has failed, or another driver error.
    pub fn done(&mut self) -> Result<u64, Error> {
        let done = self.done_or_cancelled()?;
        if done != self.seen_done {
            self.record_progress(done);
        }
        if done == self.submitted {
            return Ok(done);
        }
        self.ensure_running()?;
        self.idle_polls = self.idle_polls.saturating_add(1);
        // A failed block reports nothing itself; the driver does.
        let check_driver = self.idle_polls > POLLS_BEFORE_QUERY && self.idle_polls.is_multiple_of(QUERY_INTERVAL);
        if check_driver && self.stream.is_idle()? && self.word(EXITED)? < self.launches {
            // It exited between the two checks, or without reporting, which only an error does.
            self.stream.synchronize()?;
        }
        Ok(done)
    }

    /// Waits for a command; `false` if it was cancelled instead.
    pub fn wait(&mut self, number: u64) -> Result<bool, Error> {
        while self.done()? < number {
            if self.cancel_pending()? {
                return Ok(false);
            }
            if self.idle_polls < POLLS_BEFORE_QUERY {
                hint::spin_loop();
            } else {
                thread::yield_now();
            }
        }
        Ok(true)
    }

    fn ensure_running(&mut self) -> Result<(), Error> {
        if self.word(EXITED)? != self.launches {
            return Ok(());
        }
        // Read after the exit word: the block publishes its last completion before it exits.
        let done = self.done_or_cancelled()?;
        if done == self.submitted {
            return Ok(());
        }
        if self.last_launch == (done, true) {
            self.policy.record_idle_stay();
        }
        let stay_resident = self.policy.stay_resident();
        self.launch(stay_resident)
    }

    fn record_progress(&mut self, done: u64) {
        let now = Instant::now();
        let count = u32::try_from(done - self.seen_done).unwrap_or(u32::MAX);
        let each = (now - self.progress_at) / count.max(1);
        self.policy.record_latency(each, !self.by_launch, now);
        self.progress_at = now;
        // Other submitted commands are done by the same launch, or by a resident one.
        self.by_launch &= !self.last_launch.1;
        (self.seen_done, self.idle_polls) = (done, 0);
    }

    fn launch(&mut self, stay_resident: bool) -> Result<(), Error> {
        let done = self.done_or_cancelled()?;
        let waiting = self.submitted - done;
        let offset = (done % SLOTS) as usize * COMMAND_BYTES;
        for at in (0..COMMAND_BYTES).step_by(8) {
            let word = match waiting {
                0 => 0,
                _ => self.ring.atomic_u64(offset + at)?.load(Ordering::Relaxed) & ((1 << 56) - 1),
            };
            self.ring.atomic_u64(FIRST_COMMAND + at)?.store(word, Ordering::Relaxed);
        }
        // Commands already in the ring are executed anyway, and the first is in the header.
        let polls = waiting.saturating_sub(1);
        self.launches += 1;
        self.last_launch = (self.submitted, stay_resident);
        self.by_launch = true;
        self.launch_cancelled = false;
        let (idle_polls, max_polls) = if stay_resident {
            (MAX_IDLE_POLLS, MAX_POLLS)
        } else {
            (polls.min(1), polls)
        };
        self.ring.atomic_u64(STARTED)?.store(0, Ordering::Relaxed);
        let words = [0, done + 1, idle_polls, max_polls, self.launches];
        for (place, word) in words.into_iter().enumerate() {
            self.ring
                .atomic_u64(LAUNCH_HEADER + 8 * place)?
                .store(word, Ordering::Release);
        }
        self.launched_at = Instant::now();
        self.block.launch(&self.stream)
    }

    /// Whether to submit commands: not in backoff, nor before a cancelled launch has exited.
    ///
    /// # Errors
    /// None that a caller could cause.
    pub fn is_available(&self) -> Result<bool, Error> {
        Ok(!self.policy.in_backoff() && (!self.launch_cancelled || self.word(EXITED)? == self.launches))
    }

    /// Whether kernels of this context had to wait for their time slice just now.
    #[must_use]
    pub fn waits_for_turns(&self) -> bool {
        self.policy.is_time_sliced && self.policy.in_backoff()
    }

    /// Cancels all pending commands if the block should have started long ago: kernels may occupy
    /// the device, or earlier work wait for what they deliver. Returns whether it did. Cancelled
    /// commands never execute, but count as [`done`](Self::done); executed ones are a prefix.
    ///
    /// # Errors
    /// None that a caller could cause.
    pub fn cancel_pending(&mut self) -> Result<bool, Error> {
        let is_waiting =
            self.idle_polls >= POLLS_BEFORE_QUERY && self.word(STARTED)? == 0 && self.word(EXITED)? != self.launches;
        if !is_waiting || self.launch_cancelled || self.launched_at.elapsed() < START_TIMEOUT {
            return Ok(false);
        }
        self.ring.atomic_u64(LAUNCH_HEADER)?.store(1, Ordering::SeqCst);
        // With both fences, at least one of block (started word) and host sees the other's store.
        fence(Ordering::SeqCst);
        if self.word(STARTED)? != 0 {
            // The block may still see the cancellation and exit; it is then launched again.
            return Ok(false);
        }
        self.cancelled = self.submitted;
        self.launch_cancelled = true;
        self.last_launch = (self.submitted, false);
        (self.seen_done, self.idle_polls) = (self.submitted, 0);
        self.policy.record_latency(START_TIMEOUT, false, Instant::now());
        Ok(true)
    }

    fn done_or_cancelled(&self) -> Result<u64, Error> {
        Ok(self.word(DONE)?.max(self.cancelled))
    }

    fn word(&self, at: usize) -> Result<u64, Error> {
        Ok(self.ring.atomic_u64(at)?.load(Ordering::Acquire))
    }
}

debug_fields!(
    SmallCopies,
    self,
    device = self.stream.context().device(),
    submitted = self.submitted
);

#[cfg(test)]
mod tests {
    use super::*;

    const QUICK: Duration = Duration::from_micros(5);

    #[test]
    fn the_kernels_header_is_committed() {
        <Arguments as crate::arguments::Arguments>::header().check(env!("CARGO_MANIFEST_DIR"));
    }

    #[test]
    fn idle_stays_make_residency_rare() {
        let mut policy = LaunchPolicy::new(false);
        let mut stay_resident = 0;
        for _ in 0..POLICY_THRESHOLD + 3 * RETRY_LAUNCHES[0] {
            if policy.stay_resident() {
                stay_resident += 1;
                policy.record_idle_stay();
            }
        }
        // Probes: the last one after twice as many launches as the one before.
        assert_eq!(stay_resident, POLICY_THRESHOLD + 1);
        while !policy.stay_resident() {}
        policy.record_latency(QUICK, true, Instant::now());
        assert!(policy.stay_resident() && policy.stay_resident(), "residency paid off");
        // Occasionally one is slow.
        for _ in 0..5 {
            policy.record_latency(QUICK, true, Instant::now());
            policy.record_latency(QUICK, true, Instant::now());
            policy.record_latency(SLOW_COMMAND, true, Instant::now());
        }
        assert!(policy.stay_resident() && policy.stay_resident());
    }

    #[test]
    fn a_block_that_waits_for_its_turn_is_left_out_at_once() {
        for (is_time_sliced, resident) in [(false, true), (false, false), (true, true), (true, false)] {
            let mut policy = LaunchPolicy::new(is_time_sliced);
            policy.record_latency(SLOW_COMMAND, resident, Instant::now());
            assert!(!policy.in_backoff());
            policy.record_latency(START_TIMEOUT, resident, Instant::now());
            assert_eq!(policy.in_backoff(), is_time_sliced);
        }
    }

    #[test]
    fn slow_commands_of_a_resident_block_count_as_idle_stays() {
        let mut policy = LaunchPolicy::new(false);
        for _ in 0..POLICY_THRESHOLD {
            assert!(policy.stay_resident());
            policy.record_latency(SLOW_COMMAND, true, Instant::now());
        }
        assert!(!policy.stay_resident());
        policy.record_latency(QUICK, false, Instant::now());
        assert!(!policy.stay_resident(), "a fast launch says nothing about residency");
        assert!(!policy.in_backoff());
    }

    #[test]
    fn slow_launches_back_off_exponentially() {
        let mut policy = LaunchPolicy::new(false);
        let now = Instant::now();
        for _ in 0..POLICY_THRESHOLD {
            assert!(!policy.in_backoff());
            policy.record_latency(SLOW_COMMAND, false, now + BACKOFF[1]);
        }
        assert!(policy.in_backoff());
        assert_eq!(policy.backoff_until, Some(now + BACKOFF[1] + BACKOFF[0]));
        policy.record_latency(SLOW_COMMAND, false, now);
        assert_eq!(policy.backoff_until, Some(now + 2 * BACKOFF[0]));
        policy.record_latency(QUICK, false, now);
        assert_eq!(
            (policy.launch_score, policy.backoff),
            (POLICY_THRESHOLD - 1, BACKOFF[0])
        );
    }
}
