//! What goes over UDP from and to memory of GPUs: a packet is 4 KiB at most, and a copy that is waited for takes 10 us however short it is. So copies are made for many packets at once.
//!
//! While packets are written, what follows a payload in its message is *read ahead* with it; it is good for as long as the engine is locked, in which time nobody is told that a message is done.
//! While packets are received, what is written is *put by* in pinned memory, pieces that continue each other as one, and copied before the engine is unlocked: so before anybody is told of it.
//! Whatever else looks at such memory meanwhile, or writes to memory of the host, which programs poll, has it copied first.

use super::cuda::Pinned;
use super::{Failed, Memory, Range, failed};

/// Bytes of pinned memory for each of the two: what a batch of the link holds.
const ROOM: usize = 256 << 10;

/// Bytes of a GPU's memory on their way from or to packets.
#[derive(Debug, Default)]
pub(crate) struct Ahead {
    /// What follows is read ahead.
    reads: bool,
    /// What was read ahead.
    read: Option<Read>,
    /// Writes are put by.
    puts_by: bool,
    /// What was put by, in its order: where it is to go, and where in the pinned memory it is.
    put: Vec<Put>,
    /// Bytes of pinned memory that they take.
    taken: usize,
    /// How much was ever put by.
    count: u64,
    /// Some of it could not be copied.
    lost: bool,
    pinned: Option<(Pinned, Pinned)>,
}

#[derive(Debug)]
struct Read {
    memory: Memory,
    start: usize,
    len: usize,
}

/// A piece that was put by.
#[derive(Debug)]
pub(crate) struct Put {
    pub(crate) memory: Memory,
    pub(crate) start: usize,
    /// Where in the pinned memory.
    pub(crate) at: usize,
    pub(crate) len: usize,
}

impl Ahead {
    /// From now on writes are put by, until [`store`](Self::store).
    pub(crate) fn put_by(&mut self) {
        self.puts_by = true;
    }

    pub(crate) fn puts_by(&self) -> bool {
        self.puts_by
    }

    /// How many writes were ever put by.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// From now on what follows is read ahead, or no more: then what was is forgotten.
    pub(crate) fn read_ahead(&mut self, reads: bool) {
        self.reads = reads;
        self.read = None;
    }

    fn pinned(&mut self, memory: &Memory) -> Result<&(Pinned, Pinned), Failed> {
        match &mut self.pinned {
            Some(pinned) => Ok(pinned),
            none => {
                let new = || Ok((Pinned::new(memory, ROOM)?, Pinned::new(memory, ROOM)?));
                Ok(none.insert(new().map_err(|error| failed(&error))?))
            }
        }
    }

    /// Copies `dst.len()` bytes from `offset` of a range on out, and brings as many as there is room for of the `behind` that follow.
    pub(crate) fn read(&mut self, range: &Range, offset: usize, dst: &mut [u8], behind: usize) -> Result<(), Failed> {
        self.copy_put()?;
        let memory = range.allocation.memory();
        let start = range.offset + offset;
        let end = start + dst.len();
        let behind = if self.reads { behind } else { 0 };
        let is_here = |read: &Read| read.memory.is(memory) && read.start <= start && end <= read.start + read.len;
        if !self.reads || !self.read.as_ref().is_some_and(is_here) {
            self.read = None;
            let len = (dst.len().saturating_add(behind)).min(ROOM);
            if len < dst.len() {
                // No packet is so long.
                return Err(Failed);
            }
            let fetched = self.pinned(memory)?.0.fetch((memory, start), len);
            fetched.map_err(|error| failed(&error))?;
            let memory = memory.clone();
            self.read = Some(Read { memory, start, len });
        }
        let (Some(read), Some((pinned, _))) = (&self.read, &self.pinned) else {
            return Err(Failed);
        };
        // SAFETY: in the pinned memory, as `is_here` or the length says, which no copy uses now and nobody else has; the destination is a unique reference.
        unsafe {
            dst.as_mut_ptr()
                .copy_from_nonoverlapping(pinned.start().add(start - read.start), dst.len())
        };
        Ok(())
    }

    /// Puts by what is to be written to a range from `offset` on.
    pub(crate) fn write(&mut self, range: &Range, offset: usize, src: &[u8]) -> Result<(), Failed> {
        self.read = None;
        if self.taken + src.len() > ROOM {
            self.copy_put()?;
        }
        let memory = range.allocation.memory();
        let (at, start, len) = (self.taken, range.offset + offset, src.len());
        if len > ROOM {
            // No packet is so long.
            return Err(Failed);
        }
        let to = self.pinned(memory)?.1.start();
        // SAFETY: there is room for as many bytes, which no copy uses now and nobody else has.
        unsafe { to.add(at).copy_from_nonoverlapping(src.as_ptr(), len) };
        self.taken += len;
        self.count += 1;
        match self.put.last_mut() {
            Some(last) if last.memory.is(memory) && last.start + last.len == start => last.len += len,
            _ => self.put.push(Put {
                memory: memory.clone(),
                start,
                at,
                len,
            }),
        }
        Ok(())
    }

    /// Has what was put by so far be there, before what comes next is written where somebody may look for it: a program that polls memory of the host for a signal goes on to what was written before it.
    pub(crate) fn settle(&mut self) -> Result<(), Failed> {
        self.copy_put()
    }

    /// Copies what was put by to where it belongs, and waits for that.
    fn copy_put(&mut self) -> Result<(), Failed> {
        if self.put.is_empty() {
            return Ok(());
        }
        let put = std::mem::take(&mut self.put);
        self.taken = 0;
        let Some((_, pinned)) = &self.pinned else { return Ok(()) };
        pinned.store(&put).map_err(|error| {
            self.lost = true;
            failed(&error)
        })
    }

    /// Copies what was put by, and puts by no more. Fails where any of it could not be copied, now or when there was no room for more.
    pub(crate) fn store(&mut self) -> Result<(), Failed> {
        self.puts_by = false;
        let copied = self.copy_put();
        if std::mem::take(&mut self.lost) {
            return Err(Failed);
        }
        copied
    }
}
