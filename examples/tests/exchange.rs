//! The example of two ends that connect over TCP, on soft devices.

#![forbid(unsafe_code)]

use std::process::Command;

#[test]
fn a_message_is_written_into_the_peers_memory() {
    let output = Command::new(env!("CARGO_BIN_EXE_04_exchange"))
        .env_remove("DOORBELL_SOFT_ADDR")
        .env_remove("DOORBELL_FAULTS")
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert_eq!(output.stdout, b"Written into your memory by RDMA WRITE.\n");
}

#[test]
fn bad_usage_has_its_own_exit_code() {
    let output = Command::new(env!("CARGO_BIN_EXE_04_exchange"))
        .arg("soft0")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
}
