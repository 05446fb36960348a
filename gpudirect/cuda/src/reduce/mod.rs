//! Reductions of up to eight memories into one, by kernels that read each memory once: `kernels/reduce.cu`, of which the PTX is part of this crate.
//!
//! Results are those of the collectives' kernels on the processor, bit for bit: sources are reduced in their order, floats of 16 and 8 bits in `f32`, rounded once. What is stored has no NaN but the quiet one without a sign; in
//! [partial results](Form::Partial) signs and payloads of NaNs are unspecified.
//!
//! [`Reducer`] loads a kernel when it is first used, which takes the driver tens of milliseconds to compile; [`Reducer::prepare`] does that beforehand. [`Reduction`] is one launch as a value.

mod plan;
mod types;

use core::fmt;
use std::borrow::Cow;
use std::sync::OnceLock;

use crate::context::Context;
use crate::error::Error;
use crate::kernels::KernelFile;
use crate::memory::Span;
use crate::module::{Kernel, Launch, Module, excerpt};
use crate::stream::Stream;

pub use plan::{Arguments, KernelName, MAX_SOURCES, MAX_THREADS, Reduction, Shape, SourceAt, Unfit};
pub use types::{DataType, Form, Operator, Scalar};

/// A memory to be reduced.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    span: Span<'a>,
    form: Form,
    scalar: Option<Scalar>,
}

impl<'a> Source<'a> {
    /// Elements.
    #[must_use]
    pub fn elements(span: Span<'a>) -> Self {
        Self {
            span,
            form: Form::Element,
            scalar: None,
        }
    }

    /// Partial results.
    #[must_use]
    pub fn partials(span: Span<'a>) -> Self {
        Self {
            form: Form::Partial,
            ..Self::elements(span)
        }
    }

    /// Each element is multiplied with `scalar`, and rounded, before it is added.
    #[must_use]
    pub fn times(self, scalar: impl Into<Scalar>) -> Self {
        Self {
            scalar: Some(scalar.into()),
            ..self
        }
    }
}

/// Why memories were not reduced.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ReduceError {
    /// They cannot be.
    #[error(transparent)]
    Unfit(#[from] Unfit),
    /// The memories are not of one number of elements.
    #[error(
        "memory of {len} bytes for {elements} elements of {bytes} bytes: all memories of a reduction must be equally many elements long"
    )]
    Length {
        /// Bytes of the memory.
        len: usize,
        /// How many elements it must have: those that begin in the target.
        elements: usize,
        /// Of an element, in the memory's form.
        bytes: usize,
    },
    /// The PTX, one of somebody else's making, has no such kernel.
    #[error("the PTX has no kernel {0}")]
    NoKernel(KernelName),
    /// The driver refused.
    #[error(transparent)]
    Driver(#[from] Error),
}

/// The reduction kernels of a context.
pub struct Reducer {
    context: Context,
    ptx: Cow<'static, str>,
    shape: Shape,
    kernels: [OnceLock<Kernel>; plan::Function::COUNT * DataType::ALL.len()],
}

impl Reducer {
    /// The kernels of this crate, launched as measured to be fast.
    #[must_use]
    pub fn new(context: &Context) -> Self {
        Self::with(context, KernelFile::Reduce.ptx(), Shape::default())
    }

    /// Kernels built otherwise (`cargo xtask kernels --unroll 4`), or launched otherwise, to be compared.
    #[must_use]
    pub fn with_ptx(context: &Context, ptx: String, shape: Shape) -> Self {
        Self::with(context, ptx, shape)
    }

    /// The kernels of this crate, launched with as many threads as `shape` says.
    #[must_use]
    pub fn with_shape(context: &Context, shape: Shape) -> Self {
        Self::with(context, KernelFile::Reduce.ptx(), shape)
    }

    fn with(context: &Context, ptx: impl Into<Cow<'static, str>>, shape: Shape) -> Self {
        Self {
            context: context.clone(),
            ptx: ptx.into(),
            shape,
            kernels: [const { OnceLock::new() }; _],
        }
    }

    /// How many threads its reductions have.
    #[must_use]
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Puts the reduction of `sources`, in their order, `into` a memory of a form into `stream`. The target may be one of the sources, and must else be apart from them. All of the memories must be as many elements long.
    ///
    /// A memory of another device must be mapped for this one; what others have written to it is seen if what they did before comes before this in the stream.
    ///
    /// # Errors
    /// [`ReduceError`]; nothing was done. What fails while the kernel runs is the error of a later call.
    pub fn reduce(
        &self,
        stream: &Stream,
        data: DataType,
        operator: Operator,
        sources: &[Source<'_>],
        into: (Form, Span<'_>),
    ) -> Result<(), ReduceError> {
        let count = sources.len();
        if count == 0 || count > MAX_SOURCES {
            return Err(Unfit::Sources(count).into());
        }
        let elements = into.1.len() / data.bytes_of(into.0);
        length(data, into.0, into.1, elements)?;
        let mut at = [SourceAt {
            address: 0,
            form: Form::Element,
            scalar: None,
        }; MAX_SOURCES];
        let mut uses = [into.1; MAX_SOURCES + 1];
        for (index, source) in sources.iter().enumerate() {
            length(data, source.form, source.span, elements)?;
            at[index] = SourceAt {
                address: source.span.device_ptr().0,
                form: source.form,
                scalar: source.scalar,
            };
            uses[index + 1] = source.span;
        }
        let into = (into.0, into.1.device_ptr().0);
        let reduction = Reduction::new(data, operator, &at[..count], into, elements as u64, self.shape)?;
        // SAFETY: every span holds the elements that the kernel reads or writes in it, and is kept; the target is a source exactly or apart from all.
        unsafe { self.launch(stream, &reduction, &uses[..=count]) }
    }

    /// Puts a reduction of memory by its addresses into `stream`: of a peer's, or of PyTorch's. `uses` is kept until it is done.
    ///
    /// # Safety
    /// All addresses must be those of memory that the device reaches, with as many elements as the reduction was made for, until it is done; nobody else may write what it reads, or touch what it writes, meanwhile. The kernels' PTX must
    /// be of this crate's source.
    ///
    /// # Errors
    /// [`ReduceError::Driver`] or [`ReduceError::NoKernel`].
    pub unsafe fn launch(&self, stream: &Stream, reduction: &Reduction, uses: &[Span<'_>]) -> Result<(), ReduceError> {
        if reduction.blocks == 0 {
            return Ok(());
        }
        let kernel = self.kernel(reduction.kernel)?;
        let launch = Launch::linear(reduction.blocks, reduction.threads);
        // SAFETY: the kernel's only argument is this struct; what is in it, the caller answers for.
        unsafe { kernel.launch(stream, launch, &[&reduction.arguments], uses)? };
        Ok(())
    }

    /// Loads the kernels of `data` and `operator`, which a first reduction would do: before a stream is captured, or measured.
    ///
    /// # Errors
    /// [`ReduceError::Driver`] or [`ReduceError::NoKernel`].
    pub fn prepare(&self, data: DataType, operator: Operator) -> Result<(), ReduceError> {
        for function in plan::Function::of(operator) {
            self.kernel(KernelName {
                data,
                function: *function,
            })?;
        }
        Ok(())
    }

    /// A kernel, alone in a module of its own: to compile all takes the driver seconds.
    fn kernel(&self, name: KernelName) -> Result<&Kernel, ReduceError> {
        let slot = &self.kernels[name.data as usize * plan::Function::COUNT + name.function as usize];
        if let Some(kernel) = slot.get() {
            return Ok(kernel);
        }
        let text = name.to_string();
        let ptx = excerpt(&self.ptx, &text).ok_or(ReduceError::NoKernel(name))?;
        let kernel = Module::from_ptx(&self.context, &ptx)?.kernel(&text)?;
        Ok(slot.get_or_init(|| kernel))
    }
}

impl fmt::Debug for Reducer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reducer")
            .field("device", &self.context.device())
            .field("shape", &self.shape)
            .finish_non_exhaustive()
    }
}

/// Fails unless a memory is exactly as many elements long.
fn length(data: DataType, form: Form, span: Span<'_>, elements: usize) -> Result<(), ReduceError> {
    let (len, bytes) = (span.len(), data.bytes_of(form));
    if elements.checked_mul(bytes) == Some(len) {
        Ok(())
    } else {
        Err(ReduceError::Length { len, elements, bytes })
    }
}

#[cfg(test)]
mod tests;
