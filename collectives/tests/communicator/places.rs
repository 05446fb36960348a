//! Ranks with known locations: they are distributed, and rings use the best links.

use std::thread;

use doorbell_collectives::bootstrap::Group;
use doorbell_collectives::topology::{Gpu, Member, NvLink, NvLinkEnd, NvLinkGroup, least_nvlink};
use doorbell_collectives::{Algorithm, Communicator, Options, Rank, ReduceOp};

use crate::world::{open, options};

fn address(gpu: u32) -> String {
    format!("0000:{gpu:02x}:00.0")
}

/// One of four GPUs: each has two links to the one after the next, and one to the others.
fn location_of(gpu: u32) -> Member {
    let bundle = |other: u32| {
        let links = if other % 2 == gpu % 2 { 2 } else { 1 };
        NvLinkGroup {
            to: NvLinkEnd::Gpu(address(other)),
            links,
            bytes_per_s: u64::from(links) * 25_000_000_000,
        }
    };
    Member {
        host: "another name".to_owned(),
        gpu: Some(Gpu {
            address: address(gpu),
            nvlinks: (0..4).filter(|other| *other != gpu).map(bundle).collect(),
            ..Gpu::default()
        }),
        ..Member::default()
    }
}

fn each<R: Send>(all: Vec<Options>, rank: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
    let groups = Group::local(all.len() as u32).unwrap();
    thread::scope(|scope| {
        let rank = &rank;
        let threads: Vec<_> = groups
            .into_iter()
            .zip(all)
            .map(|(group, options)| scope.spawn(move || rank(Communicator::new(&[open()], group, options).unwrap())))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn locations_are_distributed_and_rings_use_the_best_links() {
    let at = |location| Options {
        location: Some(location),
        ..options()
    };
    each((0..4).map(|gpu| at(location_of(gpu))).collect(), |comm| {
        let order = comm.order();
        // Another ring has equal weight; this is the first of them.
        assert_eq!(order, [0, 1, 3, 2].map(Rank));
        let locations = comm.locations();
        assert_eq!(comm.hosts(), [0; 4]);
        for (rank, known) in locations.iter().enumerate() {
            // The host name is that of the group.
            assert_eq!(known.host, comm.members()[rank].host);
            assert_eq!(known.gpu, location_of(rank as u32).gpu);
        }
        let one = NvLink {
            links: 1,
            bytes_per_s: 25_000_000_000,
        };
        assert_eq!(least_nvlink(&locations), Some(one));
        let mut x = vec![i64::from(comm.rank().0); 1000];
        let ring = comm.all_reduce(&mut x, ReduceOp::Sum).algorithm(Algorithm::Ring);
        ring.wait().unwrap();
        assert_eq!(x, [6; 1000]);

        // The members of a split communicator keep their locations.
        let pair = comm.split(Some(comm.rank().0 % 2), 0).unwrap().unwrap();
        let kept: Vec<_> = pair.locations().into_iter().map(|location| location.gpu).collect();
        let me = comm.rank().0 % 2;
        assert_eq!(kept, [location_of(me).gpu, location_of(me + 2).gpu]);
        assert_eq!(least_nvlink(&pair.locations()).map(|link| link.links), Some(2));
    });
}

#[test]
fn ranks_without_a_location_have_no_gpu() {
    let mut all = vec![options(); 3];
    all[1].location = Some(location_of(0));
    each(all, |comm| {
        let has: Vec<bool> = comm.locations().iter().map(|location| location.gpu.is_some()).collect();
        assert_eq!(has, [false, true, false]);
        assert_eq!(least_nvlink(&comm.locations()), None);
        comm.barrier().wait().unwrap();
    });
}
