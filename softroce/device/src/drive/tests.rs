//! When timers run: the link is simulated, and the engine's recomputed deadline shows a run.

use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use doorbell_roce_proto::cm::CmConfig;
use doorbell_roce_proto::{Endpoint, Mtu};

use super::*;
use crate::cm::Connections;
use crate::host::{Flags, Host};
use crate::links::udp::Link;

struct Waiting(Arc<AtomicBool>);

impl Receive for Waiting {
    fn receive(&mut self, batch: &mut RxBatch) -> io::Result<usize> {
        batch.clear();
        Ok(usize::from(self.0.load(Ordering::Relaxed)))
    }
}

struct Counting(Arc<AtomicUsize>);

impl Transmit for Counting {
    fn transmit(&mut self, batch: &mut TxBatch, _now: Instant) -> io::Result<()> {
        batch.clear();
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

fn connections() -> Connections {
    Connections::new(CmConfig {
        address: Ipv4Addr::LOCALHOST.into(),
        guid: 1,
        mtu: Mtu::Mtu1024,
        slot: 0,
        key: 1.into(),
    })
}

struct Harness {
    shared: Shared,
    has_packets: Arc<AtomicBool>,
    transmits: Arc<AtomicUsize>,
}

impl Harness {
    fn new() -> Self {
        let address = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let (host, socket) = Host::join(address, Flags::default(), Duration::ZERO).unwrap();
        let link = Link::from_socket(socket).unwrap();
        let has_packets = Arc::new(AtomicBool::new(false));
        let transmits = Arc::new(AtomicUsize::new(0));
        let shared = Shared::new(
            link.local,
            Box::new(Waiting(Arc::clone(&has_packets))),
            Box::new(Counting(Arc::clone(&transmits))),
            None,
            Wakeup::new().unwrap(),
            Core::new(Endpoint::new(1), connections(), Arc::new(host), address),
        );
        Self {
            shared,
            has_packets,
            transmits,
        }
    }

    fn timers_run(&self) -> bool {
        self.shared.wakeup.set_deadline(Deadline::Engine, 0);
        self.shared.drive();
        self.shared.wakeup.deadline(Deadline::Engine) == NEVER
    }
}

#[test]
fn timers_wait_for_what_has_arrived() {
    let harness = Harness::new();
    assert!(harness.timers_run(), "the socket is empty");
    harness.has_packets.store(true, Ordering::Relaxed);
    assert!(!harness.timers_run(), "there may be more");
    harness.has_packets.store(false, Ordering::Relaxed);
    let receiving = harness.shared.rx.lock();
    assert!(!harness.timers_run(), "another thread has datagrams in hand");
    drop(receiving);
    assert!(harness.timers_run());
}

#[test]
fn timers_do_not_starve_under_an_endless_stream() {
    let harness = Harness::new();
    harness.has_packets.store(true, Ordering::Relaxed);
    for round in 0..3 {
        let ran = (1..=BACKLOG).find(|_| harness.timers_run());
        assert_eq!(ran, Some(BACKLOG), "round {round}");
    }
    harness.shared.wakeup.set_deadline(Deadline::Engine, NEVER);
    harness.shared.drive();
    assert!(!harness.timers_run(), "counted from when they are due");
}

#[test]
fn a_deadline_of_the_link_does_not_wait_for_the_receiver() {
    let harness = Harness::new();
    let receiving = harness.shared.rx.lock();
    harness.shared.wakeup.set_deadline(Deadline::Link, 0);
    assert!(harness.shared.drive());
    assert_eq!(harness.transmits.load(Ordering::Relaxed), 1);
    drop(receiving);
    harness.shared.drive();
    assert_eq!(harness.transmits.load(Ordering::Relaxed), 1, "due once");
}

/// The credit wake-up may be consumed before the ring is known to be full, and no other follows.
#[test]
fn a_sleeping_thread_has_polled_for_credits() {
    let harness = Harness::new();
    harness.shared.wakeup.set(Reasons::RING_BLOCKED, true);
    assert!(harness.shared.prepare_shm_sleep(), "no record");
    assert!(
        !harness.shared.wakeup.has(Reasons::RING_BLOCKED),
        "the ring has space, and the thread may sleep"
    );
}
