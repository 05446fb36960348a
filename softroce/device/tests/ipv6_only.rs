//! The default device in a network namespace without IPv4: this test's program again, there.

use std::env;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::os::unix::process::CommandExt;
use std::process::Command;

use doorbell_softroce::{Device, DeviceConfig};
use nix::sched::{CloneFlags, unshare};

#[test]
fn the_default_address_is_that_of_ipv6() {
    let mut inside = Command::new(env::current_exe().unwrap());
    inside.args(["--exact", "default_address", "--ignored", "--nocapture"]);
    // SAFETY: unshare(2) is async-signal-safe.
    unsafe { inside.pre_exec(|| unshare(CloneFlags::CLONE_NEWNET).map_err(io::Error::from)) };
    match inside.output() {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success(), "{said}");
        }
        Err(error) => println!("skipped: no network namespace here: {error}"),
    }
}

#[test]
#[ignore = "started by the_default_address_is_that_of_ipv6"]
fn default_address() {
    for arguments in ["link set lo up", "address delete 127.0.0.1/8 dev lo"] {
        match Command::new("ip").args(arguments.split(' ')).status() {
            Ok(status) => assert!(status.success(), "ip {arguments}"),
            Err(error) => return println!("skipped: ip(8): {error}"),
        }
    }
    let device = Device::open(&DeviceConfig::new("soft0")).unwrap();
    assert_eq!(device.info().address.ip(), IpAddr::V6(Ipv6Addr::LOCALHOST));
}
