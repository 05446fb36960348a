//! Agreement among all ranks on the options of a GPU communicator, on its memory sizes, and on how
//! they share GPUs.

use doorbell_cuda::Context;
use serde::{Deserialize, Serialize};

use super::error::GpuError;
use super::options::GpuOptions;
use super::peers::{Peers, Sizes};
use super::sharing::{GpuOffer, Sharing};
use crate::communicator::Communicator;

/// The default limit of staging memory.
const STAGING: usize = 1 << 30;

/// What a rank gives to the agreement.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Offer {
    options: GpuOptions,
    staging: usize,
    gpu: Option<GpuOffer>,
}

/// What is the same on all ranks.
pub(super) struct Agreed {
    /// Rank 0's.
    pub(super) options: GpuOptions,
    /// The minimum of all ranks'.
    pub(super) sizes: Sizes,
    pub(super) sharing: Sharing,
}

/// Collective, also for ranks without a GPU.
pub(super) fn agree(comm: &Communicator, options: GpuOptions, context: Option<&Context>) -> Result<Agreed, GpuError> {
    let staging = match (options.sizes, context) {
        (Some(sizes), _) => sizes.staging,
        (None, Some(context)) => (context.device().total_memory()? / 32).min(STAGING),
        (None, None) => STAGING,
    };
    let gpu = context.map(GpuOffer::new).transpose()?;
    let own = Offer { options, staging, gpu };
    let own = serde_json::to_vec(&own).map_err(|_| other_release())?;
    let all = comm.exchange(&own)?;
    let all: Result<Vec<Offer>, _> = all.iter().map(|bytes| serde_json::from_slice(bytes)).collect();
    let all = all.map_err(|_| other_release())?;
    let gpus: Vec<_> = all.iter().map(|offer| offer.gpu).collect();
    let mut all = all.into_iter();
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
    Ok(Agreed {
        options,
        sizes,
        sharing: Sharing::agree(&gpus, context),
    })
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
        let Agreed { sizes, .. } = agree(self, GpuOptions::default(), None)?;
        self.with_exchange(|group| Ok(Peers::connect(group.control_mut(), self.rank(), None, sizes)))??
            .err();
        Ok(())
    }
}
