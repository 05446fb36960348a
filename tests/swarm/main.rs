//! Many processes on one address (`tests/src/bin/swarm`): few of them and little traffic here; the whole is a step of CI of its own.

use std::process::Command;

/// Members, bytes each, milliseconds between two deaths, deaths at least; an address of the run's own.
fn swarm(plan: &str, address: &str, environment: &[(&str, &str)]) {
    let output = Command::new(env!("CARGO_BIN_EXE_swarm"))
        .args(plan.split(' '))
        .args(["--address", address])
        .envs(environment.iter().copied())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", output.status);
}

const FEW: &str = "--processes 6 --bytes 8000000 --kill-every 300 --kills 2 --timeout 15";

#[test]
fn survivors_are_right_and_notice_who_died() {
    swarm(FEW, "127.0.9.1", &[]);
}

#[test]
fn so_they_do_over_udp() {
    swarm(FEW, "127.0.9.2", &[("DOORBELL_LINK", "udp")]);
}

#[test]
fn an_option_that_makes_no_sense_is_refused() {
    let output = Command::new(env!("CARGO_BIN_EXE_swarm"))
        .args(["--processes", "1"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
}
