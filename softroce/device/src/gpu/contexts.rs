//! The CUDA contexts in which GPU memory is copied (decision 087).

use std::sync::atomic::{AtomicBool, Ordering};

use doorbell_cuda::{Context, Device, Driver, Error};
use parking_lot::Mutex;

/// The contexts of devices with registered memory, in order of first use. Held for good.
static USED: Mutex<Vec<UsedContext>> = Mutex::new(Vec::new());

#[derive(Clone)]
struct UsedContext {
    context: Context,
    /// The program's, not a separate one (decision 087).
    is_primary: bool,
}

impl UsedContext {
    fn is(&self, ordinal: usize, is_primary: bool) -> bool {
        self.context.device().ordinal() == ordinal && self.is_primary == is_primary
    }
}

/// Whether mapped memory is copied in separate contexts, in all devices of the process.
static SEPARATE: AtomicBool = AtomicBool::new(false);

pub(crate) fn separate_contexts() {
    SEPARATE.store(true, Ordering::Relaxed);
}

pub(super) fn is_primary_of(is_mapped: bool) -> bool {
    !is_mapped || !SEPARATE.load(Ordering::Relaxed)
}

/// The context for copies of a device's memory: the program's own, or for mapped memory, which all
/// contexts can use, a separate one, whose copies do not wait for the program's launches.
pub(super) fn context(driver: Driver, ordinal: usize, is_primary: bool) -> Result<Context, Error> {
    let mut used = USED.lock();
    if let Some(found) = used.iter().find(|used| used.is(ordinal, is_primary)) {
        return Ok(found.context.clone());
    }
    let device = driver.device(ordinal)?;
    let context = if is_primary {
        device.context()?
    } else {
        device.separate_context()?
    };
    let others = used.iter().map(|other| &other.context);
    for other in others.filter(|other| other.device() != device) {
        // Without peer access the driver stages through the host.
        for (one, other) in [(&context, other), (other, &context)] {
            if let Err(error) = one.enable_peer_access(other) {
                tracing::debug!("{error}");
            }
        }
    }
    used.push(UsedContext {
        context: context.clone(),
        is_primary,
    });
    Ok(context)
}

/// The first device with registered memory.
pub(super) fn first() -> Option<Device> {
    USED.lock().first().map(|used| used.context.device())
}
