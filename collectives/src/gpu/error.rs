//! Errors of GPU collectives.

use doorbell_cuda::reduce::ReduceError;

use crate::algorithm::Unsupported;
use crate::bootstrap::ExchangeError;
use crate::communicator::CollectiveError;
use crate::moe::MoeError;
use crate::plan::Collective;
use crate::types::{DataType, ReduceOp};

/// A failed collective on GPUs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// From the communicator: a rank is gone or has aborted; or from an operation on the host.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// From the driver.
    #[error(transparent)]
    Driver(#[from] doorbell_cuda::Error),
    /// From the reduction kernels.
    #[error(transparent)]
    Reduce(Box<ReduceError>),
    /// The algorithm does not support the collective.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// Invalid arguments; nothing was enqueued.
    #[error("{collective} on GPUs: {what}")]
    Misuse {
        /// The operation.
        collective: Collective,
        /// The defect, and what is expected.
        what: String,
    },
    /// Invalid options of expert parallelism.
    #[error(transparent)]
    Moe(Box<MoeError>),
    /// Invalid arguments of a dispatch or a combine; nothing was enqueued.
    #[error("expert parallelism on GPUs: {0}")]
    Experts(String),
    /// The operator requires a scalar.
    #[error("{op} of {data} on GPUs takes a scalar: give PreMulSum one of {}", data.accumulator())]
    NoScalar {
        /// The operator.
        op: ReduceOp,
        /// The elements' type.
        data: DataType,
    },
    /// Memory cannot be registered on all ranks.
    #[error("memory cannot be registered with the other ranks: {0}")]
    NotRegistered(String),
    /// An environment variable or option requests something unsupported here.
    #[error("{what}: {reason}")]
    Refused {
        /// The variable or option.
        what: &'static str,
        /// The reason and advice.
        reason: String,
    },
    /// A required thread cannot be started.
    #[error("cannot start a thread for operations on GPUs: {0}")]
    Thread(std::io::Error),
}

impl From<ExchangeError> for GpuError {
    fn from(error: ExchangeError) -> Self {
        Self::Collective(error.into())
    }
}

impl From<ReduceError> for GpuError {
    fn from(error: ReduceError) -> Self {
        Self::Reduce(Box::new(error))
    }
}

impl From<MoeError> for GpuError {
    fn from(error: MoeError) -> Self {
        Self::Moe(Box::new(error))
    }
}
