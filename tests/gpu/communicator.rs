//! Communicators of GPUs on the stand-in: all of `gpu-communicator`, between processes, and
//! `gpu-moe`.

use std::process::Command;

use doorbell_cuda_standin::{ExecutionMode, environment};

fn run(arguments: &[&str]) {
    run_program(env!("CARGO_BIN_EXE_gpu-communicator"), arguments);
}

fn run_program(program: &str, arguments: &[&str]) {
    let output = Command::new(program)
        .args(arguments)
        .envs(environment(ExecutionMode::Prompt, 3))
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(output.status.success(), "{}\n{}", said[0], said[1]);
    assert!(said[0].contains("PASS") && !said[0].contains("FAIL"), "{}", said[0]);
}

#[test]
fn collectives_on_foreign_memory() {
    run(&["check", "--quick", "--ranks", "3"]);
}

#[test]
fn communicators_do_not_leak() {
    run(&["leaks", "--quick", "--ranks", "2"]);
}

#[test]
fn killed_rank_leaves_the_others_usable() {
    run(&["kill", "--quick", "--ranks", "3"]);
}

#[test]
fn expert_parallelism_is_checked_and_measured() {
    let shape = ["--quick", "--ranks", "3", "--experts", "12", "--blocks", "2"];
    run_program(env!("CARGO_BIN_EXE_gpu-moe"), &shape);
}
