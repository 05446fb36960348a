//! Ranks as threads of this process, each with its own device address.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Once;
use std::thread;
use std::time::Duration;

use doorbell_cuda_standin::Standin;
use doorbell_gpudirect::heap::{HeapBuilder, SymmetricHeap, ThreadExchange};
use doorbell_softroce_ibverbs::{DeviceConfig, api, configure};
use doorbell_verbs::{Context, Library};

use crate::gpu::Gpu;

pub(crate) const TIMEOUT: Duration = Duration::from_secs(120);

pub(crate) fn device() -> Context {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let [_, _, high, low] = std::process::id().to_be_bytes();
        let mut config = DeviceConfig::new("soft0");
        config.address = Some(IpAddr::V4(Ipv4Addr::new(127, 190 + high % 32, low, 1)));
        configure(vec![config]).unwrap();
    });
    Library::new(api()).open("soft0").unwrap()
}

/// Runs `rank` on a thread per rank, with a heap built by `make`.
pub(crate) fn ranks(
    count: u32,
    make: impl for<'a> Fn(HeapBuilder<'a>) -> HeapBuilder<'a> + Sync,
    rank: impl Fn(SymmetricHeap) + Sync,
) {
    let device = device();
    thread::scope(|scope| {
        for mut exchange in ThreadExchange::new(count, TIMEOUT) {
            let (device, make, rank) = (&device, &make, &rank);
            scope.spawn(move || {
                let heap = make(SymmetricHeap::builder(device)).connect(&mut exchange).unwrap();
                rank(heap);
            });
        }
    });
}

/// As [`ranks`], each with a GPU of the stand-in, whose kernels access the heap.
pub(crate) fn gpu_ranks(
    standin: &Standin,
    count: u32,
    make: impl for<'a> Fn(HeapBuilder<'a>) -> HeapBuilder<'a> + Sync,
    rank: impl Fn(SymmetricHeap, Gpu) + Sync,
) {
    let device = device();
    let driver = standin.driver().unwrap();
    thread::scope(|scope| {
        for (number, mut exchange) in ThreadExchange::new(count, TIMEOUT).into_iter().enumerate() {
            let (device, make, rank) = (&device, &make, &rank);
            scope.spawn(move || {
                let gpu = Gpu::new(driver, number);
                let context = gpu.context.clone();
                let heap = make(SymmetricHeap::builder(device)).pinned(&context);
                rank(heap.connect(&mut exchange).unwrap(), gpu);
            });
        }
    });
}
