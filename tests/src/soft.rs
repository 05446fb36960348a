//! Two soft devices in one process, for tests of the safe API.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Once;

use doorbell_softroce_ibverbs::{DeviceConfig, api, configure};
use doorbell_verbs::{Context, Library};

/// Opens device `soft0` or `soft1`, on an address of this process's own; panics when it cannot.
pub fn open(n: u8) -> Context {
    open_of(std::process::id(), n)
}

/// The same, on the address of another process: the same one for all calls of this process.
pub fn open_of(process: u32, n: u8) -> Context {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let [_, _, high, low] = process.to_be_bytes();
        let device = |n: u8| DeviceConfig {
            address: Some(IpAddr::V4(Ipv4Addr::new(127, 96 + high % 64, low, 1 + n))),
            ..DeviceConfig::new(format!("soft{n}"))
        };
        configure(vec![device(0), device(1)]).expect("nothing else configures devices");
    });
    Library::new(api())
        .open(&format!("soft{n}"))
        .expect("the address is free")
}
