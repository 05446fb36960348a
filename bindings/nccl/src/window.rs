//! Windows: memory that all ranks register together, in which they store results directly.
//!
//! That takes memory that can be shared by descriptor, as of `ncclMemAlloc`, since a rank ends its
//! window without the others; and the promise that all ranks use it alike. Other windows are valid,
//! and their memory is used like any other.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::ptr;
use std::sync::{Mutex, PoisonError};

use doorbell_collectives::gpu::GpuError;
use doorbell_cuda::{Context, DevicePtr, Foreign, RelaxedCapture};

use crate::abi::{Opaque, Status, present};
use crate::derivation::Ticket;
use crate::failure::{Failure, caught};
use crate::{group, handles};

const SYMMETRIC: c_int = 1;

static WINDOWS: Mutex<Windows> = Mutex::new(Windows {
    last: 0,
    all: BTreeMap::new(),
});

struct Windows {
    last: usize,
    all: BTreeMap<usize, Window>,
}

/// Memory of a communicator's program.
#[derive(Clone, Copy)]
struct Window {
    communicator: usize,
    start: DevicePtr,
    bytes: usize,
}

/// A registration that the other ranks have to join.
pub(crate) struct Registration {
    ticket: Ticket,
    window: Window,
}

/// `ncclCommWindowRegister`: now, or at the end of the group. It waits for the other ranks, also
/// for a communicator whose initialisation does not block.
///
/// # Safety
/// `into` is null or may be written, and the memory is the program's until it ends the window.
pub(crate) unsafe fn register(
    communicator: Opaque,
    (buffer, bytes): (Opaque, usize),
    into: *mut Opaque,
    flags: c_int,
) -> Result<Status, Failure> {
    group::noted((|| {
        let known = handles::get(communicator)?;
        known.ready()?;
        present(into, "win")?;
        present(buffer, "buff")?;
        if bytes == 0 {
            return Err(Failure::invalid_argument("size is 0"));
        }
        let window = Window {
            communicator: communicator.addr(),
            start: DevicePtr(buffer.addr() as u64),
            bytes,
        };
        let mut windows = WINDOWS.lock().unwrap_or_else(PoisonError::into_inner);
        // Numbers that are no addresses, and of which none comes twice.
        windows.last += 1;
        let handle = windows.last;
        windows.all.insert(handle, window);
        drop(windows);
        // SAFETY: the caller's promise.
        unsafe { into.write(ptr::without_provenance_mut(handle)) };
        match flags & SYMMETRIC != 0 {
            true => group::register(Registration {
                ticket: Ticket::take(known)?,
                window,
            }),
            false => Ok(Status::Success),
        }
    })())
}

/// `ncclCommWindowDeregister`, which is local.
pub(crate) fn deregister(communicator: Opaque, window: Opaque) -> Result<Status, Failure> {
    let known = handles::get(communicator)?;
    find(communicator, window)?;
    let mut windows = WINDOWS.lock().unwrap_or_else(PoisonError::into_inner);
    let removed = windows.all.remove(&window.addr());
    drop(windows);
    if let Some(window) = removed {
        let gpu = &known.initialised()?.gpu;
        let _relaxed = RelaxedCapture::enter(gpu.context().driver());
        gpu.deregister(&window.memory(gpu.context())?);
    }
    Ok(Status::Success)
}

/// `ncclWinGetUserPtr`.
pub(crate) fn user_pointer(communicator: Opaque, window: Opaque) -> Result<Opaque, Failure> {
    let start = find(communicator, window)?.start;
    Ok(ptr::without_provenance_mut(start.0 as usize))
}

fn find(communicator: Opaque, window: Opaque) -> Result<Window, Failure> {
    let windows = WINDOWS.lock().unwrap_or_else(PoisonError::into_inner);
    let window = windows.all.get(&window.addr());
    window
        .filter(|window| window.communicator == communicator.addr())
        .copied()
        .ok_or_else(|| Failure::invalid_argument("this is no window of the communicator"))
}

/// Registers together what one group has: in threads, as several communicators of a process wait
/// for each other.
pub(crate) fn complete(all: Vec<Registration>) -> Result<(), Failure> {
    let threads = all.into_iter().map(|registration| {
        doorbell_threads::spawn("nccl register", move || caught(|| registration.run()))
            .map_err(|error| Failure::system(format!("cannot start a thread: {error}")))
    });
    // All are waited for, so that none is left half registered when this returns.
    let threads: Vec<_> = threads.collect();
    let done = threads.into_iter().map(|thread| match thread?.join() {
        Ok(done) => done,
        Err(panic) => std::panic::resume_unwind(panic),
    });
    done.fold(Ok(()), Result::and)
}

impl Registration {
    fn run(self) -> Result<(), Failure> {
        let gpu = &self.ticket.wait()?.gpu;
        // The program may capture in another thread.
        let _relaxed = RelaxedCapture::enter(gpu.context().driver());
        let memory = self.window.memory(gpu.context())?;
        match gpu.register(&memory) {
            Ok(()) => {
                if gpu.is_ipc_shared(&memory) {
                    gpu.deregister(&memory);
                }
                Ok(())
            }
            // The same on all ranks.
            Err(GpuError::NotRegistered(_)) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl Window {
    fn memory(&self, context: &Context) -> Result<Foreign, Failure> {
        // SAFETY: the promise of `register`.
        Ok(unsafe { Foreign::name(context, self.start, self.bytes)? })
    }
}
