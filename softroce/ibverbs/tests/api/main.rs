//! The soft devices through the C calls of libibverbs: several devices of one process, over real
//! sockets.

pub(crate) mod common;
mod completion;
mod drain;
mod errors;
mod extended_cq;
mod faults;
mod memory;
mod objects;
mod operations;
mod passive;
mod shared;
mod unreliable;
mod windows;
mod wr;

use common::*;
use doorbell_softroce_ibverbs::DeviceConfig;

/// The devices of this test program. Whichever test is first configures them for all.
pub(crate) fn setup() {
    devices(|| {
        // A retry fails where either of two packets is lost or spoilt, one time in nine; all seven
        // of one in a run, once in so many runs that nobody will see it.
        let faulty = |name: &str, last: u8, seed: u64| {
            let mut config = device(name, last);
            config.faults = format!("drop=0.03,duplicate=0.03,reorder=0.03,corrupt=0.03,seed={seed}")
                .parse()
                .unwrap();
            config
        };
        let mut captured = device("captured", 5);
        captured.pcap = Some(capture_file());
        let mut v6 = DeviceConfig::new("six");
        v6.address = Some("::1".parse().unwrap());
        v6.port = own_port();
        vec![
            device("soft0", 1),
            // On the same address two devices are two members of its group, with lanes between
            // them.
            device("soft1", if over_udp() { 2 } else { 1 }),
            faulty("faulty0", 3, 1),
            faulty("faulty1", 4, 2),
            captured,
            device("far", 2),
            v6,
            device("taken", 6),
            // Shared, as two processes do.
            device("holder", 7),
            device("guest", 7),
            device("leaving", 8),
            device("staying", 8),
        ]
    });
}
