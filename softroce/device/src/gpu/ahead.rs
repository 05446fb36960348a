//! Staging of UDP payloads from and to GPU memory: a packet is 4 KiB at most, and a synchronous
//! copy takes 10 us however short it is, so that one copy serves many packets.
//!
//! *Read-ahead:* while packets are written, the rest of a message is copied with its first payload.
//! The copy is valid while the engine is locked, as no completion is delivered in that time.
//! *Write-behind:* while packets are received, writes are staged in pinned memory, adjacent ones
//! merged, and copied before the engine is unlocked, and so before any completion. Other accesses
//! to such memory, and writes to host memory (which programs poll), flush the staged writes first.

use super::cuda::Pinned;
use super::{Failed, Memory, Range, failed};

/// Bytes of pinned memory for each direction: one batch of the link.
const ROOM: usize = 256 << 10;

/// The staged bytes of a device.
#[derive(Debug, Default)]
pub(crate) struct Ahead {
    /// Read-ahead is enabled.
    reads: bool,
    /// The range that was read ahead.
    read: Option<Read>,
    /// Write-behind is enabled.
    puts_by: bool,
    /// The staged writes, in order.
    put: Vec<Put>,
    /// Bytes of pinned memory in use by them.
    taken: usize,
    /// Writes ever staged.
    count: u64,
    /// A copy of staged writes failed.
    lost: bool,
    pinned: Option<(Pinned, Pinned)>,
}

#[derive(Debug)]
struct Read {
    memory: Memory,
    start: usize,
    len: usize,
}

/// A staged write.
#[derive(Debug)]
pub(crate) struct Put {
    pub(crate) memory: Memory,
    pub(crate) start: usize,
    /// Offset in the pinned memory.
    pub(crate) at: usize,
    pub(crate) len: usize,
}

impl Ahead {
    /// Stages writes from now on, until [`end_write_behind`](Self::end_write_behind).
    pub(crate) fn put_by(&mut self) {
        self.puts_by = true;
    }

    pub(crate) fn puts_by(&self) -> bool {
        self.puts_by
    }

    /// How many writes were ever staged.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// Enables or disables read-ahead, and discards what was read ahead.
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

    /// Reads `dst.len()` bytes from `offset` of a range on, and reads ahead some of the `behind`
    /// bytes that follow.
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
                // No packet is longer.
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
        // SAFETY: in the pinned memory, as `is_here` or the length says, which no copy uses now and
        // which has no other user; the destination is a unique reference.
        unsafe {
            dst.as_mut_ptr()
                .copy_from_nonoverlapping(pinned.start().add(start - read.start), dst.len())
        };
        Ok(())
    }

    /// Stages a write to a range from `offset` on.
    pub(crate) fn write(&mut self, range: &Range, offset: usize, src: &[u8]) -> Result<(), Failed> {
        self.read = None;
        if self.taken + src.len() > ROOM {
            self.copy_put()?;
        }
        let memory = range.allocation.memory();
        let (at, start, len) = (self.taken, range.offset + offset, src.len());
        if len > ROOM {
            // No packet is longer.
            return Err(Failed);
        }
        let to = self.pinned(memory)?.1.start();
        // SAFETY: there is space for as many bytes, which no copy uses now and which have no other
        // user.
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

    /// Completes the staged writes before later ones: a program that polls host memory for a flag
    /// must then find the GPU memory written before it.
    pub(crate) fn settle(&mut self) -> Result<(), Failed> {
        self.copy_put()
    }

    /// Copies the staged writes, and waits for that.
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

    /// Completes the staged writes and disables write-behind. Fails if any of them failed since it
    /// was enabled.
    pub(crate) fn store(&mut self) -> Result<(), Failed> {
        self.puts_by = false;
        let copied = self.copy_put();
        if std::mem::take(&mut self.lost) {
            return Err(Failed);
        }
        copied
    }
}
