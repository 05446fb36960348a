//! The soft device with memory of GPUs, on the stand-in: all that `gpu-verbs check` does on a GPU, in one process and in two, by lanes and over UDP.

use std::process::Command;

use doorbell_cuda_standin::{Manner, environment};

/// Runs the program; what it said is shown when it failed.
fn run(manner: Manner, link: &str, arguments: &[&str]) {
    run_with(manner, link, arguments, "newer");
}

/// The same, with memory of this kind.
fn run_with(manner: Manner, link: &str, arguments: &[&str], memory: &str) {
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
fn every_mix_on_lanes_in_one_process() {
    run(Manner::Prompt, "local", &["check", "--quick", "--one-process"]);
}

#[test]
fn every_mix_on_lanes_between_two() {
    run(Manner::Prompt, "local", &["check", "--quick", "--two-processes"]);
}

/// Copies that are done as late as may be: whatever does not wait for them is found.
#[test]
fn every_mix_on_lanes_as_late_as_may_be() {
    run(Manner::Lazy, "local", &["check", "--quick"]);
}

/// Memory that `cuMemAlloc` has made goes to the other process by the older kind of handle.
#[test]
fn every_mix_of_the_older_kind_between_two() {
    run_with(
        Manner::Prompt,
        "local",
        &["check", "--quick", "--two-processes"],
        "older",
    );
}

#[test]
fn every_mix_over_udp() {
    run(Manner::Prompt, "udp", &["check", "--quick"]);
}

/// The same, with copies that are done as late as may be.
#[test]
fn every_mix_over_udp_as_late_as_may_be() {
    run(Manner::Lazy, "udp", &["check", "--quick"]);
}

#[test]
fn it_measures() {
    run(Manner::Prompt, "local", &["bench", "--quick"]);
}
