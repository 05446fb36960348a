//! The connection manager where nothing leads to the peer: on most machines there is no library, or no device. What is there is proved in the guest.

use std::time::Duration;

use doorbell_verbs::cm::ConnectionManager;

#[test]
fn what_is_missing_is_an_error_that_says_what_to_do() {
    // RFC 5737: nobody has this address.
    let nobody = "192.0.2.1:7471".parse().unwrap();
    let result = ConnectionManager::system().and_then(|manager| manager.resolve(nobody, Duration::from_millis(100)));
    let text = result.expect_err("nobody is there").to_string();
    let advised = [
        "install rdma-core's",
        "modprobe rdma_ucm",
        "ip route get",
        "rdma link",
        "is the peer running",
    ];
    assert!(advised.iter().any(|advice| text.contains(advice)), "{text}");
}
