//! The soft device with GPU memory, on the stand-in: all that `gpu-verbs check` does on a GPU, in
//! one process and in two, over the shm link and over UDP.

use std::process::Command;

use doorbell_cuda_standin::{ExecutionMode, environment};

fn run(manner: ExecutionMode, link: &str, arguments: &[&str]) {
    run_with(manner, link, arguments, "newer");
}

/// A call that waits for space in a stream holds the lock of its context: copies of memory that
/// other contexts can use are made in another (decision 087).
#[test]
fn copies_do_not_wait_for_a_launch_that_waits() {
    for link in ["local", "udp"] {
        let output = Command::new(env!("CARGO_BIN_EXE_gpu-verbs"))
            .args(["check", "--quick", "--only", "full"])
            .envs(environment(ExecutionMode::Prompt, 2))
            .env("DOORBELL_STANDIN", "prompt,devices=2,queue=64")
            .env("DOORBELL_GPU_CONTEXT", "separate")
            .env("DOORBELL_LINK", link)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(
            said.matches("PASS").count() == 2 && output.status.success(),
            "{link}: {said}"
        );
    }
}

fn run_with(manner: ExecutionMode, link: &str, arguments: &[&str], memory: &str) {
    let output = Command::new(env!("CARGO_BIN_EXE_gpu-verbs"))
        .env("GPU_VERBS_MEMORY", memory)
        .args(arguments)
        .envs(environment(manner, 2))
        .env("DOORBELL_LINK", link)
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(output.status.success(), "{manner:?}, {link}: {}\n{}", said[0], said[1]);
}

#[test]
fn every_mix_on_shm_in_one_process() {
    run(ExecutionMode::Prompt, "local", &["check", "--quick", "--one-process"]);
}

#[test]
fn every_mix_on_shm_between_two() {
    run(ExecutionMode::Prompt, "local", &["check", "--quick", "--two-processes"]);
}

/// With maximally late copies, so that missing waits are found.
#[test]
fn every_mix_on_shm_with_lazy_copies() {
    run(ExecutionMode::Lazy, "local", &["check", "--quick"]);
}

/// Memory from `cuMemAlloc` is shared with the other process by IPC handle.
#[test]
fn every_mix_of_ipc_memory_between_two() {
    run_with(
        ExecutionMode::Prompt,
        "local",
        &["check", "--quick", "--two-processes"],
        "older",
    );
}

#[test]
fn every_mix_over_udp() {
    run(ExecutionMode::Prompt, "udp", &["check", "--quick"]);
}

/// The same, with maximally late copies.
#[test]
fn every_mix_over_udp_with_lazy_copies() {
    run(ExecutionMode::Lazy, "udp", &["check", "--quick"]);
}

#[test]
fn benchmark_runs() {
    run(ExecutionMode::Prompt, "local", &["bench", "--quick"]);
}
