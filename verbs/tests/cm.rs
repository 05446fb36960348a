//! The connection manager without a route to the peer; connections are tested in the guest.

use std::time::Duration;

use doorbell_verbs::cm::ConnectionManager;

#[test]
fn what_is_missing_is_an_error_that_says_what_to_do() {
    // RFC 5737: a documentation address, which no host has.
    let unreachable = "192.0.2.1:7471".parse().unwrap();
    let result =
        ConnectionManager::system().and_then(|manager| manager.resolve(unreachable, Duration::from_millis(100)));
    let text = result.expect_err("no host has this address").to_string();
    let advised = [
        "install rdma-core's",
        "modprobe rdma_ucm",
        "ip route get",
        "rdma link",
        "is the peer running",
    ];
    assert!(advised.iter().any(|advice| text.contains(advice)), "{text}");
}
