//! Simulations whose times can be computed by hand, and simulations that must be equal.

use super::*;
use crate::algorithm::Algorithm;
use crate::cost::{ByteCosts, Compute, DataMover, FarMessages, Link, MessageCost, Scale};
use crate::plan::{BlockForm, PlanMemory, Program, Span, Step};

/// Visible in a result: α = 1000 (100 and 200 of it busy), β = 0.1, and γ = 0.01 ns/B.
fn link() -> Link {
    let simple = MessageCost::simple(1000.0, 100.0, 200.0, 0.1);
    Link::derived(DataMover::Device, simple, 500.0)
}

const COMPUTE: Compute = Compute {
    gamma_ns_per_byte: 0.01,
    copy_ns_per_byte: 0.02,
    begin_ns: 50.0,
    gamma: None,
    copy: None,
};

fn work(bytes: u64) -> Work {
    Work {
        bytes,
        data: DataType::F32,
        protocol: Protocol::Simple,
        channels: 1,
        slice_bytes: u64::MAX,
    }
}

fn ring(collective: Collective, ranks: u32) -> Box<dyn Schedule> {
    let order: Vec<Rank> = (0..ranks).map(Rank).collect();
    Algorithm::Ring.schedule(collective, &order, Rank(0)).unwrap()
}

struct HandWritten {
    shape: Shape,
    programs: Vec<Program>,
}

impl Schedule for HandWritten {
    fn shape(&self) -> &Shape {
        &self.shape
    }

    fn strands(&self) -> u32 {
        self.programs[0].strands.len() as u32
    }

    fn steps(&self, strand: u32, rank: Rank) -> Box<dyn Iterator<Item = Step> + Send + '_> {
        Box::new(self.programs[rank.index()].strands[strand as usize].iter().cloned())
    }

    fn scratch(&self, _: Rank) -> Vec<u32> {
        Vec::new()
    }

    fn partial(&self, _: Rank) -> Vec<u32> {
        Vec::new()
    }

    fn in_place(&self) -> bool {
        false
    }
}

fn written(blocks: u32, programs: Vec<Vec<Step>>) -> HandWritten {
    let order = (0..programs.len() as u32).map(Rank).collect();
    let shape = Shape {
        collective: Collective::Broadcast,
        order,
        root: Rank(0),
        blocks,
    };
    let programs = programs
        .into_iter()
        .map(|steps| Program {
            strands: vec![steps],
            ..Program::default()
        })
        .collect();
    HandWritten { shape, programs }
}

fn send(to: u32) -> Step {
    Step::Send {
        to: Rank(to),
        span: Span::block(PlanMemory::Input, 0),
    }
}

fn recv(from: u32) -> Step {
    Step::Recv {
        from: Rank(from),
        into: Span::block(PlanMemory::Output, 0),
    }
}

#[test]
fn a_ring_takes_what_the_formula_says() {
    for ranks in [2, 3, 5, 8, 16, 33] {
        let bytes = 4096 * u64::from(ranks);
        let fabric = Fabric::uniform(ranks, link(), COMPUTE);
        let outcome = run(ring(Collective::AllReduce, ranks).as_ref(), &fabric, &work(bytes)).unwrap();
        let steps = f64::from(2 * (ranks - 1));
        let expected = 50.0 + steps * (1000.0 + 4096.0 * 0.1) + f64::from(ranks - 1) * 4096.0 * 0.01;
        assert!(
            (outcome.time.ns() - expected).abs() < 1.0,
            "{ranks} ranks: {} and not {expected}",
            outcome.time.ns()
        );
        assert_eq!(outcome.messages, u64::from(2 * (ranks - 1) * ranks));
        let carried: f64 = outcome.links.iter().map(|link| link.bytes).sum();
        assert_eq!(carried, 2.0 * 4096.0 * outcome.messages as f64, "once out and once in");
    }
}

#[test]
fn one_rank_run_for_all_is_every_rank_run() {
    for collective in [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter] {
        for (ranks, channels) in [(2, 1), (3, 4), (7, 2), (16, 3)] {
            let schedule = ring(collective, ranks);
            let work = Work {
                channels,
                slice_bytes: 3000,
                ..work(100_000 * u64::from(ranks))
            };
            for fabric in [
                Fabric::uniform(ranks, link(), COMPUTE),
                Fabric::one_host(ranks, Link::soft_local(), COMPUTE),
            ] {
                assert!(symmetry::all_ranks_symmetric(schedule.as_ref()));
                let one = run(schedule.as_ref(), &fabric, &work).unwrap();
                let all = run_every_rank(schedule.as_ref(), &fabric, &work).unwrap();
                assert_eq!((one.time, one.messages, one.steps), (all.time, all.messages, all.steps));
                assert_eq!(one.ranks, all.ranks);
                assert_eq!(one.links.len(), all.links.len());
                for link in &all.links {
                    assert!(one.links.contains(link), "{}", link.link);
                }
            }
        }
    }
}

#[test]
fn a_chain_is_not_taken_for_symmetric() {
    assert!(!symmetry::all_ranks_symmetric(ring(Collective::Broadcast, 5).as_ref()));
    let ordered: Vec<Rank> = [3, 0, 2, 1].map(Rank).into();
    let permuted = Algorithm::Ring
        .schedule(Collective::AllReduce, &ordered, Rank(0))
        .unwrap();
    assert!(symmetry::all_ranks_symmetric(permuted.as_ref()));
    // The last of four ranks sends twice.
    let mut steps: Vec<Vec<Step>> = (0..4)
        .map(|rank| vec![send((rank + 1) % 4), recv((rank + 3) % 4)])
        .collect();
    steps[3].push(send(0));
    steps[0].push(recv(3));
    assert!(!symmetry::all_ranks_symmetric(&written(1, steps)));
}

#[test]
fn senders_to_one_adapter_take_turns() {
    // The adapter of rank 0 takes 1000 ns for each of the three messages.
    let steps = vec![
        vec![recv(1), recv(2), recv(3)],
        vec![send(0)],
        vec![send(0)],
        vec![send(0)],
    ];
    let outcome = run(&written(1, steps), &Fabric::uniform(4, link(), COMPUTE), &work(10_000)).unwrap();
    // begin, post, three consecutive messages, latency, and the last one's receive.
    assert_eq!(outcome.time.ns(), 50.0 + 100.0 + 3000.0 + 700.0 + 200.0);
    let adapter = outcome
        .links
        .iter()
        .find(|link| link.link == LinkName::AdapterIn { host: 0, adapter: 0 })
        .unwrap();
    assert_eq!((adapter.bytes, adapter.busy.ns()), (30_000.0, 3000.0));
    assert_eq!(outcome.ranks[0].busy.ns(), 50.0 + 3.0 * 200.0);
}

#[test]
fn rails_share_the_load_of_channels() {
    let schedule = ring(Collective::AllReduce, 4);
    let mut fabric = Fabric::uniform(4, link(), COMPUTE);
    let work = Work {
        channels: 4,
        slice_bytes: 1 << 16,
        ..work(64 << 20)
    };
    let one = run(schedule.as_ref(), &fabric, &work).unwrap();
    (fabric.adapters, fabric.rails) = (2, 2);
    let two = run(schedule.as_ref(), &fabric, &work).unwrap();
    let faster = one.time.ns() / two.time.ns();
    assert!((1.7..=2.05).contains(&faster), "{faster}");
}

#[test]
fn full_uplinks_slow_what_goes_between_leaves() {
    let schedule = ring(Collective::AllReduce, 8);
    // A ring ordered so that every message leaves its leaf; and so that only two do.
    let crossing: Vec<Rank> = [0, 4, 1, 5, 2, 6, 3, 7].map(Rank).into();
    let crossing = Algorithm::Ring
        .schedule(Collective::AllReduce, &crossing, Rank(0))
        .unwrap();
    let work = Work {
        slice_bytes: 1 << 18,
        ..work(64 << 20)
    };
    let with = |oversubscription, schedule: &dyn Schedule| {
        let mut fabric = Fabric::uniform(8, link(), COMPUTE);
        fabric.leaves = Some(Leaves {
            hosts: 4,
            oversubscription,
            latency_ns: 0.0,
        });
        run(schedule, &fabric, &work).unwrap().time.ns()
    };
    let free = with(1.0, schedule.as_ref());
    assert!(
        (with(4.0, schedule.as_ref()) / free - 1.0).abs() < 0.05,
        "one message of four goes up"
    );
    let ratio = with(4.0, crossing.as_ref()) / with(1.0, crossing.as_ref());
    assert!((3.0..=4.5).contains(&ratio), "all go up: {ratio}");
}

#[test]
fn ranks_of_a_host_share_its_memory() {
    let schedule = ring(Collective::AllReduce, 4);
    let mut fabric = Fabric::one_host(4, Link::soft_local(), COMPUTE);
    let work = Work {
        slice_bytes: 1 << 18,
        ..work(64 << 20)
    };
    let alone = run(schedule.as_ref(), &fabric, &work).unwrap();
    fabric.host_ns_per_byte = 0.04;
    let shared = run(schedule.as_ref(), &fabric, &work).unwrap();
    assert!(shared.time.ns() > 1.5 * alone.time.ns());
    let memory = shared
        .links
        .iter()
        .find(|link| link.link == LinkName::Memory { host: 0 })
        .unwrap();
    assert_eq!(memory.bytes, 2.0 * 3.0 * (64 << 20) as f64, "2(p-1)/p n for each of p");
}

#[test]
fn a_straggler_holds_all_up() {
    let schedule = ring(Collective::AllReduce, 8);
    let mut fabric = Fabric::uniform(8, link(), COMPUTE);
    let even = run(schedule.as_ref(), &fabric, &work(8192)).unwrap();
    fabric.stragglers = vec![Straggler {
        rank: 3,
        slowness: 1.0,
        late_ns: 1e6,
    }];
    let late = run(schedule.as_ref(), &fabric, &work(8192)).unwrap();
    let held_up = late.time.ns() - even.time.ns();
    assert!((0.98e6..=1e6).contains(&held_up), "{held_up}: others begin without it");
    fabric.stragglers = vec![Straggler {
        rank: 3,
        slowness: 10.0,
        late_ns: 0.0,
    }];
    let slow = run(schedule.as_ref(), &fabric, &work(8192)).unwrap();
    assert!(slow.time > even.time && slow.ranks[3].busy > even.ranks[3].busy);
}

#[test]
fn jitter_is_of_its_seed() {
    let schedule = ring(Collective::AllReduce, 8);
    let mut fabric = Fabric::uniform(8, link(), COMPUTE);
    let none = run(schedule.as_ref(), &fabric, &work(8192)).unwrap().time;
    fabric.jitter_ns = 300.0;
    let mut with = |seed| {
        fabric.seed = seed;
        run(schedule.as_ref(), &fabric, &work(8192)).unwrap().time
    };
    let times: Vec<Time> = (0..20).map(&mut with).collect();
    assert_eq!(with(7), times[7]);
    assert!(times.iter().all(|&time| time > none) && times.iter().any(|&time| time != times[0]));
    // The slowest of eight at each of 14 steps is later than the mean.
    let mean = times.iter().map(|time| time.ns() - none.ns()).sum::<f64>() / 20.0;
    assert!((14.0 * 300.0..=14.0 * 1000.0).contains(&mean), "{mean}");
}

#[test]
fn more_than_elements_travel_as_partial_results() {
    let of = |data| {
        let work = Work { data, ..work(4 << 20) };
        let outcome = run(
            ring(Collective::AllReduce, 4).as_ref(),
            &Fabric::uniform(4, link(), COMPUTE),
            &work,
        )
        .unwrap();
        outcome.links.iter().map(|link| link.bytes).sum::<f64>() / (2.0 * 4.0) / f64::from(4 << 20)
    };
    assert_eq!(of(DataType::F32), 1.5);
    // Of three blocks sent to be reduced, two are partial results of twice the length.
    assert_eq!(of(DataType::Bf16), 1.5 + 0.5);
}

#[test]
fn a_deadlocked_rank_is_named() {
    let steps = vec![vec![recv(2), send(1)], vec![recv(0), send(2)], vec![recv(1), send(0)]];
    let error = run(&written(1, steps), &Fabric::uniform(3, link(), COMPUTE), &work(8)).unwrap_err();
    let SimulationError::Stuck { waiting, .. } = &error else {
        panic!("{error}")
    };
    let cycle: Vec<(u32, u32)> = waiting.iter().map(|wait| (wait.rank.0, wait.from.0)).collect();
    assert_eq!(cycle, [(0, 2), (2, 1), (1, 0)]);
    assert_eq!(
        error.to_string(),
        "after 50 ns no thread can continue: rank 0 waits for rank 2 at step 0 of connection 0, rank 2 waits for rank 1 at step 0 of connection 0, rank 1 waits for \
         rank 0 at step 0 of connection 0"
    );
}

#[test]
fn an_unreceived_message_is_an_error() {
    let steps = vec![vec![send(1), send(1)], vec![recv(0)]];
    let error = run(&written(1, steps), &Fabric::uniform(2, link(), COMPUTE), &work(8)).unwrap_err();
    assert_eq!(
        error,
        SimulationError::LeftOver {
            from: Rank(0),
            to: Rank(1),
            count: 1
        }
    );
    let error = run(
        ring(Collective::AllReduce, 3).as_ref(),
        &Fabric::uniform(2, link(), COMPUTE),
        &work(8),
    )
    .unwrap_err();
    assert_eq!(error, SimulationError::Ranks { plan: 3, fabric: 2 });
}

#[test]
fn any_number_of_bytes_takes_some_time() {
    for bytes in [0, 1, u64::MAX] {
        for slice_bytes in [u64::MAX, 1] {
            let work = Work {
                slice_bytes,
                channels: 3,
                ..work(bytes)
            };
            let fabric = Fabric::uniform(5, link(), COMPUTE);
            let ns = predict_ns(ring(Collective::AllReduce, 5).as_ref(), &fabric, &work).unwrap();
            assert!(ns >= 8000.0, "{bytes} bytes: {ns}");
        }
    }
}

#[test]
fn a_reduction_takes_its_time() {
    let block = |place, index| Span::block(place, index);
    let steps = vec![vec![
        Step::Reduce {
            sources: Box::new([
                block(PlanMemory::Input, 0),
                block(PlanMemory::Scratch, 0),
                block(PlanMemory::Scratch, 1),
            ]),
            into: block(PlanMemory::Output, 0),
        },
        Step::Copy {
            from: block(PlanMemory::Output, 0),
            into: block(PlanMemory::Scratch, 0),
        },
    ]];
    let outcome = run(&written(1, steps), &Fabric::uniform(1, link(), COMPUTE), &work(1000)).unwrap();
    assert_eq!(outcome.time.ns(), 50.0 + 2.0 * 1000.0 * 0.01 + 1000.0 * 0.02);
    assert_eq!(block(PlanMemory::Partial, 0).place.form(), BlockForm::Partial);
}

fn pair(both: bool) -> HandWritten {
    let turn = |other: u32| vec![send(other), recv(other)];
    written(
        1,
        if both {
            vec![turn(1), turn(0)]
        } else {
            vec![vec![send(1)], vec![recv(0)]]
        },
    )
}

#[test]
fn long_messages_wait_for_grants_and_all_for_confirmations() {
    let mut link = link();
    (link.simple.grant_ns, link.simple.confirm_ns) = (300.0, 150.0);
    let fabric = Fabric::uniform(2, link, COMPUTE);
    let took = |plan: &HandWritten, bytes| run(plan, &fabric, &work(bytes)).unwrap().time.ns();
    let again = |plan: &HandWritten, bytes| repeated_ns(plan, &fabric, &work(bytes)).unwrap();
    let near = |found: f64, expected: f64| assert!((found - expected).abs() < 0.1, "{found} and not {expected}");
    // It is posted at 150; the receiver's grant, from 50 on, arrives at 350; then wire, latency and
    // receive, and the acknowledgement.
    near(took(&pair(false), 32 << 10), 350.0 + 3276.8 + 700.0 + 200.0 + 150.0);
    near(took(&pair(false), 8 << 10), 150.0 + 819.2 + 700.0 + 200.0 + 150.0);
    near(took(&pair(true), 32 << 10), 350.0 + 3276.8 + 700.0 + 200.0 + 150.0);
    // The receiver grants the next message while the acknowledgement is in flight.
    near(again(&pair(false), 32 << 10), 50.0 + 300.0 + 3276.8 + 700.0 + 200.0);
    near(
        again(&pair(false), 8 << 10),
        50.0 + 100.0 + 819.2 + 700.0 + 200.0 + 150.0,
    );
    link.simple.send_only_ns = 1000.0;
    let fabric = Fabric::uniform(2, link, COMPUTE);
    for (plan, later) in [(pair(false), 1000.0), (pair(true), 0.0)] {
        let took = run(&plan, &fabric, &work(8 << 10)).unwrap().time.ns();
        near(took, 2019.2 + later);
    }
}

#[test]
fn a_rank_that_sends_too_receives_later() {
    let mut link = link();
    link.simple.bidirectional_ns = 40.0;
    let fabric = Fabric::uniform(2, link, COMPUTE);
    for (plan, more) in [(pair(false), 0.0), (pair(true), 40.0)] {
        let took = run(&plan, &fabric, &work(8)).unwrap().time.ns();
        assert!((took - (50.0 + 1000.0 + 0.8 + more)).abs() < 0.1, "{took}");
    }
}

#[test]
fn memory_bandwidth_is_shared() {
    let (alone, all) = (0.1, 0.3);
    let scale = |rate| Scale::of(&[(64, rate)]).unwrap();
    let mut link = Link::soft_local();
    (link.simple.send_ns, link.simple.receive_ns) = (0.0, 0.0);
    link.simple.bytes = Some(ByteCosts {
        resident: scale(all),
        forwarded: scale(all),
        reduced: scale(all),
        isolated_reduced: scale(all),
        gathered: scale(all),
        isolated_gathered: scale(all),
        isolated: scale(alone),
        far: FarMessages::default(),
    });
    let fabric = Fabric::one_host(2, link, COMPUTE);
    for (plan, rate) in [(pair(false), alone), (pair(true), all)] {
        let took = run(&plan, &fabric, &work(10_000)).unwrap().time.ns();
        let expected = 50.0 + link.simple.alpha_ns + 10_000.0 * rate;
        assert!((took - expected).abs() < 0.1, "{took} and not {expected}");
    }
}

#[test]
fn the_slices_of_a_long_operation_cost_what_its_memory_does() {
    let rates = [(128 << 10, 0.1), (16 << 20, 0.4)];
    let scale = Scale::of(&rates).unwrap();
    let mut link = Link::soft_local();
    link.simple.bytes = Some(ByteCosts {
        resident: scale,
        forwarded: scale,
        reduced: scale,
        isolated_reduced: scale,
        gathered: scale,
        isolated_gathered: scale,
        isolated: scale,
        far: FarMessages::default(),
    });
    let fabric = Fabric::one_host(2, link, COMPUTE);
    let work = Work {
        slice_bytes: 128 << 10,
        ..work(32 << 20)
    };
    let took = predict_ns(&pair(true), &fabric, &work).unwrap();
    let least = work.bytes as f64 * rates[1].1;
    assert!((1.0..1.1).contains(&(took / least)), "{took} of {least}");
}

#[test]
fn what_another_processor_wrote_costs_more_to_reduce() {
    let scale = |rate| Scale::of(&[(64, rate)]).unwrap();
    let (moved, gathered) = (0.1, 0.5);
    let took = |algorithm: Algorithm, gathered| {
        let mut link = Link::soft_local();
        link.simple.bytes = Some(ByteCosts {
            resident: scale(moved),
            forwarded: scale(moved),
            reduced: scale(moved),
            isolated_reduced: scale(moved),
            gathered: scale(gathered),
            isolated_gathered: scale(gathered),
            isolated: scale(moved),
            far: FarMessages::default(),
        });
        let order: Vec<_> = (0..2).map(Rank).collect();
        let schedule = algorithm.schedule(Collective::Reduce, &order, Rank(0)).unwrap();
        let fabric = Fabric::one_host(2, link, COMPUTE);
        run(schedule.as_ref(), &fabric, &work(1 << 20)).unwrap().time.ns()
    };
    // Reduced by a step of its own; and on arrival.
    let later = took(Algorithm::FullMesh, gathered) - took(Algorithm::FullMesh, 2.0 * gathered);
    let expected = -f64::from(1 << 20) * gathered;
    assert!((later - expected).abs() < 1.0, "{later} and not {expected}");
    assert_eq!(took(Algorithm::Ring, gathered), took(Algorithm::Ring, 2.0 * gathered));
}

/// Between processors of a host, with these costs per byte and grants.
fn moved(rate: f64, forwarded: f64) -> Link {
    let scale = |rate| Scale::of(&[(64, rate)]).unwrap();
    let mut link = Link::soft_local();
    link.simple.grant_ns = 100.0;
    link.simple.bytes = Some(ByteCosts {
        resident: scale(rate),
        forwarded: scale(forwarded),
        reduced: scale(2.0 * rate),
        isolated_reduced: scale(rate),
        gathered: scale(2.0 * rate),
        isolated_gathered: scale(rate),
        isolated: scale(rate),
        far: FarMessages::default(),
    });
    link
}

fn eight_slices(algorithm: Algorithm, collective: Collective, ranks: u32, link: Link) -> f64 {
    let order: Vec<_> = (0..ranks).map(Rank).collect();
    let schedule = algorithm.schedule(collective, &order, Rank(0)).unwrap();
    let work = Work {
        slice_bytes: 64 << 10,
        ..work(8 * (64 << 10))
    };
    let fabric = Fabric::one_host(ranks, link, COMPUTE);
    run(schedule.as_ref(), &fabric, &work).unwrap().time.ns()
}

#[test]
fn scratch_memory_has_one_slice_and_staging_several() {
    let slice = f64::from(64 << 10) * 0.1;
    // On arrival, while the next slice is moved; and by a step of its own, after which it is moved.
    for (algorithm, slices) in [(Algorithm::Ring, 9.0), (Algorithm::FullMesh, 16.0)] {
        let took = eight_slices(algorithm, Collective::Reduce, 2, moved(0.1, 0.1));
        let expected = slices * slice;
        assert!(
            (1.0..1.2).contains(&(took / expected)),
            "{algorithm}: {took} of {expected}"
        );
    }
}

#[test]
fn only_what_was_received_is_in_anothers_cache() {
    let took = |collective, forwarded| eight_slices(Algorithm::Ring, collective, 3, moved(0.1, forwarded));
    assert_eq!(took(Collective::Reduce, 0.1), took(Collective::Reduce, 0.4));
    assert!(took(Collective::Broadcast, 0.1) * 2.0 < took(Collective::Broadcast, 0.4));
}

#[test]
fn every_algorithm_gets_the_grants_that_it_needs() {
    for &collective in Collective::ALL {
        for algorithm in Algorithm::of(collective) {
            let took = eight_slices(algorithm, collective, 3, moved(0.1, 0.1));
            assert!(took > 0.0, "{collective} by {algorithm}");
        }
    }
}
