//! The closed forms, held against the simulator.

use super::*;
use crate::simulate::{self, Fabric};
use crate::types::{DataType, Protocol, Rank};

/// How far the formula is from the simulation of the same.
fn error(algorithm: Algorithm, collective: Collective, ranks: u32, link: Link, work: &Work) -> f64 {
    let order: Vec<Rank> = (0..ranks).map(Rank).collect();
    let schedule = algorithm.schedule(collective, &order, Rank(0)).unwrap();
    assert_eq!(
        work.slices(schedule.shape()),
        work.slices_of(blocks(algorithm, collective, ranks))
    );
    let compute = Compute::default();
    let fabric = Fabric::uniform(ranks, link, compute);
    let simulated = simulate::run(schedule.as_ref(), &fabric, work).unwrap().time.ns();
    let predicted = predict_ns(algorithm, collective, ranks, &link, &compute, work).unwrap();
    predicted / simulated - 1.0
}

#[test]
fn survey() {
    for &collective in Collective::ALL {
        for algorithm in Algorithm::of(collective) {
            for (what, link) in [("ndr", Link::ndr400()), ("soft", Link::soft_local())] {
                for data in [DataType::F32, DataType::Bf16] {
                    for (channels, slice_bytes) in [(1, u64::MAX), (1, 1 << 16), (4, 1 << 16)] {
                        let mut worst = (0.0f64, 0, 0);
                        for ranks in [2, 3, 4, 5, 7, 8, 16, 33] {
                            for bytes in [8, 1 << 12, 1 << 16, 1 << 20, 16 << 20] {
                                let work = Work {
                                    bytes,
                                    data,
                                    protocol: Protocol::Simple,
                                    channels,
                                    slice_bytes,
                                };
                                let e = error(algorithm, collective, ranks, link, &work);
                                if e.abs() > worst.0.abs() {
                                    worst = (e, ranks, bytes);
                                }
                            }
                        }
                        println!(
                            "{:6.1}% {collective} {algorithm} {what} {data} channels {channels} slice {slice_bytes:x} at {} ranks {} bytes",
                            worst.0 * 100.0,
                            worst.1,
                            worst.2
                        );
                    }
                }
            }
        }
    }
}
