//! Point-to-point messages: alone, in groups, started; of any length and memory; and errors when
//! one end is missing or has another length.

use std::env;
use std::net::{IpAddr, Ipv4Addr};
use std::process::{Child, Command};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use doorbell_collectives::bootstrap::{Launch, Rendezvous};
use doorbell_collectives::{Algorithm, CollectiveError, Communicator, Options, Protocol, Rank, ReduceOp};
use doorbell_softroce_ibverbs::api;
use doorbell_verbs::Library;
use nix::sys::signal::{Signal, raise};

use crate::world::{options, ranks};

const TIMEOUT: Duration = Duration::from_secs(60);
/// Lengths: empty, less and more than a fragment, and more than is staged of it.
const LENGTHS: [usize; 6] = [0, 1, 7, 5000, 70_000, 400_001];

fn given(from: u32, to: u32, len: usize) -> Vec<i32> {
    (0..len as i32).map(|at| at * 3 + (from * 1000 + to) as i32).collect()
}

#[test]
fn every_pair_and_every_length() {
    ranks(3, &options(), |comm| {
        let me = comm.rank().0;
        for (from, to) in [(0, 1), (1, 2), (2, 0), (1, 0)] {
            for len in LENGTHS {
                let data = given(from, to, len);
                let mut registered = comm.alloc::<i32>(len).unwrap();
                if me == from {
                    registered.copy_from_slice(&data);
                    comm.send(&data, Rank(to)).wait().unwrap();
                    comm.send(&registered, Rank(to)).wait().unwrap();
                    comm.send(&registered, Rank(to)).wait().unwrap();
                    comm.send(&data, Rank(to)).wait().unwrap();
                } else if me == to {
                    let mut plain = vec![-1; len];
                    comm.receive(&mut plain, Rank(from)).wait().unwrap();
                    assert_eq!(plain, data);
                    comm.receive(&mut registered, Rank(from)).wait().unwrap();
                    assert_eq!(*registered, data);
                    plain.fill(-1);
                    comm.receive(&mut plain, Rank(from)).wait().unwrap();
                    assert_eq!(plain, data);
                    registered.fill(-1);
                    comm.receive(&mut registered, Rank(from)).wait().unwrap();
                    assert_eq!(*registered, data);
                }
            }
        }
        // The third rank was not involved.
        comm.barrier().wait().unwrap();
    });
}

/// An all-to-all of sends and receives, each rank's in an order of its own, equals all-to-all.
#[test]
fn an_all_to_all_of_messages() {
    for p in [1, 2, 4, 5] {
        ranks(p, &options(), |comm| {
            let me = comm.rank().0;
            for len in LENGTHS {
                let input: Vec<i32> = (0..p).flat_map(|to| given(me, to, len)).collect();
                let mut wanted = vec![0; input.len()];
                comm.all_to_all(&input, &mut wanted).wait().unwrap();
                let mut output = vec![-1; input.len()];
                let mut parts: Vec<_> = output.chunks_mut(len.max(1)).map(Some).collect();
                parts.resize_with(p as usize, || None);
                comm.group(|group| {
                    for turn in 0..p {
                        let (to, from) = ((me + turn) % p, (me * 3 + turn * (p - 1)) % p);
                        let send = comm.send(&input[to as usize * len..][..len], Rank(to));
                        let into = parts[from as usize].take().unwrap_or_default();
                        let receive = comm.receive(into, Rank(from));
                        if me.is_multiple_of(2) {
                            group.add(receive)?;
                            group.add(send)?;
                        } else {
                            group.add(send)?;
                            group.add(receive)?;
                        }
                    }
                    Ok(())
                })
                .unwrap();
                assert_eq!(output, wanted, "{len} of {p}");
            }
        });
    }
}

/// Otherwise all three would deadlock.
#[test]
fn messages_with_different_ranks_do_not_wait_for_each_other() {
    const LEN: usize = 2_000_000;
    ranks(3, &options(), |comm| match comm.rank().0 {
        0 => {
            let (mut a, mut b) = (vec![0; LEN], vec![0; LEN]);
            comm.group(|group| {
                group.add(comm.receive(&mut a, Rank(1)))?;
                group.add(comm.receive(&mut b, Rank(2)))
            })
            .unwrap();
            assert!(a == given(1, 0, LEN) && b == given(2, 0, LEN));
        }
        1 => {
            let mut heard = [0; 1];
            comm.receive(&mut heard, Rank(2)).wait().unwrap();
            comm.send(&given(1, 0, LEN), Rank(0)).wait().unwrap();
        }
        _ => {
            comm.send(&given(2, 0, LEN), Rank(0)).wait().unwrap();
            comm.send(&[7], Rank(1)).wait().unwrap();
        }
    });
}

#[test]
fn messages_beside_operations_of_all() {
    ranks(3, &options(), |comm| {
        let me = comm.rank().0;
        let mut sum = vec![me; 300_000];
        let (mine, mut theirs) = (vec![me; 300_000], vec![9; 300_000]);
        comm.group(|group| {
            if me == 2 {
                group.add(comm.receive(&mut theirs, Rank(0)))?;
            }
            group.add(comm.all_reduce(&mut sum, ReduceOp::Sum))?;
            if me == 0 {
                group.add(comm.send(&mine, Rank(2)))?;
            }
            Ok(())
        })
        .unwrap();
        assert!(sum.iter().all(|x| *x == 3));
        assert!(theirs.iter().all(|x| *x == if me == 2 { 0 } else { 9 }));
    });
}

#[test]
fn messages_that_were_started_keep_their_order() {
    for progress_thread in [false, true] {
        let options = Options {
            progress_thread,
            ..options()
        };
        ranks(2, &options, |comm| {
            let other = Rank(1 - comm.rank().0);
            let mut sends = Vec::new();
            let mut receives = Vec::new();
            for number in 0..20u32 {
                let len = 1 + 4000 * (number as usize % 3);
                let mut data = comm.alloc::<u32>(len).unwrap();
                data.fill(number + 100 * comm.rank().0);
                sends.push(comm.send(data, other).start().unwrap());
                receives.push(comm.receive(comm.alloc::<u32>(len).unwrap(), other).start().unwrap());
            }
            // A dropped request completes nevertheless.
            drop(sends.remove(4));
            let began = Instant::now();
            while !receives[19].test().unwrap() {
                assert!(began.elapsed() < TIMEOUT);
            }
            for (number, receive) in (0..).zip(receives) {
                let data = receive.wait().unwrap();
                assert!(data.iter().all(|x| *x == number + 100 * other.0), "{number}");
            }
            sends.into_iter().for_each(|send| drop(send.wait().unwrap()));
            comm.barrier().wait().unwrap();
        });
    }
}

#[test]
fn invalid_messages_are_refused() {
    ranks(2, &options(), |comm| {
        let refused = |result: Result<(), CollectiveError>| result.unwrap_err().to_string();
        let refusal = refused(comm.send(&[1u8], Rank(2)).wait());
        assert!(refusal.contains("no rank 2 of 2"), "{refusal}");
        let ring = comm.send(&[1u8], Rank(0)).algorithm(Algorithm::Ring);
        assert!(refused(ring.wait()).contains("no algorithm"));
        let mut data = [1u8];
        let lines = comm.receive(&mut data, Rank(0)).protocol(Protocol::Ll);
        assert!(refused(lines.wait()).contains("no algorithm"));
        comm.barrier().wait().unwrap();
    });
}

#[test]
fn lengths_that_do_not_match() {
    for (sent, received) in [
        (3, 2),
        (2, 3),
        (0, 1),
        (1, 0),
        (70_000, 200_000),
        (200_000, 65_536),
        (65_536, 200_000),
    ] {
        let errors = ranks(3, &options(), |comm| match comm.rank().0 {
            1 => comm.send(&vec![1i32; sent], Rank(2)).wait().unwrap_err(),
            2 => comm.receive(&mut vec![0i32; received], Rank(1)).wait().unwrap_err(),
            // It learns of it in its own operation.
            _ => comm.barrier().wait().unwrap_err(),
        });
        let said = format!(
            "message 1 to rank 2 has {} bytes, and that rank receives {}",
            sent * 4,
            received * 4
        );
        for error in errors {
            assert!(error.to_string().contains(&said), "{sent}, {received}: {error}");
            assert_eq!(error.culprit(), Some(Rank(1)), "{error}");
        }
    }
    // Messages to the own rank, too.
    let errors = ranks(2, &options(), |comm| {
        let (from, mut into) = ([1u8; 3], [0u8; 4]);
        comm.group(|group| {
            if comm.rank() == Rank(0) {
                group.add(comm.send(&from, Rank(0)))?;
                group.add(comm.receive(&mut into, Rank(0)))?;
            }
            Ok(())
        })
        .and_then(|()| comm.barrier().wait())
        .unwrap_err()
    });
    for error in errors {
        assert!(
            error.to_string().contains("has 3 bytes, and that rank receives 4"),
            "{error}"
        );
    }
}

/// Rank 0 waits for rank 1, which waits for rank 2, which is missing: both name rank 2.
#[test]
fn a_missing_rank_is_named() {
    let options = Options {
        deadline: Duration::from_secs(2),
        ..options()
    };
    for collective in [false, true] {
        let over = Barrier::new(3);
        let errors = ranks(3, &options, |comm| {
            let me = comm.rank().0;
            let mut data = [0u8; 10];
            let result = match me {
                0 if collective => comm.barrier().wait(),
                0 => comm.receive(&mut data, Rank(1)).wait(),
                1 => comm.send(&data, Rank(2)).wait(),
                _ => Ok(()),
            };
            over.wait();
            (me != 2).then(|| result.unwrap_err())
        });
        for error in errors.into_iter().flatten() {
            assert_eq!(error.culprit(), Some(Rank(2)), "{error}");
            if !collective {
                assert!(
                    error.to_string().contains("has not come to its end of message 1"),
                    "{error}"
                );
            }
        }
    }
}

const ROLE: &str = "DOORBELL_TEST_MESSAGES";
const RANKS: u32 = 3;

/// Not a test: the body of a rank's process.
#[test]
fn is_a_rank() {
    if env::var_os(ROLE).is_none() {
        return;
    }
    let device = Library::new(api()).open("soft0").unwrap();
    let comm = Communicator::from_env_with(&[device], options()).unwrap();
    let me = comm.rank().0;
    let data = vec![me; 4_000_000];
    let mut into = vec![0u32; data.len()];
    let error = match me {
        2 => {
            let mut started = comm
                .send(comm.alloc::<u32>(data.len()).unwrap(), Rank(0))
                .start()
                .unwrap();
            // Partly in flight.
            let _ = started.test();
            raise(Signal::SIGKILL).unwrap();
            unreachable!()
        }
        0 => comm.receive(&mut into, Rank(2)).wait().unwrap_err(),
        // This rank does not depend on rank 2.
        _ => comm.receive(&mut into, Rank(0)).wait().unwrap_err(),
    };
    assert_eq!(error.culprit(), Some(Rank(2)), "{error}");
    let left = comm.shrink(TIMEOUT).unwrap();
    assert_eq!(left.size(), 2);
    match left.rank().0 {
        0 => left.send(&data, Rank(1)).wait().unwrap(),
        _ => left.receive(&mut into, Rank(0)).wait().unwrap(),
    }
    assert!(into.iter().all(|x| *x == 0));
    left.destroy().unwrap();
}

struct Processes(Vec<Child>);

impl Drop for Processes {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[test]
fn a_rank_that_is_killed_in_a_message_is_named_and_the_others_go_on() {
    let timeout = doorbell_collectives::bootstrap::Options::default().timeout;
    let rendezvous = Rendezvous::open(IpAddr::V4(Ipv4Addr::LOCALHOST), RANKS).unwrap();
    let serving = rendezvous.spawn(timeout).unwrap();
    let [_, _, high, low] = std::process::id().to_be_bytes();
    let start = |rank| {
        Command::new(env::current_exe().unwrap())
            .args(["--exact", "messages::is_a_rank", "--test-threads", "1"])
            .env(ROLE, "1")
            .env(
                "DOORBELL_SOFT_ADDR",
                Ipv4Addr::new(127, 64 + high % 32, low, 30).to_string(),
            )
            .envs(Launch::variables(serving.id(), Rank(rank), RANKS))
            .spawn()
            .unwrap()
    };
    let mut processes = Processes((0..RANKS).map(start).collect());
    for (rank, child) in processes.0.iter_mut().enumerate() {
        assert_eq!(child.wait().unwrap().success(), rank != 2, "rank {rank}");
    }
}
