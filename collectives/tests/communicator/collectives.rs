//! Results of each collective, in place and out of place, on plain and on registered memory.

use doorbell_collectives::kernel::UserOperator;
use doorbell_collectives::{Algorithm, PreMulSum, Protocol, Rank, ReduceOp};

use crate::world::{options, ranks};

pub(crate) fn given(rank: u32, len: usize) -> Vec<i64> {
    (0..len as i64)
        .map(|at| at * 7 + i64::from(rank) * 1000 - 300)
        .collect()
}

pub(crate) fn sum(ranks: u32, len: usize) -> Vec<i64> {
    (0..len)
        .map(|at| (0..ranks).map(|rank| given(rank, len)[at]).sum())
        .collect()
}

pub(crate) fn all(ranks: u32, len: usize) -> Vec<i64> {
    (0..ranks).flat_map(|rank| given(rank, len)).collect()
}

#[test]
fn every_collective_gives_the_right_result() {
    for p in [1, 2, 3, 5] {
        ranks(p, &options(), |comm| {
            let me = comm.rank().0;
            for n in [0usize, 1, 7, 3001] {
                let root = Rank(n as u32 % p);
                let at_root = me == root.0;
                let (sum, all) = (sum(p, n), all(p, n));
                let part = |of: &[i64]| of[me as usize * n..(me as usize + 1) * n].to_vec();
                let whole: Vec<i64> = given(me, n * p as usize);
                let whole_sum = self::sum(p, n * p as usize);

                let mut x = given(me, n);
                comm.all_reduce(&mut x, ReduceOp::Sum).wait().unwrap();
                assert_eq!(x, sum);
                // A slice is used again.
                let (mut x, at_most) = (given(me, n), given(p - 1, n));
                let mut slice = &mut x[..];
                comm.all_reduce(&mut slice, ReduceOp::Max).wait().unwrap();
                comm.all_reduce(&mut *slice, ReduceOp::Max).wait().unwrap();
                assert_eq!(slice, at_most);
                let mut y = vec![0; n];
                comm.all_reduce_into(&given(me, n), &mut y, ReduceOp::Sum)
                    .wait()
                    .unwrap();
                assert_eq!(y, sum);
                let mut registered = comm.alloc::<i64>(n).unwrap();
                registered.copy_from_slice(&given(me, n));
                comm.all_reduce(&mut registered, ReduceOp::Max).wait().unwrap();
                assert_eq!(*registered, given(p - 1, n));

                let mut x = vec![0; n * p as usize];
                x[me as usize * n..(me as usize + 1) * n].copy_from_slice(&given(me, n));
                comm.all_gather(&mut x).wait().unwrap();
                assert_eq!(x, all);
                let mut y = comm.alloc::<i64>(n * p as usize).unwrap();
                comm.all_gather_into(&given(me, n), &mut y).wait().unwrap();
                assert_eq!(*y, all);

                let mut x = whole.clone();
                comm.reduce_scatter(&mut x, ReduceOp::Sum).wait().unwrap();
                assert_eq!(part(&x), part(&whole_sum));
                let mut y = vec![0; n];
                comm.reduce_scatter_into(&whole, &mut y, ReduceOp::Sum).wait().unwrap();
                assert_eq!(y, part(&whole_sum));

                let mut x = given(me, n);
                comm.broadcast(&mut x, root).wait().unwrap();
                assert_eq!(x, given(root.0, n));
                let mut y = vec![0; n];
                comm.broadcast_into(&given(me, n), &mut y, root).wait().unwrap();
                assert_eq!(y, given(root.0, n));

                let mut x = given(me, n);
                comm.reduce(&mut x, ReduceOp::Sum, root).wait().unwrap();
                assert_eq!(x, if at_root { sum.clone() } else { given(me, n) });
                let mut y = vec![0; if at_root { n } else { 0 }];
                comm.reduce_into(&given(me, n), &mut y, ReduceOp::Sum, root)
                    .wait()
                    .unwrap();
                assert!(!at_root || y == sum);

                let mut x = if at_root { x_with(me, n, p) } else { given(me, n) };
                comm.gather(&mut x, root).wait().unwrap();
                assert_eq!(x, if at_root { all.clone() } else { given(me, n) });
                let mut y = vec![0; if at_root { n * p as usize } else { 0 }];
                comm.gather_into(&given(me, n), &mut y, root).wait().unwrap();
                assert!(!at_root || y == all);

                let of_root = given(root.0, n * p as usize);
                let mut x = if at_root { of_root.clone() } else { vec![0; n] };
                comm.scatter(&mut x, root).wait().unwrap();
                assert!(at_root || x == part(&of_root));
                let mut y = vec![0; n];
                comm.scatter_into(&whole, &mut y, root).wait().unwrap();
                assert_eq!(y, part(&of_root));

                let mut y = vec![0; n * p as usize];
                comm.all_to_all(&whole, &mut y).wait().unwrap();
                let wanted: Vec<i64> = (0..p).flat_map(|from| part(&given(from, n * p as usize))).collect();
                assert_eq!(y, wanted);

                let mut y = vec![0; n];
                comm.send_receive(&given(me, n), &mut y).wait().unwrap();
                assert_eq!(y, given((me + p - 1) % p, n));

                comm.barrier().wait().unwrap();
            }
        });
    }
}

/// A buffer for all parts, with this rank's own in its position.
fn x_with(me: u32, n: usize, p: u32) -> Vec<i64> {
    let mut x = vec![0; n * p as usize];
    x[me as usize * n..(me as usize + 1) * n].copy_from_slice(&given(me, n));
    x
}

#[test]
fn parts_may_have_different_lengths() {
    let count = |from: u32, to: u32| (from as usize * 3 + to as usize * 5) % 7 * 11;
    ranks(4, &options(), |comm| {
        let (me, p) = (comm.rank().0, comm.size());
        let send: Vec<usize> = (0..p).map(|to| count(me, to)).collect();
        let receive: Vec<usize> = (0..p).map(|from| count(from, me)).collect();
        let value = |from: u32, to: u32, at: usize| (from * 10_000 + to * 1000) as f32 + at as f32;
        let from: Vec<f32> = (0..p)
            .flat_map(|to| (0..count(me, to)).map(move |at| value(me, to, at)))
            .collect();
        let wanted: Vec<f32> = (0..p)
            .flat_map(|of| (0..count(of, me)).map(move |at| value(of, me, at)))
            .collect();
        let mut into = vec![0.0; wanted.len()];
        comm.all_to_all_v(&from, &send, &mut into, &receive).wait().unwrap();
        assert_eq!(into, wanted);

        let (root, counts) = (Rank(2), [3usize, 0, 5, 1000]);
        let mine = vec![me as u8 + 1; counts[me as usize]];
        let wanted: Vec<u8> = (0..p).flat_map(|of| vec![of as u8 + 1; counts[of as usize]]).collect();
        let mut all = vec![0; if comm.rank() == root { wanted.len() } else { 0 }];
        comm.gather_v(&mine, &mut all, &counts, root).wait().unwrap();
        assert!(comm.rank() != root || all == wanted);
        let (mut plain, mut registered) = (vec![0; wanted.len()], comm.alloc::<u8>(wanted.len()).unwrap());
        comm.all_gather_v(&mine, &mut plain, &counts).wait().unwrap();
        assert_eq!(plain, wanted);
        comm.all_gather_v(&mine, &mut registered, &counts).wait().unwrap();
        assert_eq!(*registered, wanted);
        for (counts, why) in [
            (&counts[1..], "3 counts for 4 ranks"),
            (&[7, 7, 7, 7], "its count is 7"),
            (&[3, 9, 5, 1000], "1017 elements"),
        ] {
            let refused = comm.all_gather_v(&mine, &mut plain, counts).wait().unwrap_err();
            assert!(refused.to_string().contains(why), "{refused}");
        }
        let mut back = vec![0; mine.len()];
        comm.scatter_v(&all, &counts, &mut back, root).wait().unwrap();
        assert_eq!(back, mine);
    });
}

/// Ragged parts of a reduction: as reduce-scatter, with any lengths and any protocol.
#[test]
fn parts_of_a_reduction_may_have_different_lengths() {
    for (p, counts) in [
        (1, vec![7]),
        (2, vec![3, 0]),
        (3, vec![1, 70_001, 5]),
        (4, vec![0, 9, 400, 31]),
    ] {
        ranks(p, &options(), |comm| {
            let me = comm.rank().index();
            let (all, first) = (counts.iter().sum(), counts[..me].iter().sum::<usize>());
            let everybody: Vec<_> = (0..p).map(|rank| given(rank, all)).collect();
            let mine = first..first + counts[me];
            let wanted: Vec<i64> = mine.map(|at| everybody.iter().map(|one| one[at]).sum()).collect();
            for &protocol in Protocol::ALL {
                let mut into = vec![-1; counts[me]];
                let input = &everybody[me];
                let call = comm.reduce_scatter_v(input, &mut into, &counts, ReduceOp::Sum);
                call.protocol(protocol).wait().unwrap();
                assert_eq!(into, wanted);
                let (mut from, mut registered) = (comm.alloc(all).unwrap(), comm.alloc(counts[me]).unwrap());
                from.copy_from_slice(input);
                let call = comm.reduce_scatter_v(&from, &mut registered, &counts, ReduceOp::Sum);
                call.protocol(protocol).wait().unwrap();
                assert_eq!(*registered, wanted);
            }
            // Partial results have another type than the input.
            let mut into = vec![half::f16::ZERO; counts[me]];
            let ones = vec![half::f16::ONE; all];
            comm.reduce_scatter_v(&ones, &mut into, &counts, ReduceOp::Sum)
                .wait()
                .unwrap();
            assert!(into.iter().all(|x| x.to_f32() == p as f32));
            let call = comm.reduce_scatter_v(&ones, &mut into, &counts, ReduceOp::Sum);
            let refused = call.algorithm(Algorithm::Ring).wait().unwrap_err();
            assert!(refused.to_string().contains("full-mesh alone"), "{refused}");
            comm.barrier().wait().unwrap();
        });
    }
}

#[test]
fn operators_of_all_kinds() {
    ranks(3, &options(), |comm| {
        let me = comm.rank().0 as f32;
        let mut x = [me + 1.0; 10];
        comm.all_reduce(&mut x, PreMulSum(0.5f32)).wait().unwrap();
        assert_eq!(x, [3.0; 10]);
        let mut x = [me; 10];
        comm.all_reduce(&mut x, ReduceOp::Avg).wait().unwrap();
        assert_eq!(x, [1.0; 10]);
        let or = UserOperator::new("or", |into: &mut [u64], from: &[u64]| {
            into.iter_mut().zip(from).for_each(|(a, b)| *a |= b);
        });
        let mut x = [1u64 << comm.rank().0; 100];
        comm.all_reduce(&mut x, &or).wait().unwrap();
        assert_eq!(x, [7; 100]);
        let error = comm.all_reduce(&mut [0f32; 2], &or).wait().unwrap_err();
        assert!(error.to_string().contains("over u64"), "{error}");
        let error = comm.all_reduce(&mut [0f32; 2], ReduceOp::PreMulSum).wait().unwrap_err();
        assert!(error.to_string().contains("scalar"), "{error}");
        // Nothing was begun, so the communicator is intact.
        comm.barrier().wait().unwrap();
    });
}

#[test]
fn settings_of_a_call_are_followed() {
    ranks(4, &options(), |comm| {
        let me = comm.rank().0;
        for &algorithm in Algorithm::ALL {
            for &protocol in Protocol::ALL {
                let mut x = given(me, 5000);
                let call = comm.all_reduce(&mut x, ReduceOp::Sum);
                let call = call.algorithm(algorithm).protocol(protocol).channels(3).slice(4096);
                match call.wait() {
                    Ok(()) => assert_eq!(x, sum(4, 5000)),
                    Err(error) => assert!(
                        algorithm == Algorithm::Bruck && error.to_string().contains("bruck does not do allreduce"),
                        "{error}"
                    ),
                }
            }
        }
    });
}
