//! Two managers and the network between them.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use doorbell_roce_proto::cm::{
    Accept, Cm, CmConfig, CmEvent, ConnectRequest, ConnectionId, Ece, Mad, PortSpace, ServiceId, SidrRequest,
};
use doorbell_roce_proto::{Instant, Mtu, Psn, Qpn};

pub(crate) const SERVICE: ServiceId = ServiceId::of_port(PortSpace::Tcp, 7471);

/// A code of about a millisecond, so that timeouts of seconds take milliseconds here.
pub(crate) const RESPONSE: u8 = 8;

const DELAY: Duration = Duration::from_micros(10);

pub(crate) fn address(side: usize) -> IpAddr {
    Ipv4Addr::new(10, 9, 0, side as u8 + 1).into()
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fate {
    Arrives,
    Lost,
    Twice,
    Late(Duration),
}

pub(crate) struct Net {
    pub(crate) cms: [Cm; 2],
    pub(crate) now: Instant,
    /// By time and order: destination and datagram.
    on_the_way: BTreeMap<(Instant, u64), (usize, Mad)>,
    sent: u64,
    /// The sender and attribute id of each datagram.
    pub(crate) log: Vec<(usize, u16)>,
    pub(crate) events: [Vec<CmEvent>; 2],
}

impl Net {
    pub(crate) fn new() -> Self {
        let cm = |side| {
            Cm::new(CmConfig {
                address: address(side),
                guid: side as u64 + 1,
                mtu: Mtu::Mtu1024,
                slot: side as u16 + 5,
                key: 1.into(),
            })
        };
        Self {
            cms: [cm(0), cm(1)],
            now: Instant(1),
            on_the_way: BTreeMap::new(),
            sent: 0,
            log: Vec::new(),
            events: [Vec::new(), Vec::new()],
        }
    }

    pub(crate) fn request(qpn: u32) -> ConnectRequest {
        ConnectRequest {
            response_timeout: RESPONSE,
            ack_timeout: RESPONSE,
            private_data: vec![7; 92],
            ..ConnectRequest::new(address(1), SERVICE, Qpn::new(qpn), Psn::new(1000 + qpn), Mtu::Mtu1024)
        }
    }

    pub(crate) fn sidr_request(service: ServiceId) -> SidrRequest {
        SidrRequest {
            response_timeout: RESPONSE,
            private_data: vec![9; 216],
            ..SidrRequest::new(address(1), service)
        }
    }

    pub(crate) fn accept(qpn: u32) -> Accept {
        Accept {
            qpn: Qpn::new(qpn),
            responder_resources: 3,
            initiator_depth: 4,
            flow_control: true,
            rnr_retry_count: 6,
            srq: true,
            ece: Ece::default(),
            private_data: vec![8; 196],
        }
    }

    pub(crate) fn connect(&mut self, qpn: u32) -> ConnectionId {
        self.cms[0].connect(self.now, &Self::request(qpn)).unwrap()
    }

    pub(crate) fn collect(&mut self, fate: &mut dyn FnMut(usize, u16) -> Fate) {
        for side in 0..2 {
            while let Some(transmit) = self.cms[side].poll_transmit() {
                assert_eq!(transmit.to, address(1 - side));
                let attribute = u16::from_be_bytes([transmit.mad[16], transmit.mad[17]]);
                self.log.push((side, attribute));
                let delays: &[Duration] = match fate(side, attribute) {
                    Fate::Arrives => &[DELAY],
                    Fate::Lost => &[],
                    Fate::Twice => &[DELAY, DELAY],
                    Fate::Late(by) => &[DELAY + by],
                };
                for &delay in delays {
                    self.sent += 1;
                    let at = (self.now + delay, self.sent);
                    self.on_the_way.insert(at, (1 - side, *transmit.mad));
                }
            }
            while let Some(event) = self.cms[side].poll_event() {
                self.events[side].push(event);
            }
        }
    }

    /// The next event: a datagram arrives, or a deadline expires. False when there is none.
    pub(crate) fn step(&mut self) -> bool {
        let arrival = self.on_the_way.keys().next().copied();
        let due = self.cms.iter().filter_map(Cm::poll_timeout).min();
        match (arrival, due) {
            (Some(at), due) if due.is_none_or(|due| at.0 <= due) => {
                self.now = self.now.max(at.0);
                if let Some((to, mad)) = self.on_the_way.remove(&at) {
                    self.cms[to].handle_mad(self.now, address(1 - to), &mad);
                }
                true
            }
            (_, Some(due)) => {
                self.now = self.now.max(due);
                self.cms.iter_mut().for_each(|cm| cm.handle_timeout(self.now));
                true
            }
            _ => false,
        }
    }

    pub(crate) fn run_with(
        &mut self,
        mut fate: impl FnMut(usize, u16) -> Fate,
        mut app: impl FnMut(&mut Cm, Instant, usize, &CmEvent),
    ) {
        let mut seen = [0; 2];
        let mut steps = 0;
        loop {
            self.collect(&mut fate);
            let mut answered = false;
            for (side, seen) in seen.iter_mut().enumerate() {
                while let Some(event) = self.events[side].get(*seen) {
                    *seen += 1;
                    answered = true;
                    app(&mut self.cms[side], self.now, side, event);
                }
            }
            if !answered && !self.step() {
                return;
            }
            steps += 1;
            assert!(steps < 100_000, "it never ends: {:?}", self.log);
        }
    }

    pub(crate) fn run(&mut self) {
        self.run_with(|_, _| Fate::Arrives, |_, _, _, _| {});
    }

    pub(crate) fn sent(&self, side: usize) -> Vec<u16> {
        let of_side = self.log.iter().filter(|(from, _)| *from == side);
        of_side.map(|(_, attribute)| *attribute).collect()
    }
}

pub(crate) fn accept_all(cm: &mut Cm, now: Instant, _side: usize, event: &CmEvent) {
    match event {
        CmEvent::Request { id, request, .. } => cm.accept(now, *id, &Net::accept(request.qpn.get() + 1)).unwrap(),
        CmEvent::Reply { id, .. } => cm.establish(*id, b"ready").unwrap(),
        _ => {}
    }
}
