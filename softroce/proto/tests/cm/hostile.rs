//! Hostile datagrams: no panic, bounded state, and no amplification.

use doorbell_roce_proto::cm::{CmEvent, ConnectRequest, Mad};
use proptest::prelude::*;

use crate::net::{Fate, Net, SERVICE, accept_all, address};

fn recorded() -> Vec<Mad> {
    let mut net = Net::new();
    net.cms[1].listen(SERVICE, 4).unwrap();
    net.connect(0x11);
    let mut mads = Vec::new();
    for _ in 0..12 {
        for side in 0..2 {
            while let Some(transmit) = net.cms[side].poll_transmit() {
                net.cms[1 - side].handle_mad(net.now, address(side), &transmit.mad);
                mads.push(*transmit.mad);
            }
            while let Some(event) = net.cms[side].poll_event() {
                let (cm, now) = (&mut net.cms[side], net.now);
                accept_all(cm, now, side, &event);
                if let CmEvent::Established { id, .. } = event {
                    cm.disconnect(now, id, b"").unwrap();
                }
            }
        }
    }
    assert_eq!(mads.len(), 5);
    mads
}

pub(crate) fn any_mad() -> impl Strategy<Value = Mad> {
    let recorded = recorded();
    let mutated = (
        0..recorded.len(),
        prop::collection::vec((0_usize..256, any::<u8>()), 0..6),
    )
        .prop_map(move |(which, changes)| {
            let mut mad = recorded[which];
            changes.iter().for_each(|&(at, byte)| mad[at] = byte);
            mad
        });
    let message = (0x10_u8..0x1b, prop::collection::vec(any::<u8>(), 232)).prop_map(|(attribute, body)| {
        let mut mad = [0; 256];
        mad[..4].copy_from_slice(&[1, 7, 2, 3]);
        mad[17] = attribute;
        mad[24..].copy_from_slice(&body);
        mad
    });
    let noise = prop::collection::vec(any::<u8>(), 256).prop_map(|bytes| bytes.try_into().unwrap());
    prop_oneof![4 => mutated, 3 => message, 1 => noise]
}

proptest! {
    #[test]
    fn arbitrary_mads(mads in prop::collection::vec((any_mad(), 0_usize..2, 0_u64..3), 0..200)) {
        let mut net = Net::new();
        net.cms[1].listen(SERVICE, 4).unwrap();
        net.connect(0x11);
        let mut fate = |_: usize, _: u16| Fate::Arrives;
        net.collect(&mut fate);
        net.step();
        net.collect(&mut fate);
        for (mad, to, events) in mads {
            net.cms[to].handle_mad(net.now, address(1 - to), &mad);
            let sent = net.log.len();
            net.collect(&mut fate);
            // A stale connection is disconnected in addition to the reply.
            prop_assert!(net.log.len() <= sent + 2);
            for _ in 0..events {
                net.step();
                net.collect(&mut fate);
            }
        }
        // At most the backlog, and the local one.
        prop_assert!(net.cms[1].connections() <= 4);
        prop_assert!(net.cms[0].connections() <= 1);
    }
}

/// Messages from another address than the peer's are dropped.
#[test]
fn another_address() {
    let mut net = Net::new();
    net.cms[1].listen(SERVICE, 4).unwrap();
    net.connect(0x11);
    let request = net.cms[0].poll_transmit().unwrap();
    net.cms[1].handle_mad(net.now, "10.9.0.77".parse().unwrap(), &request.mad);
    assert_eq!((net.cms[1].connections(), net.cms[1].dropped()), (0, 1));
    assert_eq!(net.cms[1].poll_transmit(), None);
    // Nor may another host answer for the peer.
    net.cms[1].handle_mad(net.now, address(0), &request.mad);
    let Some(CmEvent::Request { id, .. }) = net.cms[1].poll_event() else {
        panic!("no request");
    };
    net.cms[1].accept(net.now, id, &Net::accept(0x12)).unwrap();
    let reply = net.cms[1].poll_transmit().unwrap();
    net.cms[0].handle_mad(net.now, "10.9.0.77".parse().unwrap(), &reply.mad);
    assert_eq!(net.cms[0].poll_event(), None);
    // To another address than the manager's.
    let elsewhere = ConnectRequest {
        peer: "10.9.0.78".parse().unwrap(),
        ..Net::request(0x12)
    };
    net.cms[0].connect(net.now, &elsewhere).unwrap();
    let refused = loop {
        let transmit = net.cms[0].poll_transmit().unwrap();
        if transmit.to == elsewhere.peer {
            break transmit;
        }
    };
    net.cms[1].handle_mad(net.now, address(0), &refused.mad);
    assert_eq!(net.cms[1].poll_transmit().unwrap().mad[17], 0x12, "rejected");
}
