//! The CPU time of this process during a measurement, in user mode and in the kernel.
//!
//! All threads of the process count; 1.0 is one core all the time. getrusage(2) may have the
//! resolution of a scheduler tick (4 ms).

use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;

/// CPU time over elapsed time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct CpuUse {
    pub(crate) user_cores: f64,
    pub(crate) system_cores: f64,
}

#[derive(Debug, Default)]
pub(crate) struct CpuMeter {
    running: Option<Reading>,
    user: Duration,
    system: Duration,
    elapsed: Duration,
}

#[derive(Clone, Copy, Debug)]
struct Reading {
    at: Instant,
    user: Duration,
    system: Duration,
}

impl Reading {
    /// `None` where the kernel does not report it.
    fn now() -> Option<Reading> {
        let usage = getrusage(UsageWho::RUSAGE_SELF).ok()?;
        Some(Reading {
            at: Instant::now(),
            user: duration(usage.user_time()),
            system: duration(usage.system_time()),
        })
    }
}

fn duration(time: TimeVal) -> Duration {
    let seconds = u64::try_from(time.tv_sec()).unwrap_or(0);
    let micros = u64::try_from(time.tv_usec()).unwrap_or(0);
    Duration::from_secs(seconds) + Duration::from_micros(micros)
}

impl CpuMeter {
    pub(crate) fn start(&mut self) {
        self.running = Reading::now();
    }

    /// Ends it; does nothing without a start.
    pub(crate) fn stop(&mut self) {
        let (Some(from), Some(to)) = (self.running.take(), Reading::now()) else {
            return;
        };
        self.user += to.user.saturating_sub(from.user);
        self.system += to.system.saturating_sub(from.system);
        self.elapsed += to.at - from.at;
    }

    pub(crate) fn used(&self) -> CpuUse {
        let elapsed = self.elapsed.as_secs_f64();
        if elapsed == 0.0 {
            return CpuUse::default();
        }
        CpuUse {
            user_cores: self.user.as_secs_f64() / elapsed,
            system_cores: self.system.as_secs_f64() / elapsed,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;

    use super::*;

    #[test]
    fn nothing_measured_is_nothing_used() {
        let mut meter = CpuMeter::default();
        meter.stop();
        assert_eq!(meter.used(), CpuUse::default());
    }

    /// Until this process has used enough CPU time of the kind `of`, however busy the machine is.
    fn used_by(work: &mut dyn FnMut(), of: fn(&CpuMeter) -> Duration) -> CpuMeter {
        let mut meter = CpuMeter::default();
        while of(&meter) < Duration::from_millis(60) {
            meter.start();
            (0..200).for_each(|_| work());
            meter.stop();
        }
        meter
    }

    #[test]
    fn the_kernels_part_is_in_it() {
        let mut zero = File::open("/dev/zero").unwrap();
        let mut block = vec![1u8; 1 << 16];
        let meter = used_by(&mut || zero.read_exact(&mut block).unwrap(), |meter| meter.system);
        assert!(meter.used().system_cores > 0.0);
        let mut x = 1u64;
        let meter = used_by(
            &mut || (0..5000).for_each(|i| x = std::hint::black_box(x).wrapping_mul(31).wrapping_add(i)),
            |meter| meter.user,
        );
        assert!(meter.used().user_cores > 0.0);
    }
}
