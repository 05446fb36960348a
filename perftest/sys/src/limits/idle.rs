//! The cost of an idle device: only what its progress thread takes to fall asleep.

use std::thread;
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

use super::LimitError;
use doorbell_softroce::{Device, DeviceConfig};

/// A device that was just opened sleeps after this.
const SLEEP_DELAY: Duration = Duration::from_millis(100);

/// What a process used while its device was idle.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Idle {
    /// Processor time of all its threads.
    pub used: Duration,
    /// The time that passed.
    pub period: Duration,
}

/// The CPU time of this process while a device is idle for `period`: no other thread may run.
///
/// # Errors
/// [`LimitError::Device`]; or when the CPU time cannot be read.
pub fn idle(config: &DeviceConfig, period: Duration) -> Result<Idle, LimitError> {
    let device = Device::open(config).map_err(LimitError::Device)?;
    thread::sleep(SLEEP_DELAY);
    let before = used()?;
    thread::sleep(period);
    let used = used()?.saturating_sub(before);
    drop(device);
    Ok(Idle { used, period })
}

fn used() -> Result<Duration, LimitError> {
    let time = clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).map_err(std::io::Error::from)?;
    Ok(Duration::from(time))
}
