//! The example of two ends that meet over TCP, on soft devices.

#![forbid(unsafe_code)]

use std::process::Command;

#[test]
fn a_letter_is_written_into_the_other_ends_memory() {
    let output = Command::new(env!("CARGO_BIN_EXE_04_exchange"))
        .env_remove("DOORBELL_SOFT_ADDR")
        .env_remove("DOORBELL_FAULTS")
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert_eq!(output.stdout, b"Written into your memory, and you were not asked.\n");
}

#[test]
fn bad_usage_is_told_apart() {
    let output = Command::new(env!("CARGO_BIN_EXE_04_exchange"))
        .arg("soft0")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
}
