//! Whatever the network does, both ends terminate with consistent results.

use std::time::Duration;

use doorbell_roce_proto::cm::{CmEvent, RejectReason};
use proptest::prelude::*;

use crate::net::{Fate, Net, SERVICE, accept_all};

/// Fewer than the retransmissions of a message.
const LOSSES: usize = 15;

fn fates() -> impl Strategy<Value = Vec<Fate>> {
    let fate = prop_oneof![
        3 => Just(Fate::Arrives),
        2 => Just(Fate::Lost),
        1 => Just(Fate::Twice),
        // Up to two retransmission intervals.
        1 => (0_u64..8_000_000).prop_map(|ns| Fate::Late(Duration::from_nanos(ns))),
    ];
    prop::collection::vec(fate, 0..60)
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    Connected,
    Over,
}

fn end(events: &[CmEvent], side: usize) -> Option<End> {
    let mut end = None;
    for event in events {
        end = match event {
            CmEvent::Reply { .. } if side == 0 => Some(End::Connected),
            CmEvent::Established { .. } => Some(End::Connected),
            CmEvent::Rejected { .. } | CmEvent::Unreachable { .. } | CmEvent::Disconnected { .. } => Some(End::Over),
            _ => end,
        };
    }
    end
}

proptest! {
    /// With fewer losses than retransmissions it is established once, and ends at both sides.
    #[test]
    fn connects_despite_some_losses(fates in fates(), who in 0_usize..2, accepts in any::<bool>()) {
        let mut net = Net::new();
        net.cms[1].listen(SERVICE, 4).unwrap();
        let id = net.connect(0x11);
        let (mut fates, mut lost) = (fates.into_iter(), 0);
        let mut fate = |_: usize, _: u16| match fates.next() {
            Some(Fate::Lost) if lost == LOSSES => Fate::Arrives,
            Some(Fate::Lost) => {
                lost += 1;
                Fate::Lost
            }
            other => other.unwrap_or(Fate::Arrives),
        };
        net.run_with(&mut fate, |cm, now, side, event| match event {
            CmEvent::Request { id, .. } if !accepts => cm.reject(now, *id, RejectReason::CONSUMER, b"no").unwrap(),
            other => accept_all(cm, now, side, other),
        });
        let requests: Vec<_> = net.events[1].iter().filter_map(|event| match event {
            CmEvent::Request { id, .. } => Some(*id),
            _ => None,
        }).collect();
        let [theirs] = requests[..] else {
            panic!("{requests:?}");
        };
        if !accepts {
            let rejected = matches!(&net.events[0][..], [CmEvent::Rejected { reason: RejectReason::CONSUMER, .. }]);
            prop_assert!(rejected, "{:?}", net.events[0]);
            return Ok(());
        }
        prop_assert!(matches!(net.events[0][..], [CmEvent::Reply { .. }]), "{:?}", net.events[0]);
        prop_assert!(matches!(net.events[1][..], [_, CmEvent::Established { .. }]), "{:?}", net.events[1]);
        let now = net.now;
        net.cms[who].disconnect(now, [id, theirs][who], b"").unwrap();
        net.run_with(&mut fate, |_, _, _, _| {});
        for (side, id) in [(0, id), (1, theirs)] {
            let over = net.events[side].ends_with(&[CmEvent::Disconnected { id }, CmEvent::TimewaitExit { id }]);
            prop_assert!(over, "{side}: {:?}", net.events[side]);
            net.cms[side].destroy(now, id).unwrap();
            prop_assert_eq!(net.cms[side].connections(), 0);
        }
    }

    /// Nothing waits forever; the passive side reports no connection that the active one lacks.
    #[test]
    fn connection_ends_despite_losses(fates in fates(), fails_after in 0_usize..8, dead in 1_u8..4) {
        let mut net = Net::new();
        net.cms[1].listen(SERVICE, 4).unwrap();
        net.connect(0x11);
        let (mut fates, mut sent) = (fates.into_iter(), 0);
        net.run_with(
            |side, _| {
                sent += 1;
                if sent > fails_after && dead >> side & 1 != 0 {
                    return Fate::Lost;
                }
                fates.next().unwrap_or(Fate::Arrives)
            },
            accept_all,
        );
        let ends = [end(&net.events[0], 0), end(&net.events[1], 1)];
        prop_assert!(ends[0].is_some(), "the active side hears in any case");
        prop_assert!(ends[1].is_some() || net.events[1].is_empty());
        if ends[1] == Some(End::Connected) {
            prop_assert_eq!(ends[0], Some(End::Connected));
        }
    }
}
