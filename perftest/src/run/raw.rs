//! The bandwidth of copies between the two GPUs in one process, without RDMA: the upper bound that
//! a result is compared with.

use doorbell_cuda::{DeviceMemory, Error, Event, Memory, Stream};

use crate::device::Gpu;
use crate::exchange::GpuEnd;

/// Repeats, of which the median counts.
const REPEATS: usize = 5;
/// Target duration of a repeat, seconds.
const REPEAT: f64 = 0.02;
/// The most copies in one repeat.
const MOST: f64 = 1000.0;

/// Bytes per second of back-to-back copies of `bytes` from the memory of `gpu` to that of the GPU
/// `peer`; `None` where this process does not see that GPU, or the two have no peer access.
pub(crate) fn peer_copy(gpu: &Gpu, peer: &GpuEnd, bytes: u64) -> Option<f64> {
    let devices = gpu.context.driver().devices().ok()?;
    let other = devices
        .into_iter()
        .find(|device| device.uuid().is_ok_and(|uuid| uuid.to_string() == peer.uuid))?;
    let measured = measure(gpu, other, usize::try_from(bytes).ok()?);
    // A failed copy only leaves the value out of the report; the test itself is done.
    measured
        .inspect_err(|error| tracing::debug!("no raw copy: {error}"))
        .ok()?
}

fn measure(gpu: &Gpu, other: doorbell_cuda::Device, bytes: usize) -> Result<Option<f64>, Error> {
    let here = gpu.context.device();
    if here != other && here.peer(other)?.is_none() {
        return Ok(None);
    }
    let from = DeviceMemory::alloc(&gpu.context, bytes)?;
    let context = other.context()?;
    let into = DeviceMemory::options(&context).peers(&[here]).alloc(bytes)?;
    let stream = Stream::new(&gpu.context)?;
    let mut copies = 4u64;
    let mut rates = Vec::with_capacity(REPEATS);
    // The first two are warm-up and determine the number of copies in a repeat.
    for repeat in 0..REPEATS + 2 {
        let (start, end) = (Event::timed(&gpu.context)?, Event::timed(&gpu.context)?);
        stream.record(&start)?;
        for _ in 0..copies {
            stream.copy(into.all(), from.all())?;
        }
        stream.record(&end)?;
        stream.synchronize()?;
        let seconds = end.since(&start)?.as_secs_f64();
        if repeat < 2 {
            copies = (REPEAT / (seconds / copies as f64).max(1e-9)).clamp(2.0, MOST) as u64;
        } else if seconds > 0.0 {
            rates.push((copies * bytes as u64) as f64 / seconds);
        }
    }
    rates.sort_by(f64::total_cmp);
    Ok(rates.get(rates.len() / 2).copied())
}
