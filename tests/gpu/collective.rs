//! The kernels of collectives on the stand-in: every collective by every algorithm among few ranks, with every type and operator, staged and direct, in place, as lines and whole, in many slices.

use doorbell_collectives::gpu::Sizes;
use doorbell_cuda_standin::{Manner, Standin};
use doorbell_tests::gpu::collective::{Rig, Sample, cases, cuts, every_type};

fn rig(standin: &Standin, ranks: usize) -> Rig {
    let sizes = Sizes {
        flags: 1 << 20,
        slots: 1 << 20,
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
    Some(Standin::load(Manner::Prompt))
}

#[test]
fn every_collective_by_every_algorithm_gives_what_it_must() {
    let Some(standin) = standin() else { return };
    let rig = rig(&standin, 3);
    let mut done = 0;
    // An odd number of all, so that each type, algorithm, way of cutting and place has its turn.
    let mut sample = Sample::one_of(23);
    for case in cases(3, true).into_iter().filter(|case| case.count > 1) {
        done += every_type(&rig, &case, &cuts(true), &mut sample).unwrap();
    }
    assert!(done > 50, "{done} ways");
}
