//! Every type, operator, number of sources, operand kind, alias, alignment and odd length: results
//! are bit-identical to the CPU's and within bounds of `f64`, and nothing else is written.

use anyhow::{Context, Result, bail};
use doorbell_collectives::{
    ReduceOp,
    kernel::{Function, Scalar as HostScalar, bf16, f16},
    plan::BlockForm as HostForm,
};
use doorbell_cuda::reduce::{
    DataType, LaunchConfig, MAX_SOURCES, OperandKind, Operator, Reduction, Scalar, SourceOperand,
};

use super::{Device, Random, bounds, data_type, form};

/// Fills the memory around sources and target.
const GUARD: u8 = 0xa5;
/// Around the lengths of groups and of tiles; the last is several tiles of the largest blocks.
const LENGTHS: &[usize] = &[0, 1, 2, 3, 7, 15, 16, 17, 31, 33, 64, 127, 129, 500, 1025, 4099, 20_011];
const QUICK_LENGTHS: &[usize] = &[1, 17, 1025];

/// The extent of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// All.
    Full,
    /// Few lengths and few numbers of sources: for tools that slow everything down a hundredfold.
    Quick,
}

/// The maximum bytes of memory of a case.
pub const MEMORY: usize = (MAX_SOURCES + 1) * (20_011 * 8 + 1024);

const OPERATORS: [ReduceOp; 6] = [
    ReduceOp::Sum,
    ReduceOp::Prod,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Avg,
    ReduceOp::PreMulSum,
];

#[derive(Debug, Clone, Copy)]
enum Alignment {
    /// All to 256 bytes.
    Best,
    /// All by the same number of elements off that.
    Alike,
    /// Each differently.
    Apart,
}

#[derive(Debug, Clone, Copy)]
struct PlacedOperand {
    kind: OperandKind,
    offset: usize,
}

#[derive(Debug)]
struct Case {
    data: DataType,
    op: ReduceOp,
    ranks: u32,
    sources: Vec<PlacedOperand>,
    /// The factor of each source of elements.
    factors: Vec<f64>,
    into: PlacedOperand,
    elements: usize,
    shape: LaunchConfig,
    /// Numbers of at most 1, whose results can be bounded; otherwise random bits.
    ordinary: bool,
}

/// Runs all cases; returns their number.
pub fn run(device: &mut dyn Device, extent: Extent) -> Result<u64> {
    let mut random = Random::new(8);
    let mut cases = 0;
    let (lengths, counts): (_, &[usize]) = match extent {
        Extent::Full => (LENGTHS, &[1, 2, 3, 4, 5, 6, 7, 8]),
        Extent::Quick => (QUICK_LENGTHS, &[1, 2, 8]),
    };
    for data in DataType::ALL {
        for op in OPERATORS {
            for &count in counts {
                for &elements in lengths {
                    for alignment in [Alignment::Best, Alignment::Alike, Alignment::Apart] {
                        for ordinary in [false, true] {
                            let case = Case::draw(&mut random, data, op, count, elements, alignment, ordinary);
                            case.check(device, &mut random)
                                .with_context(|| format!("{case:?}, {alignment:?}"))?;
                            cases += 1;
                        }
                    }
                }
            }
        }
    }
    Ok(cases)
}

impl Case {
    fn draw(
        random: &mut Random,
        data: DataType,
        op: ReduceOp,
        count: usize,
        elements: usize,
        alignment: Alignment,
        ordinary: bool,
    ) -> Self {
        let is_mixed = random.below(3) == 0;
        let alike = random.below(16);
        let mut end = 0;
        let mut operand = |random: &mut Random| {
            let kind = if is_mixed && random.below(2) == 0 {
                OperandKind::Partial
            } else {
                OperandKind::Element
            };
            let shift = match alignment {
                Alignment::Best => 0,
                Alignment::Alike => alike,
                Alignment::Apart => random.below(16),
            };
            let offset = end + 128 + shift * data.bytes_of(kind);
            // The next one starts behind 128 guard bytes.
            end = (offset + elements * data.bytes_of(kind) + 128).next_multiple_of(256);
            PlacedOperand { kind, offset }
        };
        let sources: Vec<PlacedOperand> = (0..count).map(|_| operand(random)).collect();
        let into = match random.below(2 * count) {
            index if index < count => sources[index],
            _ => operand(random),
        };
        Self {
            data,
            op,
            ranks: [count as u32, 3, 300, 70_000][random.below(4)],
            sources,
            factors: (0..count)
                .map(|_| (random.unit() * 4.0 * 256.0).round() / 256.0)
                .collect(),
            into,
            elements,
            shape: LaunchConfig {
                threads: [32, 64, 256, 512][random.below(4)],
                blocks: [1, 3, 1 << 20][random.below(3)],
                unroll: 2,
            },
            ordinary,
        }
    }

    fn check(&self, device: &mut dyn Device, random: &mut Random) -> Result<()> {
        let places = || self.sources.iter().chain([&self.into]);
        let end = |operand: &PlacedOperand| operand.offset + self.elements * self.data.bytes_of(operand.kind);
        let len = places().map(end).max().unwrap_or(0) + 128;
        if len > device.len() {
            bail!("{len} bytes are needed, the device has {}", device.len());
        }
        let mut before = vec![GUARD; len];
        for operand in &self.sources {
            self.fill(random, *operand, &mut before[operand.offset..end(operand)]);
        }
        let mut expected = before.clone();
        self.reduce_on_host(&mut expected)?;

        let mut got = before.clone();
        device.reduce(&self.reduction(device.address())?, &mut got)?;

        let target = self.into.offset..end(&self.into);
        self.strip_payloads(&mut expected[target.clone()]);
        self.strip_payloads(&mut got[target.clone()]);
        if let Some(at) = (0..len).find(|&at| got[at] != expected[at]) {
            let Some(element) = at.checked_sub(target.start).filter(|_| at < target.end) else {
                bail!("byte {at}, which is not of the target, was written");
            };
            let size = self.data.bytes_of(self.into.kind);
            let element = element / size;
            let of = |bytes: &[u8]| bytes[target.start + element * size..][..size].to_vec();
            let operands: Vec<Vec<u8>> = self
                .sources
                .iter()
                .map(|source| {
                    let size = self.data.bytes_of(source.kind);
                    before[source.offset + element * size..][..size].to_vec()
                })
                .collect();
            bail!(
                "element {element} is {:02x?}, must be {:02x?}, of {operands:02x?}",
                of(&got),
                of(&expected)
            );
        }
        if self.ordinary {
            self.check_bounds(&before, &got[target])
        } else {
            Ok(())
        }
    }

    fn reduction(&self, address: u64) -> Result<Reduction> {
        let sources: Vec<SourceOperand> = self
            .sources
            .iter()
            .enumerate()
            .map(|(index, operand)| SourceOperand {
                address: address + operand.offset as u64,
                kind: operand.kind,
                scalar: self.factor(index).map(|factor| self.scalar(factor).0),
            })
            .collect();
        let operator = match self.op {
            ReduceOp::Sum | ReduceOp::PreMulSum => Operator::Sum,
            ReduceOp::Prod => Operator::Prod,
            ReduceOp::Min => Operator::Min,
            ReduceOp::Max => Operator::Max,
            ReduceOp::Avg => Operator::Avg { ranks: self.ranks },
        };
        let into = (self.into.kind, address + self.into.offset as u64);
        Ok(Reduction::new(
            self.data,
            operator,
            &sources,
            into,
            self.elements as u64,
            self.shape,
        )?)
    }

    fn factor(&self, index: usize) -> Option<f64> {
        let is_multiplied = self.op == ReduceOp::PreMulSum && self.sources[index].kind == OperandKind::Element;
        is_multiplied.then_some(self.factors[index])
    }

    fn scalar(&self, factor: f64) -> (Scalar, HostScalar) {
        macro_rules! of {
            ($type:ty) => {{
                let value = factor as $type;
                (value.into(), HostScalar::of(value))
            }};
        }
        match self.data.accumulator() {
            DataType::I8 => of!(i8),
            DataType::U8 => of!(u8),
            DataType::I32 => of!(i32),
            DataType::U32 => of!(u32),
            DataType::I64 => of!(i64),
            DataType::U64 => of!(u64),
            DataType::F64 => of!(f64),
            _ => of!(f32),
        }
    }

    fn fill(&self, random: &mut Random, operand: PlacedOperand, bytes: &mut [u8]) {
        let size = self.data.bytes_of(operand.kind);
        for element in bytes.chunks_exact_mut(size) {
            let bits = match (self.data, operand.kind) {
                _ if !self.ordinary && random.below(4) > 0 => random.bits(),
                _ if !self.ordinary => self.special(random, operand.kind),
                (DataType::F16, OperandKind::Element) => f16::from_f64(random.unit()).to_bits().into(),
                (DataType::Bf16, OperandKind::Element) => bf16::from_f64(random.unit()).to_bits().into(),
                // Exponents up to that of 1, and any fraction.
                (DataType::F8E4M3, OperandKind::Element) => random.below(0x38) as u64 | (random.bits() & 0x80),
                (DataType::F8E5M2, OperandKind::Element) => random.below(0x3c) as u64 | (random.bits() & 0x80),
                (DataType::F64, _) => random.unit().to_bits(),
                _ if self.data.accumulator() == DataType::F32 => (random.unit() as f32).to_bits().into(),
                _ => random.below(100) as u64,
            };
            element.copy_from_slice(&bits.to_le_bytes()[..size]);
        }
    }

    /// A boundary value of the type: zero, the least number, infinity, its neighbours, and the
    /// greatest, of either sign; for integers 0, 1, −1 and both limits.
    fn special(&self, random: &mut Random, kind: OperandKind) -> u64 {
        let exponents: u64 = match (self.data, kind) {
            (DataType::F16, OperandKind::Element) => 0x7c00,
            (DataType::Bf16, OperandKind::Element) => 0x7f80,
            (DataType::F8E4M3, OperandKind::Element) => 0x78,
            (DataType::F8E5M2, OperandKind::Element) => 0x7c,
            (DataType::F64, _) => 0x7ff << 52,
            _ if self.data.accumulator() == DataType::F32 => 0x7f80_0000,
            _ => 0,
        };
        let magnitude = [0, 1, exponents, exponents.wrapping_sub(1), exponents | 1, u64::MAX >> 1][random.below(6)];
        let bits = 8 * self.data.bytes_of(kind);
        let mask = (1 << (bits - 1)) - 1;
        magnitude & mask | (random.bits() & 1) << (bits - 1)
    }

    /// The same by the CPU's kernels.
    fn reduce_on_host(&self, memory: &mut [u8]) -> Result<()> {
        let data = data_type(self.data);
        let function = Function::new(data, self.op, self.ranks)?;
        let base = memory.as_mut_ptr();
        // Scaled sources are copied: a source is not written.
        let mut multiplied = vec![vec![0u8; self.elements * self.data.bytes()]; self.sources.len()];
        let mut sources: Vec<(HostForm, *const u8)> = Vec::new();
        for (index, (operand, copy)) in self.sources.iter().zip(&mut multiplied).enumerate() {
            let at = base.wrapping_add(operand.offset);
            let Some(factor) = self.factor(index) else {
                sources.push((form(operand.kind), at));
                continue;
            };
            // SAFETY: the source lies in the memory, and the copy has the same length.
            unsafe { function.scale(self.scalar(factor).1, at, copy.as_mut_ptr(), self.elements)? };
            sources.push((HostForm::Element, copy.as_ptr()));
        }
        let into = (form(self.into.kind), base.wrapping_add(self.into.offset));
        // SAFETY: all lie in the memory or the copies; the target is exactly a source of the same
        // form, or overlaps none.
        unsafe { function.reduce(&sources, into, self.elements) };
        Ok(())
    }

    /// Partial results have NaNs with arbitrary payloads.
    fn strip_payloads(&self, target: &mut [u8]) {
        if self.into.kind != OperandKind::Partial {
            return;
        }
        match self.data.accumulator() {
            DataType::F32 => {
                for number in target.as_chunks_mut::<4>().0 {
                    if f32::from_ne_bytes(*number).is_nan() {
                        *number = f32::NAN.to_ne_bytes();
                    }
                }
            }
            DataType::F64 => {
                for number in target.as_chunks_mut::<8>().0 {
                    if f64::from_ne_bytes(*number).is_nan() {
                        *number = f64::NAN.to_ne_bytes();
                    }
                }
            }
            _ => {}
        }
    }

    fn check_bounds(&self, before: &[u8], target: &[u8]) -> Result<()> {
        let operator = match self.op {
            ReduceOp::Sum | ReduceOp::PreMulSum => Operator::Sum,
            ReduceOp::Prod => Operator::Prod,
            ReduceOp::Min => Operator::Min,
            ReduceOp::Max => Operator::Max,
            ReduceOp::Avg => Operator::Avg { ranks: self.ranks },
        };
        for element in 0..self.elements {
            let Some(result) = bounds::value(self.data, self.into.kind, target, element) else {
                return Ok(());
            };
            let operands: Vec<(f64, Option<f64>)> = self
                .sources
                .iter()
                .enumerate()
                .filter_map(|(index, operand)| {
                    let value = bounds::value(self.data, operand.kind, &before[operand.offset..], element)?;
                    Some((value, self.factor(index)))
                })
                .collect();
            if !bounds::holds(self.data, operator, &operands, self.into.kind, result) {
                bail!("element {element} is {result:e}, too far from what f64 makes of {operands:?}");
            }
        }
        Ok(())
    }
}
