//! An idle device uses no CPU. In a test program of its own: the whole process is measured.

use std::thread::sleep;
use std::time::Duration;

use doorbell_softroce::{Device, DeviceConfig};
use nix::sys::resource::{Usage, UsageWho, getrusage};
use nix::sys::time::TimeValLike;

/// A device that was just opened sleeps after this.
const SLEEP_DELAY: Duration = Duration::from_millis(100);
/// Long enough for whatever happens once per second.
const PERIOD: Duration = Duration::from_secs(10);

fn usage() -> Usage {
    getrusage(UsageWho::RUSAGE_SELF).unwrap()
}

fn cpu_us(usage: &Usage) -> i64 {
    (usage.user_time() + usage.system_time()).num_microseconds()
}

#[test]
fn an_idle_device_uses_no_cpu() {
    let mut config = DeviceConfig::new("soft0");
    // A port of its own: the default address is then free whatever else runs here.
    config.port = 20_000 + (std::process::id() % 40_000) as u16;
    let _device = Device::open(&config).unwrap();
    sleep(SLEEP_DELAY);
    let before = usage();
    sleep(PERIOD);
    let after = usage();
    let used = cpu_us(&after) - cpu_us(&before);
    let slept = after.voluntary_context_switches() - before.voluntary_context_switches();
    assert!(used < PERIOD.as_micros() as i64 / 1000, "{used} us of {PERIOD:?}");
    assert!(slept < 5, "slept {slept} times");
}
