//! Management datagrams, commands and time into two connection managers.
//!
//! Their datagrams to each other are in flight, as those of `endpoint` are; the input also makes up
//! its own. In the end everything is destroyed and time passes: no state may be left, whatever a
//! peer has named as its times.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use arbitrary::{Result, Unstructured};
use doorbell_roce_proto::cm::{
    Accept, Cm, CmConfig, ConnectRequest, ConnectionId, Ece, Mad, PortSpace, RejectReason, ServiceId, SidrReply,
    SidrRequest, SidrStatus, route,
};
use doorbell_roce_proto::wire::Transport;
use doorbell_roce_proto::{Instant, Mtu, Psn, Qpn};

const SERVICE: ServiceId = ServiceId::of_port(PortSpace::Tcp, 7471);
const BACKLOG: usize = 4;
/// Connections of the application at each side: it makes no more.
const MOST_OWN: usize = 16;
const FLIGHT: usize = 64;
/// A reply, and the end of a stale connection.
const MOST_ANSWERS: usize = 2;
/// Timers that expire after everything is destroyed.
const MOST_TIMEOUTS: usize = 100_000;

fn address(side: usize) -> IpAddr {
    Ipv4Addr::new(10, 9, 0, side as u8 + 1).into()
}

struct World {
    cms: [Cm; 2],
    /// What the application knows of, at each side.
    ids: [Vec<ConnectionId>; 2],
    flight: VecDeque<(usize, Box<Mad>)>,
    now: Instant,
}

/// Steps of two managers.
pub fn connection_manager(data: &[u8]) {
    let mut input = Unstructured::new(data);
    let mut world = World::new();
    while !input.is_empty() && world.step(&mut input).is_ok() {
        world.drain();
    }
    world.end();
}

impl World {
    fn new() -> Self {
        let cm = |side| {
            Cm::new(CmConfig {
                address: address(side),
                guid: side as u64 + 1,
                mtu: Mtu::Mtu1024,
                slot: side as u16 + 5,
                key: 1.into(),
            })
        };
        let mut cms = [cm(0), cm(1)];
        for cm in &mut cms {
            cm.listen(SERVICE, BACKLOG).expect("nothing listens yet");
        }
        Self {
            cms,
            ids: [Vec::new(), Vec::new()],
            flight: VecDeque::new(),
            now: Instant(1),
        }
    }

    fn step(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        let side = usize::from(input.arbitrary::<bool>()?);
        match input.arbitrary::<u8>()? % 16 {
            0 | 1 => self.connect(side, input),
            2 => self.resolve(side, input),
            3..8 => self.command(side, input),
            8..12 => self.deliver(input),
            12 | 13 => self.make_up(side, input),
            14 => {
                self.cms[side].handle_peer_gone(self.now, address(1 - side), (1 - side) as u16 + 5);
                Ok(())
            }
            _ => self.pass_time(input),
        }
    }

    fn connect(&mut self, side: usize, input: &mut Unstructured<'_>) -> Result<()> {
        if self.ids[side].len() >= MOST_OWN {
            return Ok(());
        }
        let qpn = Qpn::new(input.int_in_range(0..=7)?);
        let [response_timeout, ack_timeout, max_retries, len] = input.arbitrary()?;
        let request = ConnectRequest {
            response_timeout,
            ack_timeout,
            max_retries,
            transport: *input.choose(&[Transport::Rc, Transport::Uc, Transport::Ud])?,
            private_data: vec![7; len.into()],
            ..ConnectRequest::new(address(1 - side), SERVICE, qpn, Psn::new(9), Mtu::Mtu1024)
        };
        self.ids[side].extend(self.cms[side].connect(self.now, &request).ok());
        Ok(())
    }

    fn resolve(&mut self, side: usize, input: &mut Unstructured<'_>) -> Result<()> {
        if self.ids[side].len() >= MOST_OWN {
            return Ok(());
        }
        let request = SidrRequest {
            response_timeout: input.arbitrary()?,
            max_retries: input.arbitrary()?,
            private_data: vec![9; input.arbitrary::<u8>()?.into()],
            ..SidrRequest::new(address(1 - side), SERVICE)
        };
        self.ids[side].extend(self.cms[side].sidr_request(self.now, &request).ok());
        Ok(())
    }

    /// Any command on any connection; most are refused in its state.
    fn command(&mut self, side: usize, input: &mut Unstructured<'_>) -> Result<()> {
        if self.ids[side].is_empty() {
            return Ok(());
        }
        let at = usize::from(input.arbitrary::<u8>()?) % self.ids[side].len();
        let (id, now, cm) = (self.ids[side][at], self.now, &mut self.cms[side]);
        let data = vec![3; input.arbitrary::<u8>()?.into()];
        let qpn = Qpn::new(input.int_in_range(0..=7)?);
        let _ = match input.arbitrary::<u8>()? % 8 {
            0 | 1 => {
                let accept = Accept {
                    qpn,
                    responder_resources: 1,
                    initiator_depth: 1,
                    flow_control: true,
                    rnr_retry_count: 7,
                    srq: false,
                    ece: Ece::default(),
                    private_data: data,
                };
                cm.accept(now, id, &accept)
            }
            2 => cm.reject(now, id, RejectReason(u16::from(input.arbitrary::<u8>()?)), &data),
            3 => cm.establish(id, &data),
            4 => cm.notify(id),
            5 => cm.disconnect(now, id, &data),
            6 => {
                let reply = SidrReply {
                    status: SidrStatus(input.int_in_range(0..=4)?),
                    qpn,
                    qkey: 1,
                    private_data: data,
                };
                cm.sidr_reply(now, id, &reply)
            }
            _ => {
                self.ids[side].swap_remove(at);
                cm.destroy(now, id)
            }
        };
        Ok(())
    }

    /// A datagram in flight arrives, perhaps again, perhaps changed; or is lost.
    fn deliver(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        if self.flight.is_empty() {
            return Ok(());
        }
        let at = usize::from(input.arbitrary::<u8>()?) % self.flight.len();
        let fate = input.arbitrary::<u8>()? % 8;
        let Some((to, mut mad)) = self.flight.get(at).cloned() else {
            return Ok(());
        };
        if fate != 0 {
            self.flight.remove(at);
        }
        if fate == 1 {
            return Ok(());
        }
        if fate == 2 {
            mad[usize::from(input.arbitrary::<u8>()?)] = input.arbitrary()?;
        }
        self.receive(to, address(1 - to), &mad);
        Ok(())
    }

    /// A message of any kind with any content, from the peer or another address. Where the input is
    /// short, the last datagram in flight is the rest.
    fn make_up(&mut self, side: usize, input: &mut Unstructured<'_>) -> Result<()> {
        let mut mad = match self.flight.back() {
            Some((_, mad)) => **mad,
            None => [0; 256],
        };
        mad[..4].copy_from_slice(&[1, 7, 2, 3]);
        mad[16..18].copy_from_slice(&[0, 0x10 + input.int_in_range(0..=11)?]);
        let at = 24 + usize::from(input.arbitrary::<u8>()?) % 200;
        let len = usize::from(input.arbitrary::<u8>()?).min(256 - at).min(input.len());
        mad[at..at + len].copy_from_slice(input.bytes(len)?);
        let from = if input.arbitrary::<u8>()? < 200 { 1 - side } else { 8 };
        self.receive(side, address(from), &mad);
        Ok(())
    }

    fn receive(&mut self, side: usize, from: IpAddr, mad: &Mad) {
        let _ = route(mad);
        self.drain();
        self.cms[side].handle_mad(self.now, from, mad);
        let answers = self.drain();
        assert!(answers <= MOST_ANSWERS, "{answers} datagrams in answer to one");
    }

    fn pass_time(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        let due = self.cms.iter().filter_map(Cm::poll_timeout).min();
        let later = self.now + Duration::from_millis(input.arbitrary::<u16>()?.into());
        self.now = due
            .filter(|_| input.arbitrary().unwrap_or(true))
            .map_or(later, |due| due.max(self.now));
        self.expire();
        Ok(())
    }

    fn expire(&mut self) {
        for cm in &mut self.cms {
            cm.handle_timeout(self.now);
            assert!(
                cm.poll_timeout().is_none_or(|next| next > self.now),
                "a timer that has expired is still set"
            );
        }
    }

    /// Takes all output; returns how many datagrams there were.
    fn drain(&mut self) -> usize {
        let mut sent = 0;
        for side in 0..2 {
            while let Some(transmit) = self.cms[side].poll_transmit() {
                sent += 1;
                if transmit.to == address(1 - side) {
                    self.flight.push_back((1 - side, transmit.mad));
                }
            }
            while let Some(event) = self.cms[side].poll_event() {
                let id = event.connection();
                let _ = self.cms[side].parameters(id);
                if !self.ids[side].contains(&id) {
                    self.ids[side].push(id);
                }
            }
        }
        let excess = self.flight.len().saturating_sub(FLIGHT);
        self.flight.drain(..excess);
        sent
    }

    /// Destroys everything and lets all timers expire.
    fn end(&mut self) {
        self.drain();
        for side in 0..2 {
            for id in std::mem::take(&mut self.ids[side]) {
                let _ = self.cms[side].destroy(self.now, id);
            }
        }
        for expired in 0.. {
            assert!(expired < MOST_TIMEOUTS, "timers without end");
            let Some(due) = self.cms.iter().filter_map(Cm::poll_timeout).min() else {
                break;
            };
            self.now = due.max(self.now);
            self.expire();
            self.drain();
        }
        let left = self.cms.each_ref().map(Cm::connections);
        assert_eq!(left, [0, 0], "connections are left");
    }
}
