//! The device's clock, whose ticks extended completion queues use as completion timestamps.

use core::mem::MaybeUninit;
use core::time::Duration;

use doorbell_verbs_sys::{self as sys, inline};

use crate::context::Context;
use crate::error::{DeviceError, check};

/// The rate of a device's clock, which converts ticks ([`Context::clock_ticks`],
/// [`Completion::timestamp_ticks`](crate::Completion::timestamp_ticks)) to durations.
#[doc(alias("hca_core_clock", "completion_timestamp_mask"))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceClock {
    khz: u64,
    mask: u64,
}

impl DeviceClock {
    pub(crate) fn from_sys(attr: &sys::ibv_device_attr_ex) -> Option<Self> {
        let (khz, mask) = (attr.hca_core_clock, attr.completion_timestamp_mask);
        (khz != 0 && mask != 0).then_some(Self { khz, mask })
    }

    /// Ticks per millisecond (`hca_core_clock`, ibv_query_device_ex(3)).
    #[doc(alias = "hca_core_clock")]
    #[must_use]
    pub fn khz(&self) -> u64 {
        self.khz
    }

    /// The time from `earlier` to `later`, across at most one wrap of the clock.
    #[must_use]
    pub fn between(&self, earlier: u64, later: u64) -> Duration {
        let ticks = later.wrapping_sub(earlier) & self.mask;
        let (ms, rest) = (ticks / self.khz, ticks % self.khz);
        // The remainder is less than a millisecond: the product does not overflow below 18 THz.
        Duration::from_millis(ms) + Duration::from_nanos(rest.saturating_mul(1_000_000) / self.khz)
    }
}

impl Context {
    /// The device's clock now, in ticks (ibv_query_rt_values_ex(3)).
    ///
    /// # Errors
    /// When the device has no clock that can be read.
    #[doc(alias = "ibv_query_rt_values_ex")]
    pub fn clock_ticks(&self) -> Result<u64, DeviceError> {
        let mut values = MaybeUninit::<sys::ibv_values_ex>::zeroed();
        // SAFETY: all-zero is valid for integers; the context is live, and `values` may be written.
        let (result, values) = unsafe {
            values.assume_init_mut().comp_mask = sys::IBV_VALUES_MASK_RAW_CLOCK;
            let result = inline::query_rt_values_ex(self.inner().raw, values.as_mut_ptr());
            (result, values.assume_init_ref())
        };
        check(result).map_err(|error| DeviceError::Query {
            verb: "ibv_query_rt_values_ex",
            object: self.name().to_owned(),
            error,
        })?;
        // The raw clock is returned in `tv_nsec`: ticks, all 64 bits of them, whatever their rate.
        Ok(values.raw_clock.tv_nsec.cast_unsigned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_become_times() {
        let clock = DeviceClock {
            khz: 156_250,
            mask: (1 << 48) - 1,
        };
        assert_eq!(clock.between(100, 100 + 156_250), Duration::from_millis(1));
        assert_eq!(clock.between(0, 25), Duration::from_nanos(160));
        assert_eq!(clock.between((1 << 48) - 5, 20), Duration::from_nanos(160), "wrapped");
        let fast = DeviceClock {
            khz: 1_000_000,
            mask: u64::MAX,
        };
        assert_eq!(fast.between(7, 1_000_000_000_007), Duration::from_secs(1000));
    }
}
