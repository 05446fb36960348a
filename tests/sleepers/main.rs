//! Ends that sleep whenever they wait (`tests/src/bin/sleepers`), for a few seconds: is anybody never woken? The timeout is of seconds, of which no machine is as busy.

use std::process::Command;

/// With so many conversations the device sleeps between most messages, and seldom.
const FEW_AND_MANY: [&str; 2] = ["1", "8"];

fn sleepers(link: &str, address: &str) {
    for conversations in FEW_AND_MANY {
        let output = Command::new(env!("CARGO_BIN_EXE_sleepers"))
            .args(["--seconds", "2", "--timeout", "21", "--address", address])
            .args(["--conversations", conversations])
            .env("DOORBELL_LINK", link)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{conversations} over {link}: {said}");
    }
}

#[test]
fn nobody_sleeps_on_over_lanes() {
    sleepers("local", "127.0.33.2");
}

#[test]
fn nobody_sleeps_on_over_udp() {
    sleepers("udp", "127.0.33.3");
}

#[test]
fn an_option_that_makes_no_sense_is_refused() {
    let output = Command::new(env!("CARGO_BIN_EXE_sleepers"))
        .args(["--conversations", "0"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
}
