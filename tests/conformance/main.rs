//! The conformance suite ([`doorbell_tests::conformance`]) on the soft device. And two processes, each with a soft device, over real sockets on loopback: every
//! operation from either end, every byte verified ([`doorbell_tests::interop`]), on a good link and on one with faults.

use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};

/// Starts one end: `--listen` or `--connect` on `tcp`.
fn end(address: &str, udp: u16, role: &str, tcp: u16, mtu: u32, faults: Option<&str>) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_interop"));
    command
        .args([
            "--device",
            "soft0",
            "--address",
            address,
            "--udp-port",
            &udp.to_string(),
        ])
        .args([role, &format!("127.0.0.1:{tcp}"), "--mtu", &mtu.to_string()])
        // 67 ms: what is lost is soon sent again, and a busy machine does not look like a dead peer. (With 34 ms one run in ten did, at four processes to a core.)
        .args(["--timeout", "14"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    clean(&mut command).envs(faults.map(|faults| ("DOORBELL_FAULTS", faults)));
    command.spawn().expect("the program was built with this test")
}

/// Without what the developer's own environment asks of soft devices, which is not meant here.
fn clean(command: &mut Command) -> &mut Command {
    for name in [
        "DOORBELL_SOFT_ADDR",
        "DOORBELL_SOFT_PORT",
        "DOORBELL_FAULTS",
        "DOORBELL_PCAP",
        "DOORBELL_LINK",
    ] {
        command.env_remove(name);
    }
    command
}

/// Runs both ends to success.
fn converse(addresses: [&str; 2], mtu: u32, faults: Option<&str>) {
    // A free TCP port, and the same number for UDP: each test has addresses or ports of its own.
    let tcp = TcpListener::bind("127.0.0.1:0")
        .and_then(|socket| socket.local_addr())
        .expect("loopback")
        .port();
    let server = end(addresses[0], tcp, "--listen", tcp, mtu, faults);
    let client = end(addresses[1], tcp, "--connect", tcp, mtu, faults);
    for (who, child) in [("client", client), ("server", server)] {
        let Output { status, stdout, stderr } = child.wait_with_output().expect("it was started");
        let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
        assert!(status.success(), "{who} with {faults:?}: {status}\n{stdout}{stderr}");
        assert!(stdout.contains("verified"), "{who}: {stdout}");
    }
}

/// Two addresses of 127.0.0.0/8 that no other test of this process uses.
fn addresses() -> [String; 2] {
    static NEXT: AtomicU8 = AtomicU8::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    [1, 2].map(|host| format!("127.19.{n}.{host}"))
}

#[test]
fn every_operation_over_ipv4() {
    for mtu in [256, 1024, 4096] {
        let [a, b] = addresses();
        converse([&a, &b], mtu, None);
    }
}

#[test]
fn every_operation_with_every_fault() {
    let [a, b] = addresses();
    converse(
        [&a, &b],
        1024,
        Some("drop=0.05,duplicate=0.05,reorder=0.05,corrupt=0.05,seed=1"),
    );
}

/// The suite on the soft device. Its waiver file has nothing in it.
#[test]
fn the_soft_device_conforms() {
    let [address, _] = addresses();
    let waivers = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/waivers/soft.txt");
    let mut command = Command::new(env!("CARGO_BIN_EXE_conformance"));
    clean(&mut command).args(["--device", "soft0", "--address", &address, "--waivers", waivers]);
    let Output { status, stdout, stderr } = command.output().expect("the program was built with this test");
    let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{status}\n{stdout}{stderr}");
}
