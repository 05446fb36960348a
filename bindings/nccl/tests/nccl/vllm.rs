//! vLLM's communicator, unmodified, whose ranks are processes of Python.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use crate::clients::{LIMIT, Process, variables};
use crate::library;

const RANKS: usize = 3;

/// Where `cargo xtask ci` puts vLLM's files, below the target folder, and last the note of them.
fn wrapper() -> Option<PathBuf> {
    let test = std::env::current_exe().expect("the path of this program");
    let folder = test.ancestors().nth(3)?.join("pip/vllm");
    folder.join("doorbell-wheels.txt").is_file().then_some(folder)
}

/// Whether Python is as new as vLLM requires.
fn has_python() -> bool {
    let mut python = Command::new("python3");
    python.args(["-c", "import sys; sys.exit(sys.version_info < (3, 10))"]);
    python.status().is_ok_and(|status| status.success())
}

#[test]
fn vllms_communicator_calls_every_function_of_its_wrapper() {
    let Some(wrapper) = wrapper().filter(|_| has_python()) else {
        let missing = "vLLM's files, which cargo xtask ci --only test fetches, or Python 3.10";
        assert!(std::env::var("CI").as_deref() != Ok("true"), "missing: {missing}");
        eprintln!("skipped: missing: {missing}");
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vllm/ranks.py");
    let start = |rank: usize| {
        let mut python = Command::new("python3");
        python
            .arg(&script)
            .arg(&wrapper)
            .args([rank, RANKS].map(|number| number.to_string()));
        python
            .arg(folder.path())
            .envs(variables("vllm"))
            .env("VLLM_NCCL_SO_PATH", library())
            .env("PYTHONDONTWRITEBYTECODE", "1");
        Process::spawn(&mut python)
    };
    let processes: Vec<Process> = (0..RANKS).map(start).collect();
    let until = Instant::now() + LIMIT;
    let ends: Vec<_> = processes.into_iter().map(|process| process.end(until)).collect();
    for (rank, (said, status)) in ends.iter().enumerate() {
        assert!(status.success() && said == "PASS\n", "rank {rank}: {status}: {said}");
    }
}
