//! The clocks by which completions are stamped (ibv_create_cq_ex(3)).

use nix::time::{ClockId, clock_gettime};

/// The rate of [`ticks`], in kHz: one every nanosecond.
pub const TICK_KHZ: u64 = 1_000_000;

/// The device's own clock, in ticks: CLOCK_MONOTONIC (`ibv_query_rt_values_ex(3)` calls it the raw clock).
pub fn ticks() -> u64 {
    nanoseconds(ClockId::CLOCK_MONOTONIC)
}

/// [`ticks`] of a while ago, at most [`COARSE`] nanoseconds: takes a quarter of the time.
pub(crate) fn coarse_ticks() -> u64 {
    nanoseconds(ClockId::CLOCK_MONOTONIC_COARSE)
}

/// The longest period of the kernel's timer interrupt (CONFIG_HZ is 100 at least), by which its coarse clocks go on.
pub(crate) const COARSE: u64 = 10_000_000;

/// Nanoseconds since 1970: CLOCK_REALTIME.
pub fn wallclock_ns() -> u64 {
    nanoseconds(ClockId::CLOCK_REALTIME)
}

/// 0 where the kernel lacks the clock, which none does.
fn nanoseconds(clock: ClockId) -> u64 {
    clock_gettime(clock).map_or(0, |time| time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64)
}

/// Which clocks a completion queue stamps its completions by.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Stamps {
    /// [`ticks`].
    pub ticks: bool,
    /// [`wallclock_ns`].
    pub wallclock: bool,
}

/// When a completion was generated; 0 by a clock that its queue does not stamp by.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Stamp {
    /// By the device's clock.
    pub ticks: u64,
    /// By the wall clock, in nanoseconds since 1970.
    pub wallclock_ns: u64,
}

impl Stamps {
    /// The time now, by these clocks.
    pub(crate) fn now(self) -> Stamp {
        Stamp {
            ticks: if self.ticks { ticks() } else { 0 },
            wallclock_ns: if self.wallclock { wallclock_ns() } else { 0 },
        }
    }
}
