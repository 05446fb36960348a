//! A rank on any device: `tests/vm/42-collectives.sh` starts it on the kernel's rxe, with losses.

use std::time::{Duration, Instant};

use doorbell_collectives::bootstrap::Group;
use doorbell_collectives::executor::Config;
use doorbell_collectives::plan::Collective;
use doorbell_collectives::{Algorithm, CollectiveError, Communicator, Options, Protocol, Rank, ReduceOp};
use doorbell_softroce_ibverbs::api;
use doorbell_verbs::{Context, Library};
use nix::sys::signal::{Signal, raise};

use crate::collectives::{all, given, sum};
use crate::world;

/// Names the device; a system device, unless it is the soft one.
const DEVICE: &str = "DOORBELL_COLLECTIVES_DEVICE";
/// Timeout of an operation on an emulated processor with a packet loss of 2 %.
const DEADLINE: Duration = Duration::from_secs(40);
const VICTIM: Rank = Rank(2);

fn open() -> Context {
    let name = std::env::var(DEVICE).unwrap_or_else(|_| "soft0".to_owned());
    if name.starts_with("soft") {
        return Library::new(api()).open(&name).unwrap();
    }
    Library::system().unwrap().open(&name).unwrap()
}

#[test]
#[ignore = "no test by itself, but one rank of several, with a launcher's environment: tests/vm/42-collectives.sh runs it in the guest, in CI"]
fn a_rank_does_every_collective_and_goes_on_when_another_is_killed() {
    let options = Options {
        deadline: DEADLINE,
        config: Config {
            // A packet lost at the end of a message costs 67 ms.
            timeout: 14,
            ..Config::default()
        },
        ..world::options()
    };
    let comm = Communicator::new(&[open()], Group::from_env().unwrap(), options).unwrap();
    let cases = everything(&comm, 1);
    let began = Instant::now();
    let error = killed(&comm).unwrap_err();
    assert_eq!(error.culprit(), Some(VICTIM), "{error}");
    assert!(began.elapsed() < DEADLINE + DEADLINE / 4, "{error}");
    let left = comm.shrink(2 * DEADLINE).unwrap();
    assert_eq!(left.size(), comm.size() - 1);
    drop(comm);
    let again = everything(&left, 5);
    println!("rank {}: {cases} cases, and {again} without rank {VICTIM}", left.rank());
    left.destroy().unwrap();
}

/// Every collective by each supporting algorithm; only one in `one_in` of these.
fn everything(comm: &Communicator, one_in: usize) -> usize {
    let algorithms = |&collective: &Collective| Algorithm::of(collective).map(move |algorithm| (collective, algorithm));
    let ways = Collective::ALL.iter().flat_map(algorithms).enumerate().step_by(one_in);
    let mut cases = 0;
    for (number, (collective, algorithm)) in ways {
        let protocol = Protocol::ALL[number % Protocol::ALL.len()];
        let n = [5, 3001][number % 2];
        let what = format!("{collective}, {algorithm:?}, {protocol:?}, {n}");
        let right = check(comm, collective, algorithm, protocol, n);
        assert!(right.unwrap_or_else(|error| panic!("{what}: {error}")), "{what}");
        cases += 1;
    }
    cases
}

fn check(
    comm: &Communicator,
    collective: Collective,
    algorithm: Algorithm,
    protocol: Protocol,
    n: usize,
) -> Result<bool, CollectiveError> {
    let (me, p) = (comm.rank().0, comm.size());
    let root = Rank(n as u32 % p);
    let at_root = |len| if me == root.0 { len } else { 0 };
    let (whole, own) = (n * p as usize, given(me, n));
    let part = |of: &[i64], rank: u32| of[rank as usize * n..][..n].to_vec();
    let of_all = given(me, whole);
    let mut y = vec![0; n];
    macro_rules! by {
        ($call:expr) => {
            $call.algorithm(algorithm).protocol(protocol).wait()?
        };
    }
    Ok(match collective {
        Collective::AllReduce => {
            by!(comm.all_reduce_into(&own, &mut y, ReduceOp::Sum));
            y == sum(p, n)
        }
        Collective::Reduce => {
            y.resize(at_root(n), 0);
            by!(comm.reduce_into(&own, &mut y, ReduceOp::Sum, root));
            y == sum(p, n)[..at_root(n)]
        }
        Collective::ReduceScatter => {
            by!(comm.reduce_scatter_into(&of_all, &mut y, ReduceOp::Sum));
            y == part(&sum(p, whole), me)
        }
        Collective::Broadcast => {
            by!(comm.broadcast_into(&own, &mut y, root));
            y == given(root.0, n)
        }
        Collective::AllGather => {
            y.resize(whole, 0);
            by!(comm.all_gather_into(&own, &mut y));
            y == all(p, n)
        }
        Collective::Gather => {
            y.resize(at_root(whole), 0);
            by!(comm.gather_into(&own, &mut y, root));
            y == all(p, n)[..at_root(whole)]
        }
        Collective::Scatter => {
            by!(comm.scatter_into(&of_all, &mut y, root));
            y == part(&given(root.0, whole), me)
        }
        Collective::AllToAll => {
            y.resize(whole, 0);
            by!(comm.all_to_all(&of_all, &mut y));
            let wanted: Vec<i64> = (0..p).flat_map(|from| part(&given(from, whole), me)).collect();
            y == wanted
        }
        Collective::AllToAllV => {
            y.resize(whole, 0);
            let counts = vec![n; p as usize];
            by!(comm.all_to_all_v(&of_all, &counts, &mut y, &counts));
            let wanted: Vec<i64> = (0..p).flat_map(|from| part(&given(from, whole), me)).collect();
            y == wanted
        }
        Collective::SendRecv => {
            by!(comm.send_receive(&own, &mut y));
            y == given((me + p - 1) % p, n)
        }
        Collective::Barrier => {
            by!(comm.barrier());
            true
        }
    })
}

/// An operation in which the victim is killed, and another, for ranks that completed it before.
fn killed(comm: &Communicator) -> Result<(), CollectiveError> {
    let mut data = comm.alloc::<f32>(40_000)?;
    data.fill(1.0);
    let mut request = comm.all_reduce(data, ReduceOp::Sum).start()?;
    if comm.rank() == VICTIM {
        for _ in 0..20 {
            let _ = request.test();
        }
        raise(Signal::SIGKILL).unwrap();
    }
    request.wait()?;
    comm.barrier().wait()
}
