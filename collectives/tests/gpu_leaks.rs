//! GPU communicators leave no descriptor, memory or mapping. A separate program, so that
//! no other test opens any meanwhile.

#[path = "gpu/gpus.rs"]
mod gpus;
#[path = "common/held.rs"]
mod held;
#[path = "communicator/world.rs"]
mod world;

use doorbell_collectives::gpu::GpuCommunicator;
use doorbell_collectives::plan::Collective;
use doorbell_collectives::reference::Case;
use doorbell_collectives::{Communicator, Rank, ReduceOp};
use doorbell_cuda::{Context, Stream};
use doorbell_cuda_standin::{ExecutionMode, Standin};
use held::held;

/// Of the standin's kinds, those that a communicator uses.
const KINDS: [&str; 6] = ["allocation", "mapping", "reservation", "host", "stream", "event"];

/// Creates so many communicators, one after another, and uses some.
fn make(comm: &Communicator, context: &Context, times: u32) {
    let case = Case {
        collective: Collective::AllReduce,
        ranks: comm.size(),
        root: Rank(0),
        count: 300,
    };
    for turn in 0..times {
        let gpu = GpuCommunicator::new(comm.duplicate().unwrap(), context, gpus::small()).unwrap();
        if turn % 16 == 0 {
            let stream = Stream::new(context).unwrap();
            gpus::once::<f32>(&gpu, &stream, &case, ReduceOp::Sum, false, true);
        }
        gpu.destroy().unwrap();
    }
}

#[test]
fn many_communicators_leave_nothing() {
    let standin = Standin::load(ExecutionMode::Prompt);
    let driver = standin.driver().unwrap();
    let contexts: Vec<_> = (0..2).map(|rank| gpus::gpu(driver, Rank(rank))).collect();
    // One of the ranks counts, while all are here: counting opens a folder.
    let count = |comm: &Communicator| {
        comm.barrier().wait().unwrap();
        let seen = (comm.rank() == Rank(0)).then(|| (held().0, KINDS.map(|kind| standin.count(kind))));
        comm.barrier().wait().unwrap();
        seen
    };
    world::ranks(2, &world::options(), |comm| {
        let context = &contexts[comm.rank().index()];
        make(&comm, context, 20);
        let before = count(&comm);
        let whole = std::env::var_os("DOORBELL_SWEEP").is_some_and(|value| value == "all");
        make(&comm, context, if whole { 500 } else { 100 });
        assert_eq!(count(&comm), before, "descriptors, and {KINDS:?}");
    });
    drop(contexts);
    standin.assert_nothing_left("many communicators");
}
