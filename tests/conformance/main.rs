//! The conformance suite ([`doorbell_tests::conformance`]) on the soft device, over each link; and
//! interop of two processes ([`doorbell_tests::interop`]), with faults and each copy mode.

use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};

fn end(address: &str, udp: u16, role: &str, tcp: u16, mtu: u32, environment: &[(&str, &str)]) -> Child {
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
        // 67 ms: losses are retransmitted soon, and a busy machine does not appear as a dead peer.
        // (With 34 ms one run in ten did, at four processes to a core.)
        .args(["--timeout", "14"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    clear_settings(&mut command).envs(environment.iter().copied());
    command.spawn().expect("the program was built with this test")
}

fn clear_settings(command: &mut Command) -> &mut Command {
    for name in [
        "DOORBELL_SOFT_ADDR",
        "DOORBELL_SOFT_PORT",
        "DOORBELL_FAULTS",
        "DOORBELL_PCAP",
        "DOORBELL_LINK",
        "DOORBELL_COPY",
    ] {
        command.env_remove(name);
    }
    command
}

fn interop(addresses: [&str; 2], mtu: u32, environment: &[(&str, &str)]) {
    // A free TCP port, and the same number for UDP: each test has its own addresses or ports.
    let tcp = TcpListener::bind("127.0.0.1:0")
        .and_then(|socket| socket.local_addr())
        .expect("loopback")
        .port();
    let server = end(addresses[0], tcp, "--listen", tcp, mtu, environment);
    let client = end(addresses[1], tcp, "--connect", tcp, mtu, environment);
    let ends = [("client", client), ("server", server)].map(|(who, child)| {
        let Output { status, stdout, stderr } = child.wait_with_output().expect("it was started");
        let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
        (
            status.success() && stdout.contains("verified"),
            format!("{who}: {status}\n{stdout}{stderr}"),
        )
    });
    // The other end's output mostly has the reason.
    let [(client, client_output), (server, server_output)] = ends;
    assert!(client && server, "with {environment:?}\n{client_output}{server_output}");
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
        interop([&a, &b], mtu, &[]);
    }
}

#[test]
fn every_operation_with_every_fault() {
    let [a, b] = addresses();
    interop(
        [&a, &b],
        1024,
        &[(
            "DOORBELL_FAULTS",
            "drop=0.05,duplicate=0.05,reorder=0.05,corrupt=0.05,seed=1",
        )],
    );
}

/// Two processes that share an address, without UDP.
#[test]
fn every_operation_on_one_host() {
    let local = ("DOORBELL_LINK", "local");
    for environment in [
        &[local][..],
        &[local, ("DOORBELL_COPY", "shared")],
        &[local, ("DOORBELL_COPY", "ring")],
    ] {
        let [address, _] = addresses();
        interop([&address, &address], 1024, environment);
    }
}

/// Two processes that share an address, with UDP between them.
#[test]
fn every_operation_over_udp_on_one_address() {
    let [address, _] = addresses();
    interop([&address, &address], 4096, &[("DOORBELL_LINK", "udp")]);
}

fn conforms(environment: &[(&str, &str)]) {
    let [address, _] = addresses();
    let waivers = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/waivers/soft.txt");
    let mut command = Command::new(env!("CARGO_BIN_EXE_conformance"));
    clear_settings(&mut command).envs(environment.iter().copied()).args([
        "--device",
        "soft0",
        "--address",
        &address,
        "--waivers",
        waivers,
    ]);
    let Output { status, stdout, stderr } = command.output().expect("the program was built with this test");
    let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{environment:?}: {status}\n{stdout}{stderr}");
}

#[test]
fn the_soft_device_conforms_without_udp() {
    conforms(&[]);
}

#[test]
fn the_soft_device_conforms_by_copies_in_a_shm_ring() {
    conforms(&[("DOORBELL_COPY", "ring")]);
}

#[test]
fn the_soft_device_conforms_over_udp() {
    conforms(&[("DOORBELL_LINK", "udp")]);
}
