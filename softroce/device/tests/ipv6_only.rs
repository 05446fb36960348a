//! The default device in a network namespace without IPv4.

#[path = "common/namespace.rs"]
mod namespace;

use std::net::{IpAddr, Ipv6Addr};

use doorbell_softroce::{Device, DeviceConfig};

#[test]
fn the_default_address_is_that_of_ipv6() {
    namespace::run_inside("default_address");
}

#[test]
#[ignore = "started by the_default_address_is_that_of_ipv6"]
fn default_address() {
    if namespace::configure(&["link set lo up", "address delete 127.0.0.1/8 dev lo"]) {
        let device = Device::open(&DeviceConfig::new("soft0")).unwrap();
        assert_eq!(device.info().address.ip(), IpAddr::V6(Ipv6Addr::LOCALHOST));
    }
}
