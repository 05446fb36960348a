//! Congestion notification over real sockets: marks arrive, CNPs return, the sender slows down.

use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use doorbell_softroce::congestion::{Algorithm, CongestionConfig, DcqcnConfig};
use doorbell_softroce::links::udp::fault::FaultConfig;
use doorbell_softroce::{CopyMode, Device, DeviceConfig, LinkChoice};

use super::side::{Side, TEST_TIMEOUT, own_address};

const LEN: usize = 1 << 20;
const WRITES: u64 = 16;

/// Two devices of one address, of which the first marks what it sends.
fn devices(address: IpAddr, algorithm: Algorithm) -> [Arc<Device>; 2] {
    [1.0, 0.0].map(|mark| {
        let config = DeviceConfig {
            address: Some(address),
            // A port that no other test has: ::1 is everyone's.
            port: 20_000 + (std::process::id() % 40_000) as u16,
            link: LinkChoice::Udp,
            faults: FaultConfig {
                mark,
                ..FaultConfig::default()
            },
            congestion: CongestionConfig {
                algorithm,
                line_rate: 1_250_000_000,
                min_rate: 125_000_000,
                ..CongestionConfig::default()
            },
            ..DeviceConfig::new("soft0")
        };
        Device::open(&config).unwrap()
    })
}

/// Returns the devices after WRITEs from the first to the second.
fn write(address: IpAddr, algorithm: Algorithm) -> [Arc<Device>; 2] {
    let devices = devices(address, algorithm);
    let [from, to] = [0, 1].map(|at: usize| Side::new(&devices[at], LEN, CopyMode::Ring));
    from.connect(to.key(), 17);
    to.connect(from.key(), 17);
    from.memory.fill(0, LEN, 0x5a);
    for wr_id in 0..WRITES {
        from.write(wr_id, 0, LEN, to.key());
    }
    from.wait(WRITES as usize);
    assert!(to.memory.is_all(0, LEN, 0x5a));
    devices
}

#[test]
fn marks_return_as_cnps() {
    for address in [own_address(), IpAddr::V6(Ipv6Addr::LOCALHOST)] {
        let [sender, receiver] = write(address, Algorithm::Dcqcn(DcqcnConfig::default()));
        let notified = receiver.counters();
        assert!(notified.marked_packets > 0 && notified.cnps_sent > 0, "{notified:?}");
        // Some are on their way.
        let since = Instant::now();
        while sender.counters().cnps_handled == 0 {
            assert!(since.elapsed() < TEST_TIMEOUT, "{:?}", sender.counters());
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(sender.counters().icrc_errors, 0, "the ICRC leaves the ECN field out");
    }
}

#[test]
fn without_an_algorithm_nothing_is_marked() {
    let [sender, receiver] = write(own_address(), Algorithm::None);
    assert_eq!(receiver.counters().marked_packets, 0);
    assert_eq!(sender.counters().cnps_ignored, 0);
}
