//! The end of a GPU communicator.

use std::sync::{Arc, PoisonError};

use super::GpuCommunicator;
use crate::communicator::{CollectiveError, Communicator};
use crate::gpu::GpuError;

impl GpuCommunicator {
    /// Shuts down: returns when all ranks have called it. Enqueued work still completes.
    ///
    /// # Errors
    /// As [`Communicator::destroy`], and failures of the host's part of operations.
    #[doc(alias = "ncclCommFinalize")]
    pub fn destroy(self) -> Result<(), GpuError> {
        self.end(Communicator::destroy)
    }

    /// Leaves the communicator once this rank's enqueued work is done. Unlike
    /// [`destroy`](Self::destroy) it does not wait for the other ranks, which may call it at any
    /// time; as a drop, for a few seconds, if the host has a part in operations.
    ///
    /// # Errors
    /// As [`destroy`](Self::destroy).
    #[doc(alias = "ncclCommDestroy")]
    pub fn leave(self) -> Result<(), GpuError> {
        match self.peers().is_some() && !self.stages_groups() {
            true => self.end(Communicator::leave_at_once),
            false => self.end(|comm| {
                drop(comm);
                Ok(())
            }),
        }
    }

    fn end(self, end: impl FnOnce(Communicator) -> Result<(), CollectiveError>) -> Result<(), GpuError> {
        let Self {
            watchdog,
            staged,
            state,
            path,
            comm,
            context,
            kernels,
            ..
        } = self;
        let failed = staged.error();
        let ipc_shared = state.into_inner().unwrap_or_else(PoisonError::into_inner).ipc_shared();
        drop((staged, path));
        watchdog.end();
        context.reap();
        drop(kernels);
        let parted = match failed {
            Some(error) => Err(error),
            None => match Arc::into_inner(comm) {
                Some(comm) => Ok(end(comm)?),
                None => Ok(()),
            },
        };
        drop(ipc_shared);
        parted
    }
}
