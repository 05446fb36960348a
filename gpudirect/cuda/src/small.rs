//! Low-latency short copies by a resident thread block: `kernels/copy.cu`, embedded in this crate
//! as PTX.
//!
//! A copy engine takes 4 µs to start, and completion requires another driver call. A resident block
//! polls commands in pinned memory and reports completion in pinned memory: 4 µs in total, without
//! a driver call. It delays other work by a fraction of a millisecond at most: it exits when idle,
//! and after a maximum lifetime. If no block is resident, a graph launch (half the cost of a kernel
//! launch) starts one. If staying resident does not pay off it exits immediately: contexts of two
//! processes time-slice a GPU, so a resident block can delay the very work it waits for.

use core::fmt;
use core::hint;
use core::sync::atomic::{Ordering, fence};
use std::thread;
use std::time::{Duration, Instant};

use crate::context::Context;
use crate::error::Error;
use crate::graph::{CaptureMode, GraphExec};
use crate::memory::{HostMemory, Memory as _, Span};
use crate::module::{Launch, Module};
use crate::stream::Stream;

const PTX: &str = include_str!("../kernels/copy.ptx");

/// The maximum number of outstanding commands: a power of two.
const SLOTS: u64 = 64;
/// Words of a command, and the first of those that carry inline data.
const PARTS: usize = 8;
const INLINE: usize = 3;
/// Bytes of a command: a cache line.
const LINE: usize = 8 * PARTS;
/// The highest lap number of the ring, from 1; it occupies the 8 bits above a word's 56-bit value.
const TURNS: u64 = 255;
/// The offset of the launch header behind the commands: five words, of which the first cancels the
/// launch, and the first command.
const BEGINNING: usize = SLOTS as usize * LINE;
const FIRST: usize = BEGINNING + 5 * 8;
/// The offsets of the words that the block writes: last command done, last launch exited, started.
const DONE: usize = BEGINNING + 2 * LINE;
const LEFT: usize = DONE + 8;
const BEGUN: usize = DONE + 16;
const THREADS: u32 = 256;
/// The number of polls without a command, and in total, after which the block exits: a poll takes
/// the device a microsecond.
const PATIENCE: u64 = 50;
const LIFE: u64 = 200;
/// A command that takes longer was delayed: usually one takes 5 µs with a resident block, 10 µs
/// with a launch.
const SLOW: Duration = Duration::from_micros(20);
/// The policy changes mode when slow outcomes (or idle stays) outnumber fast ones by this many. It
/// then probes the mode again after a number of launches or a time, doubled each time between these
/// limits.
const VAIN: u32 = 4;
const SELDOM: [u32; 2] = [64, 1024];
const REST: [Duration; 2] = [Duration::from_millis(10), Duration::from_secs(1)];
/// The number of fruitless polls before, and the interval at which, the driver is queried for a
/// failed block.
const DOUBT: u32 = 64;
const DOUBT_EVERY: u32 = 4;
/// A launch that has not started after this time is blocked: usually it starts within 10 µs.
const STALL: Duration = Duration::from_micros(100);

/// The kernel's parameter, as in `copy.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Arguments {
    commands: u64,
    beginning: u64,
    words: u64,
    slots: u64,
}

/// Chooses between a resident block, a launch per command, and other copy mechanisms. Contexts of
/// two processes time-slice a GPU in half milliseconds, which can delay a resident or starting
/// block, but not a copy engine.
#[derive(Debug)]
struct Habit {
    /// Saturating scores up to [`POLICY_THRESHOLD`]: idle stays and slow commands minus fast ones
    /// with a resident block; slow minus fast commands with a launch.
    vain: u32,
    slow: u32,
    /// Launches since the last resident one, and the number after which the next is resident again.
    since: u32,
    seldom: u32,
    /// The end of the current backoff, during which copies use other mechanisms, and the duration
    /// of the next.
    until: Option<Instant>,
    rest: Duration,
}

impl Habit {
    fn new() -> Self {
        Self {
            vain: 0,
            slow: 0,
            since: 0,
            seldom: SELDOM[0],
            until: None,
            rest: REST[0],
        }
    }

    /// Whether the block launched now stays resident.
    fn stays(&mut self) -> bool {
        let stays = self.vain < VAIN || self.since >= self.seldom;
        if stays && self.vain >= VAIN {
            self.seldom = (2 * self.seldom).min(SELDOM[1]);
        }
        self.since = if stays { 0 } else { self.since + 1 };
        stays
    }

    /// A block stayed resident without receiving a command.
    fn stayed_in_vain(&mut self) {
        self.vain = (self.vain + 1).min(VAIN);
    }

    /// Records the latency of a command, with a resident block or with a launch.
    fn took(&mut self, time: Duration, stayed: bool, now: Instant) {
        match (time < SLOW, stayed) {
            (true, true) => (self.vain, self.seldom) = (less(self.vain), SELDOM[0]),
            (false, true) => self.stayed_in_vain(),
            (true, false) => (self.slow, self.rest) = (less(self.slow), REST[0]),
            (false, false) => {
                self.slow = (self.slow + 1).min(VAIN);
                if self.slow >= VAIN {
                    self.until = Some(now + self.rest);
                    self.rest = (2 * self.rest).min(REST[1]);
                }
            }
        }
    }

    /// Whether copies currently use other mechanisms.
    fn rests(&self) -> bool {
        self.until.is_some_and(|until| Instant::now() < until)
    }
}

/// One fast outcome offsets one slow one: alternating outcomes are no gain.
fn less(count: u32) -> u32 {
    count.saturating_sub(1)
}

/// Short copies of a context, executed in order.
pub struct SmallCopies {
    stream: Stream,
    block: GraphExec,
    /// Commands, launch header and the block's words.
    ring: HostMemory,
    /// Commands submitted.
    given: u64,
    /// Launches so far.
    launches: u64,
    /// The last launch: commands submitted by then, and whether it is resident.
    last: (u64, bool),
    habit: Habit,
    /// The time of the last progress, or of the first submission after idling; and whether a launch
    /// was needed for it.
    progress_at: Instant,
    by_launch: bool,
    /// The time of the last launch.
    launched_at: Instant,
    /// At the last cancellation: commands up to this number were done or cancelled.
    void: u64,
    /// Whether the last launch was cancelled.
    revoked: bool,
    /// Consecutive polls without progress.
    asked: u32,
    /// Commands done at the last progress.
    seen: u64,
}

/// The source of a short copy.
#[derive(Clone, Copy, Debug)]
pub enum SmallSource<'a> {
    /// Memory accessible to kernels of the context.
    Memory(Span<'a>),
    /// Inline data: at most [`SmallCopies::MOST_INLINE`] bytes.
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
    pub const LARGEST: usize = 4096;
    /// The maximum bytes if addresses or length are not multiples of 8, which is slower.
    pub const LARGEST_ODD: usize = 512;
    /// The maximum bytes of inline data.
    pub const MOST_INLINE: usize = 4 * (PARTS - INLINE);

    /// Loads the kernel and runs it once, which takes tens of milliseconds.
    ///
    /// # Errors
    /// The driver's error.
    pub fn new(context: &Context) -> Result<Self, Error> {
        // The highest priority.
        let stream = Stream::with_priority(context, i32::MIN)?;
        let kernel = Module::from_ptx(context, PTX)?.kernel("small_copies")?;
        // Loading may wait for all work of the device, so it is not left to the first launch.
        kernel.load()?;
        let ring = HostMemory::alloc(context, BEGUN + 8)?;
        let commands = ring.device_ptr().0;
        let arguments = Arguments {
            commands,
            beginning: commands + BEGINNING as u64,
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
            given: 0,
            launches: 0,
            last: (0, false),
            launched_at: Instant::now(),
            void: 0,
            revoked: false,
            habit: Habit::new(),
            progress_at: Instant::now(),
            by_launch: false,
            asked: 0,
            seen: 0,
        };
        copies.launch(false)?;
        Ok(copies)
    }

    /// Whether a copy of this length and alignment is supported.
    #[must_use]
    pub fn takes(into: Span<'_>, from: Span<'_>) -> bool {
        let bytes = into.len() as u64;
        let even = (into.device_ptr().0 | from.device_ptr().0 | bytes).is_multiple_of(8);
        into.len() <= if even { Self::LARGEST } else { Self::LARGEST_ODD }
    }

    /// Submits a copy. Returns its number, to be compared with [`done`](Self::done), or `None` if
    /// too many are outstanding.
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
            SmallSource::Memory(from) => Self::takes(into, from),
            SmallSource::Bytes(bytes) => bytes.len() <= Self::MOST_INLINE,
        };
        if into.len() != from.len() || !fits {
            return Err(Error::Lengths {
                from: from.len(),
                into: into.len(),
            });
        }
        if self.given - self.finished()? >= SLOTS {
            return Ok(None);
        }
        let mut command = [0; PARTS];
        command[0] = into.device_ptr().0;
        command[2] = into.len() as u64;
        match from {
            SmallSource::Memory(from) => command[1] = from.device_ptr().0,
            SmallSource::Bytes(bytes) => {
                for (word, few) in command[INLINE..].iter_mut().zip(bytes.chunks(4)) {
                    let mut padded = [0; 4];
                    padded[..few.len()].copy_from_slice(few);
                    *word = u64::from(u32::from_le_bytes(padded));
                }
            }
        }
        let line = (self.given % SLOTS) as usize * LINE;
        let turn = (self.given / SLOTS) % TURNS + 1;
        for (place, word) in command.iter().enumerate() {
            // Release: earlier writes to memory that the command names are visible to a reader of
            // the word.
            self.ring
                .atomic_u64(line + 8 * place)?
                .store(word | turn << 56, Ordering::Release);
        }
        if self.finished()? == self.given {
            self.progress_at = Instant::now();
            self.by_launch = false;
        }
        self.given += 1;
        self.keep_running()?;
        Ok(Some(self.given))
    }

    /// The number of the last command done, with all earlier ones; their copies are visible.
    ///
    /// # Errors
    /// [`Error::Lost`] if the block has failed, or another driver error.
    pub fn done(&mut self) -> Result<u64, Error> {
        let done = self.finished()?;
        if done != self.seen {
            self.see(done);
        }
        if done == self.given {
            return Ok(done);
        }
        self.keep_running()?;
        self.asked = self.asked.saturating_add(1);
        // A failed block reports nothing itself; the driver does.
        let doubtful = self.asked > DOUBT && self.asked.is_multiple_of(DOUBT_EVERY);
        if doubtful && self.stream.is_idle()? && self.word(LEFT)? < self.launches {
            // It exited between the two checks, or without reporting, which only an error does.
            self.stream.synchronize()?;
        }
        Ok(done)
    }

    /// Waits for a command; `false` if it was cancelled instead.
    ///
    /// # Errors
    /// As [`done`](Self::done).
    pub fn wait(&mut self, number: u64) -> Result<bool, Error> {
        while self.done()? < number {
            if self.take_back()? {
                return Ok(false);
            }
            if self.asked < DOUBT {
                hint::spin_loop();
            } else {
                thread::yield_now();
            }
        }
        Ok(true)
    }

    /// Launches the block if it has exited while commands are pending.
    fn keep_running(&mut self) -> Result<(), Error> {
        if self.word(LEFT)? != self.launches {
            return Ok(());
        }
        // Read after the exit word: the block publishes its last completion before it exits.
        let done = self.finished()?;
        if done == self.given {
            return Ok(());
        }
        if self.last == (done, true) {
            self.habit.stayed_in_vain();
        }
        let stays = self.habit.stays();
        self.launch(stays)
    }

    /// Records progress up to this command.
    fn see(&mut self, done: u64) {
        let now = Instant::now();
        let count = u32::try_from(done - self.seen).unwrap_or(u32::MAX);
        let each = (now - self.progress_at) / count.max(1);
        self.habit.took(each, !self.by_launch, now);
        self.progress_at = now;
        // Other submitted commands are done by the same launch, or by a resident one.
        self.by_launch &= !self.last.1;
        (self.seen, self.asked) = (done, 0);
    }

    fn launch(&mut self, stays: bool) -> Result<(), Error> {
        let done = self.finished()?;
        let waiting = self.given - done;
        let line = (done % SLOTS) as usize * LINE;
        for at in (0..LINE).step_by(8) {
            let word = match waiting {
                0 => 0,
                _ => self.ring.atomic_u64(line + at)?.load(Ordering::Relaxed) & ((1 << 56) - 1),
            };
            self.ring.atomic_u64(FIRST + at)?.store(word, Ordering::Relaxed);
        }
        // Commands already in the ring are executed anyway, and the first is in the header.
        let looks = waiting.saturating_sub(1);
        self.launches += 1;
        self.last = (self.given, stays);
        self.by_launch = true;
        self.revoked = false;
        let (patience, life) = if stays { (PATIENCE, LIFE) } else { (looks.min(1), looks) };
        self.ring.atomic_u64(BEGUN)?.store(0, Ordering::Relaxed);
        let words = [0, done + 1, patience, life, self.launches];
        for (place, word) in words.into_iter().enumerate() {
            self.ring
                .atomic_u64(BEGINNING + 8 * place)?
                .store(word, Ordering::Release);
        }
        self.launched_at = Instant::now();
        self.block.launch(&self.stream)
    }

    /// Whether commands should be submitted: not while a cancelled launch has not exited, nor
    /// during backoff.
    ///
    /// # Errors
    /// None that a caller could cause.
    pub fn is_free(&self) -> Result<bool, Error> {
        Ok(!self.habit.rests() && (!self.revoked || self.word(LEFT)? == self.launches))
    }

    /// Cancels all pending commands if the block should have started long ago: other kernels may
    /// occupy the whole device, or earlier work of its queue may wait for what these commands
    /// deliver. Returns whether they were cancelled: they then never execute, and count as
    /// [`done`](Self::done). Those executed before are a prefix of the order.
    ///
    /// # Errors
    /// None that a caller could cause.
    pub fn take_back(&mut self) -> Result<bool, Error> {
        let is_waiting = self.asked >= DOUBT && self.word(BEGUN)? == 0 && self.word(LEFT)? != self.launches;
        if !is_waiting || self.revoked || self.launched_at.elapsed() < STALL {
            return Ok(false);
        }
        self.ring.atomic_u64(BEGINNING)?.store(1, Ordering::SeqCst);
        // The block sets its started word and then reads this one: with both fences at least one
        // side sees the other's store.
        fence(Ordering::SeqCst);
        if self.word(BEGUN)? != 0 {
            // The block may still see the cancellation and exit; it is then launched again.
            return Ok(false);
        }
        self.void = self.given;
        self.revoked = true;
        self.last = (self.given, false);
        (self.seen, self.asked) = (self.given, 0);
        self.habit.took(STALL, false, Instant::now());
        Ok(true)
    }

    /// The last command that is done or cancelled.
    fn finished(&self) -> Result<u64, Error> {
        Ok(self.word(DONE)?.max(self.void))
    }

    fn word(&self, at: usize) -> Result<u64, Error> {
        Ok(self.ring.atomic_u64(at)?.load(Ordering::Acquire))
    }
}

impl fmt::Debug for SmallCopies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SmallCopies")
            .field("device", &self.stream.context().device())
            .field("given", &self.given)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUICK: Duration = Duration::from_micros(5);

    #[test]
    fn a_block_that_stays_for_nothing_is_told_to_seldom() {
        let mut habit = Habit::new();
        let mut stays = 0;
        for _ in 0..VAIN + 3 * SELDOM[0] {
            if habit.stays() {
                stays += 1;
                habit.stayed_in_vain();
            }
        }
        // Probes: the last one after twice as many launches as the one before.
        assert_eq!(stays, VAIN + 1);
        while !habit.stays() {}
        habit.took(QUICK, true, Instant::now());
        assert!(habit.stays() && habit.stays(), "it was of use");
        // Occasionally one is slow.
        for _ in 0..5 {
            habit.took(QUICK, true, Instant::now());
            habit.took(QUICK, true, Instant::now());
            habit.took(SLOW, true, Instant::now());
        }
        assert!(habit.stays() && habit.stays());
    }

    #[test]
    fn commands_that_are_slow_while_it_stays_count_as_well() {
        let mut habit = Habit::new();
        for _ in 0..VAIN {
            assert!(habit.stays());
            habit.took(SLOW, true, Instant::now());
        }
        assert!(!habit.stays());
        habit.took(QUICK, false, Instant::now());
        assert!(!habit.stays(), "that a launch was quick says nothing of it");
        assert!(!habit.rests());
    }

    #[test]
    fn where_launches_are_slow_copies_are_left_to_others_for_ever_longer() {
        let mut habit = Habit::new();
        let now = Instant::now();
        for _ in 0..VAIN {
            assert!(!habit.rests());
            habit.took(SLOW, false, now + REST[1]);
        }
        assert!(habit.rests());
        assert_eq!(habit.until, Some(now + REST[1] + REST[0]));
        habit.took(SLOW, false, now);
        assert_eq!(habit.until, Some(now + 2 * REST[0]));
        habit.took(QUICK, false, now);
        assert_eq!((habit.slow, habit.rest), (VAIN - 1, REST[0]));
    }
}
