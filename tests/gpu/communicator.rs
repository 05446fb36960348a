//! Communicators of GPUs between processes, on the stand-in: all that `gpu-communicator` does on GPUs.

use std::process::Command;

use doorbell_cuda_standin::{Manner, environment};

/// Runs the program; what it said is shown when it failed.
fn run(arguments: &[&str]) {
    let output = Command::new(env!("CARGO_BIN_EXE_gpu-communicator"))
        .args(arguments)
        .envs(environment(Manner::Prompt, 2))
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(output.status.success(), "{}\n{}", said[0], said[1]);
    assert!(said[0].contains("PASS") && !said[0].contains("FAIL"), "{}", said[0]);
}

#[test]
fn collectives_on_memory_that_others_have_allocated() {
    run(&["check", "--quick", "--ranks", "3"]);
}

#[test]
fn communicators_leave_nothing() {
    run(&["leaks", "--quick", "--ranks", "2"]);
}

#[test]
fn who_is_killed_leaves_the_others_well() {
    run(&["kill", "--quick", "--ranks", "3"]);
}
