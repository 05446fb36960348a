//! What a device costs that nobody uses: nothing, but for what its progress thread takes to fall asleep.

use std::thread;
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

use super::LimitError;
use crate::config::DeviceConfig;
use crate::device::Device;

/// Until then a device that was just opened has gone to sleep.
const SETTLE: Duration = Duration::from_millis(100);

/// What a process used while its device was at rest.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Idle {
    /// Processor time of all its threads.
    pub used: Duration,
    /// The time that passed.
    pub period: Duration,
}

/// Opens a device as `config` says, leaves it alone for `period` and gives the processor time that the whole process used meanwhile: no other thread of it may be at work.
///
/// # Errors
///
/// [`LimitError::Device`]; or when the system does not tell the processor time.
pub fn idle(config: &DeviceConfig, period: Duration) -> Result<Idle, LimitError> {
    let device = Device::open(config)?;
    thread::sleep(SETTLE);
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
