//! Staging of UDP payloads from and to GPU memory (decision 039): a synchronous copy takes 10 us
//! however short it is, so one copy serves many packets.
//!
//! *Read-ahead:* the rest of a message is copied with its first payload; valid while the engine is
//! locked. *Write-behind:* writes are staged in pinned memory, merged, and copied before the engine
//! is unlocked. Other accesses to such memory, and writes to host memory (which programs poll),
//! flush them.

use super::cuda::{DriverError, Pinned};
use super::{Failed, Memory, Range, failed};

/// Bytes of pinned memory for each direction: one batch of the link.
const CAPACITY: usize = 256 << 10;

#[derive(Debug, Default)]
pub(crate) struct UdpStaging {
    read_ahead: bool,
    read: Option<Read>,
    write_behind: bool,
    writes: Vec<StagedWrite>,
    used: usize,
    write_count: u64,
    lost: bool,
    pinned: Option<UdpPinned>,
}

/// Pinned memory for what is read, and for what is written.
#[derive(Debug)]
pub(crate) struct UdpPinned(Pinned, Pinned);

impl UdpPinned {
    pub(super) fn new(memory: &Memory) -> Result<Self, DriverError> {
        Ok(Self(Pinned::new(memory, CAPACITY)?, Pinned::new(memory, CAPACITY)?))
    }
}

#[derive(Debug)]
struct Read {
    memory: Memory,
    start: usize,
    len: usize,
}

#[derive(Debug)]
pub(crate) struct StagedWrite {
    pub(crate) memory: Memory,
    pub(crate) start: usize,
    pub(crate) at: usize,
    pub(crate) len: usize,
}

impl UdpStaging {
    /// Stages writes from now on, until [`end_write_behind`](Self::end_write_behind).
    pub(crate) fn begin_write_behind(&mut self) {
        self.write_behind = true;
    }

    pub(crate) fn is_write_behind(&self) -> bool {
        self.write_behind
    }

    pub(crate) fn write_count(&self) -> u64 {
        self.write_count
    }

    pub(crate) fn set_read_ahead(&mut self, enabled: bool) {
        self.read_ahead = enabled;
        self.read = None;
    }

    /// Uses `pinned`, unless it has pinned memory.
    pub(crate) fn prepare(&mut self, pinned: UdpPinned) {
        self.pinned.get_or_insert(pinned);
    }

    fn pinned(&mut self, memory: &Memory) -> Result<&UdpPinned, Failed> {
        match &mut self.pinned {
            Some(pinned) => Ok(pinned),
            none => Ok(none.insert(UdpPinned::new(memory).map_err(|error| failed(&error))?)),
        }
    }

    /// Reads ahead some of the `behind` bytes that follow.
    pub(crate) fn read(&mut self, range: &Range, offset: usize, dst: &mut [u8], behind: usize) -> Result<(), Failed> {
        self.copy_writes()?;
        let memory = range.allocation.memory();
        let start = range.offset + offset;
        let end = start + dst.len();
        let behind = if self.read_ahead { behind } else { 0 };
        let is_here = |read: &Read| read.memory.is(memory) && read.start <= start && end <= read.start + read.len;
        if !self.read_ahead || !self.read.as_ref().is_some_and(is_here) {
            self.read = None;
            let len = (dst.len().saturating_add(behind)).min(CAPACITY);
            if len < dst.len() {
                // No packet is longer.
                return Err(Failed);
            }
            let fetched = self.pinned(memory)?.0.fetch((memory, start), len);
            fetched.map_err(|error| failed(&error))?;
            let memory = memory.clone();
            self.read = Some(Read { memory, start, len });
        }
        let (Some(read), Some(UdpPinned(pinned, _))) = (&self.read, &self.pinned) else {
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

    pub(crate) fn write(&mut self, range: &Range, offset: usize, src: &[u8]) -> Result<(), Failed> {
        self.read = None;
        if self.used + src.len() > CAPACITY {
            self.copy_writes()?;
        }
        let memory = range.allocation.memory();
        let (at, start, len) = (self.used, range.offset + offset, src.len());
        if len > CAPACITY {
            // No packet is longer.
            return Err(Failed);
        }
        let to = self.pinned(memory)?.1.start();
        // SAFETY: there is space for as many bytes, which no copy uses now and which have no other
        // user.
        unsafe { to.add(at).copy_from_nonoverlapping(src.as_ptr(), len) };
        self.used += len;
        self.write_count += 1;
        match self.writes.last_mut() {
            Some(last) if last.memory.is(memory) && last.start + last.len == start => last.len += len,
            _ => self.writes.push(StagedWrite {
                memory: memory.clone(),
                start,
                at,
                len,
            }),
        }
        Ok(())
    }

    /// A program that polls host memory for a flag then finds the GPU memory written before it.
    pub(crate) fn flush(&mut self) -> Result<(), Failed> {
        self.copy_writes()
    }

    fn copy_writes(&mut self) -> Result<(), Failed> {
        if self.writes.is_empty() {
            return Ok(());
        }
        let writes = std::mem::take(&mut self.writes);
        self.used = 0;
        let Some(UdpPinned(_, pinned)) = &self.pinned else {
            return Ok(());
        };
        pinned.store(&writes).map_err(|error| {
            self.lost = true;
            failed(&error)
        })
    }

    /// Completes the staged writes and disables write-behind. Fails if any of them failed since it
    /// was enabled.
    pub(crate) fn end_write_behind(&mut self) -> Result<(), Failed> {
        self.write_behind = false;
        let copied = self.copy_writes();
        if std::mem::take(&mut self.lost) {
            return Err(Failed);
        }
        copied
    }
}
