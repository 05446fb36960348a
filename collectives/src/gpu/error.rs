//! What can go wrong with collectives on GPUs.

use doorbell_cuda::reduce::ReduceError;

use crate::algorithm::Unsupported;
use crate::bootstrap::ExchangeError;
use crate::communicator::CollectiveError;
use crate::plan::Collective;
use crate::types::{DataType, ReduceOp};

/// Why a collective on GPUs was not begun, or has failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// Of the communicator: a rank is gone, or has given up; or what was asked of the processors.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// Of the driver.
    #[error(transparent)]
    Driver(#[from] doorbell_cuda::Error),
    /// Of the reduction kernels.
    #[error(transparent)]
    Reduce(Box<ReduceError>),
    /// The algorithm does not do it.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// What was given to an operation does not fit it; nothing was begun.
    #[error("{collective} on GPUs: {what}")]
    Misuse {
        /// The operation.
        collective: Collective,
        /// What does not fit, and how it should be.
        what: String,
    },
    /// An operator that elements are not reduced by without more.
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
    /// A variable of the environment, or an option, asks for what cannot be done here.
    #[error("{what}: {reason}")]
    Refused {
        /// What was asked for.
        what: &'static str,
        /// Why not, and what to do.
        reason: String,
    },
    /// A thread that is needed cannot be started.
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
