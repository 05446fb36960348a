//! Where ranks meet that have no launcher.

use std::sync::{Mutex, PoisonError};

use doorbell::collectives::bootstrap::{self, RendezvousServer};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::communicator::seconds;
use crate::error;

/// Serves one group until all its ranks have joined.
#[pyclass(frozen, module = "doorbell_rdma")]
pub(crate) struct Rendezvous {
    server: Mutex<Option<RendezvousServer>>,
    /// It has the group's secret.
    #[pyo3(get)]
    id: String,
}

#[pymethods]
impl Rendezvous {
    #[new]
    #[pyo3(signature = (size, address = "127.0.0.1", timeout = None))]
    fn new(size: u32, address: &str, timeout: Option<f64>) -> PyResult<Self> {
        let parsed = address.parse();
        let parsed = parsed.map_err(|_| {
            PyValueError::new_err(format!("address {address:?}: expected one of this host, as 192.0.2.1"))
        })?;
        let timeout = timeout.map_or(Ok(bootstrap::DEFAULT_TIMEOUT), seconds)?;
        let listening = bootstrap::Rendezvous::open(parsed, size).map_err(error::of)?;
        let server = listening.spawn(timeout).map_err(error::of)?;
        Ok(Self {
            id: server.id().to_string(),
            server: Mutex::new(Some(server)),
        })
    }

    /// Ends it: ranks that have not joined cannot any more.
    fn close(&self, py: Python<'_>) {
        let server = self.server.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(server));
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) {
        self.close(py);
    }
}
