//! Nothing is left of communicators that are gone, however they went: neither descriptors, nor threads, nor shared memory. A program of its own, as it counts what the process has.

#[path = "communicator/world.rs"]
mod world;

use std::fs;
use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use doorbell_collectives::{Options, Rank, ReduceOp};

const PATIENCE: Duration = Duration::from_secs(60);

/// Descriptors, threads, and mappings of memory that other processes can have, too.
fn held() -> (usize, usize, usize) {
    let count = |what: &str| fs::read_dir(format!("/proc/self/{what}")).unwrap().count();
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let shared = maps
        .lines()
        .filter(|line| line.contains("memfd:") || line.contains("/dev/shm"));
    (count("fd"), count("task"), shared.count())
}

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
        // Messages that nobody waits for.
        let (next, before) = (Rank((me + 1) % 3), Rank((me + 2) % 3));
        drop(comm.send(comm.alloc::<u8>(300_000).unwrap(), next).start().unwrap());
        drop(
            comm.receive(comm.alloc::<u8>(300_000).unwrap(), before)
                .start()
                .unwrap(),
        );
        // Whoever aborts or cuts does so after all have begun theirs. In a barrier of the communicator's some would still be.
        begun.wait();
        match number % 5 {
            // In an order, with a request that nobody waits for.
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
                // Another rank may be done with it, and have aborted already.
                let _ = request.wait();
                if me == 1 {
                    comm.abort("a test");
                }
                comm.all_reduce(&mut [1.0f32; 100_000], ReduceOp::Sum)
                    .wait()
                    .unwrap_err();
                let whole = comm.shrink(PATIENCE).unwrap();
                assert_eq!(whole.size(), 3);
                whole.barrier().wait().unwrap();
            }
            3 => {
                let _ = request.wait();
                if me == 0 {
                    comm.cut(Rank(1)).unwrap();
                    comm.cut(Rank(2)).unwrap();
                }
                comm.all_reduce(&mut [1.0f32; 100_000], ReduceOp::Sum)
                    .wait()
                    .unwrap_err();
            }
            _ => {
                // Some have gone before it is done.
                drop(request);
            }
        }
    });
}

#[test]
fn forty_communicators_leave_nothing() {
    // What is made once, and kept.
    (0..5).for_each(round);
    let _device = world::open();
    thread::sleep(Duration::from_millis(300));
    let before = held();
    (0..40).for_each(round);
    // The kernel takes a thread off the list a moment after it has been joined.
    for _ in 0..2000 {
        if held() == before {
            break;
        }
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(held(), before, "descriptors, threads, shared mappings");
}
