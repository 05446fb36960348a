//! Agreement among all ranks on the options of a GPU communicator and on its memory sizes.

use doorbell_cuda::Context;
use serde::{Deserialize, Serialize};

use super::error::GpuError;
use super::options::GpuOptions;
use super::peers::{Peers, Sizes};
use crate::communicator::Communicator;

/// The default limit of staging memory.
const STAGING: usize = 1 << 30;

/// What a rank gives to the agreement.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Offer {
    options: GpuOptions,
    staging: usize,
}

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
    let own = Offer { options, staging };
    let own = serde_json::to_vec(&own).map_err(|_| other_release())?;
    let all = comm.exchange(&own)?;
    let all: Result<Vec<Offer>, _> = all.iter().map(|bytes| serde_json::from_slice(bytes)).collect();
    let mut all = all.map_err(|_| other_release())?.into_iter();
    let first = all.next().ok_or_else(other_release)?;
    let staging = all.map(|offer| offer.staging).fold(first.staging, usize::min);
    let sizes = Sizes {
        staging,
        ..first.options.sizes.unwrap_or_default()
    };
    let options = GpuOptions {
        sizes: Some(sizes),
        ..first.options
    };
    Ok((options, sizes))
}

fn other_release() -> GpuError {
    GpuError::Refused {
        what: "a communicator of GPUs",
        reason: "a rank has left meanwhile, or the ranks are not of one release: run the same one everywhere"
            .to_owned(),
    }
}

impl Communicator {
    /// For a rank without a GPU, when other ranks of the communicator create a
    /// [`GpuCommunicator`](super::GpuCommunicator):
    /// informs them. From then on, its operations on host memory and their stream operations match.
    ///
    /// # Errors
    /// If a rank does not arrive.
    pub fn without_gpu(&self) -> Result<(), GpuError> {
        let (_, sizes) = agree(self, GpuOptions::default(), None)?;
        self.with_exchange(|group| Ok(Peers::connect(group.control_mut(), self.rank(), None, sizes)))??
            .err();
        Ok(())
    }
}
