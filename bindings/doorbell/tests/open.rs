//! Devices by one string: their names and options, and the message for each that is invalid.

#![cfg(feature = "softroce")]

use std::process::Command;

use doorbell::prelude::*;

fn refusal(device: &str) -> String {
    let Err(error) = doorbell::open(device) else {
        panic!("{device} was opened");
    };
    let text = error.to_string();
    assert!(!text.contains('\n'), "{text}");
    text
}

/// The GID of the device's address, which is the last of its table.
fn gid(device: &Context) -> String {
    device.default_gid(1).unwrap().gid.to_string()
}

#[test]
fn each_soft_is_a_device_of_its_own() {
    let devices: Vec<_> = ["soft", "soft?", "soft?drop=0.01&seed=7"]
        .map(|device| doorbell::open(device).unwrap())
        .into();
    let mut gids: Vec<_> = devices.iter().map(gid).collect();
    gids.sort();
    gids.dedup();
    assert_eq!(gids.len(), 3);
    // Those of a fixed address are one, as programs on one adapter are.
    let shared = ["soft?address=127.77.0.1", "soft?address=127.77.0.1"].map(|device| doorbell::open(device).unwrap());
    assert_eq!(shared.each_ref().map(gid), ["::ffff:127.77.0.1", "::ffff:127.77.0.1"]);
}

#[test]
fn a_capture_is_an_option() {
    let file = std::env::temp_dir().join(format!("doorbell-open-{}.pcap", std::process::id()));
    let device = doorbell::open(&format!("soft?pcap={}", file.display())).unwrap();
    assert!(file.exists());
    drop(device);
    std::fs::remove_file(file).unwrap();
}

#[test]
fn what_is_wrong_is_one_line() {
    let names =
        "drop, duplicate, reorder, corrupt, mark, delay, rate, down and seed; other options are address and pcap";
    for (device, message) in [
        (
            "soft?dorp=0.01",
            format!("no fault is called 'dorp': there are {names}"),
        ),
        ("soft?drop=2", "drop=2: expected a fraction from 0 to 1".to_owned()),
        ("soft?drop", "'drop' is not NAME=VALUE, such as drop=0.05".to_owned()),
        ("soft?drop=0.1&drop=0.2", "'drop' is given twice".to_owned()),
        (
            "soft?address=localhost",
            "address=localhost: expected an address such as 127.0.0.2".to_owned(),
        ),
        (
            "soft?address=127.0.0.2&address=127.0.0.3",
            "'address' is given twice".to_owned(),
        ),
        ("soft?pcap=", "pcap=: expected a file".to_owned()),
        (
            "soft0?drop=0.1",
            "soft0 is configured by the environment or the program; options are for a device of its own, soft?drop=0.1"
                .to_owned(),
        ),
        (
            "mlx5_0?drop=0.1",
            "options are for the userspace device, soft, and mlx5_0 is another".to_owned(),
        ),
    ] {
        assert_eq!(refusal(device), format!("device {device:?}: {message}"));
    }
    let none = refusal("soft7");
    assert!(none.starts_with("no RDMA device \"soft7\""), "{none}");
}

/// The variable is read once for each call; so this runs itself with it.
#[test]
fn the_environment_names_the_device() {
    const INSIDE: &str = "DOORBELL_TEST_OPEN";
    if let Ok(expected) = std::env::var(INSIDE) {
        let opened = doorbell::open_from_env();
        assert_eq!(
            opened.map(|device| gid(&device)).map_err(|error| error.to_string()),
            Ok(expected)
        );
        return;
    }
    for (device, address) in [
        ("", "127.77.1.1"),
        ("soft1", "127.77.1.2"),
        ("soft?address=127.77.1.3", "127.77.1.3"),
    ] {
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "the_environment_names_the_device"])
            .env("DOORBELL_DEVICE", device)
            .env("DOORBELL_SOFT_ADDR", "127.77.1.1,127.77.1.2")
            .env(INSIDE, format!("::ffff:{address}"))
            .status();
        assert!(status.unwrap().success(), "{device}");
    }
}
