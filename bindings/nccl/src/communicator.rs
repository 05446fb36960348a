//! Communicators: initialisation in a thread, state, abort and the end.
//!
//! A thread of its own initialises each one, so that a rank that does not come blocks no call that
//! may not block, and an abort ends the wait of the one that does. There is no deadline: programs
//! have watchdogs of their own, which abort.

use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use doorbell_collectives::bootstrap::{self, Group, RendezvousServer};
use doorbell_collectives::gpu::{GpuCommunicator, GpuError, GpuOptions, Sizes};
use doorbell_collectives::{Communicator as HostCommunicator, Options, Rank};
use doorbell_cuda::{Device, Driver, Follower, HostMemory, RelaxedCapture};

use crate::abi::{Config, Opaque, Status, UniqueId};
use crate::derivation::{Derivation, Tickets};
use crate::failure::{Failure, caught};
use crate::reduction::{Operators, SCALAR};
use crate::{group, handles, unique_id};

/// Thread blocks of a kernel, of which each takes a multiprocessor, where nothing says otherwise.
const BLOCKS: u32 = 32;
/// In all 185 MiB a communicator: FIFOs for slices of 128 KiB of as many blocks, four ranks.
const FIFOS: usize = 64 << 20;
/// Slots of 256 KiB for four ranks: with 90 KiB a send takes 1.3 times as long (docs/RESULTS.md).
const EXCHANGE: usize = 48 << 20;
const STAGING: usize = 32 << 20;

/// What a communicator is made of.
pub(crate) struct Request {
    pub(crate) origin: Origin,
    pub(crate) device: Device,
    pub(crate) config: Config,
}

pub(crate) enum Origin {
    /// The ranks meet by a unique id.
    Id {
        id: bootstrap::UniqueId,
        rank: Rank,
        ranks: u32,
    },
    /// Ranks of another communicator, which are connected already.
    Derived(Derivation),
}

impl Request {
    /// For the device that is current in this thread.
    pub(crate) fn new(id: &UniqueId, rank: c_int, ranks: c_int, config: Config) -> Result<Self, Failure> {
        Self::on(current_device()?, id, rank, ranks, config)
    }

    pub(crate) fn on(
        device: Device,
        id: &UniqueId,
        rank: c_int,
        ranks: c_int,
        config: Config,
    ) -> Result<Self, Failure> {
        let id = unique_id::decode(id)?;
        let numbers = u32::try_from(rank).ok().zip(u32::try_from(ranks).ok());
        let Some((rank, ranks)) = numbers.filter(|(rank, ranks)| rank < ranks) else {
            return Err(Failure::invalid_argument(format!(
                "there is no rank {rank} of {ranks} ranks"
            )));
        };
        let rank = Rank(rank);
        Ok(Self {
            origin: Origin::Id { id, rank, ranks },
            device,
            config,
        })
    }
}

pub(crate) fn driver() -> Result<Driver, Failure> {
    Driver::load().map_err(|absent| Failure::new(Status::UnhandledCudaError, absent.to_string()))
}

/// The device of the calling thread's context; the first one in a thread without.
pub(crate) fn current_device() -> Result<Device, Failure> {
    let driver = driver()?;
    match driver.current_device()? {
        Some(device) => Ok(device),
        None => Ok(driver.device(0)?),
    }
}

/// A communicator of this process.
pub(crate) struct Communicator {
    pub(crate) device: Device,
    pub(crate) config: Config,
    pub(crate) operators: Operators,
    pub(crate) tickets: Tickets,
    pub(crate) shrunk: AtomicBool,
    /// `None` for a rank without a colour, which has no handle of it.
    ready: OnceLock<Result<Option<Ready>, Failure>>,
    /// Whether its initialisation is over; also after an abort.
    is_over: Mutex<bool>,
    over: Condvar,
    aborted: AtomicBool,
    finalized: AtomicBool,
    failure: OnceLock<Failure>,
}

/// What an initialised communicator has.
pub(crate) struct Ready {
    pub(crate) gpu: GpuCommunicator,
    /// Knows when all that is enqueued on streams of the program is done.
    pub(crate) follower: Follower,
    /// Through which scalars in device memory are read.
    pub(crate) scalar: Mutex<HostMemory>,
}

impl Communicator {
    /// Begins the initialisation, and stores the handle, which is valid at once. Waits for its end,
    /// unless it is in a group, whose end waits, or the configuration says not to.
    ///
    /// # Safety
    /// `into` may be written.
    pub(crate) unsafe fn create(request: Request, into: *mut Opaque) -> Result<Status, Failure> {
        let communicator = Arc::new(Self::new(&request));
        let (blocking, has_handle) = match &request.origin {
            Origin::Id { .. } => (request.config.blocking, true),
            Origin::Derived(derivation) => (derivation.is_blocking(), derivation.is_member()),
        };
        let theirs = Arc::clone(&communicator);
        let work = move || theirs.initialise(request);
        doorbell_threads::spawn("nccl init", work)
            .map_err(|error| Failure::system(format!("cannot start a thread: {error}")))?;
        let handle = match has_handle {
            true => handles::insert(Arc::clone(&communicator)),
            false => ptr::null_mut(),
        };
        // SAFETY: the caller's promise.
        unsafe { into.write(handle) };
        match blocking {
            true => group::wait_for(communicator).inspect_err(|_| drop(handles::remove(handle))),
            false => Ok(Status::InProgress),
        }
    }

    fn new(request: &Request) -> Self {
        Self {
            device: request.device,
            config: request.config,
            operators: Operators::default(),
            tickets: Tickets::default(),
            shrunk: AtomicBool::new(false),
            ready: OnceLock::new(),
            is_over: Mutex::new(false),
            over: Condvar::new(),
            aborted: AtomicBool::new(false),
            finalized: AtomicBool::new(false),
            failure: OnceLock::new(),
        }
    }

    fn initialise(&self, request: Request) {
        let ready = caught(|| connect(request));
        // No other thread sets it.
        let _ = self.ready.set(ready);
        self.set_over();
        // An abort that came before that lock was taken has not seen it.
        if self.aborted.load(Ordering::Acquire) {
            self.abort_ready();
        }
    }

    /// Ends the wait for its initialisation, which then fails.
    pub(crate) fn give_up(&self) {
        self.aborted.store(true, Ordering::Release);
        self.set_over();
    }

    /// Reports the abort to the other ranks, which are known once it is initialised.
    fn abort_ready(&self) {
        if let Some(Ok(Some(ready))) = self.ready.get() {
            ready.gpu.abort("it called ncclCommAbort");
        }
    }

    fn set_over(&self) {
        *self.is_over.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.over.notify_all();
    }

    /// Waits for the end of the initialisation.
    pub(crate) fn wait(&self) -> Result<(), Failure> {
        let is_over = self.is_over.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.over.wait_while(is_over, |is_over| !*is_over));
        match self.ready.get() {
            Some(Ok(_)) => Ok(()),
            Some(Err(failure)) => Err(failure.clone()),
            None => Err(Failure::invalid_usage(
                "the communicator was aborted while it was initialised",
            )),
        }
    }

    /// What to enqueue operations with.
    pub(crate) fn ready(&self) -> Result<&Ready, Failure> {
        match self.finalized.load(Ordering::Acquire) {
            true => Err(Failure::invalid_usage(
                "the communicator was finalized: it can only be destroyed",
            )),
            false => self.initialised(),
        }
    }

    /// The same of one that may have been finalized.
    pub(crate) fn initialised(&self) -> Result<&Ready, Failure> {
        match self.ready.get() {
            Some(Ok(Some(ready))) => Ok(ready),
            Some(Err(failure)) => Err(failure.clone()),
            Some(Ok(None)) | None => Err(Failure::invalid_argument(
                "the communicator is not initialised yet: ncclCommGetAsyncError says when it is",
            )),
        }
    }

    /// `ncclCommGetAsyncError`: the state, and for a failure its text.
    pub(crate) fn state(&self) -> Result<Status, Failure> {
        if let Some(failure) = self.failure.get() {
            return Err(failure.clone());
        }
        match self.ready.get() {
            None => Ok(Status::InProgress),
            Some(Err(failure)) => Err(failure.clone()),
            Some(Ok(None)) => Ok(Status::Success),
            Some(Ok(Some(ready))) => match ready.gpu.check() {
                Ok(()) => Ok(Status::Success),
                Err(error) => Err(self.failure.get_or_init(|| error.into()).clone()),
            },
        }
    }

    /// `ncclCommFinalize`: takes no more operations. It completes them when it is destroyed.
    pub(crate) fn finalize(&self) -> Result<Status, Failure> {
        self.ready()?;
        self.finalized.store(true, Ordering::Release);
        self.state()
    }

    /// `ncclCommDestroy`, of a communicator without a handle: completes this rank's operations, and
    /// leaves without waiting for the others.
    pub(crate) fn destroy(self: Arc<Self>) -> Result<Status, Failure> {
        let _relaxed = RelaxedCapture::enter(self.device.driver());
        // Another thread in a call, or that initialises it, drops it at its end.
        match Arc::into_inner(self).and_then(|communicator| communicator.ready.into_inner()) {
            Some(Ok(Some(ready))) => match ready.gpu.leave() {
                // Its failure was reported by ncclCommGetAsyncError.
                Ok(()) | Err(GpuError::Collective(_)) => Ok(Status::Success),
                Err(error) => Err(error.into()),
            },
            Some(Ok(None) | Err(_)) | None => Ok(Status::Success),
        }
    }

    /// `ncclCommAbort`, of a communicator without a handle: fails it on all ranks, and ends it in a
    /// thread, as streams may take their time.
    pub(crate) fn abort(self: Arc<Self>) -> Result<Status, Failure> {
        self.give_up();
        self.abort_ready();
        doorbell_threads::spawn("nccl abort", move || drop(caught(|| self.destroy())))
            .map_err(|error| Failure::system(format!("cannot start a thread: {error}")))?;
        Ok(Status::Success)
    }
}

fn connect(request: Request) -> Result<Option<Ready>, Failure> {
    let Request { origin, device, config } = request;
    // The program may capture in another thread.
    let _relaxed = RelaxedCapture::enter(device.driver());
    let gpu_options = gpu_options(&config)?;
    let host = match origin {
        Origin::Id { id, rank, ranks } => Some(meet(&id, rank, ranks)?),
        Origin::Derived(derivation) => derivation.run()?,
    };
    let Some(host) = host else {
        return Ok(None);
    };
    let context = device.context()?;
    Ok(Some(Ready {
        gpu: GpuCommunicator::new(host, &context, gpu_options)?,
        follower: Follower::new(&context),
        scalar: Mutex::new(HostMemory::alloc(&context, SCALAR)?),
    }))
}

/// Connects the ranks that have a unique id.
pub(crate) fn meet(id: &bootstrap::UniqueId, rank: Rank, ranks: u32) -> Result<HostCommunicator, Failure> {
    let bootstrap = bootstrap::Options {
        timeout: Duration::MAX,
        rendezvous_is_open: !unique_id::is_named(id)?,
        ..bootstrap::Options::from_env()?
    };
    let serving = unique_id::serve_named(id, rank, ranks)?;
    let group = Group::join(id, rank, ranks, &bootstrap)?;
    // The next communicator's is at the same address.
    serving.map_or(Ok(()), RendezvousServer::wait)?;
    let options = Options {
        deadline: Duration::MAX,
        // Programs make many communicators, and the host has a part only in few.
        calibrate: false,
        ..Options::from_env()?
    };
    let host = doorbell::open_from_env().map_err(|error| Failure::system(error.to_string()))?;
    Ok(HostCommunicator::new(&[host], group, options)?)
}

fn sizes() -> Sizes {
    Sizes {
        exchange: EXCHANGE,
        fifos: FIFOS,
        staging: STAGING,
        ..Sizes::default()
    }
}

fn gpu_options(config: &Config) -> Result<GpuOptions, Failure> {
    let mut options = GpuOptions::from_env()?;
    options.sizes.get_or_insert_with(sizes);
    let most =
        match doorbell_trust::text_variable("NCCL_MAX_CTAS").filter(|text| !text.is_empty()) {
            Some(text) => {
                let blocks = text.parse().ok().filter(|blocks| *blocks > 0);
                Some(blocks.ok_or_else(|| {
                    Failure::invalid_usage(format!("NCCL_MAX_CTAS is {text:?}: it is a number from 1"))
                })?)
            }
            None => config.max_blocks,
        };
    options.allows_overlap = true;
    options.blocks.get_or_insert(most.unwrap_or(BLOCKS).min(BLOCKS));
    Ok(options)
}

#[cfg(test)]
mod tests {
    use doorbell_collectives::gpu::Areas;

    use super::*;

    #[test]
    fn a_communicator_of_four_ranks_takes_at_most_200_mb() {
        let bytes = Areas::new(4, sizes()).len();
        assert!(bytes <= 200_000_000, "{bytes}");
    }
}
