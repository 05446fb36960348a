//! The conformance suite as a client of the drop-in library: what is true of the table in-process is true of the symbols.

use std::process::Command;

use crate::{doorbell, texts};

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
