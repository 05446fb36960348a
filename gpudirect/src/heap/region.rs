//! The memory of a rank's part of the heap.
#![expect(
    unsafe_code,
    reason = "memory that is posted again and again, by a protocol that its users keep among themselves"
)]

use core::any::Any;

use doorbell_cuda::{Context, DevicePtr, Span, Stream};
use doorbell_verbs::{AllAccess, BufferAlias, PeerAll, ProtectionDomain, Remote};

use super::HeapError;
use crate::words::SharedWords;
use crate::{Flush, GpuMemory, Path, Scope, register};

#[derive(Debug)]
pub(super) enum Region {
    Host(SharedWords),
    Gpu(GpuMemory),
}

pub(super) struct Registered {
    pub(super) alias: BufferAlias,
    pub(super) remote: Remote<AllAccess>,
    pub(super) keep: Box<dyn Any + Send>,
}

impl Region {
    pub(super) fn len(&self) -> u64 {
        match self {
            Self::Host(words) => words.len() as u64,
            Self::Gpu(memory) => memory.len() as u64,
        }
    }

    pub(super) fn host(&self) -> Result<&SharedWords, HeapError> {
        match self {
            Self::Host(words) => Ok(words),
            Self::Gpu(_) => Err(HeapError::OnGpu),
        }
    }

    pub(super) fn span(&self) -> Option<Span<'_>> {
        match self {
            Self::Host(words) => words.all(),
            Self::Gpu(memory) => Some(memory.all()),
        }
    }

    pub(super) fn device_ptr(&self) -> DevicePtr {
        match self {
            Self::Host(words) => words.device_ptr(),
            Self::Gpu(memory) => memory.device_ptr(),
        }
    }

    pub(super) fn alloc_host(
        pd: &ProtectionDomain,
        context: Option<&Context>,
        len: u64,
    ) -> Result<(Self, Registered), HeapError> {
        let (words, registered) = host_words(pd, context, usize::try_from(len).unwrap_or(usize::MAX))?;
        Ok((Self::Host(words), registered))
    }

    /// Fails unless a direct path works and kernels see puts before the signal behind them.
    pub(super) fn alloc_gpu(
        pd: &ProtectionDomain,
        context: &Context,
        len: u64,
    ) -> Result<(Self, Registered), HeapError> {
        let memory = GpuMemory::alloc(context, usize::try_from(len).unwrap_or(usize::MAX))?;
        let stream = Stream::new(context)?;
        stream.fill(memory.all(), 0)?;
        stream.synchronize()?;
        let registered = register(pd, &memory, PeerAll).map_err(Box::new)?;
        let region = registered.region();
        if region.path() == Path::Staged {
            let refused: Vec<_> = region.refused().iter().map(ToString::to_string).collect();
            return Err(HeapError::Staged {
                refused: refused.join("; "),
            });
        }
        let flush = Flush::needed(region, Scope::Owner)?;
        if !matches!(flush, Flush::Copied | Flush::InOrder) {
            return Err(HeapError::Unordered { flush });
        }
        // SAFETY: as in `host_words`; only kernels and copies access these bytes.
        let alias = unsafe { registered.buffer().alias(..) };
        let keys = Registered {
            alias,
            remote: registered.remote(),
            keep: Box::new(registered),
        };
        Ok((Self::Gpu(memory), keys))
    }
}

pub(super) fn host_words(
    pd: &ProtectionDomain,
    context: Option<&Context>,
    len: usize,
) -> Result<(SharedWords, Registered), HeapError> {
    let mut words = SharedWords::shared(len)?;
    if let Some(context) = context {
        words.pin(context)?;
    }
    // SAFETY: the bytes are zeroed and stay valid until their owner is dropped. They are referenced
    // only as atomics, which devices may change.
    let buffer = unsafe { pd.register_raw(words.start(), words.len(), PeerAll, words.owner()) }?;
    // SAFETY: the buffer is kept until the queue pairs that post it are gone. No slice of these
    // bytes is ever given out: a write to a source of a put, or a read of a target of a get, sees
    // old or new bytes, as with remote accesses to this memory.
    let alias = unsafe { buffer.alias(..) };
    let registered = Registered {
        alias,
        remote: buffer.remote(),
        keep: Box::new(buffer),
    };
    Ok((words, registered))
}
