//! Where a rank's part of the heap lies.
#![expect(
    unsafe_code,
    reason = "memory that is posted again and again, by a protocol that its users keep among themselves"
)]

use core::any::Any;

use doorbell_cuda::{Context, DevicePtr, Span, Stream};
use doorbell_verbs::{Alias, All, ProtectionDomain, Remote, RemoteAll};

use super::HeapError;
use crate::words::Words;
use crate::{Flush, GpuMemory, Path, Scope, register};

/// The memory of a part.
#[derive(Debug)]
pub(super) enum Region {
    /// Memory of the host.
    Host(Words),
    /// Memory of a GPU.
    Gpu(GpuMemory),
}

/// Memory that is registered, as the proxy and the peers name it.
pub(super) struct Registered {
    pub(super) alias: Alias,
    pub(super) remote: Remote<All>,
    /// What keeps it registered.
    pub(super) keep: Box<dyn Any + Send>,
}

impl Region {
    pub(super) fn len(&self) -> u64 {
        match self {
            Self::Host(words) => words.len() as u64,
            Self::Gpu(memory) => memory.len() as u64,
        }
    }

    /// What the processor reaches.
    pub(super) fn host(&self) -> Result<&Words, HeapError> {
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

    /// Memory of the host, registered; reached by devices of CUDA, too, where a context is given.
    pub(super) fn on_host(
        pd: &ProtectionDomain,
        context: Option<&Context>,
        len: u64,
    ) -> Result<(Self, Registered), HeapError> {
        let (words, registered) = host_words(pd, context, usize::try_from(len).unwrap_or(usize::MAX))?;
        Ok((Self::Host(words), registered))
    }

    /// Memory of a GPU, zero at first, registered by a path that leads to the memory itself, and in which kernels find what was put there once they find the signal behind it.
    pub(super) fn on_gpu(pd: &ProtectionDomain, context: &Context, len: u64) -> Result<(Self, Registered), HeapError> {
        let memory = GpuMemory::alloc(context, usize::try_from(len).unwrap_or(usize::MAX))?;
        let stream = Stream::new(context)?;
        stream.fill(memory.all(), 0)?;
        stream.synchronize()?;
        let registered = register(pd, &memory, RemoteAll).map_err(Box::new)?;
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
        // SAFETY: as of host_words: the buffer is kept, and these bytes are nobody's but kernels' and copies'.
        let alias = unsafe { registered.buffer().alias(..) };
        let keys = Registered {
            alias,
            remote: registered.remote(),
            keep: Box::new(registered),
        };
        Ok((Self::Gpu(memory), keys))
    }
}

/// Words for peers to read, write and add to.
pub(super) fn host_words(
    pd: &ProtectionDomain,
    context: Option<&Context>,
    len: usize,
) -> Result<(Words, Registered), HeapError> {
    let mut words = Words::shared(len)?;
    if let Some(context) = context {
        words.pin(context)?;
    }
    // SAFETY: the bytes are zeros at first and stay until their owner is dropped. Nobody has a reference to any of them but to atomics, which devices may change.
    let buffer = unsafe { pd.register_raw(words.start(), words.len(), RemoteAll, words.owner()) }?;
    // SAFETY: the buffer is kept until the queue pairs are gone that post it. Nothing ever lends a slice of these bytes: whoever writes what is being put, or reads what is being got, has
    // bytes of either time, as with what peers do to this memory.
    let alias = unsafe { buffer.alias(..) };
    let registered = Registered {
        alias,
        remote: buffer.remote(),
        keep: Box::new(buffer),
    };
    Ok((words, registered))
}
