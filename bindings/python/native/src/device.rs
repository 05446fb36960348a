//! Devices.

use std::sync::{Mutex, PoisonError};

use doorbell::Context;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::error;

/// An open device.
#[pyclass(frozen, module = "doorbell_rdma")]
pub(crate) struct Device {
    context: Mutex<Option<Context>>,
    #[pyo3(get)]
    name: String,
    #[pyo3(get)]
    address: String,
}

/// Opens a device.
#[pyfunction]
#[pyo3(signature = (device = "soft0"))]
pub(crate) fn open(py: Python<'_>, device: &str) -> PyResult<Device> {
    let context = py.detach(|| doorbell::open(device)).map_err(error::of)?;
    Device::of(context)
}

impl Device {
    fn of(context: Context) -> PyResult<Self> {
        let gid = context.default_gid(1).map_err(error::of)?.gid;
        Ok(Self {
            name: context.name().to_owned(),
            address: gid.to_ip().to_canonical().to_string(),
            context: Mutex::new(Some(context)),
        })
    }

    pub(crate) fn context(&self) -> PyResult<Context> {
        let context = self.context.lock().unwrap_or_else(PoisonError::into_inner);
        context
            .clone()
            .ok_or_else(|| PyValueError::new_err("the device is closed"))
    }
}

#[pymethods]
impl Device {
    /// Closes the device; communicators on it keep it open for themselves.
    fn close(&self, py: Python<'_>) {
        let context = self.context.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(context));
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        format!("<Device {} at {}>", self.name, self.address)
    }
}
