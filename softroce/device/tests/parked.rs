//! A device at rest uses no processor. In a test program of its own: what is measured is the whole process.

use std::time::Duration;

use doorbell_softroce::{DeviceConfig, limits};
use nix::sys::resource::{UsageWho, getrusage};

/// Long enough to see whatever happens once in a second.
const PERIOD: Duration = Duration::from_secs(10);

/// How often threads of this process have gone to sleep.
fn sleeps() -> i64 {
    let usage = getrusage(UsageWho::RUSAGE_SELF).unwrap();
    usage.voluntary_context_switches()
}

#[test]
fn a_parked_device_uses_no_processor() {
    let mut config = DeviceConfig::new("soft0");
    // An own port: the default address is then free whatever else runs here.
    config.port = 20_000 + (std::process::id() % 40_000) as u16;
    let before = sleeps();
    let idle = limits::idle(&config, PERIOD).unwrap();
    // It opens, spins a while, and sleeps; then nothing wakes it until it is closed.
    let slept = sleeps() - before;
    assert!(idle.used < PERIOD / 1000, "{:?} of {:?}", idle.used, idle.period);
    assert!(slept < 50, "slept {slept} times");
}
