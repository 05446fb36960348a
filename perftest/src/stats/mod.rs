//! Statistics that cost a test's hot loop next to nothing: fixed memory, no allocation after the start, one clock reading per sample.

mod bandwidth;
mod latency;

pub(crate) use bandwidth::{Bandwidth, Timeline};
pub(crate) use latency::{Latency, LatencyFigures, Trip};
