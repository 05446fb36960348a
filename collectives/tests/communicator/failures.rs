//! Processes as ranks, of which some are killed, stopped or cut off in the midst of an operation: all others say who it was, in time, and go on without.
//!
//! A run is a list of faults, one after another; each leaves one rank fewer. What goes begins the operation as the others do, drives it for so many turns, and then goes: at another step each time.

use std::io::{BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, thread};

use doorbell_collectives::bootstrap::{Group, Launch, Rendezvous};
use doorbell_collectives::{CollectiveError, Communicator, Options, Rank, ReduceOp};
use doorbell_softroce_ibverbs::api;
use doorbell_verbs::Library;
use nix::sys::signal::{Signal, kill, raise};
use nix::unistd::Pid;

use crate::world;

/// Set for processes that are ranks: the faults.
const ROLE: &str = "DOORBELL_TEST_FAULTS";
/// Marks a line as an answer, among what the test harness prints.
const ANSWER: &str = "rank: ";
/// What an operation may take.
const DEADLINE: Duration = Duration::from_secs(4);
/// How much later a process may come to say so on a busy machine.
const LATE: Duration = Duration::from_secs(2);
/// For what takes as long as it takes.
const PATIENCE: Duration = Duration::from_secs(60);
const RANKS: u32 = 5;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Kill,
    Stop,
    Cut,
}

/// Somebody goes, after so many turns.
#[derive(Clone, Copy, Debug)]
struct Fault {
    kind: Kind,
    /// As it was ranked at the beginning.
    who: u32,
    turns: u32,
}

impl Fault {
    fn write(self) -> String {
        format!("{:?} {} {}", self.kind, self.who, self.turns)
    }

    fn read(text: &str) -> Self {
        let words: Vec<_> = text.split(' ').collect();
        let kind = match words[0] {
            "Kill" => Kind::Kill,
            "Stop" => Kind::Stop,
            _ => Kind::Cut,
        };
        Self {
            kind,
            who: words[1].parse().unwrap(),
            turns: words[2].parse().unwrap(),
        }
    }
}

/// No test of its own: what a rank does.
#[test]
fn is_a_rank() {
    let Ok(faults) = env::var(ROLE) else { return };
    let device = Library::new(api()).open("soft0").unwrap();
    let options = Options {
        deadline: DEADLINE,
        ..world::options()
    };
    let mut comm = Communicator::new(&[device], Group::from_env().unwrap(), options).unwrap();
    let me = comm.rank().0;
    // By rank: what it was at the beginning.
    let mut names: Vec<u32> = (0..comm.size()).collect();
    for (number, fault) in faults.split(';').map(Fault::read).enumerate() {
        let began = Instant::now();
        // Who is late may learn of it already here.
        let result = all_reduce(&comm, number as u32 * 7).and_then(|()| {
            let mut data = comm.alloc::<f32>(40_000)?;
            data.fill(1.0);
            let mut request = comm.all_reduce(data, ReduceOp::Sum).start()?;
            if fault.who == me {
                for _ in 0..fault.turns {
                    let _ = request.test();
                }
                go(&comm, fault.kind);
            }
            request.wait()?;
            // Whoever goes had done its part already, so the next one shows it.
            all_reduce(&comm, 1)
        });
        let took = began.elapsed();
        let error = result
            .err()
            .unwrap_or_else(|| panic!("rank {me} has noticed nothing of {fault:?}"));
        if fault.who == me {
            println!("{ANSWER}gone");
            return;
        }
        let culprit = error.culprit().map(|rank| names[rank.index()]);
        assert_eq!(culprit, Some(fault.who), "{fault:?}: {error}");
        let failure = error
            .failure()
            .unwrap_or_else(|| panic!("{fault:?}: {error}"))
            .to_string();
        assert!(
            failure.contains("process ") && failure.contains(" on "),
            "no host: {failure}"
        );
        assert!(took < DEADLINE + LATE, "{fault:?} took {took:?}: {error}");
        let again = comm.barrier().wait().unwrap_err();
        assert_eq!(again.culprit(), error.culprit());
        let left = comm
            .shrink(PATIENCE)
            .unwrap_or_else(|e| panic!("{fault:?}: {error}: {e}"));
        names.retain(|name| *name != fault.who);
        assert_eq!(left.size() as usize, names.len(), "{fault:?}: {error}");
        assert_eq!(names[left.rank().index()], me);
        println!("{ANSWER}{number} {} {error}", took.as_millis());
        comm = left;
    }
    all_reduce(&comm, 99).unwrap();
    comm.destroy().unwrap();
    println!("{ANSWER}done");
}

/// Goes.
fn go(comm: &Communicator, kind: Kind) {
    match kind {
        Kind::Kill => raise(Signal::SIGKILL).unwrap(),
        Kind::Stop => raise(Signal::SIGSTOP).unwrap(),
        Kind::Cut => (0..comm.size())
            .map(Rank)
            .filter(|peer| *peer != comm.rank())
            .for_each(|peer| comm.cut(peer).unwrap()),
    }
}

/// A sum, which is right if it is done.
fn all_reduce(comm: &Communicator, seed: u32) -> Result<(), CollectiveError> {
    let mut data: Vec<u32> = (0..5000).map(|at| at * seed + comm.rank().0).collect();
    comm.all_reduce(&mut data, ReduceOp::Sum).wait()?;
    let p = comm.size();
    for (at, got) in data.into_iter().enumerate() {
        assert_eq!(got, at as u32 * seed * p + p * (p - 1) / 2);
    }
    Ok(())
}

/// A rank's process, killed when dropped.
struct Process {
    child: Child,
    answers: BufReader<ChildStdout>,
}

impl Process {
    /// The next answer; none when it has ended.
    fn answer(&mut self) -> Option<String> {
        let mut line = String::new();
        while self.answers.read_line(&mut line).unwrap() > 0 {
            // The harness begins its line with the test's name, and ends it later.
            if let Some((_, answer)) = line.split_once(ANSWER) {
                return Some(answer.trim_end().to_owned());
            }
            line.clear();
        }
        None
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs these faults, and sees that all who are left have noticed each.
fn run(number: u8, faults: &[Fault]) {
    let options = doorbell_collectives::bootstrap::Options::default();
    let rendezvous = Rendezvous::open(IpAddr::V4(Ipv4Addr::LOCALHOST), RANKS).unwrap();
    let serving = rendezvous.spawn(options.patience).unwrap();
    let role: Vec<_> = faults.iter().map(|fault| fault.write()).collect();
    let [_, _, high, low] = std::process::id().to_be_bytes();
    let address = Ipv4Addr::new(127, 64 + high % 32, low, 10 + number);
    let start = |rank| {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "failures::is_a_rank", "--nocapture", "--test-threads", "1"])
            .env(ROLE, role.join(";"))
            .env("DOORBELL_SOFT_ADDR", address.to_string())
            .envs(Launch::variables(serving.id(), Rank(rank), RANKS))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        Process { child, answers }
    };
    let mut processes: Vec<_> = (0..RANKS).map(start).collect();
    let mut gone: Vec<u32> = Vec::new();
    for (number, fault) in faults.iter().enumerate() {
        for rank in (0..RANKS).filter(|rank| *rank != fault.who && !gone.contains(rank)) {
            let answer = processes[rank as usize].answer();
            let answer = answer.unwrap_or_else(|| panic!("rank {rank} has ended instead of noticing {fault:?}"));
            assert!(
                answer.starts_with(&format!("{number} ")),
                "rank {rank}, {fault:?}: {answer}"
            );
        }
        let process = &mut processes[fault.who as usize];
        if fault.kind == Kind::Stop {
            // It learns that the others have gone on without it.
            kill(Pid::from_raw(process.child.id() as i32), Signal::SIGCONT).unwrap();
        }
        let last = process.answer();
        assert_eq!(
            last.as_deref(),
            (fault.kind != Kind::Kill).then_some("gone"),
            "{fault:?}"
        );
        gone.push(fault.who);
    }
    for rank in (0..RANKS).filter(|rank| !gone.contains(rank)) {
        let process = &mut processes[rank as usize];
        assert_eq!(process.answer().as_deref(), Some("done"), "rank {rank}");
        assert!(process.child.wait().unwrap().success(), "rank {rank}");
    }
}

/// Three faults of each kind at any step, in an order of its own for each seed.
fn faults(seed: u32) -> Vec<Fault> {
    let mut state = seed;
    let mut draw = |below: u32| {
        // Knuth's constants: the upper bits are good enough.
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % below
    };
    let mut left: Vec<u32> = (0..RANKS).collect();
    let kinds = [Kind::Kill, Kind::Stop, Kind::Cut];
    (0..3)
        .map(|round| Fault {
            kind: kinds[((seed + round) % 3) as usize],
            who: left.remove(draw(left.len() as u32) as usize),
            turns: draw(60),
        })
        .collect()
}

#[test]
fn ranks_that_go_at_any_step_are_named_and_the_others_go_on() {
    let began = Instant::now();
    for seed in 0..8 {
        run(seed as u8, &faults(seed));
        // The first three are each kind first, in the middle and last; the others are for more steps, where there is time.
        if seed >= 2 && began.elapsed() > Duration::from_secs(30) {
            break;
        }
    }
}

#[test]
fn an_abort_reaches_all_who_wait() {
    let options = world::options();
    let errors = world::ranks(3, &options, |comm| {
        thread::scope(|scope| {
            if comm.rank() == Rank(1) {
                scope.spawn(|| {
                    thread::sleep(Duration::from_millis(50));
                    comm.abort("the loss is not a number");
                });
                let began = Instant::now();
                while !comm.has_failed() {
                    assert!(began.elapsed() < PATIENCE);
                    thread::yield_now();
                }
            }
            comm.all_reduce(&mut [0.0f32; 10], ReduceOp::Sum).wait().unwrap_err()
        })
    });
    for error in errors {
        assert_eq!(error.culprit(), Some(Rank(1)));
        assert!(
            error.to_string().contains("aborted: the loss is not a number"),
            "{error}"
        );
    }
}

#[test]
fn a_rank_that_does_not_begin_is_named_within_the_deadline() {
    let options = Options {
        deadline: Duration::from_secs(2),
        ..world::options()
    };
    let errors = world::ranks(3, &options, |comm| {
        comm.barrier().wait().unwrap();
        let began = Instant::now();
        if comm.rank() == Rank(2) {
            while !comm.has_failed() {
                assert!(began.elapsed() < PATIENCE);
                thread::sleep(Duration::from_millis(1));
            }
        }
        let error = comm.all_reduce(&mut [0.0f32; 10], ReduceOp::Sum).wait().unwrap_err();
        assert!(began.elapsed() < Duration::from_secs(2) + LATE);
        error
    });
    for error in errors {
        assert_eq!(error.culprit(), Some(Rank(2)), "{error}");
        assert!(error.to_string().contains("has not begun operation 2"), "{error}");
    }
}
