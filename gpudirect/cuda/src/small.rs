//! Short copies by a block that stays for a moment: `kernels/copy.cu`, of which the PTX is part of this crate.
//!
//! A copy by an engine takes the driver 4 us to begin, and its end is asked of the driver too. A block that is there already looks for commands in pinned memory, and says in pinned memory that they are done: that takes 4 us in all,
//! without a call. Nobody waits for it longer than a fraction of a millisecond: it leaves when nothing comes, and after some time anyway. What finds no block there launches it, by a graph, which takes half of a launch's time; and where
//! staying is of no use it leaves at once: contexts of two processes have a GPU by turns, and what one waits for may be what the other's block keeps from running.

use core::fmt;
use core::hint;
use core::sync::atomic::{Ordering, fence};
use std::thread;
use std::time::{Duration, Instant};

use crate::context::Context;
use crate::error::Error;
use crate::graph::{CaptureMode, GraphExec};
use crate::kernels::KernelFile;
use crate::memory::{HostMemory, Memory as _, Span};
use crate::module::{Launch, Module};
use crate::stream::Stream;

/// Commands on their way at most: a power of two.
const SLOTS: u64 = 64;
/// Words of a command, and which of them are the bytes that it brings along.
const PARTS: usize = 8;
const INLINE: usize = 3;
/// Bytes of a command: a line.
const LINE: usize = 8 * PARTS;
/// Above a word's 56 bits stands the turn of the ring, which goes from 1 to this.
const TURNS: u64 = 255;
/// Where a launch's beginning lies, behind the commands: these words, of which the first takes it back, and a command.
const BEGINNING: usize = SLOTS as usize * LINE;
const FIRST: usize = BEGINNING + 5 * 8;
/// Where the words lie, which the block writes.
const DONE: usize = BEGINNING + 2 * LINE;
const LEFT: usize = DONE + 8;
const BEGUN: usize = DONE + 16;
const THREADS: u32 = 256;
/// Looks for a command in a row before the block leaves, and in all: a look takes the device a microsecond.
const PATIENCE: u64 = 50;
const LIFE: u64 = 200;
/// A command that takes longer was kept waiting: mostly one takes 5 us where the block stays, and 10 where it is launched.
const SLOW: Duration = Duration::from_micros(20);
/// So many more that were slow, or that a block stayed in vain for, than were quick, and it is done otherwise; then now and then it is tried again, after so many launches or so long, twice as many and as long each time.
const VAIN: u32 = 4;
const SELDOM: [u32; 2] = [64, 1024];
const REST: [Duration; 2] = [Duration::from_millis(10), Duration::from_secs(1)];
/// So many questions may be asked whether a command is done before the driver is asked, now and then, whether the block has failed.
const DOUBT: u32 = 64;
const DOUBT_EVERY: u32 = 4;
/// A launch that has not begun after so long waits for something: mostly it begins within 10 us.
const STALL: Duration = Duration::from_micros(100);

/// The argument of the kernel, as `copy.cu` has it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Arguments {
    commands: u64,
    beginning: u64,
    words: u64,
    slots: u64,
}

/// What has proved of use: to have the block stay, to launch it for each command, or to leave copies to others. Contexts of two processes have a GPU by turns of half a millisecond, and a block that stays, or is to begin, may wait for its
/// turn: a copy engine does not.
#[derive(Debug)]
struct Habit {
    /// Blocks that stayed for nothing, and commands that were slow for one that stayed, more than were quick; the same of commands with a launch. [`VAIN`] at most.
    vain: u32,
    slow: u32,
    /// Launches since one stayed, and after how many one does again.
    since: u32,
    seldom: u32,
    /// Until when copies are left to others, and for how long the next time.
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

    /// Whether the block that is launched now stays.
    fn stays(&mut self) -> bool {
        let stays = self.vain < VAIN || self.since >= self.seldom;
        if stays && self.vain >= VAIN {
            self.seldom = (2 * self.seldom).min(SELDOM[1]);
        }
        self.since = if stays { 0 } else { self.since + 1 };
        stays
    }

    /// A block has stayed and was given nothing.
    fn stayed_in_vain(&mut self) {
        self.vain = (self.vain + 1).min(VAIN);
    }

    /// What a command has taken, of a block that stayed or of one that was launched for it.
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

    /// Whether copies are left to others.
    fn rests(&self) -> bool {
        self.until.is_some_and(|until| Instant::now() < until)
    }
}

/// A quick one makes good for a slow one, and no more: where every other is slow it is of no use.
fn less(count: u32) -> u32 {
    count.saturating_sub(1)
}

/// Short copies of a context, in their order.
pub struct SmallCopies {
    stream: Stream,
    block: GraphExec,
    /// Commands, beginning and words.
    ring: HostMemory,
    /// Commands that were given.
    given: u64,
    /// Launches.
    launches: u64,
    /// The last launch: what had been given by then, and whether it stays.
    last: (u64, bool),
    habit: Habit,
    /// When something was done last, or given when nothing was to be done; and whether that had the block launched.
    progress_at: Instant,
    by_launch: bool,
    /// When that was.
    launched_at: Instant,
    /// Commands up to this one were carried out or taken back when one was taken back last.
    void: u64,
    /// The last launch was taken back.
    revoked: bool,
    /// Questions in a row that nothing was new at.
    asked: u32,
    /// What was done when it was last asked.
    seen: u64,
}

/// What a command copies from.
#[derive(Clone, Copy, Debug)]
pub enum SmallSource<'a> {
    /// Memory that kernels of the context reach.
    Memory(Span<'a>),
    /// These bytes: [`SmallCopies::MOST_INLINE`] at most.
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
    /// The most bytes of one copy.
    pub const LARGEST: usize = 4096;
    /// The most where addresses or length are no multiples of 8, which takes longer.
    pub const LARGEST_ODD: usize = 512;
    /// The most bytes that a command brings along.
    pub const MOST_INLINE: usize = 4 * (PARTS - INLINE);

    /// Loads the kernel and runs it once, which takes tens of milliseconds.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(context: &Context) -> Result<Self, Error> {
        // Before whatever else the device has to do.
        let stream = Stream::with_priority(context, i32::MIN)?;
        let kernel = Module::from_ptx(context, KernelFile::Copy.ptx())?.kernel("small_copies")?;
        // The first launch may wait for all of the device: not when somebody waits for a copy.
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
            // SAFETY: the kernel takes this argument, and all that it names itself is in the ring, which is kept; of what the commands name whoever gives them promises so.
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

    /// Whether a copy of so many bytes between these addresses is one for this.
    #[must_use]
    pub fn takes(into: Span<'_>, from: Span<'_>) -> bool {
        let bytes = into.len() as u64;
        let even = (into.device_ptr().0 | from.device_ptr().0 | bytes).is_multiple_of(8);
        into.len() <= if even { Self::LARGEST } else { Self::LARGEST_ODD }
    }

    /// Gives the command to copy. Its number, by which [`done`](Self::done) tells of it; `None` when too many are on their way.
    ///
    /// # Safety
    /// Both memories are kept until it is done, and kernels of this context reach them: they are of this context, mapped for its device, or pinned memory of the host. Nobody has a slice of them.
    ///
    /// # Errors
    /// [`Error::Lengths`], or what the driver says.
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
            // What was written before, into memory that the command names, is there for whoever sees the word.
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

    /// The number of the last command that was carried out: what it copied, and all before it, is there.
    ///
    /// # Errors
    /// [`Error::Lost`] when the block has failed, or what the driver says otherwise.
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
        // Where it has failed it says nothing any more, and the driver does.
        let doubtful = self.asked > DOUBT && self.asked.is_multiple_of(DOUBT_EVERY);
        if doubtful && self.stream.is_idle()? && self.word(LEFT)? < self.launches {
            // It has ended between the two questions, or without a word, for which there is no way but an error.
            self.stream.synchronize()?;
        }
        Ok(done)
    }

    /// Waits until a command is done; `false` when it was [taken back](Self::take_back) instead.
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

    /// Launches the block, when it has left and commands are not done.
    fn keep_running(&mut self) -> Result<(), Error> {
        if self.word(LEFT)? != self.launches {
            return Ok(());
        }
        // What it did last it said before it left.
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

    /// Commands up to this one are done, which is news.
    fn see(&mut self, done: u64) {
        let now = Instant::now();
        let count = u32::try_from(done - self.seen).unwrap_or(u32::MAX);
        let each = (now - self.progress_at) / count.max(1);
        self.habit.took(each, !self.by_launch, now);
        self.progress_at = now;
        // What else was given is done by the same launch, or by one that stays.
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
        // Those that are there already are taken in any case; the first of them it need not look for.
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

    /// Whether commands should be given: not while a launch that was [taken back](Self::take_back) has not ended, nor for some time after several in a row have taken long.
    ///
    /// # Errors
    /// None that a caller could bring about.
    pub fn is_free(&self) -> Result<bool, Error> {
        Ok(!self.habit.rests() && (!self.revoked || self.word(LEFT)? == self.launches))
    }

    /// Takes back all commands that are not done, where the block should have begun long ago: others' kernels may have all of the device, or what is before it in a queue of the device may wait for what these commands are to bring. `true`
    /// when that could be done: they never will be carried out, and count as [`done`](Self::done). What was done of them is what was done in their order.
    ///
    /// # Errors
    /// None that a caller could bring about.
    pub fn take_back(&mut self) -> Result<bool, Error> {
        let is_waiting = self.asked >= DOUBT && self.word(BEGUN)? == 0 && self.word(LEFT)? != self.launches;
        if !is_waiting || self.revoked || self.launched_at.elapsed() < STALL {
            return Ok(false);
        }
        self.ring.atomic_u64(BEGINNING)?.store(1, Ordering::SeqCst);
        // The block sets its word and then looks for this one: one of the two sees the other's.
        fence(Ordering::SeqCst);
        if self.word(BEGUN)? != 0 {
            // It may have seen it all the same, and leaves then; so it is launched anew.
            return Ok(false);
        }
        self.void = self.given;
        self.revoked = true;
        self.last = (self.given, false);
        (self.seen, self.asked) = (self.given, 0);
        self.habit.took(STALL, false, Instant::now());
        Ok(true)
    }

    /// Up to this command all are carried out, or taken back.
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
        // The last one after twice as many launches as the one before.
        assert_eq!(stays, VAIN + 1);
        while !habit.stays() {}
        habit.took(QUICK, true, Instant::now());
        assert!(habit.stays() && habit.stays(), "it was of use");
        // Now and then one is slow.
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
