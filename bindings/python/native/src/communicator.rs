//! Communicators.

use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use doorbell::Context;
use doorbell::collectives::bootstrap::{self, Group, Launch, Launcher, RendezvousPoint, Secret};
use doorbell::collectives::communicator::Call;
use doorbell::collectives::{self, CollectiveError, CommBuffer, Options, Rank, ReduceOp};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyMemoryView, PyType};

use crate::array::{Access, Array, BufferPlace, Pair, typed};
use crate::device::Device;
use crate::error;
use crate::interrupt::{self, Interrupts};

/// One rank of a group of processes, and the collectives between them.
#[pyclass(frozen, module = "doorbell_rdma")]
pub(crate) struct Communicator {
    inner: Mutex<Option<Arc<collectives::Communicator>>>,
    /// Whether an operation has raised that it failed, which `close` then does not repeat.
    has_raised: AtomicBool,
    #[pyo3(get)]
    rank: u32,
    #[pyo3(get)]
    size: u32,
}

/// Keeps the memory of [`Communicator::alloc`].
#[pyclass(frozen)]
struct Memory {
    _memory: CommBuffer<u8>,
}

/// For the buffers of input and output.
const PLACES: [BufferPlace; 2] = [BufferPlace::new(), BufferPlace::new()];

/// What is the same for both ways to join a group.
struct Joining {
    device: Option<Context>,
    timeout: Option<Duration>,
}

impl Joining {
    fn new(device: Option<&Bound<'_, Device>>, timeout: Option<f64>) -> PyResult<Self> {
        let device = device.map(|device| device.get().context()).transpose()?;
        let timeout = timeout.map(seconds).transpose()?;
        Ok(Self { device, timeout })
    }

    fn bootstrap(&self) -> Result<bootstrap::Options, CollectiveError> {
        let options = bootstrap::Options::from_env()?;
        Ok(bootstrap::Options {
            timeout: self.timeout.unwrap_or(options.timeout),
            ..options
        })
    }

    fn run(
        self,
        py: Python<'_>,
        own: u32,
        join: impl FnOnce(&Self) -> Result<Group, CollectiveError> + Send + 'static,
    ) -> PyResult<Communicator> {
        let joined = interrupt::wait(
            py,
            "join",
            move || -> Result<_, Box<dyn std::error::Error + Send + Sync>> {
                let device = match &self.device {
                    Some(device) => device.clone(),
                    None => doorbell::open_from_env()?,
                };
                let mut options = Options::from_env()?;
                options.deadline = self.timeout.unwrap_or(options.deadline);
                Ok(collectives::Communicator::new(&[device], join(&self)?, options)?)
            },
        )?;
        let inner = joined.map_err(|error| match error.downcast::<CollectiveError>() {
            Ok(error) => error::of_collective(py, own, &error),
            Err(error) => error::of(error),
        })?;
        Ok(Communicator {
            rank: inner.rank().0,
            size: inner.size(),
            inner: Mutex::new(Some(Arc::new(inner))),
            has_raised: AtomicBool::new(false),
        })
    }
}

pub(crate) fn seconds(seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| PyValueError::new_err(format!("a timeout of {seconds} s: expected a number of seconds")))
}

impl Communicator {
    fn inner(&self) -> PyResult<Arc<collectives::Communicator>> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner
            .clone()
            .ok_or_else(|| PyValueError::new_err("the communicator is closed"))
    }

    fn take(&self) -> Option<Arc<collectives::Communicator>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Waits for an operation: for some tens of microseconds with the interpreter, where it is
    /// short and repeats an earlier one, as to release and take the interpreter is an eighth of a
    /// call; and then without. A signal whose handler raises an exception aborts the communicator:
    /// what peers read and write cannot be called back otherwise.
    fn wait<B>(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        call: impl FnOnce(&collectives::Communicator) -> Call<'_, B>,
    ) -> PyResult<()> {
        let (comm, timeout) = (self.inner()?, timeout.map(seconds).transpose()?);
        let comm = &*comm;
        let mut interrupts = Interrupts::default();
        let mut call = call(comm);
        if let Some(timeout) = timeout {
            call = call.deadline(timeout);
        }
        let waited = call.wait_detached(
            |rest| py.detach(rest),
            || {
                if interrupts.poll() {
                    comm.abort("interrupted by a signal");
                }
            },
        );
        if comm.has_failed() {
            self.has_raised.store(true, Ordering::Relaxed);
        }
        match interrupts.raised() {
            Some(raised) => Err(raised),
            None => waited.map_err(|error| error::of_collective(py, self.rank, &error)),
        }
    }
}

#[pymethods]
impl Communicator {
    #[new]
    #[pyo3(signature = (rank, size, address, secret = None, device = None, timeout = None))]
    fn new(
        py: Python<'_>,
        rank: u32,
        size: u32,
        address: &str,
        secret: Option<&str>,
        device: Option<&Bound<'_, Device>>,
        timeout: Option<f64>,
    ) -> PyResult<Self> {
        let joining = Joining::new(device, timeout)?;
        let rendezvous = point(address, secret)?;
        joining.run(py, rank, move |joining| {
            let launch = Launch {
                launcher: Launcher::Doorbell,
                rank: Rank(rank),
                ranks: size,
                local_rank: None,
                rendezvous,
            };
            Ok(launch.join(&joining.bootstrap()?)?)
        })
    }

    #[staticmethod]
    #[pyo3(signature = (device = None, timeout = None))]
    fn from_env(py: Python<'_>, device: Option<&Bound<'_, Device>>, timeout: Option<f64>) -> PyResult<Self> {
        let launch = Launch::from_env().map_err(error::of)?;
        let joining = Joining::new(device, timeout)?;
        joining.run(
            py,
            launch.rank.0,
            move |joining| Ok(launch.join(&joining.bootstrap()?)?),
        )
    }

    /// As a view of bytes whose owner keeps them. `ctypes` makes it: in Python 3.9's stable ABI no
    /// class of an extension can have the buffer protocol.
    fn alloc<'py>(&self, py: Python<'py>, bytes: usize) -> PyResult<Bound<'py, PyAny>> {
        let memory = self.inner()?.alloc::<u8>(bytes);
        let memory = memory.map_err(|error| error::of_collective(py, self.rank, &error))?;
        let ctypes = py.import("ctypes")?;
        let kind = ctypes.getattr("c_ubyte")?.mul(bytes)?;
        let array = kind.call_method1("from_address", (memory.as_ptr().addr(),))?;
        array.setattr("_memory", Bound::new(py, Memory { _memory: memory })?)?;
        PyMemoryView::from(&array)?.call_method1("cast", ("B",))
    }

    #[pyo3(signature = (array, out = None, op = Operator(ReduceOp::Sum), timeout = None))]
    fn all_reduce<'py>(
        &self,
        array: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
        op: Operator,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let mut places = PLACES;
        let (mut pair, Operator(op)) = (Pair::new(array, out, &mut places)?, op);
        typed!(pair.data_type(), T => match pair.slices::<T>() {
            (None, data) => self.wait(array.py(), timeout, |comm| comm.all_reduce(data, op)),
            (Some(input), output) => self.wait(array.py(), timeout, |comm| comm.all_reduce_into(input, output, op)),
        })?;
        Ok(out.unwrap_or(array).clone())
    }

    #[pyo3(signature = (array, root = 0, op = Operator(ReduceOp::Sum), timeout = None))]
    fn reduce<'py>(
        &self,
        array: &Bound<'py, PyAny>,
        root: u32,
        op: Operator,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let mut place = BufferPlace::new();
        let (mut data, Operator(op)) = (Array::new(array, Access::Write, &mut place)?, op);
        typed!(data.data_type(), T => {
            let data = data.slice_mut::<T>();
            self.wait(array.py(), timeout, |comm| comm.reduce(data, op, Rank(root)))
        })?;
        Ok(array.clone())
    }

    #[pyo3(signature = (array, out = None, op = Operator(ReduceOp::Sum), timeout = None))]
    fn reduce_scatter<'py>(
        &self,
        array: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
        op: Operator,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let mut places = PLACES;
        let (mut pair, Operator(op)) = (Pair::new(array, out, &mut places)?, op);
        typed!(pair.data_type(), T => match pair.slices::<T>() {
            (None, data) => self.wait(array.py(), timeout, |comm| comm.reduce_scatter(data, op)),
            (Some(input), output) => self.wait(array.py(), timeout, |comm| comm.reduce_scatter_into(input, output, op)),
        })?;
        Ok(out.unwrap_or(array).clone())
    }

    #[pyo3(signature = (array, out = None, timeout = None))]
    fn all_gather<'py>(
        &self,
        array: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let mut places = PLACES;
        let mut pair = Pair::new(array, out, &mut places)?;
        typed!(pair.data_type(), T => match pair.slices::<T>() {
            (None, data) => self.wait(array.py(), timeout, |comm| comm.all_gather(data)),
            (Some(input), output) => self.wait(array.py(), timeout, |comm| comm.all_gather_into(input, output)),
        })?;
        Ok(out.unwrap_or(array).clone())
    }

    #[pyo3(signature = (array, root = 0, timeout = None))]
    fn broadcast<'py>(
        &self,
        array: &Bound<'py, PyAny>,
        root: u32,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let mut place = BufferPlace::new();
        let mut data = Array::new(array, Access::Write, &mut place)?;
        typed!(data.data_type(), T => {
            let data = data.slice_mut::<T>();
            self.wait(array.py(), timeout, |comm| comm.broadcast(data, Rank(root)))
        })?;
        Ok(array.clone())
    }

    /// With both counts, parts of these lengths by rank; with none, of one length.
    #[pyo3(signature = (array, out, send_counts = None, receive_counts = None, timeout = None))]
    fn all_to_all<'py>(
        &self,
        array: &Bound<'py, PyAny>,
        out: &Bound<'py, PyAny>,
        send_counts: Option<Vec<usize>>,
        receive_counts: Option<Vec<usize>>,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let counts = match (send_counts, receive_counts) {
            (None, None) => None,
            (Some(send), Some(receive)) => Some((send, receive)),
            _ => return Err(PyValueError::new_err("counts of one direction: expected both, or none")),
        };
        let mut places = PLACES;
        let mut pair = Pair::new(array, Some(out), &mut places)?;
        typed!(pair.data_type(), T => match (pair.slices::<T>(), counts) {
            ((None, _), _) => Err(PyValueError::new_err("out is the array: expected another")),
            ((Some(input), output), None) => self.wait(array.py(), timeout, |comm| comm.all_to_all(input, output)),
            ((Some(input), output), Some((send, receive))) => {
                self.wait(array.py(), timeout, |comm| comm.all_to_all_v(input, &send, output, &receive))
            }
        })?;
        Ok(out.clone())
    }

    #[pyo3(signature = (array, to, timeout = None))]
    fn send(&self, array: &Bound<'_, PyAny>, to: u32, timeout: Option<f64>) -> PyResult<()> {
        let mut place = BufferPlace::new();
        let data = Array::new(array, Access::Read, &mut place)?;
        typed!(data.data_type(), T => {
            let data = data.slice::<T>();
            self.wait(array.py(), timeout, |comm| comm.send(data, Rank(to)))
        })
    }

    #[pyo3(signature = (array, source, timeout = None))]
    fn receive<'py>(
        &self,
        array: &Bound<'py, PyAny>,
        source: u32,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let mut place = BufferPlace::new();
        let mut data = Array::new(array, Access::Write, &mut place)?;
        typed!(data.data_type(), T => {
            let data = data.slice_mut::<T>();
            self.wait(array.py(), timeout, |comm| comm.receive(data, Rank(source)))
        })?;
        Ok(array.clone())
    }

    #[pyo3(signature = (timeout = None))]
    fn barrier(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        self.wait(py, timeout, collectives::Communicator::barrier)
    }

    fn abort(&self, reason: &str) -> PyResult<()> {
        self.inner()?.abort(reason);
        Ok(())
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let Some(inner) = self.take() else {
            return Ok(());
        };
        let inner = Arc::try_unwrap(inner).map_err(|inner| {
            inner.abort("closed during an operation");
            error::of("the communicator was closed while another thread was using it")
        })?;
        let left = interrupt::wait(py, "leave", || inner.destroy())?;
        match left {
            Err(error) if !self.has_raised.load(Ordering::Relaxed) => Err(error::of_collective(py, self.rank, &error)),
            _ => Ok(()),
        }
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    /// After an exception the others are not waited for.
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        if kind.is_none() {
            return self.close(py);
        }
        if let Some(inner) = self.take() {
            inner.abort(&format!("{}: {value}", kind.cast::<PyType>()?.name()?));
            py.detach(|| drop(inner));
        }
        Ok(())
    }

    fn __repr__(&self) -> String {
        format!("<Communicator rank {} of {}>", self.rank, self.size)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if let Some(inner) = self.take() {
            // It waits for the other ranks. Without an interpreter the process is about to end.
            let mut inner = Some(inner);
            Python::try_attach(|py| py.detach(|| drop(inner.take())));
            std::mem::forget(inner);
        }
    }
}

/// Of `HOST:PORT`, where rank 0 listens at that port or one of the next seven; or of the id of a
/// [`Rendezvous`](crate::rendezvous::Rendezvous).
fn point(address: &str, secret: Option<&str>) -> PyResult<RendezvousPoint> {
    let expected = || {
        PyValueError::new_err(format!(
            "address {address:?}: expected HOST:PORT, or the id of a Rendezvous"
        ))
    };
    if address.starts_with("doorbell:") {
        if secret.is_some() {
            return Err(PyValueError::new_err(
                "the id of a Rendezvous has its own secret: give no other",
            ));
        }
        let id = address.parse().map_err(|_| expected())?;
        return Ok(RendezvousPoint::Id(id));
    }
    let (host, port) = address.rsplit_once(':').ok_or_else(expected)?;
    let secret = match secret {
        Some(secret) => {
            let given = |name| (name == "DOORBELL_SECRET").then(|| secret.to_owned());
            Secret::of_job(&["python"], given)
        }
        None => Secret::from_env(&["python"]),
    };
    Ok(RendezvousPoint::Derived {
        host: host.trim_start_matches('[').trim_end_matches(']').to_owned(),
        port: port.parse().map_err(|_| expected())?,
        secret: secret.map_err(error::of)?,
    })
}

/// An operator by its name.
struct Operator(ReduceOp);

impl<'a, 'py> FromPyObject<'a, 'py> for Operator {
    type Error = PyErr;

    fn extract(name: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let name: Cow<'_, str> = name.extract()?;
        let known = name
            .parse()
            .map_err(|unknown: collectives::UnknownName| PyValueError::new_err(unknown.to_string()));
        match known? {
            ReduceOp::PreMulSum => Err(PyValueError::new_err(
                "the operator premulsum has a scalar, which Python cannot give",
            )),
            op => Ok(Self(op)),
        }
    }
}
