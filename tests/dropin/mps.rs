//! `doorbell run --ranks-per-gpu`: the MPS daemon of a command, played by a script that records
//! what it is called with.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::PathBuf;
use std::process::{Child, Command, Output};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::{doorbell, texts};

/// Does what `AT_START` says when it is to start.
const SCRIPT: &str = r#"#!/bin/sh
if [ "$1" = -d ]; then
    echo "start $(stat -c %a "$CUDA_MPS_PIPE_DIRECTORY") $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY gpus=$CUDA_VISIBLE_DEVICES" >> "$RECORD"
    eval "$AT_START"
else
    echo "$(cat) $CUDA_MPS_PIPE_DIRECTORY" >> "$RECORD"
fi
"#;
/// Records what the command has, and ends as its first argument says.
const COMMAND: &str =
    r#"echo "command $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY $DOORBELL_RANKS_PER_GPU" >> "$RECORD"; "#;

struct Machine {
    folder: TempDir,
    record: PathBuf,
}

impl Machine {
    /// With the script, or without the daemon's program.
    fn new(has_daemon: bool) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let record = folder.path().join("record");
        fs::write(&record, "").expect("a file");
        let programs = folder.path().join("bin");
        fs::create_dir(&programs).expect("the folder is empty");
        for program in ["cat", "sh", "sleep", "stat"] {
            let path = ["/usr/bin", "/bin"].map(|folder| PathBuf::from(folder).join(program));
            let path = path
                .into_iter()
                .find(|path| path.exists())
                .expect("a program of every system");
            symlink(path, programs.join(program)).expect("the folder is empty");
        }
        if has_daemon {
            let script = programs.join("nvidia-cuda-mps-control");
            fs::write(&script, SCRIPT).expect("a file");
            fs::set_permissions(&script, Permissions::from_mode(0o755)).expect("a file of this test");
        }
        Self { folder, record }
    }

    fn command(&self, end: &str) -> Command {
        let mut command = doorbell(&["run", "--nccl", "--ranks-per-gpu", "4", "--", "sh", "-c"]);
        command.arg([COMMAND, end].concat());
        command.env("PATH", self.folder.path().join("bin"));
        command.env("TMPDIR", self.folder.path()).env("RECORD", &self.record);
        command
            .env("CUDA_VISIBLE_DEVICES", "1")
            .env_remove("CUDA_MPS_PIPE_DIRECTORY");
        command
    }

    /// In a process group of its own, in which SIGINT is not ignored, as it is in background jobs.
    fn spawn(&self, command: &Command) -> Child {
        let mut through = Command::new("/usr/bin/env");
        through.arg("--default-signal=INT").arg(command.get_program());
        through.args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => through.env(name, value),
                None => through.env_remove(name),
            };
        }
        through.process_group(0).spawn().expect("doorbell was built")
    }

    fn run(&self, end: &str) -> Output {
        self.command(end).output().expect("doorbell was built")
    }

    fn records(&self) -> Vec<String> {
        let text = fs::read_to_string(&self.record).expect("a file");
        text.lines().map(str::to_owned).collect()
    }

    fn await_record(&self, start: &str) {
        let until = Instant::now() + Duration::from_secs(60);
        while !self.records().iter().any(|record| record.starts_with(start)) {
            assert!(Instant::now() < until, "no {start}: {:?}", self.records());
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// One daemon, with a folder of its own that is gone, started before and ended after the
    /// command.
    fn assert_served(&self) {
        let records = self.records();
        let words: Vec<Vec<&str>> = records.iter().map(|record| record.split(' ').collect()).collect();
        let [start, command, quit] = &words[..] else {
            panic!("{records:?}");
        };
        let folder = start[2];
        assert_eq!(start[..], ["start", "700", folder, folder, "gpus="]);
        assert_eq!(command[..], ["command", folder, folder, "4"]);
        assert_eq!(quit[..], ["quit", "-t", "5", folder]);
        assert!(folder.starts_with(self.folder.path().to_str().expect("a plain path")));
        assert!(!PathBuf::from(folder).exists());
    }
}

#[test]
fn a_daemon_is_started_for_the_command_and_ended_however_it_ends() {
    for (end, code, signal) in [
        ("exit 0", Some(0), None),
        ("exit 7", Some(7), None),
        ("kill -9 $$", None, Some(9)),
    ] {
        let machine = Machine::new(true);
        let output = machine.run(end);
        let (_, stderr) = texts(&output);
        assert_eq!(
            (output.status.code(), output.status.signal()),
            (code, signal),
            "{stderr}"
        );
        assert!(
            stderr.lines().count() == 1 && stderr.contains("4 ranks share each GPU by an MPS daemon"),
            "{stderr}"
        );
        machine.assert_served();
    }
}

/// As a terminal sends it: to the command and to doorbell.
#[test]
fn an_interrupt_ends_the_command_and_the_daemon() {
    let machine = Machine::new(true);
    let mut child = machine.spawn(&machine.command("trap 'exit 3' INT; while :; do sleep 0.05; done"));
    machine.await_record("command");
    killpg(Pid::from_raw(child.id().cast_signed()), Signal::SIGINT).expect("it runs");
    let status = child.wait().expect("it was started");
    // Before the trap is set, it is the signal that ends it.
    assert!(status.code() == Some(3) || status.signal() == Some(2), "{status}");
    machine.assert_served();
}

#[test]
fn an_interrupt_while_the_daemon_starts_ends_it_and_starts_no_command() {
    let machine = Machine::new(true);
    let go = machine.folder.path().join("go");
    let mut command = machine.command("exit 0");
    command.env(
        "AT_START",
        format!("while ! [ -e {} ]; do sleep 0.05; done", go.display()),
    );
    let mut child = machine.spawn(&command);
    machine.await_record("start");
    killpg(Pid::from_raw(child.id().cast_signed()), Signal::SIGINT).expect("it runs");
    fs::write(go, "").expect("a file");
    assert_eq!(child.wait().expect("it was started").code(), Some(130));
    let records = machine.records();
    assert!(
        matches!(&records[..], [start, quit] if start.starts_with("start") && quit.starts_with("quit")),
        "{records:?}"
    );
}

#[test]
fn without_a_daemon_one_line_says_that_ranks_take_turns() {
    for (has_daemon, reason) in [(false, "No such file"), (true, "no GPU to serve")] {
        let machine = Machine::new(has_daemon);
        let mut command = machine.command("exit 5");
        command.env("AT_START", "echo no GPU to serve >&2; exit 1");
        let output = command.output().expect("doorbell was built");
        let (_, stderr) = texts(&output);
        assert_eq!(output.status.code(), Some(5), "{stderr}");
        assert!(
            stderr.lines().count() == 1 && stderr.contains("time-sliced") && stderr.contains(reason),
            "{stderr}"
        );
        let records = machine.records();
        assert_eq!(records.last().expect("the command's"), "command   4");
        assert_eq!(
            records.len(),
            1 + usize::from(has_daemon),
            "nothing to end: {records:?}"
        );
    }
}

#[test]
fn the_daemon_of_the_environment_is_used() {
    let machine = Machine::new(true);
    let theirs = machine.folder.path().join("theirs");
    fs::create_dir(&theirs).expect("a folder of this test");
    fs::write(theirs.join("control"), "").expect("a file");
    let mut command = machine.command("exit 0");
    let output = command.env("CUDA_MPS_PIPE_DIRECTORY", &theirs).output();
    let (_, stderr) = texts(&output.expect("doorbell was built"));
    assert!(
        stderr.lines().count() == 1 && stderr.contains("the MPS daemon of CUDA_MPS_PIPE_DIRECTORY"),
        "{stderr}"
    );
    assert_eq!(machine.records(), [format!("command {}  4", theirs.display())]);
}
