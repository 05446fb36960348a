//! A device at rest uses no processor. In a test program of its own: what is measured is the whole process.

use std::time::Duration;

use doorbell_softroce::{Device, DeviceConfig};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;

/// The processor time that this process has used.
fn used() -> Duration {
    let usage = getrusage(UsageWho::RUSAGE_SELF).unwrap();
    let micros = usage.user_time().num_microseconds() + usage.system_time().num_microseconds();
    Duration::from_micros(micros.try_into().unwrap())
}

#[test]
fn a_parked_device_uses_no_processor() {
    let mut config = DeviceConfig::new("soft0");
    // An own port: the default address is then free whatever else runs here.
    config.port = 20_000 + (std::process::id() % 40_000) as u16;
    let device = Device::open(&config).unwrap();
    // It spins at first.
    std::thread::sleep(Duration::from_millis(50));
    let before = used();
    std::thread::sleep(Duration::from_secs(1));
    let while_parked = used() - before;
    assert!(while_parked < Duration::from_millis(10), "{while_parked:?} of a second");
    drop(device);
}
