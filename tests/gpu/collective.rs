//! The collectives' kernels on the stand-in, among few ranks: every collective, algorithm, type and
//! operator, staged and direct, in place, LL and Simple, in many slices.

use doorbell_collectives::gpu::Sizes;
use doorbell_collectives::gpu::program::{Function, LaunchShape};
use doorbell_collectives::plan::Collective;
use doorbell_collectives::reference::Case;
use doorbell_collectives::{Algorithm, DataType, Rank, ReduceOp};
use doorbell_cuda_standin::{ExecutionMode, Standin};
use doorbell_tests::gpu::collective::{Rig, Sample, Variant, cases, every_type, launch_shapes};
use doorbell_tests::gpu::short;

fn rig(standin: &Standin, ranks: usize) -> Rig {
    let sizes = Sizes {
        flags: 1 << 20,
        slots: 1 << 20,
        small: 16 << 20,
        exchange: 1 << 20,
        fifos: 1 << 20,
        staging: 4096,
    };
    Rig::new(standin.driver().unwrap(), ranks, 1 << 17, sizes, 4, None).unwrap()
}

fn standin() -> Option<Standin> {
    if let Some(missing) = doorbell_cuda_standin::missing() {
        assert!(std::env::var_os("CI").is_none(), "{missing}");
        eprintln!("skipped: {missing}");
        return None;
    }
    Some(Standin::load(ExecutionMode::Prompt))
}

#[test]
fn every_collective_by_every_algorithm_is_correct() {
    let Some(standin) = standin() else { return };
    let rig = rig(&standin, 3);
    let mut done = 0;
    // An odd sampling step, so that each type, algorithm, launch shape and placement is covered.
    let mut sample = Sample::one_of(23);
    for case in cases(3, true).into_iter().filter(|case| case.count > 1) {
        done += every_type(&rig, &case, &launch_shapes(true), &mut sample).unwrap();
    }
    assert!(done > 50, "{done} ways");
}

#[test]
fn waiting_kernels_abort_on_request() {
    let Some(standin) = standin() else { return };
    let rig = rig(&standin, 2);
    let case = Case {
        collective: Collective::AllReduce,
        ranks: 2,
        root: Rank(0),
        count: 1000,
    };
    for (ll, algorithm) in [(false, Algorithm::Ring), (true, Algorithm::OneShot)] {
        let variant = Variant {
            algorithm,
            direct: false,
            in_place: false,
            shape: LaunchShape {
                blocks: 2,
                threads: 64,
                slice: 1024,
                ll,
            },
            skew: (0, 0),
        };
        let function = Function::reduce(DataType::F32, ReduceOp::Sum);
        let plans = rig.plans(&case, variant).unwrap();
        rig.launch_one(0, &plans, &case, variant, function).unwrap();
        assert!(!rig.ranks[0].stream.is_idle().unwrap(), "it waits for rank 1");
        rig.stop(true).unwrap();
        rig.ranks[0].stream.synchronize().unwrap();
        rig.stop(false).unwrap();
    }
}

#[test]
fn every_short_operation_is_correct() {
    let Some(standin) = standin() else { return };
    let mut done = 0;
    for ranks in 1..=8 {
        let rig = rig(&standin, ranks);
        let mut sample = Sample::one_of(17);
        for case in short::cases(ranks as u32, &[1, 3, 61, 1031]) {
            done += short::every_type(&rig, &case, &mut sample).unwrap();
        }
    }
    assert!(done > 1000, "{done} ways");
}

#[test]
fn broadcast_root_is_limited_by_slots() {
    let Some(standin) = standin() else { return };
    let rig = rig(&standin, 4);
    // In one block and in many, after operations with more and with fewer blocks.
    for (turns, count, two_steps) in [(40, 100, false), (30, 1000, true), (9, 3000, true), (40, 20, false)] {
        rig.check_ahead(turns, count, two_steps).unwrap();
    }
}
