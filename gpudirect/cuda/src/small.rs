//! Short copies that begin without a launch: `kernels/small.cu`, of which the PTX is part of this crate.
//!
//! A launch or a copy takes the driver 3 us to begin and the device 5 more. A block that is there already, and looks for commands in pinned memory, begins one within a microsecond. It stays for as long as commands come, and leaves
//! a fraction of a millisecond after the last of them, or some milliseconds after it came: whoever waits for the device waits no longer for it. It is launched anew when there is something to do.

use core::fmt;
use core::sync::atomic::Ordering;

use crate::context::Context;
use crate::error::Error;
use crate::memory::{HostMemory, Memory as _, Span};
use crate::module::{Kernel, Launch, Module};
use crate::stream::Stream;

const PTX: &str = include_str!("../kernels/small.ptx");

/// Commands on their way at most: a power of two.
const SLOTS: u64 = 64;
/// Bytes of a command.
const COMMAND: usize = 32;
/// Where the words lie: behind the commands, a cache line each, as the kernel has them beside each other.
const DONE: usize = SLOTS as usize * COMMAND;
const LEFT: usize = DONE + 8;
const THREADS: u32 = 256;
/// Looks for a command in a row before the block leaves, and in all: a look takes the device 1 to 2 us.
const PATIENCE: u32 = 300;
const LIFE: u32 = 3000;
/// After so many questions whether a command is done, the driver is asked whether the block is still there.
const DOUBT: u32 = 16;

/// The argument of the kernel, as `small.cu` has it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Arguments {
    commands: u64,
    words: u64,
    slots: u32,
    patience: u32,
    life: u32,
    launch: u32,
}

/// Short copies of a context, in their order.
pub struct SmallCopies {
    stream: Stream,
    kernel: Kernel,
    /// Commands and words.
    ring: HostMemory,
    /// Commands that were given.
    given: u64,
    /// Launches.
    launches: u64,
    /// Questions in a row that nothing was new at.
    asked: u32,
    /// What was done when it was last asked.
    seen: u64,
}

impl SmallCopies {
    /// The most bytes of one copy.
    pub const LARGEST: usize = 4096;
    /// The most where addresses or length are no multiples of 8, which takes longer.
    pub const LARGEST_ODD: usize = 256;

    /// Loads the kernel and runs it once, which takes tens of milliseconds.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(context: &Context) -> Result<Self, Error> {
        let mut copies = Self {
            // Before whatever else the device has to do.
            stream: Stream::with_priority(context, -1)?,
            kernel: Module::from_ptx(context, PTX)?.kernel("small_copies")?,
            ring: HostMemory::alloc(context, LEFT + 8)?,
            given: 0,
            launches: 0,
            asked: 0,
            seen: 0,
        };
        // The first launch may wait for all of the device: not when somebody waits for a copy.
        copies.launch()?;
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
    pub unsafe fn copy(&mut self, into: Span<'_>, from: Span<'_>) -> Result<Option<u64>, Error> {
        if into.len() != from.len() || !Self::takes(into, from) {
            return Err(Error::Lengths {
                from: from.len(),
                into: into.len(),
            });
        }
        if self.given - self.word(DONE)? >= SLOTS {
            return Ok(None);
        }
        let slot = (self.given % SLOTS) as usize * COMMAND;
        for (at, word) in [into.device_ptr().0, from.device_ptr().0, into.len() as u64]
            .into_iter()
            .enumerate()
        {
            self.ring.atomic_u64(slot + 8 * at)?.store(word, Ordering::Relaxed);
        }
        self.given += 1;
        self.ring.atomic_u64(slot + 24)?.store(self.given, Ordering::Release);
        self.keep_running()?;
        Ok(Some(self.given))
    }

    /// The number of the last command that was carried out: what it copied, and all before it, is there.
    ///
    /// # Errors
    /// [`Error::Lost`] when the block has failed, or what the driver says otherwise.
    pub fn done(&mut self) -> Result<u64, Error> {
        let done = self.word(DONE)?;
        if done == self.given || done != self.seen {
            (self.seen, self.asked) = (done, 0);
            return Ok(done);
        }
        self.keep_running()?;
        self.asked += 1;
        // Where it has failed it says nothing any more, and the driver does.
        if self.asked.is_multiple_of(DOUBT) && self.stream.is_idle()? && self.word(LEFT)? < self.launches {
            // It has ended between the two questions, or without a word, for which there is no way but an error.
            self.stream.synchronize()?;
        }
        Ok(done)
    }

    /// Launches the block when it has left, and commands are not done.
    fn keep_running(&mut self) -> Result<(), Error> {
        if self.word(LEFT)? == self.launches && self.word(DONE)? < self.given {
            self.launch()?;
        }
        Ok(())
    }

    fn launch(&mut self) -> Result<(), Error> {
        self.launches += 1;
        let commands = self.ring.device_ptr().0;
        let arguments = Arguments {
            commands,
            words: commands + DONE as u64,
            slots: SLOTS as u32,
            patience: PATIENCE,
            life: LIFE,
            // As many as 2^32 take months.
            launch: self.launches as u32,
        };
        // SAFETY: the kernel takes this argument, and all that it names itself is in the ring, which is kept; of what the commands name whoever gave them has promised so.
        unsafe {
            self.kernel.launch(
                &self.stream,
                Launch::linear(1, THREADS),
                &[&arguments],
                &[self.ring.all()],
            )
        }
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
