//! A process without free descriptors: its error is that, and no other.

use std::env;
use std::process::Command;

use doorbell_softroce_ibverbs::api;
use doorbell_tests::soft;
use doorbell_verbs::{Endpoint, Library};
use nix::sys::resource::{Resource, setrlimit};

/// The peer's process and endpoint, for the process that a test starts.
const PEER: &str = "TEST_PEER";

#[test]
fn a_connection_without_descriptors_fails_with_emfile() {
    let device = soft::open(0);
    let cq = device.completion_queue(256).unwrap();
    let qp = device.protection_domain().unwrap().queue_pair(&cq).rc().unwrap();
    let endpoint = qp.endpoint().to_bytes().map(|byte| byte.to_string()).join(" ");
    let output = Command::new(env::current_exe().unwrap())
        .args([
            "--exact",
            "descriptors::connects_without_descriptors",
            "--ignored",
            "--nocapture",
        ])
        .env(PEER, format!("{} {endpoint}", std::process::id()))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let error = |of: &str| {
        said.lines()
            .find(|line| line.contains(of))
            .unwrap_or_else(|| panic!("{said}"))
    };
    for call in ["ibv_modify_qp", "ibv_open_device"] {
        let error = error(call);
        let expected = "Too many open files (os error 24)";
        let advice = "raise the limit on descriptors (`ulimit -n`)";
        assert!(error.contains(expected) && error.ends_with(advice), "{error}");
    }
}

#[test]
#[ignore = "started by a_connection_without_descriptors_fails_with_emfile"]
fn connects_without_descriptors() {
    let peer = env::var(PEER).unwrap();
    let (process, endpoint) = peer.split_once(' ').unwrap();
    let bytes: Vec<u8> = endpoint.split(' ').map(|byte| byte.parse().unwrap()).collect();
    let endpoint = Endpoint::from_bytes(bytes[..].try_into().unwrap()).unwrap();
    let device = soft::open_of(process.parse().unwrap(), 0);
    let cq = device.completion_queue(256).unwrap();
    let qp = device.protection_domain().unwrap().queue_pair(&cq).rc().unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, 3, 3).unwrap();
    println!("\n{}", qp.connect(&endpoint).unwrap_err());
    println!("{}", Library::new(api()).open("soft1").unwrap_err());
}
