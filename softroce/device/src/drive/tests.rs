//! When timers run. The link is simulated; a run shows in the engine's deadline, which it
//! recomputes.

use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use doorbell_roce_proto::cm::CmConfig;
use doorbell_roce_proto::{Endpoint, Mtu};

use super::*;
use crate::cm::Connections;
use crate::host::{Flags, Host};
use crate::link::Link;

/// A socket with or without queued packets.
struct Waiting(Arc<AtomicBool>);

impl Receive for Waiting {
    fn receive(&mut self, batch: &mut RxBatch) -> io::Result<usize> {
        batch.clear();
        Ok(usize::from(self.0.load(Ordering::Relaxed)))
    }
}

/// A link that counts its calls.
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
        seed: 1,
    })
}

struct Rig {
    shared: Shared,
    something_waits: Arc<AtomicBool>,
    transmits: Arc<AtomicUsize>,
}

impl Rig {
    fn new() -> Self {
        let address = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let (host, socket) = Host::join(address, Flags::default(), Duration::ZERO).unwrap();
        let link = Link::over(socket).unwrap();
        let something_waits = Arc::new(AtomicBool::new(false));
        let transmits = Arc::new(AtomicUsize::new(0));
        let shared = Shared::new(
            link.local,
            Box::new(Waiting(Arc::clone(&something_waits))),
            Box::new(Counting(Arc::clone(&transmits))),
            None,
            link.parker.waker(),
            Core::new(Endpoint::new(1), connections(), Arc::new(host), address),
        );
        Self {
            shared,
            something_waits,
            transmits,
        }
    }

    /// Makes timers due, drives, and returns whether they ran.
    fn timers_run(&self) -> bool {
        self.shared.engine_due.store(0, Ordering::SeqCst);
        self.shared.drive();
        self.shared.engine_due.load(Ordering::SeqCst) == NEVER
    }
}

#[test]
fn timers_wait_for_what_has_arrived() {
    let rig = Rig::new();
    assert!(rig.timers_run(), "the socket is empty");
    rig.something_waits.store(true, Ordering::Relaxed);
    assert!(!rig.timers_run(), "there may be more");
    rig.something_waits.store(false, Ordering::Relaxed);
    let receiving = rig.shared.rx.lock();
    assert!(!rig.timers_run(), "another thread has datagrams in hand");
    drop(receiving);
    assert!(rig.timers_run());
}

#[test]
fn timers_do_not_starve_under_an_endless_stream() {
    let rig = Rig::new();
    rig.something_waits.store(true, Ordering::Relaxed);
    for round in 0..3 {
        let ran = (1..=BACKLOG).find(|_| rig.timers_run());
        assert_eq!(ran, Some(BACKLOG), "round {round}");
    }
    rig.shared.engine_due.store(NEVER, Ordering::SeqCst);
    rig.shared.drive();
    assert!(!rig.timers_run(), "counted from when they are due");
}

#[test]
fn a_deadline_of_the_link_does_not_wait_for_the_receiver() {
    let rig = Rig::new();
    let receiving = rig.shared.rx.lock();
    rig.shared.link_due.store(0, Ordering::SeqCst);
    assert!(rig.shared.drive());
    assert_eq!(rig.transmits.load(Ordering::Relaxed), 1);
    drop(receiving);
    rig.shared.drive();
    assert_eq!(rig.transmits.load(Ordering::Relaxed), 1, "due once");
}

/// The credit wake-up may be consumed before the ring is known to be full, and no other follows.
#[test]
fn whoever_goes_to_sleep_has_looked_for_room() {
    let rig = Rig::new();
    rig.shared.lanes_blocked.store(true, Ordering::SeqCst);
    assert!(rig.shared.sleep_on_lanes(), "nothing has come");
    assert!(
        !rig.shared.lanes_blocked.load(Ordering::SeqCst),
        "there is room, and it sleeps"
    );
}
