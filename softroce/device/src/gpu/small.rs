//! Small copies of GPU memory by a persistent kernel, [`SmallCopies`] (decision 038). A copy engine
//! takes as long for 8 bytes as for 256 KiB. A batch is all small copies or none, and such batches
//! do not overlap others, as there is no order between them.

use std::slice;
use std::sync::Arc;

use doorbell_cuda::{Context, Error, HostMemory, Memory as _, SmallCopies, SmallSource, Span};

use super::claim::{Claim, claim};
use super::copies::{CopyEnd, CopyOp};
use super::cuda::{Mark, Memory};

/// The most small copies in a batch: they are done one after another.
const MAX_BATCH: usize = 16;

/// `None` for copy engines: no kernel, or another process has claimed the device.
pub(super) type SmallCopyDevice = (Context, Option<Block>);

#[derive(Debug)]
pub(crate) struct Block {
    pub(super) copies: SmallCopies,
    _claim: Arc<Claim>,
}

pub(super) fn start_small_copies(memory: &Memory) -> SmallCopyDevice {
    let context = memory.context();
    let device = context.device();
    let Some(claim) = claim(device) else {
        tracing::debug!("small copies of {device} use its copy engines: another process has claimed it");
        return (context.clone(), None);
    };
    let made = SmallCopies::new(context).inspect_err(|error| {
        tracing::warn!("small copies of {device} use its copy engines: {error}");
    });
    let block = made.ok().map(|copies| Block { copies, _claim: claim });
    (context.clone(), block)
}

#[derive(Debug, Default)]
pub(super) struct SmallCopyDevices(Vec<SmallCopyDevice>);

struct SmallCopy<'a> {
    device: usize,
    into: Span<'a>,
    from: SmallSource<'a>,
}

impl SmallCopyDevices {
    pub(super) fn has(&self, memory: &Memory) -> bool {
        self.0.iter().any(|(known, _)| known == memory.context())
    }

    /// Whether the device is new.
    pub(super) fn add(&mut self, small: SmallCopyDevice) -> bool {
        let new = self.0.iter().all(|(known, _)| *known != small.0);
        if new {
            self.0.push(small);
        }
        new
    }

    /// A copy in the kernel's terms; `None` where it is not small.
    fn find<'a>(&self, CopyOp { into, from, len }: &'a CopyOp, ring: Option<&'a HostMemory>) -> Option<SmallCopy<'a>> {
        let (dst, src) = (memory(into), memory(from));
        let context = dst.or(src)?.context();
        if dst.into_iter().chain(src).any(|memory| memory.context() != context) {
            // Kernels cannot access memory of another context.
            return None;
        }
        let device = self
            .0
            .iter()
            .position(|(known, block)| known == context && block.as_ref().is_some_and(is_free))?;
        let (to, source) = (span(into, *len, ring)?, span(from, *len, ring)?);
        if !SmallCopies::supports(to, source) {
            return None;
        }
        let from = match (from, ring) {
            (CopyEnd::Ring(at), Some(ring)) if *len <= SmallCopies::MAX_INLINE => {
                // SAFETY: the span above lies in the ring, where the source was written, and
                // nothing else is until it has been copied.
                SmallSource::Bytes(unsafe { slice::from_raw_parts(ring.as_ptr().add(*at), *len) })
            }
            _ => SmallSource::Memory(source),
        };
        Some(SmallCopy { device, into: to, from })
    }

    pub(super) fn take(&self, ops: &[CopyOp], ring: Option<&HostMemory>) -> bool {
        let mut places = ops.iter().map(|op| self.find(op, ring).map(|found| found.device));
        let Some(Some(first)) = places.next() else {
            return false;
        };
        ops.len() <= MAX_BATCH && places.all(|device| device == Some(first))
    }

    /// Starts copies that it [takes](Self::take). The memory is to be kept until they are done.
    pub(super) fn copy(
        &mut self,
        ops: &[CopyOp],
        ring: Option<&HostMemory>,
        marks: &mut Vec<Mark>,
    ) -> Result<(), Error> {
        for op in ops {
            let Some(SmallCopy { device, into, from }) = self.find(op, ring) else {
                continue;
            };
            let Some((_, Some(Block { copies, .. }))) = self.0.get_mut(device) else {
                continue;
            };
            let number = loop {
                // SAFETY: the caller keeps the memory, which kernels of its context can access: it
                // is of that context, or imported for its device, or pinned.
                if let Some(number) = unsafe { copies.copy(into, from)? } {
                    break number;
                }
                copies.done()?;
            };
            marks.clear();
            marks.push(Mark::Small(device, number));
        }
        Ok(())
    }

    /// Whether kernels, and short copies from the host, wait for the turn of the memory's context.
    pub(super) fn wait_for_turns(&self, memory: &Memory) -> bool {
        let block = self.0.iter().find(|(known, _)| known == memory.context());
        block.is_some_and(|(_, block)| block.as_ref().is_some_and(|block| block.copies.waits_for_turns()))
    }

    /// Cancels these copies if their kernel has not run for long. Returns the device index, if they
    /// were cancelled: copy engines must do them.
    pub(super) fn cancel(&mut self, marks: &[Mark]) -> Option<usize> {
        let device = marks.iter().find_map(|mark| match mark {
            Mark::Small(device, _) => Some(*device),
            Mark::Event(_) => None,
        })?;
        let (_, block) = self.0.get_mut(device)?;
        block
            .as_mut()?
            .copies
            .cancel_pending()
            .unwrap_or(false)
            .then_some(device)
    }

    pub(super) fn is_done(&mut self, device: usize, number: u64) -> Result<bool, Error> {
        match self.0.get_mut(device) {
            Some((_, Some(block))) => Ok(block.copies.done()? >= number),
            _ => Ok(true),
        }
    }
}

fn is_free(block: &Block) -> bool {
    block.copies.is_available().unwrap_or(false)
}

fn memory(end: &CopyEnd) -> Option<&Memory> {
    match end {
        CopyEnd::Device(memory, _) => Some(memory),
        CopyEnd::Ring(_) | CopyEnd::Host(..) => None,
    }
}

fn span<'a>(end: &'a CopyEnd, len: usize, ring: Option<&'a HostMemory>) -> Option<Span<'a>> {
    match end {
        CopyEnd::Device(memory, at) => memory.span(*at, len).ok(),
        CopyEnd::Ring(at) => ring?.span(*at..at.saturating_add(len)).ok(),
        // Such copies are long.
        CopyEnd::Host(..) => None,
    }
}
