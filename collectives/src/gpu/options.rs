//! Options of a GPU communicator.

use core::str::FromStr;

use serde::{Deserialize, Serialize};

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
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
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
    /// Thread blocks per kernel, except for LL; by default tuned. Limited by the FIFOs allocated,
    /// and by the rank's share of a GPU that has several.
    pub blocks: Option<u32>,
    /// Slice size per thread block in bytes, except for LL; by default tuned. At most a FIFO slot.
    pub cut: Option<u32>,
    /// The percentage of elements for the copy engines in a split operation; by default tuned.
    pub share: Option<u8>,
    /// Whether what is received may overlap what is sent, in send-receive and all-to-all: contents
    /// are undefined where it does. By default such a call is refused.
    pub allows_overlap: bool,
}

/// The variable that sets options.
const VARIABLE: &str = "DOORBELL_GPU";

impl GpuOptions {
    /// Options from the environment: `DOORBELL_GPU` has settings, as
    /// `executor=copies,slice=1048576`. `executor` is an [`Executor`]; `slice`, `cut`, `staging`
    /// and `fifos` are bytes; `copiers` is a number from 1 to 4, `blocks` one from 1 to 256, and
    /// `share` one from 1 to 99.
    ///
    /// # Errors
    /// An invalid setting.
    pub fn from_env() -> Result<Self, GpuError> {
        let settings = doorbell_trust::text_variable(VARIABLE).unwrap_or_default();
        settings.parse()
    }

    fn set(&mut self, setting: &str) -> Result<(), String> {
        let (name, value) = setting.split_once('=').ok_or("it is not NAME=VALUE")?;
        let number = |range: core::ops::RangeInclusive<u64>| {
            let number = value.parse().ok().filter(|number| range.contains(number));
            number.ok_or_else(|| format!("{value:?} is no number from {} to {}", range.start(), range.end()))
        };
        let area = || number(1 << 16..=1 << 40).map(|bytes| bytes as usize);
        match name {
            "executor" => self.executor = Some(value.parse().map_err(|e: crate::UnknownName| e.to_string())?),
            "slice" => self.slice = Some(number(1 << 12..=1 << 40)?),
            "copiers" => self.copiers = Some(number(1..=4)? as u8),
            "blocks" => self.blocks = Some(number(1..=u64::from(MAX_BLOCKS))? as u32),
            "cut" => self.cut = Some(number(1 << 10..=1 << 20)? as u32),
            "share" => self.share = Some(number(1..=99)? as u8),
            "staging" => self.sizes.get_or_insert_default().staging = area()?,
            "fifos" => self.sizes.get_or_insert_default().fifos = area()?,
            _ => return Err("there is no such setting".to_owned()),
        }
        Ok(())
    }
}

impl FromStr for GpuOptions {
    type Err = GpuError;

    fn from_str(settings: &str) -> Result<Self, GpuError> {
        let mut options = Self::default();
        for setting in settings.split(',').filter(|setting| !setting.is_empty()) {
            options.set(setting).map_err(|reason| GpuError::Refused {
                what: VARIABLE,
                reason: format!("{setting}: {reason}"),
            })?;
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_parsed() {
        assert_eq!("".parse::<GpuOptions>().unwrap(), GpuOptions::default());
        let settings =
            "executor=staged,slice=1048576,staging=65536,fifos=131072,blocks=96,cut=65536,copiers=2,share=65";
        let sizes = Sizes {
            staging: 65536,
            fifos: 131_072,
            ..Sizes::default()
        };
        let options = GpuOptions {
            executor: Some(Executor::Staged),
            sizes: Some(sizes),
            slice: Some(1 << 20),
            copiers: Some(2),
            blocks: Some(96),
            cut: Some(65536),
            share: Some(65),
            allows_overlap: false,
        };
        assert_eq!(settings.parse::<GpuOptions>().unwrap(), options);
        for setting in [
            "executor=fast",
            "blocks=257",
            "share=100",
            "slice=1M",
            "copiers=9",
            "speed=1",
            "kernel",
        ] {
            let error = format!("cut=1024,{setting}").parse::<GpuOptions>().unwrap_err();
            let error = error.to_string();
            assert!(
                error.starts_with("DOORBELL_GPU") && error.contains(setting) && !error.contains('\n'),
                "{error}"
            );
        }
    }
}
