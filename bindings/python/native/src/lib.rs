//! `doorbell_rdma._native`: devices and communicators for Python. The package around it, with the
//! documentation of the Python API (`__init__.pyi`), is in `bindings/python/doorbell_rdma`.

mod array;
mod communicator;
mod device;
mod error;
mod interrupt;
mod rendezvous;

use pyo3::pymodule;

#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::communicator::Communicator;
    #[pymodule_export]
    use crate::device::{Device, open};
    #[pymodule_export]
    use crate::error::{Error, PeerFailed};
    #[pymodule_export]
    use crate::rendezvous::Rendezvous;
}
