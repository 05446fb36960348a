//! Parts of different lengths: errors where two ranks disagree; ranks without messages do not wait.

use std::sync::Barrier;

use doorbell_collectives::{CollectiveError, Communicator, Protocol, Rank, ReduceOp};

use crate::world::{options, ranks};

/// The error names the ranks, on all ranks, long before the deadline.
#[test]
fn mismatched_lengths_are_reported() {
    // LL, eager and granted; empty at one end; and eager at one end, granted at the other.
    for (sent, expected) in [
        (3, 2),
        (2, 3),
        (0, 1),
        (1, 0),
        (70_000, 90_000),
        (90_000, 70_000),
        (5000, 2),
        (2, 5000),
    ] {
        for &protocol in Protocol::ALL {
            let errors = ranks(3, &options(), |comm| {
                let me = comm.rank().index();
                let mut send = [4, 4, 4];
                let mut receive = [4, 4, 4];
                match me {
                    1 => send[2] = sent,
                    2 => receive[1] = expected,
                    _ => {}
                }
                let input = vec![me as u32; send.iter().sum()];
                let mut output = vec![9; receive.iter().sum()];
                let call = comm.all_to_all_v(&input, &send, &mut output, &receive);
                // Rank 0 may be done before the others detect the error.
                let result = call.protocol(protocol).wait();
                result.and_then(|()| comm.barrier().wait()).unwrap_err()
            });
            let said = format!(
                "operation 1 (alltoallv): rank 1 sends rank 2 {} bytes, and that one expects {}",
                sent * 4,
                expected * 4
            );
            for error in errors {
                assert!(
                    error.to_string().contains(&said),
                    "{sent}, {expected}, {protocol}: {error}"
                );
                assert!(matches!(error.culprit(), Some(Rank(1 | 2))), "{error}");
            }
        }
    }
}

/// The same for collectives whose counts are to be equal on all ranks, and for rooted ones.
#[test]
fn counts_that_do_not_match() {
    let fails = |what: &str, call: &(dyn Fn(&Communicator) -> Result<(), CollectiveError> + Sync), said: &str| {
        let errors = ranks(3, &options(), |comm| {
            let mut all = [0u8; 6];
            // A rank may still be in the first one when the others detect the error of the second.
            comm.all_gather_v(&vec![1; comm.rank().index() + 1], &mut all, &[1, 2, 3])
                .wait()
                .and_then(|()| call(&comm))
                .and_then(|()| comm.barrier().wait())
                .unwrap_err()
        });
        for error in errors {
            assert!(error.to_string().contains(said), "{what}: {error}");
        }
    };
    let gather = |comm: &Communicator| {
        // Rank 2 has one more than the others expect.
        let counts = if comm.rank() == Rank(2) {
            [10, 20, 31]
        } else {
            [10, 20, 30]
        };
        let mut all = vec![0u32; counts.iter().sum()];
        comm.all_gather_v(&vec![7; counts[comm.rank().index()]], &mut all, &counts)
            .wait()
    };
    fails("all-gather-v", &gather, "rank 2 sends rank ");
    fails("all-gather-v", &gather, "124 bytes, and that one expects 120");
    let reduce = |comm: &Communicator| {
        let counts = if comm.rank() == Rank(0) {
            [10, 20, 30]
        } else {
            [10, 25, 25]
        };
        let mut part = vec![0f32; counts[comm.rank().index()]];
        comm.reduce_scatter_v(&vec![1.0; 60], &mut part, &counts, ReduceOp::Sum)
            .wait()
    };
    fails(
        "reduce-scatter-v",
        &reduce,
        "operation 2 (reduce-scatter): rank 0 sends rank ",
    );
    let gather_to = |comm: &Communicator| {
        let mine = vec![1u8; if comm.rank() == Rank(1) { 5 } else { 4 }];
        comm.gather_v(&mine, &mut [0; 12], &[4, 4, 4], Rank(0)).wait()
    };
    fails(
        "gather-v",
        &gather_to,
        "rank 1 sends rank 0 5 bytes, and that one expects 4",
    );
    let scatter = |comm: &Communicator| {
        let mut mine = vec![1u8; if comm.rank() == Rank(2) { 0 } else { 4 }];
        comm.scatter_v(&[0; 12], &[4, 4, 4], &mut mine, Rank(1)).wait()
    };
    fails(
        "scatter-v",
        &scatter,
        "rank 1 sends rank 2 4 bytes, and that one expects 0",
    );
}

#[test]
fn with_a_root_the_others_do_not_wait_for_one_another() {
    let others = Barrier::new(2);
    ranks(3, &options(), |comm| {
        let gathers = || {
            comm.gather_v(&[1u8, 2], &mut [0; 6], &[2, 2, 2], Rank(0))
                .wait()
                .unwrap()
        };
        if comm.rank() == Rank(2) {
            others.wait();
            gathers();
        } else if comm.rank() == Rank(1) {
            gathers();
            others.wait();
        } else {
            gathers();
        }
        let refused = comm
            .gather_v(&[1u8, 2], &mut [0; 6], &[2, 2, 2], Rank(3))
            .wait()
            .unwrap_err();
        assert!(refused.to_string().contains("cannot be the root"), "{refused}");
        comm.barrier().wait().unwrap();
    });
}

/// More operations than slots for lengths records, most without messages between most ranks.
#[test]
fn many_of_ragged_parts_in_a_row() {
    for &protocol in Protocol::ALL {
        ranks(4, &options(), |comm| {
            let (me, p) = (comm.rank().0, comm.size());
            let count = |round: u32, from: u32, to: u32| {
                if (from + 2 * to + round).is_multiple_of(3) {
                    5 + round as usize
                } else {
                    0
                }
            };
            for round in 0..70 {
                let send: Vec<_> = (0..p).map(|to| count(round, me, to)).collect();
                let receive: Vec<_> = (0..p).map(|from| count(round, from, me)).collect();
                let input: Vec<u64> = (0..p)
                    .flat_map(|to| vec![u64::from(round * 100 + me * 10 + to); send[to as usize]])
                    .collect();
                let wanted: Vec<u64> = (0..p)
                    .flat_map(|from| vec![u64::from(round * 100 + from * 10 + me); receive[from as usize]])
                    .collect();
                let mut output = vec![0; wanted.len()];
                comm.all_to_all_v(&input, &send, &mut output, &receive)
                    .protocol(protocol)
                    .wait()
                    .unwrap();
                assert_eq!(output, wanted, "round {round}");
                // Another operation between, on the same connection.
                if round % 16 == 3 {
                    comm.barrier().wait().unwrap();
                }
            }
        });
    }
}
