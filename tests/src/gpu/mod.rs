//! Verification of the GPU's reduction kernels against the CPU's: [`sweep`] has the cases,
//! [`bounds`] compares with `f64`. A [`Device`] is a GPU ([`driven`]), or the CPU in `tests/gpu`.

pub mod bounds;
pub mod collective;
pub mod driven;
pub mod foreign;
pub mod ranks;
pub mod short;
pub mod sweep;
pub mod tool;

use anyhow::Result;
use doorbell_collectives as coll;
use doorbell_cuda::reduce;

/// Runs kernels on a memory of its own.
pub trait Device {
    /// The memory's device pointer: a multiple of 256.
    fn address(&self) -> u64;

    /// The memory's bytes.
    fn len(&self) -> usize;

    /// Whether it has none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies `bytes` to the start of the memory, runs the reduction, whose addresses all lie
    /// within these bytes, and copies them back.
    fn reduce(&mut self, reduction: &reduce::Reduction, bytes: &mut [u8]) -> Result<()>;
}

/// SplitMix64: a deterministic generator.
pub struct Random(u64);

impl Random {
    /// Seeded with `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// A number less than `bound`, which is not 0.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.bits() % bound as u64) as usize
    }

    /// From −1 to 1.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}

/// Converts a type to that of the collectives.
#[must_use]
pub fn data_type(data: reduce::DataType) -> coll::DataType {
    match data {
        reduce::DataType::I8 => coll::DataType::I8,
        reduce::DataType::U8 => coll::DataType::U8,
        reduce::DataType::I32 => coll::DataType::I32,
        reduce::DataType::U32 => coll::DataType::U32,
        reduce::DataType::I64 => coll::DataType::I64,
        reduce::DataType::U64 => coll::DataType::U64,
        reduce::DataType::F16 => coll::DataType::F16,
        reduce::DataType::Bf16 => coll::DataType::Bf16,
        reduce::DataType::F32 => coll::DataType::F32,
        reduce::DataType::F64 => coll::DataType::F64,
        reduce::DataType::F8E4M3 => coll::DataType::F8E4M3,
        reduce::DataType::F8E5M2 => coll::DataType::F8E5M2,
    }
}

/// Converts an operand kind to the form of the collectives.
#[must_use]
pub fn form(kind: reduce::OperandKind) -> coll::plan::BlockForm {
    match kind {
        reduce::OperandKind::Element => coll::plan::BlockForm::Element,
        reduce::OperandKind::Partial => coll::plan::BlockForm::Partial,
    }
}
