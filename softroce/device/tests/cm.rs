//! Two devices of this process connect over real sockets, through queue pair 1.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use doorbell_roce_proto::{Mtu, Psn, Qpn};
use doorbell_softroce::cm::protocol::{
    Accept, CmError, CmEvent, ConnectRequest, ConnectionId, Ece, PortSpace, RejectReason, ServiceId,
};
use doorbell_softroce::cm::{CmOwner, ConnectionManager};
use doorbell_softroce::{Device, DeviceConfig, EventQueue, Token};

const SERVICE: ServiceId = ServiceId::of_port(PortSpace::Tcp, 7471);

struct End {
    cm: ConnectionManager,
    address: IpAddr,
    events: Arc<EventQueue<(Token, CmEvent)>>,
}

impl End {
    fn new(address: &str) -> Self {
        let address: IpAddr = address.parse().unwrap();
        let config = DeviceConfig {
            address: Some(address),
            ..DeviceConfig::new("soft0")
        };
        let device = Device::open(&config).unwrap();
        Self {
            cm: device.cm(),
            address,
            events: Arc::new(EventQueue::new().unwrap()),
        }
    }

    fn with_same_queue(&self, address: &str) -> Self {
        Self {
            events: Arc::clone(&self.events),
            ..Self::new(address)
        }
    }

    fn owner(&self, token: Token) -> CmOwner {
        CmOwner {
            sink: self.events.clone(),
            token,
        }
    }

    fn next(&self) -> (Token, CmEvent) {
        self.events.wait(|_| {}).unwrap()
    }

    fn request(&self, to: &Self, qpn: u32) -> ConnectRequest {
        ConnectRequest {
            // Shortens the time-wait state.
            ack_timeout: 10,
            private_data: b"hello".to_vec(),
            ..ConnectRequest::new(to.address, SERVICE, Qpn::new(qpn), Psn::new(77), Mtu::Mtu1024)
        }
    }
}

fn accept(qpn: u32) -> Accept {
    Accept {
        qpn: Qpn::new(qpn),
        responder_resources: 1,
        initiator_depth: 2,
        flow_control: true,
        rnr_retry_count: 7,
        srq: false,
        ece: Ece::default(),
        private_data: b"welcome".to_vec(),
    }
}

/// Connects, and returns both ids of the connection, without waiting for the passive side's event.
fn connect(active: &End, passive: &End) -> [ConnectionId; 2] {
    let ours = active
        .cm
        .connect(&active.request(passive, 0x11), active.owner(2))
        .unwrap();
    let (_, CmEvent::Request { id: theirs, .. }) = passive.next() else {
        panic!("no request");
    };
    passive.cm.accept(theirs, &accept(0x22)).unwrap();
    assert!(matches!(active.next(), (2, CmEvent::Reply { .. })));
    active.cm.establish(ours, b"").unwrap();
    [ours, theirs]
}

/// Connects, and disconnects from the side that accepted; `active` may be `passive` itself.
fn connect_and_disconnect(active: &End, passive: &End) {
    let listener = passive.cm.listen(SERVICE, 4, passive.owner(1)).unwrap();
    assert_eq!(passive.cm.listen(SERVICE, 4, passive.owner(1)), Err(CmError::InUse));
    let ours = active
        .cm
        .connect(&active.request(passive, 0x11), active.owner(2))
        .unwrap();
    let (
        1,
        CmEvent::Request {
            listener: at,
            id: theirs,
            request,
        },
    ) = passive.next()
    else {
        panic!("no request");
    };
    assert_eq!(
        (at, request.qpn, request.peer),
        (listener, Qpn::new(0x11), active.address)
    );
    assert!(request.private_data.starts_with(b"hello\0"));
    passive.cm.set_owner(theirs, passive.owner(3)).unwrap();
    let parameters = passive.cm.parameters(theirs).unwrap();
    assert_eq!((parameters.dest_qpn, parameters.sq_psn), (Qpn::new(0x11), Psn::new(77)));
    passive.cm.accept(theirs, &accept(0x22)).unwrap();
    let (2, CmEvent::Reply { id, reply }) = active.next() else {
        panic!("no reply");
    };
    assert_eq!((id, reply.qpn), (ours, Qpn::new(0x22)));
    assert!(reply.private_data.starts_with(b"welcome\0"));
    active.cm.establish(ours, b"").unwrap();
    assert!(matches!(passive.next(), (3, CmEvent::Established { id, .. }) if id == theirs));
    passive.cm.disconnect(theirs, b"").unwrap();
    let mut over: Vec<_> = [active, passive, active, passive].map(End::next).into();
    // Stable: the events of each end keep their order.
    over.sort_by_key(|(token, _)| *token);
    let ends = [(2, ours), (3, theirs)].map(|(token, id)| {
        [
            (token, CmEvent::Disconnected { id }),
            (token, CmEvent::TimewaitExit { id }),
        ]
    });
    assert_eq!(over, ends.concat());
    active.cm.destroy(ours).unwrap();
    passive.cm.destroy(theirs).unwrap();
    assert_eq!(passive.cm.destroy(theirs), Err(CmError::Unknown));
    passive.cm.unlisten(listener).unwrap();
    let refused = active
        .cm
        .connect(&active.request(passive, 0x12), active.owner(4))
        .unwrap();
    let (4, CmEvent::Rejected { id, reason, .. }) = active.next() else {
        panic!("not rejected");
    };
    assert_eq!((id, reason), (refused, RejectReason::INVALID_SERVICE_ID));
    active.cm.destroy(refused).unwrap();
}

#[test]
fn two_devices_and_one() {
    let (one, other) = (End::new("127.77.1.1"), End::new("127.77.1.2"));
    connect_and_disconnect(&one, &other);
    connect_and_disconnect(&other, &other);
}

/// Found by their services, from other addresses too: the UDP port holder forwards.
#[test]
fn several_devices_on_one_address() {
    let ends = [1, 2, 3].map(|_| End::new("127.77.3.1"));
    let elsewhere = End::new("127.77.3.2");
    for passive in &ends {
        for active in ends.iter().chain([&elsewhere]) {
            connect_and_disconnect(active, passive);
        }
        connect_and_disconnect(passive, &elsewhere);
    }
    let [one, other, _] = &ends;
    let listener = one.cm.listen(SERVICE, 4, one.owner(1)).unwrap();
    assert_eq!(other.cm.listen(SERVICE, 4, other.owner(1)), Err(CmError::InUse));
    one.cm.unlisten(listener).unwrap();
    assert_eq!(one.cm.unlisten(listener), Err(CmError::Unknown));
    other.cm.listen(SERVICE, 4, other.owner(1)).unwrap();
}

#[test]
fn a_peer_that_leaves_is_disconnected() {
    let [holder, other] = [1, 2].map(|_| End::new("127.77.4.1"));
    holder.cm.listen(SERVICE, 4, holder.owner(1)).unwrap();
    let [ours, _] = connect(&other, &holder);
    drop(holder);
    assert_eq!(other.next(), (2, CmEvent::Disconnected { id: ours }));
    assert_eq!(other.next(), (2, CmEvent::TimewaitExit { id: ours }));
    // The port and the service are taken over.
    connect_and_disconnect(&other, &other);
}

/// `passive` listens after `active` has requested and `meanwhile` has run. False when this took
/// longer than such a request is kept: it may have been rejected.
fn listens_late(active: &End, passive: &End, meanwhile: impl FnOnce()) -> bool {
    let since = Instant::now();
    let request = active.request(passive, 0x11);
    let ours = active.cm.connect(&request, active.owner(2)).unwrap();
    meanwhile();
    let listener = passive.cm.listen(SERVICE, 4, passive.owner(1)).unwrap();
    let in_time = since.elapsed() < Duration::from_millis(200);
    let answer = match passive.next() {
        (1, CmEvent::Request { listener: at, id, .. }) => {
            assert_eq!(at, listener);
            passive.cm.reject(id, RejectReason::CONSUMER, b"").unwrap();
            let answer = active.next();
            passive.cm.destroy(id).unwrap();
            answer
        }
        answer => answer,
    };
    let (2, CmEvent::Rejected { reason, .. }) = answer else {
        panic!("{answer:?}");
    };
    assert!(reason == RejectReason::CONSUMER || !in_time, "{reason:?}");
    active.cm.destroy(ours).unwrap();
    passive.cm.unlisten(listener).unwrap();
    in_time
}

/// In any process of the address, and though it has listened before and stopped.
#[test]
fn a_late_listener_gets_the_request() {
    let elsewhere = End::new("127.77.5.2");
    let ends = [1, 2, 3].map(|_| elsewhere.with_same_queue("127.77.5.1"));
    for passive in &ends {
        let before = passive.cm.listen(SERVICE, 4, passive.owner(1)).unwrap();
        passive.cm.unlisten(before).unwrap();
        for active in ends.iter().chain([&elsewhere]) {
            while !listens_late(active, passive, || drop(End::new("127.77.5.1"))) {}
        }
    }
}

/// Sets the flag when it is dropped, also by a panic.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn requests_survive_members_joining_and_leaving() {
    const ADDRESS: &str = "127.77.6.1";
    const ROUNDS: u32 = 40;
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let _set_on_drop = SetOnDrop(&over);
        for _ in 0..2 {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    drop(End::new(ADDRESS));
                }
            });
        }
        for round in 0..ROUNDS {
            let passive = End::new(ADDRESS);
            let active = passive.with_same_queue(ADDRESS);
            // Up to 3 ms, differently each time.
            let late = Duration::from_micros(u64::from(round.wrapping_mul(2_654_435_761) % 3000));
            while !listens_late(&active, &passive, || thread::sleep(late)) {}
        }
    });
}

#[test]
fn a_request_without_a_listener_is_rejected() {
    let one = End::new("127.77.7.1");
    let id = one.cm.connect(&one.request(&one, 0x11), one.owner(5)).unwrap();
    let (
        5,
        CmEvent::Rejected {
            id: refused, reason, ..
        },
    ) = one.next()
    else {
        panic!("not rejected");
    };
    assert_eq!((refused, reason), (id, RejectReason::INVALID_SERVICE_ID));
}

/// The progress thread handles the deadlines: the device is not called during the retransmissions.
#[test]
fn an_unanswered_request_times_out() {
    let one = End::new("127.77.2.1");
    let request = ConnectRequest {
        peer: "127.77.2.9".parse().unwrap(),
        response_timeout: 14,
        max_retries: 3,
        ..one.request(&one, 0x11)
    };
    let id = one.cm.connect(&request, one.owner(5)).unwrap();
    let begun = Instant::now();
    assert_eq!(one.next(), (5, CmEvent::Unreachable { id }));
    assert!(begun.elapsed() >= 4 * Duration::from_nanos(4096 << 14));
}
