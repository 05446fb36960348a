//! Agreement among all ranks on the options of a GPU communicator and on its memory sizes.

use doorbell_cuda::Context;

use super::error::GpuError;
use super::options::{Executor, GpuOptions};
use super::peers::Sizes;
use crate::communicator::Communicator;

/// The default limit of staging memory.
const STAGING: usize = 1 << 30;

/// Agrees on rank 0's options, and on the minimum of all ranks' memory sizes.
pub(super) fn agree(
    comm: &Communicator,
    options: GpuOptions,
    context: Option<&Context>,
) -> Result<(GpuOptions, Sizes), GpuError> {
    let staging = match (options.sizes, context) {
        (Some(sizes), _) => sizes.staging,
        (None, Some(context)) => (context.device().total_memory()? / 32).min(STAGING),
        (None, None) => STAGING,
    };
    let executor = options.executor.map_or(0, |executor| 1 + executor as u64);
    let copiers = options.copiers.unwrap_or(0);
    let sizes = options.sizes.unwrap_or_default();
    let own = [
        executor,
        options.slice.unwrap_or(0),
        copiers.into(),
        options.blocks.unwrap_or(0).into(),
        options.cut.unwrap_or(0).into(),
        options.share.unwrap_or(0).into(),
        sizes.flags as u64,
        sizes.slots as u64,
        sizes.small as u64,
        sizes.fifos as u64,
        staging as u64,
    ];
    let bytes: Vec<u8> = own.iter().flat_map(|number| number.to_be_bytes()).collect();
    let messages = comm.with_exchange(|group| crate::bootstrap::Exchange::all_gather(group.control_mut(), &bytes))?;
    let numbers = |message: &Vec<u8>| -> Vec<u64> {
        message
            .as_chunks::<8>()
            .0
            .iter()
            .map(|bytes| u64::from_be_bytes(*bytes))
            .collect()
    };
    let all: Vec<_> = messages.iter().map(numbers).collect();
    let first = all
        .first()
        .filter(|first| all.iter().all(|one| one.len() == first.len() && one.len() == own.len()));
    let Some(
        &[
            executor,
            slice,
            copiers,
            blocks,
            cut,
            share,
            flags,
            slots,
            small,
            fifos,
            _,
        ],
    ) = first.map(Vec::as_slice)
    else {
        return Err(GpuError::Refused {
            what: "a communicator of GPUs",
            reason: "a rank has left meanwhile, or the ranks are not of one release: run the same one everywhere"
                .to_owned(),
        });
    };
    let sizes = Sizes {
        flags: flags as usize,
        slots: slots as usize,
        small: small as usize,
        fifos: fifos as usize,
        staging: all
            .iter()
            .filter_map(|one| one.last())
            .min()
            .map_or(0, |least| *least as usize),
    };
    let options = GpuOptions {
        executor: executor
            .checked_sub(1)
            .and_then(|at| Executor::ALL.get(at as usize).copied()),
        sizes: Some(sizes),
        slice: (slice > 0).then_some(slice),
        copiers: (copiers > 0).then_some(copiers as u8),
        blocks: (blocks > 0).then_some(blocks as u32),
        cut: (cut > 0).then_some(cut as u32),
        share: (share > 0).then_some(share as u8),
    };
    Ok((options, sizes))
}
