//! Many processes on one address (`tests/src/bin/swarm`), with few members and little traffic; the
//! full size is a CI step of its own.

use std::process::Command;

fn swarm(plan: &str, address: &str, environment: &[(&str, &str)]) {
    let output = Command::new(env!("CARGO_BIN_EXE_swarm"))
        .args(plan.split(' '))
        .args(["--address", address])
        .envs(environment.iter().copied())
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {stderr}", output.status);
}

const SMALL: &str = "--processes 6 --bytes 8000000 --kill-every 300 --kills 2 --timeout 15";

#[test]
fn survivors_verify_data_and_detect_deaths() {
    swarm(SMALL, "127.0.9.1", &[]);
}

#[test]
fn survivors_over_udp() {
    swarm(SMALL, "127.0.9.2", &[("DOORBELL_LINK", "udp")]);
}

#[test]
fn an_invalid_option_is_refused() {
    let output = Command::new(env!("CARGO_BIN_EXE_swarm"))
        .args(["--processes", "1"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
}
