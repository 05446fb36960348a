//! libibverbs' C calls on several soft devices in one process, over real sockets.

pub(crate) mod common;
mod completion;
mod domains;
mod extended_cq;
mod faults;
mod gids;
mod import;
mod memory;
mod multicast;
mod objects;
mod on_demand;
mod operations;
mod outage;
mod passive;
mod shared;
mod unreliable;
mod windows;
mod wr;
mod xrc;

use common::*;
use doorbell_softroce_ibverbs::DeviceConfig;

/// The devices of this test program. The first test configures them for all.
pub(crate) fn setup() {
    devices(|| {
        // A retry fails if either packet is lost, one time in nine: practically never seven times.
        let faulty = |name: &str, last: u8, seed: u64| {
            let mut config = device(name, last);
            config.faults = format!("drop=0.03,duplicate=0.03,reorder=0.03,corrupt=0.03,seed={seed}")
                .parse()
                .unwrap();
            config
        };
        // Times count from the opening of the device.
        let down = |name: &str, last: u8, time: &str| {
            let mut config = device(name, last);
            config.faults = format!("down={time}").parse().unwrap();
            config
        };
        let mut captured = device("captured", 5);
        captured.pcap = Some(capture_file());
        let mut v6 = DeviceConfig::new("six");
        v6.address = Some("::1".parse().unwrap());
        v6.port = own_port();
        vec![
            device("soft0", 1),
            // Two devices at one address are of one process group, connected by a shm link.
            device("soft1", if over_udp() { 2 } else { 1 }),
            faulty("faulty0", 3, 1),
            faulty("faulty1", 4, 2),
            captured,
            device("far", 2),
            v6,
            device("taken", 6),
            // Shared, as by two processes.
            device("holder", 7),
            device("guest", 7),
            device("leaving", 8),
            device("staying", 8),
            down("cut", 9, "500ms"),
            down("flapping", 10, "500ms+1s"),
            device("uncut", 11),
        ]
    });
}
