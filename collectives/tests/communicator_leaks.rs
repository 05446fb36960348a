//! Dropped communicators leave no descriptors, threads, or shared memory: counted for the process.

#[path = "common/held.rs"]
mod held;
#[path = "communicator/world.rs"]
mod world;

use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use doorbell_collectives::{Options, Rank, ReduceOp};
use held::held;

const TIMEOUT: Duration = Duration::from_secs(60);

fn round(number: u32) {
    let options = Options {
        progress_thread: number.is_multiple_of(2),
        ..world::options()
    };
    let begun = Barrier::new(3);
    world::ranks(3, &options, |comm| {
        let me = comm.rank().0;
        let mut x = comm.alloc::<f32>(10_000).unwrap();
        comm.all_reduce(&mut x, ReduceOp::Sum).wait().unwrap();
        let half = comm.split(Some(me % 2), 0).unwrap().unwrap();
        let request = comm.all_reduce(x, ReduceOp::Sum).start().unwrap();
        // Messages with dropped requests.
        let (next, before) = (Rank((me + 1) % 3), Rank((me + 2) % 3));
        drop(comm.send(comm.alloc::<u8>(300_000).unwrap(), next).start().unwrap());
        drop(
            comm.receive(comm.alloc::<u8>(300_000).unwrap(), before)
                .start()
                .unwrap(),
        );
        // Follows the beginning of all operations: in a barrier some ranks could still be inside.
        begun.wait();
        match number % 5 {
            // Orderly, with a dropped request.
            0 => {
                drop(request);
                half.destroy().unwrap();
                comm.destroy().unwrap();
            }
            1 => {
                request.wait().unwrap();
                drop(comm);
                half.all_reduce(&mut [1u8; 9], ReduceOp::Max).wait().unwrap();
            }
            2 => {
                // Another rank may have completed it, and aborted already.
                let _ = request.wait();
                if me == 1 {
                    comm.abort("a test");
                }
                comm.all_reduce(&mut [1.0f32; 100_000], ReduceOp::Sum)
                    .wait()
                    .unwrap_err();
                let whole = comm.shrink(TIMEOUT).unwrap();
                assert_eq!(whole.size(), 3);
                whole.barrier().wait().unwrap();
            }
            3 => {
                let _ = request.wait();
                if me == 0 {
                    comm.break_links(Rank(1)).unwrap();
                    comm.break_links(Rank(2)).unwrap();
                }
                comm.all_reduce(&mut [1.0f32; 100_000], ReduceOp::Sum)
                    .wait()
                    .unwrap_err();
            }
            _ => {
                // Some leave before it is complete.
                drop(request);
            }
        }
    });
}

#[test]
fn forty_communicators_leave_nothing() {
    // One-time allocations.
    (0..5).for_each(round);
    let _device = world::open();
    thread::sleep(Duration::from_millis(300));
    let before = held();
    (0..40).for_each(round);
    // The kernel removes a thread from the list shortly after it was joined.
    for _ in 0..2000 {
        if held() == before {
            break;
        }
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(held(), before, "descriptors, threads, shared mappings");
}
