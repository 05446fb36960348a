//! What a GPU communicator is, and how it performs its operations.

use std::sync::Arc;

use doorbell_cuda::Context;
use doorbell_cuda::collective::CollectiveKernels;

use super::{GpuCommunicator, OperationPath};
use crate::algorithm::Algorithm;
use crate::gpu::choice::Choice;
use crate::gpu::options::Executor;
use crate::gpu::peers::Peers;
use crate::plan::Collective;
use crate::types::{DataType, Rank};

impl GpuCommunicator {
    /// This rank.
    #[must_use]
    #[doc(alias = "ncclCommUserRank")]
    pub fn rank(&self) -> Rank {
        self.comm.rank()
    }

    /// The number of ranks.
    #[must_use]
    #[doc(alias = "ncclCommCount")]
    pub fn size(&self) -> u32 {
        self.comm.size()
    }

    /// The context of its GPU.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The ranks' mapped memory, if they use peer access.
    #[must_use]
    pub fn peers(&self) -> Option<&Arc<Peers>> {
        match &self.path {
            OperationPath::Direct(peers) => Some(peers),
            OperationPath::Staged(_) => None,
        }
    }

    /// The executor and algorithm of an operation, if the GPUs execute it.
    #[must_use]
    pub fn selection(
        &self,
        collective: Collective,
        data: DataType,
        count: usize,
        registered: bool,
    ) -> (Executor, Option<Algorithm>) {
        if let OperationPath::Staged(_) = &self.path {
            return (Executor::Staged, None);
        }
        if collective == Collective::AllToAllV {
            return match self.stages_groups() {
                true => (Executor::Staged, None),
                false => (Executor::Kernel, Some(Algorithm::FullMesh)),
            };
        }
        let given = (data, count, registered);
        match Choice::new(&self.options, (self.size(), &self.sharing), collective, given, true) {
            Choice::Small(cut) => (Executor::Small, Some(cut.algorithm(collective))),
            Choice::Kernel(algorithm, _) => (Executor::Kernel, Some(algorithm)),
            Choice::Messages => (Executor::Kernel, Some(Algorithm::FullMesh)),
            Choice::Copies(algorithm, _) => (Executor::Copies, Some(algorithm)),
            Choice::Split(_, (algorithm, _), _) => (Executor::Split, Some(algorithm)),
        }
    }

    /// The most ranks on a GPU, at least those that this communicator or another one of the process
    /// has there, or `DOORBELL_RANKS_PER_GPU`. The same on all ranks.
    #[must_use]
    pub fn ranks_per_gpu(&self) -> u32 {
        self.sharing.ranks
    }

    /// Whether ranks of a GPU are time-sliced, so that no kernel may wait for another rank: the
    /// copy engines perform operations, and the host performs [groups](Self::group) and reductions
    /// with a scalar. So it is for contexts of different processes without an MPS daemon, and where
    /// a GPU is too small for its ranks. The same on all ranks.
    #[must_use]
    pub fn is_time_sliced(&self) -> bool {
        self.sharing.is_time_sliced
    }

    /// Whether what copy engines cannot do goes through host memory: groups, of which no rank knows
    /// all lengths, and reductions with a scalar.
    pub(super) fn stages_some(&self) -> bool {
        self.sharing.is_time_sliced && self.options.executor.is_none()
    }

    /// Whether groups go through host memory.
    pub(super) fn stages_groups(&self) -> bool {
        (self.sharing.is_time_sliced || !self.sharing.has_room_for_exchanges) && self.options.executor.is_none()
    }

    /// The ranks' mapped memory and kernels, for kernels that wait for other ranks; or why none
    /// may.
    pub(in crate::gpu) fn waiting_kernels(&self) -> Result<(&Arc<Peers>, &CollectiveKernels), String> {
        match (&self.path, &self.kernels) {
            (OperationPath::Staged(reason), _) => Err(reason.clone()),
            (OperationPath::Direct(_), _) if self.stages_some() => {
                Err("the ranks of a GPU are time-sliced, as there is no MPS daemon".to_owned())
            }
            (OperationPath::Direct(peers), Some(kernels)) => Ok((peers, kernels)),
            (OperationPath::Direct(_), None) => Err("no kernels are loaded".to_owned()),
        }
    }

    /// Thread blocks of a launch of kernels that wait for other ranks: `usual` ones, unless options
    /// or the sharing of a GPU say otherwise. The same on all ranks.
    pub(in crate::gpu) fn blocks(&self, usual: u32) -> u32 {
        self.sharing.blocks(self.options.blocks.unwrap_or(usual))
    }

    /// Why operations are staged through host memory, if they are: the same on all ranks.
    #[must_use]
    pub fn staged_reason(&self) -> Option<&str> {
        match &self.path {
            OperationPath::Direct(_) => None,
            OperationPath::Staged(reason) => Some(reason),
        }
    }
}
