//! An idle device uses no CPU. In a test program of its own: the whole process is measured.

use std::time::Duration;

use doorbell_softroce::{DeviceConfig, limits};
use nix::sys::resource::{UsageWho, getrusage};

/// Long enough for whatever happens once per second.
const PERIOD: Duration = Duration::from_secs(10);

fn sleeps() -> i64 {
    let usage = getrusage(UsageWho::RUSAGE_SELF).unwrap();
    usage.voluntary_context_switches()
}

#[test]
fn an_idle_device_uses_no_cpu() {
    let mut config = DeviceConfig::new("soft0");
    // A port of its own: the default address is then free whatever else runs here.
    config.port = 20_000 + (std::process::id() % 40_000) as u16;
    let before = sleeps();
    let idle = limits::idle(&config, PERIOD).unwrap();
    // It opens, busy-polls, and sleeps; then nothing wakes it until it is closed.
    let slept = sleeps() - before;
    assert!(idle.used < PERIOD / 1000, "{:?} of {:?}", idle.used, idle.period);
    assert!(slept < 50, "slept {slept} times");
}
