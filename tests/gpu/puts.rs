//! Puts by kernels and in stream order, on the stand-in: all that `gpu-puts` does on GPUs, between
//! two processes, with the heap in host memory and in GPU memory.

use std::process::Command;

use doorbell_cuda_standin::{ExecutionMode, environment};

fn run(link: &str, arguments: &[&str]) {
    let output = Command::new(env!("CARGO_BIN_EXE_gpu-puts"))
        .args(arguments)
        .envs(environment(ExecutionMode::Prompt, 2))
        // A call of the data path that waits for a kernel deadlocks, as the kernel waits for its
        // put.
        .env("DOORBELL_STANDIN", "prompt,devices=2,implicit")
        .env("DOORBELL_LINK", link)
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(output.status.success(), "{link}: {}\n{}", said[0], said[1]);
    assert!(said[0].contains("PASS") && !said[0].contains("FAIL"), "{}", said[0]);
}

#[test]
fn puts_between_two_processes_on_shm() {
    run("local", &["check", "--quick"]);
}

#[test]
fn puts_between_two_processes_over_udp() {
    run("udp", &["check", "--quick"]);
}

#[test]
fn benchmark_runs() {
    run("local", &["bench", "--quick"]);
}
