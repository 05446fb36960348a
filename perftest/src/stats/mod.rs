//! Statistics with negligible cost in a test's hot loop: fixed memory, no allocation after the
//! start, one clock reading per sample.

mod bandwidth;
mod clock;
mod cpu;
mod latency;
mod pace;
mod repeats;
mod student_t;

pub(crate) use bandwidth::{Bandwidth, Timeline};
pub(crate) use clock::{Clock, ClockChoice, ClockReport};
pub(crate) use cpu::{CpuMeter, CpuUse};
pub(crate) use latency::{Latency, LatencySummary, Trip, samples_needed};
pub(crate) use pace::{Pacer, nanoseconds};
pub(crate) use repeats::Spread;
pub(crate) use student_t::student_t_quantile;
