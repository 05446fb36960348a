//! Starts the ranks of a run, and checks their replies.

use std::collections::BTreeMap;
use std::env;
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use doorbell_collectives::Rank;
use doorbell_collectives::bootstrap::{Launch, Options, Rendezvous};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::fault::{self, Fault, Kind, RANKS, Wire, address};
use crate::rank::{ANSWER, ROLE};

pub(crate) const DEADLINE: Duration = Duration::from_secs(4);
/// Scheduling delay of a process on a busy machine.
pub(crate) const LATE: Duration = Duration::from_secs(2);
/// For operations without a time limit.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);
/// The number of runs, or `all`.
const RUNS: &str = "DOORBELL_SWEEP";
/// Runs side by side. On fewer than four cores it is one: the ranks of two runs together delay each
/// other's processes by more than the evidence of a rank that left allows for.
fn beside() -> usize {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    if cores < 4 { 1 } else { 2 }
}

/// Faults by kind and number of ranks, and the longest time until a rank returned, in ms.
type Times = BTreeMap<(Kind, usize), (u32, u64)>;

pub(crate) fn sweep(wire: Wire, runs: u32) {
    let runs = match env::var(RUNS).as_deref() {
        Err(_) => runs,
        Ok("all") => fault::all(),
        Ok(number) => number.parse().expect("a number of runs, or `all`"),
    };
    // Few runs are spread over all.
    let spread = |number| (u64::from(number) * u64::from(fault::all()) / u64::from(runs)) as u32;
    perform_all(wire, &(0..runs).map(spread).collect::<Vec<_>>());
}

pub(crate) fn perform_all(wire: Wire, runs: &[u32]) {
    let (next, times) = (AtomicUsize::new(0), Mutex::new(Times::new()));
    let work = || {
        loop {
            let Some(&run) = runs.get(next.fetch_add(1, Ordering::Relaxed)) else {
                return;
            };
            let took = perform(wire, run);
            let mut times = times.lock().unwrap();
            for (key, most) in took {
                let entry = times.entry(key).or_insert((0, 0));
                *entry = (entry.0 + 1, entry.1.max(most));
            }
        }
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..beside().min(runs.len())).map(|_| scope.spawn(work)).collect();
        for worker in workers {
            worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
    });
    let times = times.lock().unwrap();
    for ((kind, ranks), (count, most)) in &*times {
        println!(
            "{wire:?} {kind:?} among {ranks}: {count}, at most {most} ms of {} ms",
            DEADLINE.as_millis()
        );
    }
    let faults: u32 = times.values().map(|(count, _)| count).sum();
    assert_eq!(faults, runs.len() as u32 * (RANKS - 1));
}

/// A rank's process, killed when dropped.
struct Process {
    child: Child,
    answers: Receiver<String>,
}

impl Process {
    fn new(mut child: Child) -> Self {
        let mut lines = BufReader::new(child.stdout.take().unwrap())
            .lines()
            .map_while(Result::ok);
        let (said, answers) = channel();
        // Ends with the process. The harness prints the test's name first, and its result later.
        thread::spawn(move || {
            lines.try_for_each(|line| match line.split_once(ANSWER) {
                Some((_, answer)) => said.send(answer.trim_end().to_owned()),
                None => Ok(()),
            })
        });
        Self { child, answers }
    }

    fn answer(&mut self) -> Option<String> {
        match self.answers.recv_timeout(2 * TIMEOUT) {
            Ok(answer) => Some(answer),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("process {} says nothing", self.child.id()),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn start(wire: Wire, run: u32, faults: &[Fault]) -> Vec<Process> {
    let timeout = Options::default().timeout;
    let rendezvous = Rendezvous::open(IpAddr::V4(Ipv4Addr::LOCALHOST), RANKS).unwrap();
    let serving = rendezvous.spawn(timeout).unwrap();
    let faults: Vec<_> = faults.iter().map(Fault::to_string).collect();
    let own = std::process::id();
    let start = |rank| {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", "rank::is_a_rank", "--nocapture", "--test-threads", "1"]);
        command.env(ROLE, format!("{wire:?} {own} {run} {rank} {}", faults.join(";")));
        command.env("DOORBELL_SOFT_ADDR", address(wire, own, run, rank).to_string());
        match wire {
            Wire::SharedMemory => command.env_remove("DOORBELL_LINK"),
            Wire::Udp => command.env("DOORBELL_LINK", "udp"),
        };
        command.envs(Launch::variables(serving.id(), Rank(rank), RANKS));
        Process::new(command.stdout(Stdio::piped()).spawn().unwrap())
    };
    let processes = (0..RANKS).map(start).collect();
    serving.wait().unwrap();
    processes
}

/// Performs a run, and checks that all survivors notice each fault. Returns the time of the last of
/// them, in milliseconds, by kind and number of ranks.
fn perform(wire: Wire, run: u32) -> Vec<((Kind, usize), u64)> {
    let faults = fault::faults(run);
    let mut processes = start(wire, run, &faults);
    let mut here: Vec<u32> = (0..RANKS).collect();
    let mut times = Vec::new();
    for (number, fault) in faults.iter().enumerate() {
        let what = format!("{wire:?}, run {run}, {fault}, {:?}", fault.way());
        let mut said: Option<String> = None;
        let mut most = 0;
        // If a link is cut, both of its ends live, and notice.
        let notices = |rank: &&u32| fault.kind == Kind::Link || **rank != fault.rank;
        for rank in here.iter().filter(notices) {
            let answer = processes[*rank as usize].answer();
            let answer = answer.unwrap_or_else(|| panic!("rank {rank} has ended instead of noticing {what}"));
            let words: Vec<_> = answer.splitn(3, ' ').collect();
            assert!(
                words.len() == 3 && words[0] == number.to_string(),
                "rank {rank}, {what}: {answer}"
            );
            most = most.max(words[1].parse().unwrap());
            let first = said.get_or_insert_with(|| words[2].to_owned());
            assert_eq!(first, words[2], "rank {rank} says otherwise: {what}");
        }
        times.push(((fault.kind, here.len()), most));
        let process = &mut processes[fault.gone() as usize];
        if fault.kind == Kind::Stop {
            // It learns that it was excluded.
            kill(Pid::from_raw(process.child.id() as i32), Signal::SIGCONT).unwrap();
        }
        let last = process.answer();
        assert_eq!(last.as_deref(), (fault.kind != Kind::Kill).then_some("gone"), "{what}");
        here.retain(|rank| *rank != fault.gone());
    }
    for rank in here {
        let process = &mut processes[rank as usize];
        assert_eq!(process.answer().as_deref(), Some("done"), "rank {rank}, run {run}");
        assert!(process.child.wait().unwrap().success(), "rank {rank}, run {run}");
    }
    drop(processes);
    vanishes(wire, run);
    times
}

/// Neither a name nor a descriptor that holds one remains.
fn vanishes(wire: Wire, run: u32) {
    let began = Instant::now();
    for rank in 0..RANKS {
        let ours = format!("/{}:4791/", address(wire, std::process::id(), run, rank));
        while std::fs::read_to_string("/proc/net/unix").unwrap().contains(&ours) {
            assert!(began.elapsed() < TIMEOUT, "a name is left: {ours}");
            thread::sleep(Duration::from_millis(2));
        }
    }
}
