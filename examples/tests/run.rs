//! Runs the examples as their users do: with both ends in one process, on soft devices.

#![forbid(unsafe_code)]

use std::process::Command;

fn run(program: &str) -> String {
    let mut command = Command::new(program);
    // What the developer's own environment asks of soft devices is not meant here.
    for name in ["DOORBELL_FAULTS", "DOORBELL_PCAP", "DOORBELL_LINK"] {
        command.env_remove(name);
    }
    let output = command.output().expect("the example was built with this test");
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{stdout}{stderr}", output.status);
    stdout
}

#[test]
fn the_sleeping_receiver_wakes_for_every_message_and_event() {
    let stdout = run(env!("CARGO_BIN_EXE_02_sleeping_receiver"));
    let lines: Vec<_> = stdout.lines().collect();
    assert_eq!(lines.len(), 6, "{stdout}");
    assert_eq!(lines[4], "message 4: 64 bytes");
    assert_eq!(lines[5], "a write by a key of its own making: refused");
}

#[test]
fn datagrams_are_answered_without_connecting() {
    let stdout = run(env!("CARGO_BIN_EXE_05_datagrams"));
    let lines: Vec<_> = stdout.lines().collect();
    assert_eq!(lines.len(), 4, "{stdout}");
    for (number, line) in lines[..3].iter().enumerate() {
        assert!(
            line.starts_with(&format!("client {number}: 20 answers from queue pair 0x")),
            "{stdout}"
        );
    }
    assert_eq!(lines[3], "the server knew none of them before they asked");
}

#[test]
fn tasks_serve_all_clients() {
    assert_eq!(run(env!("CARGO_BIN_EXE_03_tokio")), "8 clients, 50 answers each\n");
}
