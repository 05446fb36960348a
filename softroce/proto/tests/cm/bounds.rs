//! A peer keeps no state here for longer than this side's own times, and takes no space of others.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use doorbell_roce_proto::cm::{Cm, CmConfig, CmEvent, ConnectRequest, ConnectionId, MAX_BACKLOG, Mad, RejectReason};
use doorbell_roce_proto::{Instant, Mtu, Psn, Qpn};
use proptest::prelude::*;

use crate::hostile::any_mad;
use crate::net::{Fate, Net, SERVICE, accept_all, address};

/// 16 REPs at most 4.6 s apart; or 5 minutes of MRAs, and then 69 s of TIMEWAIT.
const BOUND: Duration = Duration::from_secs(400);
const NONE: Instant = Instant(u64::MAX);

/// Every deadline up to `until`; what is sent is lost.
fn advance(cm: &mut Cm, until: Instant) {
    while cm.poll_timeout().unwrap_or(NONE) <= until {
        cm.handle_timeout(cm.poll_timeout().unwrap_or(until));
        while cm.poll_transmit().is_some() {}
    }
}

/// A REQ of another host, which gives the longest times.
fn request(from: IpAddr, number: u32) -> Mad {
    let mut cm = Cm::new(CmConfig {
        address: from,
        guid: 77,
        mtu: Mtu::Mtu1024,
        slot: 5,
        key: 1.into(),
    });
    let qpn = Qpn::new(number & 0xff_ffff);
    let request = ConnectRequest {
        response_timeout: 31,
        ack_timeout: 31,
        max_retries: 15,
        ..ConnectRequest::new(address(1), SERVICE, qpn, Psn::new(1), Mtu::Mtu1024)
    };
    cm.connect(Instant(1), &request).unwrap();
    let mut mad = *cm.poll_transmit().unwrap().mad;
    // The communication id, as of the host's request with this number.
    mad[24..28].copy_from_slice(&(number + 1).to_be_bytes());
    mad
}

/// Delivers a request that the owner rejects. Whether it was reported.
fn rejected(cm: &mut Cm, now: Instant, from: IpAddr, number: u32) -> bool {
    cm.handle_mad(now, from, &request(from, number));
    let Some(CmEvent::Request { id, .. }) = cm.poll_event() else {
        return false;
    };
    cm.reject(now, id, RejectReason::CONSUMER, b"").unwrap();
    cm.destroy(now, id).unwrap();
    while cm.poll_transmit().is_some() {}
    true
}

#[test]
fn rejected_requests_of_one_host_shut_no_listener() {
    let mut cm = Net::new().cms.into_iter().nth(1).unwrap();
    cm.listen(SERVICE, 16).unwrap();
    let (now, attacker) = (Instant(1), address(7));
    for number in 1..=80_000 {
        assert!(rejected(&mut cm, now, attacker, number), "request {number}");
    }
    assert!(rejected(&mut cm, now, address(8), 1), "another host's");
    assert!(cm.connections() <= 1025, "{} connections", cm.connections());
    cm.connect(now, &Net::request(0x11)).unwrap();
}

#[test]
fn rejected_requests_of_many_hosts_shut_no_listener() {
    let mut cm = Net::new().cms.into_iter().nth(1).unwrap();
    cm.listen(SERVICE, 16).unwrap();
    let now = Instant(1);
    for number in 1..=80_000_u32 {
        let from = Ipv4Addr::from_bits(0x0a0a_0000 + number % 200);
        assert!(rejected(&mut cm, now, from.into(), number), "request {number}");
    }
    assert!(cm.connections() <= 1 << 15, "{} connections", cm.connections());
    cm.connect(now, &Net::request(0x11)).unwrap();
}

#[test]
fn unanswered_requests_of_one_host_leave_room_in_the_backlog() {
    let mut cm = Net::new().cms.into_iter().nth(1).unwrap();
    cm.listen(SERVICE, usize::MAX).unwrap();
    for number in 1..=2 * MAX_BACKLOG as u32 {
        cm.handle_mad(Instant(1), address(7), &request(address(7), number));
    }
    assert_eq!(cm.connections(), MAX_BACKLOG / 4 * 3);
    cm.handle_mad(Instant(1), address(8), &request(address(8), 1));
    assert_eq!(cm.connections(), MAX_BACKLOG / 4 * 3 + 1);
}

/// REQ and REJ in a loop.
#[test]
fn withdrawn_requests_stay_in_the_backlog_until_they_are_destroyed() {
    let mut cm = Net::new().cms.into_iter().nth(1).unwrap();
    cm.listen(SERVICE, 4).unwrap();
    let mut taken = Vec::new();
    for number in 1..=100 {
        let req = request(address(7), number);
        cm.handle_mad(Instant(1), address(7), &req);
        for (id, _) in reported(&mut cm) {
            let rej = rejection(&req, id);
            cm.handle_mad(Instant(1), address(7), &rej);
            taken.push(id);
        }
    }
    assert_eq!((taken.len(), cm.connections()), (3, 3));
    cm.destroy(Instant(1), taken[0]).unwrap();
    assert!(cm.connections() == 2);
    cm.handle_mad(Instant(1), address(7), &request(address(7), 101));
    assert_eq!(reported(&mut cm).len(), 1);
}

/// A REJ of the sender of `req`, for the connection `id`.
fn rejection(req: &Mad, id: ConnectionId) -> Mad {
    let mut rej = [0; 256];
    rej[..4].copy_from_slice(&[1, 7, 2, 3]);
    rej[17] = 0x12;
    rej[24..28].copy_from_slice(&req[24..28]);
    rej[28..32].copy_from_slice(&id.get().to_be_bytes());
    rej
}

/// The peer answers each repeated REQ with an MRA.
#[test]
fn mras_extend_no_wait_for_ever() {
    let mut net = Net::new();
    net.cms[1].listen(SERVICE, 4).unwrap();
    net.connect(0x11);
    let request = net.cms[0].poll_transmit().unwrap();
    net.cms[1].handle_mad(net.now, address(0), &request.mad);
    let until = net.now + BOUND;
    while net.now < until {
        net.cms[1].handle_mad(net.now, address(0), &request.mad);
        let mra = net.cms[1].poll_transmit().unwrap();
        net.cms[0].handle_mad(net.now, address(1), &mra.mad);
        net.now = net.now + Duration::from_secs(30);
        advance(&mut net.cms[0], net.now);
    }
    assert!(matches!(net.cms[0].poll_event(), Some(CmEvent::Unreachable { .. })));
}

/// A REJ or DREQ that names no connection of the peer's, where that is known.
#[test]
fn messages_without_the_peers_id_match_no_connection() {
    let mut net = Net::new();
    net.cms[1].listen(SERVICE, 4).unwrap();
    let ours = net.connect(0x11);
    net.run_with(|_, _| Fate::Arrives, accept_all);
    let rej = rejection(&[0; 256], ours);
    let dropped = net.cms[0].dropped();
    net.cms[0].handle_mad(net.now, address(1), &rej);
    assert_eq!((net.cms[0].dropped(), net.cms[0].poll_event()), (dropped + 1, None));
}

/// What the owner knows of, from events.
fn reported(cm: &mut Cm) -> Vec<(ConnectionId, bool)> {
    let mut ids = Vec::new();
    while let Some(event) = cm.poll_event() {
        match event {
            CmEvent::Request { id, .. } => ids.push((id, true)),
            CmEvent::SidrRequest { id, .. } => ids.push((id, false)),
            _ => {}
        }
    }
    ids
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn no_field_of_a_peers_keeps_state_longer_than_our_bound(
        steps in prop::collection::vec((any_mad(), 0_u64..20_000, 0_u8..4), 0..200),
    ) {
        let [_, mut cm] = Net::new().cms;
        cm.listen(SERVICE, 64).unwrap();
        let mut now = Instant(1);
        cm.handle_mad(now, address(0), &request(address(0), 3));
        let mut owned = Vec::new();
        for (mad, pause, answer) in steps {
            now = now + Duration::from_millis(pause);
            cm.handle_timeout(now);
            cm.handle_mad(now, address(0), &mad);
            for (id, connection) in reported(&mut cm) {
                let _ = match answer {
                    0 if connection => cm.accept(now, id, &Net::accept(0x12)),
                    1 if connection => cm.reject(now, id, RejectReason::CONSUMER, b""),
                    2 => cm.destroy(now, id),
                    _ => Ok(()),
                };
                owned.push(id);
            }
            while cm.poll_transmit().is_some() {}
        }
        owned.extend(reported(&mut cm).into_iter().map(|(id, _)| id));
        for id in owned {
            let _ = cm.destroy(now, id);
        }
        advance(&mut cm, now + BOUND);
        prop_assert_eq!((cm.connections(), cm.poll_timeout()), (0, None));
    }
}
