//! Reductions of up to eight memories into one by `kernels/reduce.cu`, reading each memory once.
//!
//! Results are bit-identical to those of the collectives' host kernels: sources are reduced in
//! order, 16- and 8-bit floats in `f32` with one rounding. Stored NaNs are the positive quiet NaN;
//! in [partial results](OperandKind::Partial) their signs and payloads are unspecified.
//!
//! [`Reducer`] loads a kernel on first use (for tens of milliseconds if the driver compiles it) or by
//! [`Reducer::prepare`]. [`Reduction`] is one launch as a value.

mod plan;
mod types;

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::OnceLock;

use crate::context::Context;
use crate::error::Error;
use crate::kernels::KernelFile;
use crate::loader::Loader;
use crate::memory::Span;
use crate::module::{Kernel, Launch};
use crate::stream::Stream;

pub use plan::{
    Arguments, InvalidReduction, KernelName, LaunchConfig, MAX_SOURCES, MAX_THREADS, Reduction, SourceOperand,
};
pub use types::{DataType, OperandKind, Operator, Scalar};

/// A source of a reduction.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    span: Span<'a>,
    kind: OperandKind,
    scalar: Option<Scalar>,
}

impl<'a> Source<'a> {
    /// Elements.
    #[must_use]
    pub fn elements(span: Span<'a>) -> Self {
        Self {
            span,
            kind: OperandKind::Element,
            scalar: None,
        }
    }

    /// Partial results.
    #[must_use]
    pub fn partials(span: Span<'a>) -> Self {
        Self {
            kind: OperandKind::Partial,
            ..Self::elements(span)
        }
    }

    /// Multiplies each element by `scalar`, with rounding, before it is added.
    #[must_use]
    pub fn times(self, scalar: impl Into<Scalar>) -> Self {
        Self {
            scalar: Some(scalar.into()),
            ..self
        }
    }
}

/// A failed reduction.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ReduceError {
    /// The operands are invalid.
    #[error(transparent)]
    InvalidReduction(#[from] InvalidReduction),
    /// The operands have different element counts.
    #[error(
        "memory of {len} bytes for {elements} elements of {bytes} bytes: all memories of a reduction must have the same number of elements"
    )]
    Length {
        /// Bytes of the memory.
        len: usize,
        /// The required number of elements: that of the target.
        elements: usize,
        /// Bytes per element, for the operand's kind.
        bytes: usize,
    },
    /// PTX of another build lacks the kernel.
    #[error("the PTX has no kernel {0}")]
    NoKernel(KernelName),
    /// The driver's error.
    #[error(transparent)]
    Driver(#[from] Error),
}

/// The reduction kernels of a context.
pub struct Reducer {
    context: Context,
    loader: Loader,
    config: LaunchConfig,
    kernels: [OnceLock<Kernel>; plan::Function::COUNT * DataType::ALL.len()],
}

impl Reducer {
    /// The embedded kernels with the launch configuration that measured fastest.
    #[must_use]
    pub fn new(context: &Context) -> Self {
        Self::with_config(context, LaunchConfig::default())
    }

    /// The embedded kernels with this launch configuration.
    #[must_use]
    pub fn with_config(context: &Context, config: LaunchConfig) -> Self {
        Self::of(context, Loader::new(context, KernelFile::Reduce), config)
    }

    /// Kernels of another build (`cargo xtask kernels --unroll 4`), for comparison.
    #[must_use]
    pub fn with_ptx(context: &Context, ptx: impl Into<Cow<'static, str>>, config: LaunchConfig) -> Self {
        Self::of(context, Loader::with_ptx(context, ptx), config)
    }

    fn of(context: &Context, loader: Loader, config: LaunchConfig) -> Self {
        Self {
            context: context.clone(),
            loader,
            config,
            kernels: [const { OnceLock::new() }; _],
        }
    }

    /// Its launch configuration.
    #[must_use]
    pub fn config(&self) -> LaunchConfig {
        self.config
    }

    /// Enqueues the reduction of `sources`, in order, into `into`, which is exactly one of them or
    /// overlaps none. All operands must have the same element count.
    ///
    /// Memory of another device must be mapped for this one; other writers' data is visible if it
    /// is ordered before this in the stream.
    ///
    /// # Errors
    /// [`ReduceError`]: nothing was enqueued. A later call reports failures of the kernel.
    pub fn reduce(
        &self,
        stream: &Stream,
        data: DataType,
        operator: Operator,
        sources: &[Source<'_>],
        into: (OperandKind, Span<'_>),
    ) -> Result<(), ReduceError> {
        let count = sources.len();
        if count == 0 || count > MAX_SOURCES {
            return Err(InvalidReduction::Sources(count).into());
        }
        let elements = into.1.len() / data.bytes_of(into.0);
        length(data, into.0, into.1, elements)?;
        let mut at = [SourceOperand {
            address: 0,
            kind: OperandKind::Element,
            scalar: None,
        }; MAX_SOURCES];
        let mut uses = [into.1; MAX_SOURCES + 1];
        for (index, source) in sources.iter().enumerate() {
            length(data, source.kind, source.span, elements)?;
            at[index] = SourceOperand {
                address: source.span.device_ptr().0,
                kind: source.kind,
                scalar: source.scalar,
            };
            uses[index + 1] = source.span;
        }
        let into = (into.0, into.1.device_ptr().0);
        let reduction = Reduction::new(data, operator, &at[..count], into, elements as u64, self.config)?;
        // SAFETY: every span holds the elements that the kernel accesses in it, and is kept; the
        // target is exactly a source or overlaps none.
        unsafe { self.launch(stream, &reduction, &uses[..=count]) }
    }

    /// Enqueues a reduction of memory by address (a peer's, PyTorch's); `uses` is kept until then.
    ///
    /// # Safety
    /// Until it is done, each address must be accessible to the device and hold the element count
    /// of the reduction; nothing else may write its sources or access its target. The PTX must be
    /// built from this crate's source.
    ///
    /// # Errors
    /// [`ReduceError::Driver`] or [`ReduceError::NoKernel`].
    pub unsafe fn launch(&self, stream: &Stream, reduction: &Reduction, uses: &[Span<'_>]) -> Result<(), ReduceError> {
        if reduction.blocks == 0 {
            return Ok(());
        }
        let kernel = self.kernel(reduction.kernel)?;
        let launch = Launch::linear(reduction.blocks, reduction.threads);
        // SAFETY: this struct is the kernel's only parameter; the caller vouches for its contents.
        unsafe { kernel.launch(stream, launch, &[&reduction.arguments], uses)? };
        Ok(())
    }

    /// Loads the kernels of `data` and `operator` in advance: before a capture, and before any work
    /// of the context waits for another rank, as loading may wait for that work.
    ///
    /// # Errors
    /// [`ReduceError::Driver`] or [`ReduceError::NoKernel`].
    pub fn prepare(&self, data: DataType, operator: Operator) -> Result<(), ReduceError> {
        let functions = plan::Function::of(operator).iter();
        self.load(functions.map(|function| KernelName {
            data,
            function: *function,
        }))
    }

    /// Loads all kernels in advance.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare).
    pub fn prepare_all(&self) -> Result<(), ReduceError> {
        self.load(KernelName::all())
    }

    fn kernel(&self, name: KernelName) -> Result<&Kernel, ReduceError> {
        let slot = self.slot(name);
        if slot.get().is_none() {
            self.load([name])?;
        }
        slot.get().ok_or(ReduceError::NoKernel(name))
    }

    fn load(&self, names: impl IntoIterator<Item = KernelName>) -> Result<(), ReduceError> {
        let entries: HashMap<_, _> = self.loader.entries().map(|entry| (entry.name, entry)).collect();
        for name in names {
            let slot = self.slot(name);
            if slot.get().is_none() {
                let text = name.to_string();
                let entry = entries.get(&*text).ok_or(ReduceError::NoKernel(name))?;
                let kernel = self.loader.kernel(entry)?;
                // Another thread may have loaded it meanwhile.
                let _ = slot.set(kernel);
            }
        }
        Ok(())
    }

    fn slot(&self, name: KernelName) -> &OnceLock<Kernel> {
        &self.kernels[name.data as usize * plan::Function::COUNT + name.function as usize]
    }
}

debug_fields!(Reducer, self, device = self.context.device(), shape = self.config);

/// Checks that a memory holds exactly this many elements.
fn length(data: DataType, kind: OperandKind, span: Span<'_>, elements: usize) -> Result<(), ReduceError> {
    let (len, bytes) = (span.len(), data.bytes_of(kind));
    if elements.checked_mul(bytes) == Some(len) {
        Ok(())
    } else {
        Err(ReduceError::Length { len, elements, bytes })
    }
}

#[cfg(test)]
mod tests;
