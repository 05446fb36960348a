//! The closed forms against the simulator and against textbook formulas.

use super::*;
use crate::cost::MessageCost;
use crate::simulate::{self, Fabric};
use crate::types::{DataType, Protocol, Rank};

fn work(bytes: u64, slice_bytes: u64) -> Work {
    Work {
        bytes,
        data: DataType::F32,
        protocol: Protocol::Simple,
        channels: 1,
        slice_bytes,
    }
}

/// Excess of the formula over the simulation.
fn excess(algorithm: Algorithm, collective: Collective, ranks: u32, link: Link, work: &Work) -> f64 {
    let order: Vec<Rank> = (0..ranks).map(Rank).collect();
    let schedule = algorithm.schedule(collective, &order, Rank(0)).unwrap();
    assert_eq!(
        work.slices(schedule.shape()),
        work.slices_of(blocks(algorithm, collective, ranks)),
        "{algorithm} {collective}"
    );
    let compute = Compute::default();
    let simulated = simulate::run(schedule.as_ref(), &Fabric::uniform(ranks, link, compute), work).unwrap();
    let predicted = predict_ns(algorithm, collective, ranks, &link, &compute, work).unwrap();
    predicted / simulated.time.ns() - 1.0
}

#[test]
fn where_all_ranks_do_the_same_the_formulas_are_exact() {
    let exact = [
        (Algorithm::Ring, Collective::AllReduce),
        (Algorithm::Ring, Collective::ReduceScatter),
        (Algorithm::RecursiveDoubling, Collective::AllReduce),
        (Algorithm::RecursiveDoubling, Collective::AllGather),
        (Algorithm::HalvingDoubling, Collective::AllReduce),
        (Algorithm::HalvingDoubling, Collective::ReduceScatter),
        (Algorithm::Bruck, Collective::AllGather),
        (Algorithm::FullMesh, Collective::SendRecv),
        (Algorithm::RecursiveDoubling, Collective::Barrier),
    ];
    for (algorithm, collective) in exact {
        for link in [Link::ndr400(), Link::soft_local()] {
            for ranks in [2, 4, 8, 16, 64] {
                for bytes in [8, 1 << 12, 1 << 20, 64 << 20] {
                    let excess = excess(algorithm, collective, ranks, link, &work(bytes, 1 << 20));
                    assert!(
                        excess.abs() < 0.02,
                        "{algorithm} {collective}, {ranks} ranks, {bytes} bytes: {:+.1} %",
                        excess * 100.0
                    );
                }
            }
        }
    }
}

#[test]
fn with_one_channel_every_formula_is_near_for_many_ranks() {
    for &collective in Collective::ALL {
        for algorithm in Algorithm::of(collective) {
            for link in [Link::ndr400(), Link::soft_local()] {
                for ranks in [64, 100] {
                    for (bytes, slice) in [
                        (8, 1 << 16),
                        (1 << 16, 1 << 16),
                        (1 << 20, u64::MAX),
                        (16 << 20, 1 << 16),
                    ] {
                        let excess = excess(algorithm, collective, ranks, link, &work(bytes, slice));
                        assert!(
                            excess.abs() < 0.2,
                            "{algorithm} {collective}, {ranks} ranks, {bytes} bytes in slices of {slice}: {:+.1} %",
                            excess * 100.0
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn without_overheads_the_formulas_are_the_textbooks() {
    let (alpha, beta) = (1000.0, 0.1);
    let cost = MessageCost::simple(alpha, 0.0, 0.0, beta);
    let link = Link::derived(DataMover::Device, cost, alpha);
    let compute = Compute {
        gamma_ns_per_byte: 0.0,
        copy_ns_per_byte: 0.0,
        begin_ns: 0.0,
        ..Compute::default()
    };
    let (p, n) = (16u32, 1u64 << 20);
    let (log, whole) = (4.0, n as f64 * beta);
    let share = 15.0 / 16.0 * whole;
    let c = 64.0;
    let table = [
        (
            Algorithm::Ring,
            Collective::AllReduce,
            u64::MAX,
            30.0 * alpha + 2.0 * share,
        ),
        (
            Algorithm::HalvingDoubling,
            Collective::AllReduce,
            u64::MAX,
            2.0 * log * alpha + 2.0 * share,
        ),
        (
            Algorithm::RecursiveDoubling,
            Collective::AllReduce,
            u64::MAX,
            log * (alpha + whole),
        ),
        (
            Algorithm::FullMesh,
            Collective::AllReduce,
            u64::MAX,
            2.0 * alpha + 2.0 * share,
        ),
        (
            Algorithm::OneShot,
            Collective::AllReduce,
            u64::MAX,
            alpha + 15.0 * whole,
        ),
        (Algorithm::Tree, Collective::Broadcast, u64::MAX, log * (alpha + whole)),
        (Algorithm::Ring, Collective::AllGather, u64::MAX, 15.0 * alpha + share),
        (Algorithm::Bruck, Collective::AllGather, u64::MAX, log * alpha + share),
        (Algorithm::FullMesh, Collective::AllGather, u64::MAX, alpha + share),
        (
            Algorithm::Ring,
            Collective::ReduceScatter,
            u64::MAX,
            15.0 * alpha + share,
        ),
        // Cut into c slices, a chain of p ranks takes (p − 2 + c)·(nβ/c) and the latencies of its
        // hops.
        (
            Algorithm::Ring,
            Collective::Broadcast,
            n / 64,
            15.0 * alpha + (14.0 + c) * whole / c,
        ),
    ];
    for (algorithm, collective, slice, expected) in table {
        let found = predict_ns(algorithm, collective, p, &link, &compute, &work(n, slice)).unwrap();
        assert!(
            (found / expected - 1.0).abs() < 1e-9,
            "{algorithm} {collective}: {found} and not {expected}"
        );
    }
    // Pipelined, a double binary tree takes its latency plus twice the data of each rank.
    let tree = predict_ns(
        Algorithm::DoubleBinaryTree,
        Collective::Broadcast,
        p,
        &link,
        &compute,
        &work(64 << 20, 1 << 16),
    )
    .unwrap();
    let bound = f64::from(64 << 20) * beta;
    assert!((1.0..1.1).contains(&(tree / bound)), "{}", tree / bound);
    assert_eq!(
        predict_ns(Algorithm::Ring, Collective::Barrier, p, &link, &compute, &work(0, 1)),
        None
    );
}
