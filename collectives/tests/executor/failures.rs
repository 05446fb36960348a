//! Failures are values, name the rank, and leave nothing behind.

use std::time::{Duration, Instant};

use doorbell_collectives::executor::{Config, Data, EngineError, Failed, Operation, PlanId, Ticket, Tuning};
use doorbell_collectives::kernel::Function;
use doorbell_collectives::plan::Collective;
use doorbell_collectives::{Algorithm, DataType, Protocol, Rank, ReduceOp};

use crate::world::{Device, TIMEOUT, World};

const ONE: &[Device] = &[Device::Soft(0)];

fn sum(world: &mut World, plan: PlanId, rank: Rank, count: u64, protocol: Protocol, deadline: Duration) -> Operation {
    let engine = &mut world.engines[rank.index()];
    let segment = engine.allocate(count as usize * 8).unwrap();
    Operation {
        plan,
        function: Function::new(DataType::F32, ReduceOp::Sum, engine.ranks()).unwrap(),
        count,
        parts: None,
        input: Data::Registered(segment.clone(), 0),
        output: Data::Registered(segment, count as usize * 4),
        scale: None,
        tuning: Tuning {
            protocol,
            channels: 2,
            slice: 16 << 10,
        },
        deadline: Some(deadline),
    }
}

/// Drives all engines that are left until they have failed. All worlds at once, as each waits for
/// the retries of its queue pairs.
fn fail(worlds: &mut [World]) {
    let began = Instant::now();
    let mut engines: Vec<_> = worlds.iter_mut().flat_map(|world| &mut world.engines).collect();
    while engines.iter().any(|engine| engine.failed().is_none()) {
        for engine in &mut engines {
            engine.progress();
        }
        if began.elapsed() > TIMEOUT {
            let waits: Vec<_> = engines
                .iter()
                .map(|engine| (engine.failed(), engine.report()))
                .collect();
            panic!("the ranks that are left do not fail: {waits:?}");
        }
    }
}

fn culprit(failed: &Failed) -> Rank {
    match failed {
        Failed::Connection { peer, .. } | Failed::Refused { peer, .. } => *peer,
        Failed::Deadline(waiting) => waiting.peer,
        other => panic!("{other} names no rank"),
    }
}

/// Drops rank 1 in its first operation or after; the others have a second one. Returns their
/// tickets of the first.
fn with_a_dropped_rank(protocol: Protocol, turns: u32) -> (World, [Ticket; 2]) {
    let mut world = World::new(3, ONE, Config::default());
    let plan = world.prepare(Algorithm::FullMesh, Collective::AllReduce, Rank(0));
    let mut tickets = Vec::new();
    for rank in (0..3).map(Rank) {
        let op = sum(&mut world, plan, rank, 1 << 18, protocol, Duration::from_secs(10));
        // SAFETY: the memory is owned by the operation.
        tickets.push(unsafe { world.engines[rank.index()].submit(op) }.unwrap());
    }
    for _ in 0..turns {
        for engine in &mut world.engines {
            engine.progress();
        }
    }
    for rank in [Rank(0), Rank(2)] {
        let op = sum(&mut world, plan, rank, 5000, protocol, Duration::from_secs(10));
        // SAFETY: as above.
        unsafe { world.engines[rank.index()].submit(op) }.unwrap();
    }
    drop(world.engines.remove(1));
    (world, [tickets[0], tickets[2]])
}

#[test]
fn a_dropped_rank_is_named_by_the_others() {
    let cases = [(Protocol::Simple, 0), (Protocol::Simple, 9), (Protocol::Ll128, 20)];
    let (mut worlds, tickets): (Vec<_>, Vec<_>) = cases
        .into_iter()
        .map(|(protocol, turns)| with_a_dropped_rank(protocol, turns))
        .unzip();
    fail(&mut worlds);
    for (world, first) in worlds.iter_mut().zip(tickets) {
        for (engine, first) in world.engines.iter_mut().zip(first) {
            let failed = engine.failed().unwrap();
            assert_eq!(culprit(failed), Rank(1), "{failed}");
            assert!(engine.take(first).is_some());
            assert_eq!(engine.outstanding(), 1);
        }
    }
}

#[test]
fn a_rank_that_never_begins_is_named_at_the_deadline() {
    let mut world = World::new(2, ONE, Config::default());
    let plan = world.prepare(Algorithm::Ring, Collective::AllReduce, Rank(0));
    let op = sum(
        &mut world,
        plan,
        Rank(0),
        4096,
        Protocol::Simple,
        Duration::from_millis(50),
    );
    // SAFETY: the memory is owned by the operation.
    let ticket = unsafe { world.engines[0].submit(op) }.unwrap();
    let Failed::Deadline(waiting) = world.engines[0].wait(ticket).unwrap_err() else {
        panic!("the other rank has not begun");
    };
    assert_eq!(
        (waiting.operation, waiting.peer, waiting.collective),
        (1, Rank(1), Collective::AllReduce)
    );
    assert_eq!(world.engines[0].waiting(), Some(waiting), "it is known afterwards");
    let op = sum(&mut world, plan, Rank(0), 1, Protocol::Ll, Duration::from_secs(1));
    // SAFETY: as above.
    let refused = unsafe { world.engines[0].submit(op) }.unwrap_err();
    assert!(matches!(refused, EngineError::Failed(Failed::Deadline(_))), "{refused}");
}

#[test]
fn an_abort_ends_everything_at_once() {
    let mut world = World::new(2, ONE, Config::default());
    let plan = world.prepare(Algorithm::RecursiveDoubling, Collective::AllReduce, Rank(0));
    let engine = 0;
    let mut tickets = Vec::new();
    for _ in 0..3 {
        let op = sum(
            &mut world,
            plan,
            Rank(0),
            100_000,
            Protocol::Simple,
            Duration::from_secs(60),
        );
        // SAFETY: the memory is owned by the operation.
        tickets.push(unsafe { world.engines[engine].submit(op) }.unwrap());
    }
    world.engines[engine].progress();
    assert!(
        world.engines[engine]
            .waiting()
            .is_some_and(|waiting| waiting.peer == Rank(1))
    );
    assert_eq!(world.engines[engine].report().len(), 2, "one for each lane at work");
    world.engines[engine].abort("rank 7 is on fire");
    for ticket in tickets {
        assert_eq!(
            world.engines[engine].wait(ticket),
            Err(Failed::Aborted("rank 7 is on fire".to_owned()))
        );
    }
}

#[test]
fn invalid_operations_are_refused() {
    let mut world = World::new(2, ONE, Config::default());
    let plan = world.prepare(Algorithm::Ring, Collective::AllReduce, Rank(0));
    let mut good = || sum(&mut world, plan, Rank(0), 100, Protocol::Ll, Duration::from_secs(1));
    let mut bad = Vec::new();
    let mut op = good();
    op.count = 101;
    bad.push((op, "beyond its segment"));
    let mut op = good();
    op.count = u64::MAX;
    bad.push((op, "more elements than there can be"));
    let mut op = good();
    op.input = Data::None;
    bad.push((op, "gave none"));
    let mut op = good();
    op.tuning.channels = 5;
    bad.push((op, "more channels than there are"));
    let mut op = good();
    op.tuning.slice = 0;
    bad.push((op, "slices of nothing"));
    for (op, why) in bad {
        // SAFETY: the memory is as long as declared, where there is any.
        let error = unsafe { world.engines[0].submit(op) }.unwrap_err().to_string();
        assert!(error.contains(why), "{error:?} does not say {why:?}");
    }
    let order: Vec<_> = (0..3).map(Rank).collect();
    let of_three = Algorithm::Ring
        .schedule(Collective::AllReduce, &order, Rank(0))
        .unwrap();
    let error = world.engines[0].prepare(&*of_three).unwrap_err().to_string();
    assert!(error.contains("is for 3 ranks, and there are 2"), "{error}");
}

fn held() -> (usize, usize) {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let mappings = std::fs::read_to_string("/proc/self/maps").unwrap();
    let shared = mappings.lines().filter(|line| line.contains("memfd:doorbell")).count();
    (descriptors, shared)
}

/// In a process of its own, as other tests open descriptors meanwhile.
#[test]
fn many_engines_leave_nothing_behind() {
    const ALONE: &str = "DOORBELL_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let this = std::env::current_exe().unwrap();
        let status = std::process::Command::new(this)
            .args(["--exact", "failures::many_engines_leave_nothing_behind", "--nocapture"])
            .env(ALONE, "1")
            .status()
            .unwrap();
        assert!(status.success());
        return;
    }
    let config = Config {
        channels: 1,
        strands: 1,
        fragment: 8192,
        eager: 1024,
        ..Config::default()
    };
    let turn = |in_flight: bool| {
        let mut world = World::new(2, ONE, config);
        let plan = world.prepare(Algorithm::Ring, Collective::AllReduce, Rank(0));
        let mut ops: Vec<_> = [Rank(0), Rank(1)]
            .map(|rank| sum(&mut world, plan, rank, 5000, Protocol::Simple, TIMEOUT))
            .into();
        ops.iter_mut().for_each(|op| op.tuning.channels = 1);
        let mut ops = ops.into_iter();
        // SAFETY: the memory is owned by the operations.
        let tickets = unsafe { world.submit(|_| ops.next().unwrap()) };
        if in_flight {
            world.engines[0].progress();
        } else {
            assert!(world.finish(&tickets).iter().all(Result::is_ok));
        }
    };
    turn(true);
    turn(false);
    let before = held();
    let whole = std::env::var_os("DOORBELL_SWEEP").is_some_and(|value| value == "all");
    for index in 0..if whole { 500 } else { 100 } {
        turn(index % 4 == 0);
    }
    assert_eq!(held(), before);
}
