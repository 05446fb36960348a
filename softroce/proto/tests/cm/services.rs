//! Datagram services (SIDR).

use std::collections::HashSet;

use doorbell_roce_proto::Instant;
use doorbell_roce_proto::Qpn;
use doorbell_roce_proto::cm::{
    Cm, CmEvent, PortSpace, Route, ServiceId, SidrReply, SidrStatus, private_data_len, route,
};

use crate::net::{Fate, Net, SERVICE, address};

const UD: ServiceId = ServiceId::of_port(PortSpace::Udp, 7471);

fn granted() -> SidrReply {
    SidrReply {
        status: SidrStatus::SUCCESS,
        qpn: Qpn::new(0x33),
        qkey: 0x0123_4567,
        private_data: vec![4; private_data_len::SIDR_REP],
    }
}

fn grants(cm: &mut Cm, now: Instant, _side: usize, event: &CmEvent) {
    if let CmEvent::SidrRequest { id, .. } = event {
        cm.sidr_reply(now, *id, &granted()).unwrap();
        cm.destroy(now, *id).unwrap();
    }
}

#[test]
fn granted_though_every_message_is_lost_once() {
    let mut net = Net::new();
    let listener = net.cms[1].listen(UD, 4).unwrap();
    let ours = net.cms[0].sidr_request(net.now, &Net::sidr_request(UD)).unwrap();
    let mut lost = Vec::new();
    net.run_with(
        |side, attribute| {
            if lost.contains(&(side, attribute)) {
                return Fate::Twice;
            }
            lost.push((side, attribute));
            Fate::Lost
        },
        grants,
    );
    let [
        CmEvent::SidrRequest {
            listener: at,
            peer,
            service,
            private_data,
            ..
        },
    ] = &net.events[1][..]
    else {
        panic!("{:?}", net.events[1]);
    };
    assert_eq!(
        (*at, *peer, *service, private_data.as_slice()),
        (listener, address(0), UD, [9; private_data_len::SIDR_REQ].as_slice())
    );
    let [CmEvent::SidrReply { id, reply }] = &net.events[0][..] else {
        panic!("{:?}", net.events[0]);
    };
    assert_eq!((*id, **reply == granted()), (ours, true));
    assert_eq!(net.cms[1].connections(), 0, "the answer is not kept for ever");
}

#[test]
fn refused_and_unanswered() {
    let mut net = Net::new();
    net.cms[0].sidr_request(net.now, &Net::sidr_request(UD)).unwrap();
    net.run();
    assert!(
        matches!(&net.events[0][..], [CmEvent::SidrReply { reply, .. }] if reply.status == SidrStatus::UNSUPPORTED)
    );
    net.cms[1].listen(UD, 4).unwrap();
    net.cms[0].sidr_request(net.now, &Net::sidr_request(UD)).unwrap();
    net.run_with(
        |_, _| Fate::Arrives,
        |cm, now, _, event| {
            if let CmEvent::SidrRequest { id, .. } = event {
                cm.destroy(now, *id).unwrap();
            }
        },
    );
    assert!(
        matches!(&net.events[0][..], [_, CmEvent::SidrReply { reply, .. }] if reply.status == SidrStatus::REJECTED)
    );
    let id = net.cms[0].sidr_request(net.now, &Net::sidr_request(UD)).unwrap();
    net.run_with(|_, _| Fate::Lost, |_, _, _, _| {});
    assert_eq!(net.events[0].last(), Some(&CmEvent::Unreachable { id }));
}

/// A message's bytes determine the process of the address that it is for.
#[test]
fn routes() {
    let mut net = Net::new();
    net.cms[0].connect(net.now, &Net::request(0x11)).unwrap();
    net.cms[0].sidr_request(net.now, &Net::sidr_request(UD)).unwrap();
    for service in [SERVICE, UD] {
        let mad = net.cms[0].poll_transmit().unwrap().mad;
        assert_eq!(route(&mad), Some(Route::Service(service)));
        net.cms[1].handle_mad(net.now, address(0), &mad);
        let answer = net.cms[1].poll_transmit().unwrap().mad;
        assert_eq!(route(&answer), Some(Route::Slot(5)));
    }
    assert_eq!(route(&[0; 256]), None);
}

/// What a peer sees of one connection reveals nothing of another's: no step from one to the next
/// occurs twice.
#[test]
fn ids_transactions_and_psns_cannot_be_predicted() {
    const COUNT: usize = 64;
    let Net {
        cms: [mut active, mut passive],
        now,
        ..
    } = Net::new();
    passive.listen(SERVICE, COUNT * 2).unwrap();
    let mut seen = [const { Vec::new() }; 3];
    for qpn in 0..COUNT {
        active.connect(now, &Net::request(qpn as u32)).unwrap();
        let mad = active.poll_transmit().unwrap().mad;
        passive.handle_mad(now, address(0), &mad);
        let Some(CmEvent::Request { id, .. }) = passive.poll_event() else {
            panic!("no request was reported");
        };
        seen[0].push(u64::from_be_bytes(mad[8..16].try_into().unwrap()));
        seen[1].push(u32::from_be_bytes(mad[24..28].try_into().unwrap()).into());
        seen[2].push(passive.parameters(id).unwrap().rq_psn.get().into());
    }
    for numbers in seen {
        let steps: HashSet<u64> = numbers.windows(2).map(|pair| pair[1].wrapping_sub(pair[0])).collect();
        assert_eq!(steps.len(), COUNT - 1, "{numbers:x?}");
    }
}
