//! Errors as Python's exceptions.

use doorbell::collectives::CollectiveError;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

pyo3::create_exception!(
    doorbell_rdma,
    Error,
    PyRuntimeError,
    "A device or a communicator has failed."
);
pyo3::create_exception!(
    doorbell_rdma,
    PeerFailed,
    Error,
    "A communicator has failed because of the rank in the attribute rank."
);

/// The exception for an error of a communicator of this rank.
pub(crate) fn of_collective(py: Python<'_>, own: u32, error: &CollectiveError) -> PyErr {
    let message = error.to_string();
    if matches!(error, CollectiveError::Misuse { .. }) {
        return PyValueError::new_err(message);
    }
    match error.culprit() {
        Some(peer) if peer.0 != own => {
            let failed = PeerFailed::new_err(message);
            match failed.value(py).setattr("rank", peer.0) {
                Ok(()) => failed,
                Err(other) => other,
            }
        }
        _ => Error::new_err(message),
    }
}

/// The exception for any other error.
pub(crate) fn of(error: impl std::fmt::Display) -> PyErr {
    Error::new_err(error.to_string())
}
