//! The clocks of completion time stamps (ibv_create_cq_ex(3)).

use nix::time::{ClockId, clock_gettime};

/// The rate of [`ticks`], in kHz: one per nanosecond.
pub const TICK_KHZ: u64 = 1_000_000;

/// The device's own clock, in ticks: CLOCK_MONOTONIC, the raw clock of ibv_query_rt_values_ex(3).
pub fn ticks() -> u64 {
    nanoseconds(ClockId::CLOCK_MONOTONIC)
}

/// [`ticks`], up to [`COARSE`] nanoseconds old: takes a quarter of the time.
pub(crate) fn coarse_ticks() -> u64 {
    nanoseconds(ClockId::CLOCK_MONOTONIC_COARSE)
}

/// The longest timer tick (CONFIG_HZ is at least 100), by which the kernel's coarse clocks advance.
pub(crate) const COARSE: u64 = 10_000_000;

/// Nanoseconds since 1970: CLOCK_REALTIME.
pub fn wallclock_ns() -> u64 {
    nanoseconds(ClockId::CLOCK_REALTIME)
}

/// 0 without the clock, which every kernel has.
fn nanoseconds(clock: ClockId) -> u64 {
    clock_gettime(clock).map_or(0, |time| time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64)
}

/// The clocks of a completion queue's time stamps.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct TimestampClocks {
    /// [`ticks`].
    pub ticks: bool,
    /// [`wallclock_ns`].
    pub wallclock: bool,
}

/// When a completion was generated; 0 for a clock that its queue does not use.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Timestamp {
    /// By the device's clock.
    pub ticks: u64,
    /// By the wall clock, in nanoseconds since 1970.
    pub wallclock_ns: u64,
}

impl TimestampClocks {
    pub(crate) fn now(self) -> Timestamp {
        Timestamp {
            ticks: if self.ticks { ticks() } else { 0 },
            wallclock_ns: if self.wallclock { wallclock_ns() } else { 0 },
        }
    }
}
