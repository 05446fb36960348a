//! The lost wake-up test (`tests/src/bin/sleepers`); its timeout exceeds any scheduling delay.

use std::process::Command;

/// Conversations: with one the device sleeps between most messages, with eight rarely.
const CONVERSATIONS: [&str; 2] = ["1", "8"];

fn sleepers(link: &str, address: &str) {
    for conversations in CONVERSATIONS {
        let output = Command::new(env!("CARGO_BIN_EXE_sleepers"))
            .args(["--seconds", "2", "--timeout", "21", "--address", address])
            .args(["--conversations", conversations])
            .env("DOORBELL_LINK", link)
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{conversations} over {link}: {stderr}");
    }
}

#[test]
fn no_lost_wake_up_over_shm() {
    sleepers("local", "127.0.33.2");
}

#[test]
fn no_lost_wake_up_over_udp() {
    sleepers("udp", "127.0.33.3");
}

#[test]
fn an_invalid_option_is_refused() {
    let output = Command::new(env!("CARGO_BIN_EXE_sleepers"))
        .args(["--conversations", "0"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
}
