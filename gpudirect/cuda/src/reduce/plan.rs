//! What a reduction is, checked and turned into what its kernel is launched with: numbers alone, so that the kernels' source can be run by the processor, too.

use core::fmt;

use super::types::{DataType, Form, Operator, Scalar};

/// How many memories one pass reduces at most.
pub const MAX_SOURCES: usize = 8;
/// How many threads a block has at most.
pub const MAX_THREADS: u32 = 512;
/// Bytes of a group of elements that a thread loads and stores at once.
const GROUP: u64 = 16;

/// A memory to be reduced, by its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SourceAt {
    /// Where it begins.
    pub address: u64,
    /// What it is made of.
    pub form: Form,
    /// What each of its elements is multiplied with first, and rounded: of elements alone.
    pub scalar: Option<Scalar>,
}

/// Why memories cannot be reduced.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unfit {
    /// None, or more than a kernel takes.
    #[error(
        "{0} sources to reduce: one pass takes 1 to {MAX_SOURCES}; reduce more of them in several, through partial results"
    )]
    Sources(usize),
    /// Memory between the elements' natural addresses.
    #[error("memory at {address:#x} for elements of {bytes} bytes: its address must be a multiple of that")]
    Misaligned {
        /// Where it begins.
        address: u64,
        /// Of an element, in the memory's form.
        bytes: u64,
    },
    /// Memory beyond the last address there is.
    #[error("{elements} elements at {address:#x} do not end at any address")]
    TooLong {
        /// Where it begins.
        address: u64,
        /// How many.
        elements: u64,
    },
    /// The target lies across a source.
    #[error(
        "the target at {target:#x} lies across the source at {source_at:#x}: it may be a source exactly, in the same form, or must be apart from all"
    )]
    Overlap {
        /// Where the target begins.
        target: u64,
        /// Where the source begins.
        source_at: u64,
    },
    /// A scalar for something that is not multiplied.
    #[error("a scalar for {what}: only sources of elements are multiplied, and only in a sum")]
    Scaled {
        /// Whose it is.
        what: &'static str,
    },
    /// A scalar of another type.
    #[error("a scalar of {scalar} for elements of {data}: it must be of {}, which they accumulate in", data.accumulator())]
    Scalar {
        /// The scalar's type.
        scalar: DataType,
        /// The elements' type.
        data: DataType,
    },
    /// An average over nobody.
    #[error("an average over 0 ranks")]
    NoRanks,
    /// A block's threads.
    #[error("blocks of {0} threads: a multiple of 32 up to {MAX_THREADS} is needed")]
    Threads(u32),
}

/// The kernels: what each is called after the type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Function {
    Sum,
    Prod,
    Min,
    Max,
    Avg,
    PreMulSum,
}

impl Function {
    pub(super) const COUNT: usize = 6;

    /// Those that reductions by `operator` use.
    pub(super) const fn of(operator: Operator) -> &'static [Self] {
        match operator {
            Operator::Sum => &[Self::Sum, Self::PreMulSum],
            Operator::Prod => &[Self::Prod],
            Operator::Min => &[Self::Min],
            Operator::Max => &[Self::Max],
            Operator::Avg { .. } => &[Self::Avg, Self::Sum],
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Prod => "prod",
            Self::Min => "min",
            Self::Max => "max",
            Self::Avg => "avg",
            Self::PreMulSum => "premulsum",
        }
    }
}

/// A kernel: of a type and a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KernelName {
    pub(super) data: DataType,
    pub(super) function: Function,
}

impl fmt::Display for KernelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "reduce_{}_{}", self.data, self.function.name())
    }
}

/// What a kernel is given: `doorbell::Arguments` in kernels/reduce.cu, whose fields are told there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct Arguments {
    sources: [u64; MAX_SOURCES],
    scalars: [u64; MAX_SOURCES],
    into: u64,
    elements: u64,
    head: u64,
    groups: u64,
    count: u32,
    partials: u32,
    divisor: u32,
    reserved: u32,
}

const _: () = assert!(size_of::<Arguments>() == 176);

/// How many threads a reduction has: to be measured. More than it has work for are not launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Threads of a block: a multiple of 32, up to [`MAX_THREADS`].
    pub threads: u32,
    /// Blocks at most. Where there are fewer than tiles, each does several.
    pub blocks: u32,
    /// Groups of 16 bytes that a thread has in flight, as the kernels were built, for types of 2 bytes and more.
    pub unroll: u32,
}

impl Default for Shape {
    /// A block for each tile.
    fn default() -> Self {
        Self {
            threads: MAX_THREADS,
            blocks: i32::MAX as u32,
            unroll: 2,
        }
    }
}

/// A reduction that is ready to be launched: checked, with the work divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reduction {
    /// Its kernel.
    pub kernel: KernelName,
    /// What the kernel is given.
    pub arguments: Arguments,
    /// Blocks of the grid; 0 where there is nothing to do.
    pub blocks: u32,
    /// Threads of each.
    pub threads: u32,
}

impl Reduction {
    /// The reduction of `elements` of each of the `sources`, in their order, into memory of a form at an address.
    ///
    /// # Errors
    /// See [`Unfit`].
    pub fn new(
        data: DataType,
        operator: Operator,
        sources: &[SourceAt],
        into: (Form, u64),
        elements: u64,
        shape: Shape,
    ) -> Result<Self, Unfit> {
        if sources.is_empty() || sources.len() > MAX_SOURCES {
            return Err(Unfit::Sources(sources.len()));
        }
        if shape.threads == 0 || shape.threads > MAX_THREADS || !shape.threads.is_multiple_of(32) {
            return Err(Unfit::Threads(shape.threads));
        }
        let mut arguments = Arguments {
            into: into.1,
            elements,
            count: sources.len() as u32,
            ..Arguments::default()
        };
        let target = extent(data, into.0, into.1, elements)?;
        for (index, source) in sources.iter().enumerate() {
            let memory = extent(data, source.form, source.address, elements)?;
            let same = source.address == into.1 && data.bytes_of(source.form) == data.bytes_of(into.0);
            if !same && memory.start < target.end && target.start < memory.end {
                return Err(Unfit::Overlap {
                    target: into.1,
                    source_at: source.address,
                });
            }
            arguments.sources[index] = source.address;
            if is_partial(data, source.form) {
                arguments.partials |= 1 << index;
            }
        }
        if is_partial(data, into.0) {
            arguments.partials |= 1 << MAX_SOURCES;
        }
        let function = function(data, operator, sources, into.0, &mut arguments)?;
        arguments.divide(data);
        Ok(Self {
            kernel: KernelName { data, function },
            arguments,
            blocks: arguments.blocks(data, shape),
            threads: shape.threads,
        })
    }
}

/// Where memory is partial results of another type than elements are.
fn is_partial(data: DataType, form: Form) -> bool {
    form == Form::Partial && data.accumulator() != data
}

/// The addresses that elements take, checked.
fn extent(data: DataType, form: Form, address: u64, elements: u64) -> Result<core::ops::Range<u64>, Unfit> {
    let bytes = data.bytes_of(form) as u64;
    if !address.is_multiple_of(bytes) {
        return Err(Unfit::Misaligned { address, bytes });
    }
    let end = elements.checked_mul(bytes).and_then(|len| address.checked_add(len));
    end.map(|end| address..end).ok_or(Unfit::TooLong { address, elements })
}

/// The kernel's function for an operator, with what it is to divide by and to multiply with.
fn function(
    data: DataType,
    operator: Operator,
    sources: &[SourceAt],
    into: Form,
    arguments: &mut Arguments,
) -> Result<Function, Unfit> {
    let is_scaled = sources.iter().any(|source| source.scalar.is_some());
    if is_scaled {
        if operator != Operator::Sum {
            return Err(Unfit::Scaled { what: operator.name() });
        }
        for (source, bits) in sources.iter().zip(&mut arguments.scalars) {
            // What is not multiplied is multiplied with one, which changes nothing.
            let scalar = source.scalar.unwrap_or(Scalar::one(data));
            if source.form == Form::Partial && source.scalar.is_some() {
                return Err(Unfit::Scaled {
                    what: "partial results",
                });
            }
            if scalar.over() != data.accumulator() {
                return Err(Unfit::Scalar {
                    scalar: scalar.over(),
                    data,
                });
            }
            *bits = scalar.bits();
        }
        return Ok(Function::PreMulSum);
    }
    Ok(match operator {
        Operator::Sum => Function::Sum,
        Operator::Prod => Function::Prod,
        Operator::Min => Function::Min,
        Operator::Max => Function::Max,
        Operator::Avg { ranks: 0 } => return Err(Unfit::NoRanks),
        // Partial results are divided when they are finished.
        Operator::Avg { .. } if into == Form::Partial => Function::Sum,
        Operator::Avg { ranks } => {
            arguments.divisor = ranks;
            Function::Avg
        }
    })
}

impl Arguments {
    /// Divides the elements into head, groups and tail. Without an element from which on every memory is aligned, all is head.
    fn divide(&mut self, data: DataType) {
        let forms = (0..self.count as usize).map(|index| (self.sources[index], self.partials >> index & 1 == 1));
        let target = (self.into, self.partials >> MAX_SOURCES & 1 == 1);
        let is_aligned = |head: u64| {
            forms.clone().chain([target]).all(|(address, is_partial)| {
                let bytes = if is_partial { 4 } else { data.bytes() as u64 };
                (address + head * bytes).is_multiple_of(GROUP)
            })
        };
        let each = GROUP / data.bytes() as u64;
        match (0..each.min(self.elements)).find(|&head| is_aligned(head)) {
            Some(head) => {
                self.head = head;
                self.groups = (self.elements - head) / each;
            }
            None => self.head = self.elements,
        }
    }

    /// Blocks for a tile each, or for one of the other elements for each thread, whichever are more.
    fn blocks(&self, data: DataType, shape: Shape) -> u32 {
        let threads = u64::from(shape.threads);
        let each = GROUP / data.bytes() as u64;
        let unroll = u64::from(shape.unroll.max(1));
        let tiles = match (self.partials, data.bytes()) {
            (0, 1) => self.groups.div_ceil(threads * unroll.div_ceil(2)),
            (0, _) => self.groups.div_ceil(threads * unroll),
            // Four times four elements for each thread.
            _ => (self.groups * each).div_ceil(threads * 16),
        };
        let single = self.elements - self.groups * each;
        let most = u64::from(shape.blocks.clamp(1, i32::MAX as u32));
        tiles.max(single.div_ceil(threads)).min(most) as u32
    }
}
