//! Clients in C (`tests/client`), against headers of their own.

use std::ffi::OsString;
use std::io::{BufRead as _, BufReader, Read as _};
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use doorbell_cuda_standin::{ExecutionMode, environment};
use tempfile::TempDir;

use crate::library;

const SOURCES: [&str; 10] = [
    "main.c",
    "gpu.c",
    "collectives.c",
    "groups.c",
    "graphs.c",
    "failures.c",
    "aborts.c",
    "derived.c",
    "windows.c",
    "kills.c",
];
pub(crate) const LIMIT: Duration = Duration::from_secs(240);

/// The client, in a folder with the library by its name.
pub(crate) fn client() -> &'static Path {
    static BUILT: OnceLock<(TempDir, PathBuf)> = OnceLock::new();
    let (_, client) = BUILT.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a folder");
        let link = folder.path().join("libnccl.so.2");
        symlink(library(), &link).expect("the folder is empty");
        let client = folder.path().join("client");
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/client");
        let output = Command::new("cc")
            .args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"])
            .args(SOURCES.map(|source| sources.join(source)))
            .arg(&link)
            .args(["-ldl", "-Wl,-rpath,$ORIGIN", "-o"])
            .arg(&client)
            .output()
            .expect("a C compiler, cc");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        (folder, client)
    });
    client
}

/// On loopback, with a device address of the test's own.
pub(crate) fn variables(test: &str) -> Vec<(&'static str, OsString)> {
    let [_, _, high, low] = std::process::id().to_be_bytes();
    let own = test
        .bytes()
        .fold(1, |sum: u8, byte| sum.wrapping_mul(31).wrapping_add(byte))
        | 1;
    let address = format!("127.{}.{low}.{own}", 112 + high % 8);
    let mut all = Vec::from(environment(ExecutionMode::Prompt, 4));
    all.push(("NCCL_SOCKET_IFNAME", "lo".into()));
    all.push(("DOORBELL_SOFT_ADDR", address.into()));
    all
}

/// A process that is killed when the test has failed.
pub(crate) struct Process(Child);

impl Process {
    fn start(test: &str, arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        let mut command = Command::new(client());
        command
            .args(arguments)
            .envs(variables(test))
            .envs(environment.iter().copied());
        Self::spawn(&mut command)
    }

    pub(crate) fn spawn(command: &mut Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        Self(command.spawn().expect("the client starts"))
    }

    /// Lets it end: what it has written, and its status.
    pub(crate) fn end(mut self, until: Instant) -> (String, ExitStatus) {
        drop(self.0.stdin.take());
        let status = loop {
            match self.0.try_wait().expect("a child of this process") {
                Some(status) => break status,
                None if Instant::now() < until => thread::sleep(Duration::from_millis(5)),
                None => panic!("the client does not end"),
            }
        };
        let mut said = String::new();
        let output = self.0.stdout.as_mut().expect("a pipe");
        output.read_to_string(&mut said).expect("the client writes text");
        (said, status)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only if it has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a test's ranks, whose id a process makes that is none of them. With as many ranks, which
/// may be more than run.
fn run(test: &str, running: u32, ranks: u32, environment: &[(&str, &str)]) -> Vec<(String, ExitStatus)> {
    let mut server = Process::start(test, &["id"], environment);
    let mut id = String::new();
    let output = server.0.stdout.as_mut().expect("a pipe");
    BufReader::new(output).read_line(&mut id).expect("the id");
    let of = ranks.to_string();
    let start = |rank: u32| Process::start(test, &[test, &rank.to_string(), &of, id.trim()], environment);
    let processes: Vec<Process> = (0..running).map(start).collect();
    let until = Instant::now() + LIMIT;
    // A rank that aborts is still there when those before it have learned of it.
    processes.into_iter().map(|process| process.end(until)).collect()
}

fn pass(test: &str, running: u32, ranks: u32, environment: &[(&str, &str)]) {
    for (rank, (said, status)) in run(test, running, ranks, environment).into_iter().enumerate() {
        assert!(
            status.success() && said.trim() == "PASS",
            "rank {rank}: {status}: {said}"
        );
    }
}

#[test]
fn every_collective_type_and_operator_in_place_and_not() {
    pass("collectives", 3, 3, &[]);
}

#[test]
fn every_collective_in_groups_and_of_a_communicator_that_does_not_block() {
    pass("collectives-in-groups", 3, 3, &[]);
}

#[test]
fn every_collective_staged_through_the_host() {
    pass("collectives", 3, 3, &[("DOORBELL_GPU", "executor=staged")]);
}

#[test]
fn sends_and_receives_of_a_group_progress_together() {
    pass("messages", 3, 3, &[]);
}

#[test]
fn groups_nest_and_span_communicators() {
    pass("groups", 3, 3, &[]);
}

/// Of a driver that waits for the device where it loads kernels.
#[test]
fn two_communicators_may_be_fed_in_opposite_orders() {
    pass("orders", 2, 2, &[("DOORBELL_STANDIN", "prompt,devices=2,implicit")]);
}

#[test]
fn received_memory_may_overlap_sent_memory() {
    pass("overlaps", 3, 3, &[]);
}

#[test]
fn graphs_of_the_program_mix_with_direct_operations_and_outlive_the_communicator() {
    pass("graphs", 3, 3, &[]);
}

/// Processes without an MPS daemon.
const ON_ONE_GPU: (&str, &str) = ("DOORBELL_STANDIN", "prompt,devices=1");

#[test]
fn collectives_of_ranks_that_are_time_sliced() {
    pass("collectives", 3, 3, &[ON_ONE_GPU]);
}

#[test]
fn groups_of_ranks_that_are_time_sliced() {
    pass("groups", 3, 3, &[ON_ONE_GPU]);
}

/// Captures have groups, which the host would have a part in if the ranks were time-sliced.
#[test]
fn graphs_of_ranks_on_one_gpu_with_an_mps_daemon() {
    under_mps(|environment| pass("graphs", 3, 3, environment));
}

#[test]
fn one_rank_is_a_communicator_too() {
    pass("messages", 1, 1, &[]);
}

/// An MPS daemon's folder, and the environment of its clients.
fn under_mps(run: impl FnOnce(&[(&str, &str)])) {
    let folder = tempfile::tempdir().expect("a folder");
    run(&[
        ("DOORBELL_STANDIN", "prompt,devices=1,133=1"),
        ("CUDA_MPS_PIPE_DIRECTORY", folder.path().to_str().expect("a plain path")),
    ]);
}

/// The last rank is killed.
fn pass_without_last(test: &str, ranks: u32) {
    has_passed_without_last(&run(test, ranks, ranks, &[]));
}

fn has_passed_without_last(ends: &[(String, ExitStatus)]) {
    let (killed, others) = ends.split_last().expect("ranks");
    let has_passed = |(said, status): &(String, ExitStatus)| status.success() && said.trim() == "PASS";
    assert!(
        killed.1.signal() == Some(9) && others.iter().all(has_passed),
        "{ends:?}"
    );
}

#[test]
fn a_killed_rank_is_named_to_the_others() {
    pass_without_last("killed", 3);
}

#[test]
fn work_of_a_killed_rank_that_its_gpu_executes_on_ends() {
    under_mps(|environment| {
        let ends = run("killed-with-work", 3, 3, environment);
        has_passed_without_last(&ends);
        assert_eq!(ends[2].0, "ENDED\n");
    });
}

/// Ends once the victim has said that it was initialised.
fn kill_in_initialisation(victim: usize, at: u32, environment: &[(&str, &str)]) -> bool {
    let (at, number) = (at.to_string(), victim.to_string());
    let killed = [("KILLED_AT", at.as_str()), ("VICTIM", number.as_str())];
    let mut ends = run("killed-in-initialisation", 3, 3, &[&killed, environment].concat());
    let (said, status) = ends.remove(victim);
    assert_eq!(
        status.signal(),
        Some(9),
        "rank {victim}, killed at {at}: {status}: {said}"
    );
    let has_passed = |(said, status): &(String, ExitStatus)| status.success() && said.trim() == "PASS";
    assert!(ends.iter().all(has_passed), "rank {victim}, killed at {at}: {ends:?}");
    said.contains("INITIALISED")
}

/// At each of the calls by which ranks pass descriptors to each other, and at its end.
#[test]
fn a_rank_that_is_killed_in_its_initialisation_is_named_to_the_others() {
    for victim in [0, 2] {
        let first = (1..).find(|at| kill_in_initialisation(victim, *at, &[]));
        assert_ne!(first, Some(1), "no call was counted");
    }
}

/// At each of the calls by which a rank connects to the others and sends them something, once it
/// has confirmed its registration: three calls. The first rank connects to two others, and the last
/// one replies to two. Last, each says that it is connected.
#[test]
fn a_rank_that_is_killed_in_the_rendezvous_is_named_to_the_others() {
    for (victim, last) in [(0, 8), (2, 6)] {
        for at in 4..=last {
            let is_initialised = kill_in_initialisation(victim, at, &[("IN_RENDEZVOUS", "1")]);
            assert!(!is_initialised, "rank {victim} has made fewer than {at} calls");
        }
    }
}

#[test]
fn a_communicator_is_split_by_colour_and_key() {
    pass("split", 4, 4, &[]);
}

#[test]
fn a_communicator_whose_data_the_host_moves_is_split() {
    pass("split", 4, 4, &[("DOORBELL_GPU", "executor=staged")]);
}

#[test]
fn a_rank_that_is_killed_in_a_split_is_named_to_the_others() {
    pass_without_last("killed-in-split", 3);
}

#[test]
fn another_thread_aborts_the_parent_during_a_split() {
    pass("abort-split", 2, 2, &[]);
}

#[test]
fn a_communicator_shrinks_with_and_without_an_abort() {
    pass_without_last("shrink", 4);
}

#[test]
fn a_rank_joins_a_communicator_that_grows() {
    pass("grow", 3, 3, &[]);
}

#[test]
fn another_thread_aborts_an_operation() {
    pass("abort-operation", 2, 2, &[]);
}

#[test]
fn an_abort_ends_the_launch_of_a_graph() {
    pass("abort-graph", 2, 2, &[]);
}

#[test]
fn an_initialisation_without_the_other_rank_blocks_no_caller_and_is_aborted() {
    pass("abort-initialisation", 1, 2, &[]);
}

#[test]
fn an_abort_may_come_in_any_part_of_an_initialisation() {
    pass("abort-initialisations", 2, 2, &[]);
}

#[test]
fn an_abort_may_come_in_any_part_of_an_operation() {
    pass("abort-operations", 2, 2, &[]);
}

#[test]
fn an_abort_may_come_in_any_part_of_an_operation_that_the_host_moves() {
    pass("abort-operations", 2, 2, &[("DOORBELL_GPU", "executor=staged")]);
}

#[test]
fn wrong_arguments_are_refused_with_a_sentence() {
    pass("arguments", 1, 1, &[]);
}

#[test]
fn windows_are_registered_by_all_ranks_and_ended_by_each() {
    pass("windows", 3, 3, &[]);
}

#[test]
fn windows_of_communicators_whose_data_the_host_moves() {
    pass("windows", 2, 2, &[("DOORBELL_GPU", "executor=staged")]);
}

/// Each rank makes the id, of the port that the environment has.
#[test]
fn ranks_meet_where_the_environment_says() {
    let port = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    let address = port.expect("a free port").to_string();
    let environment = [
        ("NCCL_COMM_ID", address.as_str()),
        ("DOORBELL_SECRET", "sixteen characters or more"),
    ];
    pass("named", 3, 3, &environment);
}
