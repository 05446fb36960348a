//! Repeated operations, which run from the program cache, with others between, and late ranks.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use doorbell_collectives::kernel::UserOperator;
use doorbell_collectives::{Algorithm, Communicator, Options, Protocol, Rank, ReduceOp};

use crate::collectives::{all, given, sum};
use crate::world::{options, ranks};

/// Each kind several times, with other lengths, memory and operators between.
#[test]
fn repeated_operations_give_equal_results() {
    for p in [2, 3, 4] {
        ranks(p, &options(), |comm| {
            for protocol in [Protocol::Ll, Protocol::Ll128] {
                for n in [0, 1, 5, 100] {
                    everything(&comm, protocol, n);
                }
            }
        });
    }
}

/// Rank 1 begins only when rank 0 has begun and not finished, which then waits in the rest. A rank
/// alone waits for no other.
#[test]
fn only_what_a_repeated_operation_has_to_wait_for_is_left_to_the_rest() {
    ranks(1, &options(), |comm| {
        let calls = [0, 1, 2].map(|_| rests(&comm, &mut given(0, 5)));
        assert_eq!(calls, [1, 0, 0]);
    });
    let is_waiting = AtomicBool::new(false);
    ranks(2, &options(), |comm| {
        let mut x = given(comm.rank().0, 5);
        comm.all_reduce(&mut x, ReduceOp::Sum).wait().unwrap();
        x = given(comm.rank().0, 5);
        if comm.rank() == Rank(0) {
            let detached = |rest: &mut (dyn FnMut() + Send)| {
                is_waiting.store(true, Ordering::Release);
                rest();
            };
            let call = comm.all_reduce(&mut x, ReduceOp::Sum);
            call.wait_detached(detached, || ()).unwrap();
        } else {
            while !is_waiting.load(Ordering::Acquire) {
                thread::yield_now();
            }
            comm.all_reduce(&mut x, ReduceOp::Sum).wait().unwrap();
        }
        assert_eq!(x, sum(2, 5));
    });
    assert!(is_waiting.into_inner());
}

/// How often the rest of an all-reduce was called for.
fn rests(comm: &Communicator, x: &mut [i64]) -> u32 {
    let mut calls = 0;
    let detached = |rest: &mut (dyn FnMut() + Send)| {
        calls += 1;
        rest();
    };
    let call = comm.all_reduce(x, ReduceOp::Sum);
    call.wait_detached(detached, || ()).unwrap();
    calls
}

fn everything(comm: &Communicator, protocol: Protocol, n: usize) {
    let (p, me) = (comm.size(), comm.rank().0);
    for collective in 0..5 {
        // Ranks are late in turn: some operations complete at once, and some have to be waited for.
        for turn in 0..6u32 {
            if turn % p == me && n == 5 {
                thread::sleep(Duration::from_millis(1));
            }
            let mut x = given(me, n);
            let mut y = vec![0; n * p as usize];
            match collective {
                0 => {
                    comm.all_reduce(&mut x, ReduceOp::Sum)
                        .protocol(protocol)
                        .wait()
                        .unwrap();
                    assert_eq!(x, sum(p, n));
                }
                1 => {
                    comm.all_gather_into(&x, &mut y).protocol(protocol).wait().unwrap();
                    assert_eq!(y, all(p, n));
                }
                2 => {
                    let root = Rank(turn / 3 % p);
                    comm.broadcast(&mut x, root).protocol(protocol).wait().unwrap();
                    assert_eq!(x, given(root.0, n));
                }
                3 => {
                    let whole = given(me, n * p as usize);
                    comm.reduce_scatter_into(&whole, &mut x, ReduceOp::Sum)
                        .protocol(protocol)
                        .wait()
                        .unwrap();
                    assert_eq!(x, sum(p, n * p as usize)[me as usize * n..][..n]);
                }
                _ => {
                    let whole = given(me, n * p as usize);
                    comm.all_to_all(&whole, &mut y).protocol(protocol).wait().unwrap();
                    let expected = (0..p).flat_map(|rank| given(rank, n * p as usize)[me as usize * n..][..n].to_vec());
                    assert!(y.iter().copied().eq(expected));
                }
            }
        }
    }
}

/// Each differs from the previous one in one property.
#[test]
fn different_operations_miss_the_program_cache() {
    ranks(2, &options(), |comm| {
        let me = comm.rank().0;
        let n = 6;
        let product = UserOperator::new("product", |into: &mut [i64], from: &[i64]| {
            into.iter_mut().zip(from).for_each(|(into, from)| *into *= from);
        });
        let (mut x, mut buffer) = (given(me, n), comm.alloc::<i64>(2 * n).unwrap());
        for _ in 0..3 {
            for op in [ReduceOp::Sum, ReduceOp::Min] {
                for _ in 0..2 {
                    x.copy_from_slice(&given(me, n));
                    comm.all_reduce(&mut x, op).wait().unwrap();
                    let expected = if op == ReduceOp::Sum { sum(2, n) } else { given(0, n) };
                    assert_eq!(x, expected);
                }
            }
            x.copy_from_slice(&given(me, n));
            comm.all_reduce(&mut x, &product).wait().unwrap();
            let expected: Vec<_> = given(0, n).iter().zip(given(1, n)).map(|(a, b)| a * b).collect();
            assert_eq!(x, expected);
            // The same bytes, of another type.
            let mut halves = vec![1i32; 2 * n];
            comm.all_reduce(&mut halves, ReduceOp::Sum).wait().unwrap();
            assert_eq!(halves, vec![2; 2 * n]);
            // In place and out of place, and with the output before and after the input.
            let mut y = vec![0; n];
            for _ in 0..2 {
                comm.all_reduce_into(&given(me, n), &mut y, ReduceOp::Sum)
                    .wait()
                    .unwrap();
                assert_eq!(y, sum(2, n));
            }
            buffer[..n].copy_from_slice(&given(me, n));
            buffer[n..].fill(3);
            comm.all_reduce(&mut buffer, ReduceOp::Sum).wait().unwrap();
            assert_eq!((&buffer[..n], buffer[n]), (&sum(2, n)[..], 6));
            // Started, and waited for later.
            let mut started = comm.alloc::<i64>(n).unwrap();
            started.copy_from_slice(&given(me, n));
            let request = comm.all_reduce(started, ReduceOp::Sum).start().unwrap();
            x.copy_from_slice(&given(me, n));
            comm.all_reduce(&mut x, ReduceOp::Sum).wait().unwrap();
            assert_eq!(
                (x.as_slice(), &request.wait().unwrap()[..]),
                (&sum(2, n)[..], &sum(2, n)[..])
            );
            // By another algorithm.
            x.copy_from_slice(&given(me, n));
            comm.all_reduce(&mut x, ReduceOp::Sum)
                .algorithm(Algorithm::Ring)
                .wait()
                .unwrap();
            assert_eq!(x, sum(2, n));
        }
    });
}

#[test]
fn a_repeat_without_its_peer_fails_at_its_deadline() {
    let options = Options {
        deadline: Duration::from_secs(2),
        ..options()
    };
    ranks(2, &options, |comm| {
        let mut x = [1.0f32; 4];
        for _ in 0..5 {
            comm.all_reduce(&mut x, ReduceOp::Sum).wait().unwrap();
        }
        if comm.rank() == Rank(1) {
            return;
        }
        let error = comm.all_reduce(&mut x, ReduceOp::Sum).wait().unwrap_err();
        assert_eq!(error.culprit(), Some(Rank(1)), "{error}");
        assert!(comm.all_reduce(&mut x, ReduceOp::Sum).wait().is_err());
    });
}
