//! Options of a GPU communicator.

use std::ffi::OsString;

use super::error::GpuError;
use super::peers::Sizes;
use super::program::MAX_BLOCKS;
use crate::types::named;

named! {
    /// An executor of operations.
    Executor, "executor" {
        /// Kernels, one launch per operation: for short messages, and among three or more GPUs.
        Kernel = "kernel",
        /// The kernel for short operations; longer ones use the other kernels.
        Small = "small",
        /// The copy engines, with kernels that reduce: for long messages.
        Copies = "copies",
        /// Both concurrently, for operations that can be split; otherwise the best one.
        Split = "split",
        /// The host executor, staged through pinned host memory: between hosts, with ranks that
        /// have no GPU, and for GPUs without peer access.
        Staged = "staged",
    }
}

/// Options of a GPU communicator: those of rank 0 apply, except memory sizes (the minimum).
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct GpuOptions {
    /// The executor of all operations; by default the best for each.
    pub executor: Option<Executor>,
    /// Bytes of the areas that ranks map of each other; by default the default sizes, with
    /// [staging](Sizes::staging) of a thirty-second of the device's memory, up to 1 GiB.
    pub sizes: Option<Sizes>,
    /// Slice size for the copy engines, in bytes of the whole; by default tuned.
    pub slice: Option<u64>,
    /// Streams for copies to peers; by default one, which keeps the ranks in step.
    pub copiers: Option<u8>,
    /// Thread blocks per kernel, except for LL; by default tuned. Limited by the FIFOs allocated.
    pub blocks: Option<u32>,
    /// Slice size per thread block in bytes, except for LL; by default tuned. At most a FIFO slot.
    pub cut: Option<u32>,
    /// The percentage of elements for the copy engines in a split operation; by default tuned.
    pub share: Option<u8>,
}

impl GpuOptions {
    /// Options from the environment: `DOORBELL_GPU_EXECUTOR` is an [`Executor`],
    /// `DOORBELL_GPU_SLICE`, `DOORBELL_GPU_CUT`, `DOORBELL_GPU_STAGING` and `DOORBELL_GPU_FIFOS`
    /// are bytes, `DOORBELL_GPU_COPIERS` is a number from 1 to 4, `DOORBELL_GPU_BLOCKS` one from 1
    /// to 256, and `DOORBELL_GPU_SHARE` one from 1 to 99.
    ///
    /// # Errors
    /// A variable with an invalid value.
    pub fn from_env() -> Result<Self, GpuError> {
        Self::from(doorbell_trust::variable)
    }

    fn from(variable: impl Fn(&str) -> Option<OsString>) -> Result<Self, GpuError> {
        let text = |name: &'static str| {
            let value = variable(name).filter(|value| !value.is_empty());
            value.map(|value| value.to_string_lossy().into_owned())
        };
        let number = |name: &'static str, range: core::ops::RangeInclusive<u64>| {
            let Some(value) = text(name) else { return Ok(None) };
            let number = value.parse().ok().filter(|number| range.contains(number));
            number.map(Some).ok_or_else(|| GpuError::Refused {
                what: name,
                reason: format!("{value:?} is no number from {} to {}", range.start(), range.end()),
            })
        };
        let executor = text("DOORBELL_GPU_EXECUTOR").map(|name| name.parse()).transpose();
        let staging = number("DOORBELL_GPU_STAGING", 1 << 16..=1 << 40)?;
        let fifos = number("DOORBELL_GPU_FIFOS", 1 << 16..=1 << 40)?;
        let usual = Sizes::default();
        Ok(Self {
            executor: executor.map_err(|e: crate::UnknownName| GpuError::Refused {
                what: "DOORBELL_GPU_EXECUTOR",
                reason: e.to_string(),
            })?,
            sizes: staging.or(fifos).map(|_| Sizes {
                staging: staging.map_or(usual.staging, |staging| staging as usize),
                fifos: fifos.map_or(usual.fifos, |fifos| fifos as usize),
                ..usual
            }),
            slice: number("DOORBELL_GPU_SLICE", 1 << 12..=1 << 40)?,
            copiers: number("DOORBELL_GPU_COPIERS", 1..=4)?.map(|copiers| copiers as u8),
            blocks: number("DOORBELL_GPU_BLOCKS", 1..=u64::from(MAX_BLOCKS))?.map(|blocks| blocks as u32),
            cut: number("DOORBELL_GPU_CUT", 1 << 10..=1 << 20)?.map(|cut| cut as u32),
            share: number("DOORBELL_GPU_SHARE", 1..=99)?.map(|share| share as u8),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(name: &str, value: &str) -> Result<GpuOptions, GpuError> {
        GpuOptions::from(|requested| (requested == name).then(|| value.into()))
    }

    #[test]
    fn environment_variables_are_parsed() {
        assert_eq!(GpuOptions::from(|_| None).unwrap(), GpuOptions::default());
        assert_eq!(
            parsed("DOORBELL_GPU_EXECUTOR", "staged").unwrap().executor,
            Some(Executor::Staged)
        );
        assert_eq!(parsed("DOORBELL_GPU_SLICE", "1048576").unwrap().slice, Some(1 << 20));
        assert_eq!(
            parsed("DOORBELL_GPU_STAGING", "65536").unwrap().sizes.unwrap().staging,
            65536
        );
        assert_eq!(
            parsed("DOORBELL_GPU_FIFOS", "131072").unwrap().sizes.unwrap().fifos,
            131_072
        );
        assert_eq!(parsed("DOORBELL_GPU_BLOCKS", "96").unwrap().blocks, Some(96));
        assert_eq!(parsed("DOORBELL_GPU_CUT", "65536").unwrap().cut, Some(65536));
        assert_eq!(parsed("DOORBELL_GPU_SHARE", "65").unwrap().share, Some(65));
        for (name, value) in [
            ("DOORBELL_GPU_EXECUTOR", "fast"),
            ("DOORBELL_GPU_BLOCKS", "257"),
            ("DOORBELL_GPU_SHARE", "100"),
            ("DOORBELL_GPU_SLICE", "1M"),
            ("DOORBELL_GPU_COPIERS", "9"),
        ] {
            let error = parsed(name, value).unwrap_err().to_string();
            assert!(
                error.starts_with(name) && error.contains(value) && !error.contains('\n'),
                "{error}"
            );
        }
    }
}
