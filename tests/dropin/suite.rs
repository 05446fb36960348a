//! The conformance suite as a client of the drop-in library.

use std::process::Command;

use crate::{address, doorbell, texts};

#[test]
fn the_device_conforms_behind_the_systems_librarys_name() {
    let waivers = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/waivers/soft.txt");
    let suite = [
        env!("CARGO_BIN_EXE_conformance"),
        "--device",
        "soft0",
        "--system",
        "--waivers",
        waivers,
    ];
    let output = doorbell(&[&["run", "--"], &suite[..]].concat())
        .output()
        .expect("doorbell was built");
    let (stdout, stderr) = texts(&output);
    assert!(output.status.success(), "{}\n{stdout}{stderr}", output.status);
    // Without the drop-in library the same program finds no such device.
    let alone = Command::new(suite[0])
        .args(&suite[1..])
        .args(["--only", "matrix"])
        .output();
    assert!(!alone.expect("it was built with this test").status.success());
}

/// Both ends of connections by the safe API, also rejected, refused and unanswered.
#[test]
fn the_safe_api_connects_behind_the_systems_librarys_name() {
    let here = address();
    let mut command = doorbell(&["run", "--", env!("CARGO_BIN_EXE_cm"), &here]);
    let output = command
        .env("DOORBELL_SOFT_ADDR", &here)
        .output()
        .expect("doorbell was built");
    let (stdout, stderr) = texts(&output);
    assert!(output.status.success(), "{}\n{stdout}{stderr}", output.status);
    assert!(stdout.contains("data both ways"), "{stdout}");
}
