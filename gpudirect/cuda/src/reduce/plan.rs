//! A reduction as validated launch parameters: numbers alone, which host builds of kernels take.

use core::fmt;

use super::types::{DataType, OperandKind, Operator, Scalar};

/// The maximum number of sources per pass.
pub const MAX_SOURCES: usize = 8;
/// The maximum number of threads per block.
pub const MAX_THREADS: u32 = 512;
/// Bytes of a group, the elements that a thread loads or stores at once, where every memory can be
/// aligned to it.
const WIDE_GROUP: u64 = 16;

/// A source given by its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SourceOperand {
    /// Its address.
    pub address: u64,
    /// Elements or partial results.
    pub kind: OperandKind,
    /// The factor applied to each element first, with rounding; for elements only.
    pub scalar: Option<Scalar>,
}

/// Why a reduction is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidReduction {
    /// No sources, or more than a kernel takes.
    #[error(
        "{0} sources to reduce: one pass takes 1 to {MAX_SOURCES}; reduce more of them in several, through partial results"
    )]
    Sources(usize),
    /// A memory is not aligned to its elements.
    #[error("memory at {address:#x} for elements of {bytes} bytes: its address must be a multiple of the element size")]
    Misaligned {
        /// Its address.
        address: u64,
        /// Bytes per element, for the operand's kind.
        bytes: u64,
    },
    /// A memory exceeds the address space.
    #[error("{elements} elements at {address:#x} exceed the address space")]
    TooLong {
        /// Its address.
        address: u64,
        /// The number of elements.
        elements: u64,
    },
    /// The target overlaps a source.
    #[error(
        "the target at {target:#x} overlaps the source at {source_at:#x}: it may be exactly a source, of the same kind, or must overlap none"
    )]
    Overlap {
        /// The target's address.
        target: u64,
        /// The source's address.
        source_at: u64,
    },
    /// A scalar for an operand that cannot be scaled.
    #[error("a scalar for {what}: only sources of elements can be scaled, and only in a sum")]
    Scaled {
        /// The operand.
        what: &'static str,
    },
    /// A scalar of the wrong type.
    #[error("a scalar of {scalar} for elements of {data}: it must be of {}, their accumulator type", data.accumulator())]
    Scalar {
        /// The scalar's type.
        scalar: DataType,
        /// The elements' type.
        data: DataType,
    },
    /// An average over zero ranks.
    #[error("an average over 0 ranks")]
    NoRanks,
    /// An invalid number of threads per block.
    #[error("blocks of {0} threads: a multiple of 32 up to {MAX_THREADS} is needed")]
    Threads(u32),
}

/// The kernel functions; their names follow the type's in the kernel's name.
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
    const ALL: [Self; 6] = [Self::Sum, Self::Prod, Self::Min, Self::Max, Self::Avg, Self::PreMulSum];
    pub(super) const COUNT: usize = Self::ALL.len();

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

/// A kernel, by type and function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KernelName {
    pub(super) data: DataType,
    pub(super) function: Function,
}

impl KernelName {
    pub(super) fn all() -> impl Iterator<Item = Self> {
        let of = |data| Function::ALL.into_iter().map(move |function| Self { data, function });
        DataType::ALL.into_iter().flat_map(of)
    }
}

impl fmt::Display for KernelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "reduce_{}_{}", self.data, self.function.name())
    }
}

crate::kernel_arguments! {
    constants {
        const MOST_SOURCES: i32 = MAX_SOURCES as i32;
        /// Per block.
        const MOST_THREADS: i32 = MAX_THREADS as i32;
    }
    /// The launch argument of a reduction.
    // fields: the layout of the kernel's parameter.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct Arguments as Arguments in "reduce" {
        sources: [u64; MAX_SOURCES],
        /// For scaled sums: the bits of each source's scalar, in the accumulator type. Partial
        /// results are not scaled.
        scalars: [u64; MAX_SOURCES],
        into: u64,
        elements: u64,
        /// Elements before the first group, and the number of groups.
        head: u64,
        groups: u64,
        count: u32,
        /// A bit per source that is partial results, and one above them for the target.
        partials: u32,
        /// For averages.
        divisor: Divisor,
        /// Bytes of a group in memories of elements.
        group: u32,
    }
}

crate::kernel_arguments! {
    constants {}
    /// A number of ranks to divide by, with its reciprocal: for narrow floats, `high` is the
    /// greatest binary32 below it, and `low` the rest; for 8-bit integers `high` is the least
    /// multiple of 2^-16 above it.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub(super) struct Divisor as Divisor in "divisor" {
        pub(super) ranks: u32,
        pub(super) high: u32,
        pub(super) low: u32,
    }
}

impl crate::arguments::Field for Divisor {
    const TYPE: &'static str = "Divisor";
}

impl Divisor {
    pub(super) fn new(data: DataType, ranks: u32) -> Self {
        let (high, low) = match data {
            DataType::I8 | DataType::U8 => (65536 / ranks + 1, 0),
            _ => {
                let reciprocal = f64::from(ranks).recip();
                let nearest = reciprocal as f32;
                let below = if f64::from(nearest) < reciprocal {
                    nearest
                } else {
                    nearest.next_down()
                };
                let rest = (reciprocal - f64::from(below)) as f32;
                (below.to_bits(), rest.to_bits())
            }
        };
        Self { ranks, high, low }
    }
}

/// A launch configuration, for tuning. No more threads are launched than there is work for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchConfig {
    /// Threads per block: a multiple of 32, up to [`MAX_THREADS`].
    pub threads: u32,
    /// The maximum number of blocks. With fewer blocks than tiles, each block loops.
    pub blocks: u32,
    /// Groups of 16 bytes in flight per thread, as built into kernels of types beyond one byte.
    pub unroll: u32,
}

impl Default for LaunchConfig {
    /// One block per tile.
    fn default() -> Self {
        Self {
            threads: MAX_THREADS,
            blocks: i32::MAX as u32,
            unroll: 2,
        }
    }
}

/// A validated reduction, ready to launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reduction {
    /// Its kernel.
    pub kernel: KernelName,
    /// Its parameter.
    pub arguments: Arguments,
    /// Blocks of the grid; 0 if there is nothing to do.
    pub blocks: u32,
    /// Threads per block.
    pub threads: u32,
}

impl Reduction {
    /// Reduces `elements` elements of each source, in order, into memory of a kind and address.
    ///
    /// # Errors
    /// See [`InvalidReduction`].
    pub fn new(
        data: DataType,
        operator: Operator,
        sources: &[SourceOperand],
        into: (OperandKind, u64),
        elements: u64,
        config: LaunchConfig,
    ) -> Result<Self, InvalidReduction> {
        if sources.is_empty() || sources.len() > MAX_SOURCES {
            return Err(InvalidReduction::Sources(sources.len()));
        }
        if config.threads == 0 || config.threads > MAX_THREADS || !config.threads.is_multiple_of(32) {
            return Err(InvalidReduction::Threads(config.threads));
        }
        let mut arguments = Arguments {
            into: into.1,
            elements,
            count: sources.len() as u32,
            ..Arguments::default()
        };
        let target = extent(data, into.0, into.1, elements)?;
        for (index, source) in sources.iter().enumerate() {
            let memory = extent(data, source.kind, source.address, elements)?;
            let same = source.address == into.1 && data.bytes_of(source.kind) == data.bytes_of(into.0);
            if !same && memory.start < target.end && target.start < memory.end {
                return Err(InvalidReduction::Overlap {
                    target: into.1,
                    source_at: source.address,
                });
            }
            arguments.sources[index] = source.address;
            if is_partial(data, source.kind) {
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
            blocks: arguments.blocks(data, config),
            threads: config.threads,
        })
    }
}

/// Whether the memory holds partial results whose type differs from the elements'.
fn is_partial(data: DataType, kind: OperandKind) -> bool {
    kind == OperandKind::Partial && data.accumulator() != data
}

fn extent(
    data: DataType,
    kind: OperandKind,
    address: u64,
    elements: u64,
) -> Result<core::ops::Range<u64>, InvalidReduction> {
    let bytes = data.bytes_of(kind) as u64;
    if !address.is_multiple_of(bytes) {
        return Err(InvalidReduction::Misaligned { address, bytes });
    }
    let end = elements.checked_mul(bytes).and_then(|len| address.checked_add(len));
    end.map(|end| address..end)
        .ok_or(InvalidReduction::TooLong { address, elements })
}

/// The kernel function for an operator; sets the divisor and the scalars.
fn function(
    data: DataType,
    operator: Operator,
    sources: &[SourceOperand],
    into: OperandKind,
    arguments: &mut Arguments,
) -> Result<Function, InvalidReduction> {
    let is_scaled = sources.iter().any(|source| source.scalar.is_some());
    if is_scaled {
        if operator != Operator::Sum {
            return Err(InvalidReduction::Scaled { what: operator.name() });
        }
        for (source, bits) in sources.iter().zip(&mut arguments.scalars) {
            // A factor of one changes nothing.
            let scalar = source.scalar.unwrap_or(Scalar::one(data));
            if source.kind == OperandKind::Partial && source.scalar.is_some() {
                return Err(InvalidReduction::Scaled {
                    what: "partial results",
                });
            }
            if scalar.data_type() != data.accumulator() {
                return Err(InvalidReduction::Scalar {
                    scalar: scalar.data_type(),
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
        Operator::Avg { ranks: 0 } => return Err(InvalidReduction::NoRanks),
        // Partial results are divided when they are finished.
        Operator::Avg { .. } if into == OperandKind::Partial => Function::Sum,
        Operator::Avg { ranks } => {
            arguments.divisor = Divisor::new(data, ranks);
            Function::Avg
        }
    })
}

impl Arguments {
    /// Divides the elements into head, groups and tail. Groups are of 16 bytes if every memory can
    /// be aligned to that; otherwise the target alone is aligned, or with partial results nothing.
    fn divide(&mut self, data: DataType) {
        let forms = (0..self.count as usize).map(|index| (self.sources[index], self.partials >> index & 1 == 1));
        let target = (self.into, self.partials >> MAX_SOURCES & 1 == 1);
        let is_aligned = |head: u64| {
            forms.clone().chain([target]).all(|(address, is_partial)| {
                let bytes = if is_partial { 4 } else { data.bytes() as u64 };
                (address + head * bytes).is_multiple_of(WIDE_GROUP)
            })
        };
        let bytes = data.bytes() as u64;
        let each = WIDE_GROUP / bytes;
        let wide = (0..each.min(self.elements)).find(|&head| is_aligned(head));
        let (head, group) = match wide {
            Some(head) => (head, WIDE_GROUP),
            None if self.partials != 0 => (self.elements, WIDE_GROUP),
            None => {
                let group = bytes.max(4);
                let head = (self.into.next_multiple_of(group) - self.into) / bytes;
                (head.min(self.elements), group)
            }
        };
        (self.head, self.group) = (head, group as u32);
        self.groups = (self.elements - head) / (group / bytes);
    }

    /// Groups per thread and tile, as in the kernel.
    fn unroll(&self, data: DataType, config: LaunchConfig) -> u64 {
        let wide = u64::from(config.unroll.max(1));
        match (self.partials, u64::from(self.group), data.bytes()) {
            (0, WIDE_GROUP, 1) => wide.div_ceil(2),
            (0, WIDE_GROUP, _) => wide,
            (0, _, 4) => 8,
            (0, ..) => 4,
            // Each thread takes four times four elements.
            (_, _, bytes) => bytes as u64,
        }
    }

    /// The larger of one block per tile and one thread per head or tail element.
    fn blocks(&self, data: DataType, config: LaunchConfig) -> u32 {
        let threads = u64::from(config.threads);
        let tiles = self.groups.div_ceil(threads * self.unroll(data, config));
        let single = self.elements - self.groups * (u64::from(self.group) / data.bytes() as u64);
        let most = u64::from(config.blocks.clamp(1, i32::MAX as u32));
        tiles.max(single.div_ceil(threads)).min(most) as u32
    }
}

#[cfg(test)]
mod tests {
    use crate::arguments::Arguments as _;

    #[test]
    fn the_kernels_headers_are_committed() {
        super::Arguments::header().check(env!("CARGO_MANIFEST_DIR"));
        super::Divisor::header().check(env!("CARGO_MANIFEST_DIR"));
    }
}
