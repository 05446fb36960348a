//! Making an engine's connections: a queue pair to each other rank for each lane, and the mailboxes.

use std::sync::Arc;

use doorbell_verbs::{
    CompletionQueue, Context, Endpoint, PreparedQueuePair, ProtectionDomain, QueuePair, Remote, Write,
};

use super::Config;
use super::error::EngineError;
use super::link::{DRAFTS, Door, INLINE, Link, Mail, SEND_DEPTH};
use super::mapped::{Mapped, OFFER, Offer, SECRET};
use crate::bootstrap::Exchange;
use crate::memory::Segment;
use crate::protocol::at;
use crate::types::Rank;

/// A device, and what lies on it.
pub(super) struct Rail {
    pub(super) context: Context,
    pub(super) domain: ProtectionDomain,
    pub(super) cq: CompletionQueue,
    /// Mailboxes and drafts of the rail's connections.
    pub(super) mail: Option<Segment>,
}

/// The first bytes of an address: the version of what is behind, and of the mailbox.
const VERSION: [u8; 8] = *b"DBCOLL\0\x03";
/// Bytes of one connection's address: the end point, and the mailbox.
const ADDRESS: usize = 32 + 24;
/// Entries of a completion queue that every device has.
const ENTRIES: u32 = 24_000;

/// Bytes of a connection's mailbox, and those of its drafts. The last lane, for messages between two ranks, has no lines.
fn each(lane: u32, lanes: u32) -> (usize, usize) {
    if lane + 1 == lanes {
        (at::RINGS[0].next_multiple_of(64), 0)
    } else {
        (at::LEN, DRAFTS)
    }
}

/// How many requests a connection's send queue holds where there are so many on a device.
fn send_depth(connections: u32) -> u32 {
    (ENTRIES / connections.max(1)).clamp(48, SEND_DEPTH)
}

/// The lanes on a device.
fn lanes_on(rail: usize, rails: usize, lanes: u32) -> impl Iterator<Item = u32> {
    (rail as u32..lanes).step_by(rails)
}

/// Opens what is needed of each device.
pub(super) fn rails(devices: &[Context], ranks: u32, lanes: u32) -> Result<Vec<Rail>, EngineError> {
    let rail = |(index, device): (usize, &Context)| {
        let lanes_here = || lanes_on(index, devices.len(), lanes);
        let connections = (lanes_here().count() as u32 * (ranks - 1)).max(1);
        let domain = device.protection_domain()?;
        // One receive for each, which queue pairs have even if none is ever posted.
        let cq = device.completion_queue(connections * (send_depth(connections) + 1))?;
        let to_each: usize = lanes_here()
            .map(|lane| each(lane, lanes))
            .map(|(mailbox, drafts)| mailbox + drafts)
            .sum();
        let mail = match to_each * (ranks as usize - 1) {
            0 => None,
            bytes => Some(Segment::new([&domain], SECRET + bytes)?),
        };
        Ok(Rail {
            context: device.clone(),
            domain,
            cq,
            mail,
        })
    };
    devices.iter().enumerate().map(rail).collect()
}

/// One connection before it is connected.
struct Half {
    peer: Rank,
    lane: u32,
    rail: usize,
    /// Where its memory begins in the rail's, and the lengths of its mailbox and drafts.
    place: usize,
    each: (usize, usize),
    prepared: PreparedQueuePair,
}

/// Connects to each other rank once for each lane, as the configuration says. Gives the connections by lane and rank.
pub(super) fn connect(
    rails: &[Rail],
    (rank, ranks): (Rank, u32),
    lanes: u32,
    config: Config,
    exchange: &mut dyn Exchange,
) -> Result<Vec<Vec<Option<Link>>>, EngineError> {
    let mut halves = Vec::new();
    let mut places = vec![SECRET; rails.len()];
    let mut hello = VERSION.to_vec();
    for rail in rails {
        let offer = rail.mail.as_ref().filter(|_| config.mapped).and_then(Offer::of);
        hello.extend_from_slice(&offer.map_or([0; OFFER], Offer::to_bytes));
    }
    let mut addresses = vec![hello; ranks as usize];
    for lane in 0..lanes {
        let on = lane as usize % rails.len();
        let rail = &rails[on];
        let here = lanes_on(on, rails.len(), lanes).count() as u32;
        let (mailbox, drafts) = each(lane, lanes);
        for peer in (0..ranks).map(Rank).filter(|&peer| peer != rank) {
            let prepared = rail
                .domain
                .queue_pair(&rail.cq)
                .send_depth(send_depth(here * (ranks - 1)))
                .recv_depth(1)
                .max_inline(INLINE as u32)
                .allow_remote_write()
                .timeout(config.timeout)
                .tag(u64::from(lane) << 32 | u64::from(peer.0))
                .rc()
                .map_err(|error| EngineError::QueuePair { peer, error })?;
            let place = places[on];
            places[on] += mailbox + drafts;
            let Some(mail) = &rail.mail else { continue };
            let inbox =
                Remote::<Write>::from_raw(mail.start().addr() as u64 + place as u64, mail.rkey(0), mailbox as u64);
            let address = &mut addresses[peer.index()];
            address.extend_from_slice(&prepared.endpoint().to_bytes());
            address.extend_from_slice(&inbox.to_bytes());
            halves.push(Half {
                peer,
                lane,
                rail: on,
                place,
                each: (mailbox, drafts),
                prepared,
            });
        }
    }
    let theirs = exchange.all_to_all(addresses)?;
    let mut links: Vec<Vec<Option<Link>>> = (0..lanes).map(|_| (0..ranks).map(|_| None).collect()).collect();
    let mut mappings = Mappings::new(ranks, rails.len());
    for half in halves {
        let (peer, lane) = (half.peer, half.lane as usize);
        let said = theirs
            .get(peer.index())
            .and_then(|all| Said::of(all, rails.len(), lanes as usize));
        let address = said.as_ref().and_then(|said| said.address(lane, half.each.0));
        let (Some(said), Some((endpoint, inbox))) = (said, address) else {
            return Err(EngineError::BadAddress { peer });
        };
        let mapped = config.mapped.then(|| mappings.of(peer, half.rail, &said)).flatten();
        let door = mapped.and_then(|mapped| Door::new(mapped, inbox));
        let qp = half
            .prepared
            .connect(&endpoint)
            .map_err(|error| EngineError::QueuePair { peer, error })?;
        links[lane][peer.index()] = Some(link(
            &rails[half.rail],
            (half.place, half.each),
            peer,
            qp,
            (inbox, door),
        )?);
    }
    // Nobody sends before all are connected.
    exchange.barrier()?;
    Ok(links)
}

fn link(
    rail: &Rail,
    (place, (mailbox, len)): (usize, (usize, usize)),
    peer: Rank,
    qp: QueuePair,
    (theirs, door): (Remote<Write>, Option<Door>),
) -> Result<Link, EngineError> {
    let drafts = place + mailbox;
    let memory = rail
        .mail
        .as_ref()
        .and_then(|mail| Some((mail, mail.alias(0, drafts, len)?)));
    let Some((mail, drafts_alias)) = memory else {
        return Err(EngineError::BadAddress { peer });
    };
    let start = mail.start();
    Ok(Link::new(
        peer,
        qp,
        Mail {
            own: start.wrapping_add(place),
            theirs,
            drafts: start.wrapping_add(drafts),
            drafts_alias,
        },
        door,
    ))
}

/// What a peer says of its ends of the connections to us.
struct Said<'a> {
    offers: &'a [u8],
    addresses: &'a [u8],
}

impl<'a> Said<'a> {
    /// Of so many devices and lanes.
    fn of(all: &'a [u8], rails: usize, lanes: usize) -> Option<Self> {
        let (offers, addresses) = all.strip_prefix(&VERSION)?.split_at_checked(rails * OFFER)?;
        (addresses.len() == lanes * ADDRESS).then_some(Self { offers, addresses })
    }

    fn offer(&self, rail: usize) -> Option<Offer> {
        Offer::from_bytes(self.offers.get(rail * OFFER..)?.first_chunk()?)
    }

    /// Its end of a lane's connection, and its mailbox, which is so long.
    fn address(&self, lane: usize, mailbox: usize) -> Option<(Endpoint, Remote<Write>)> {
        let (endpoint, inbox) = self.addresses.get(lane * ADDRESS..(lane + 1) * ADDRESS)?.split_at(32);
        let inbox = Remote::from_bytes(inbox.try_into().ok()?).ok()?;
        (inbox.len() == mailbox as u64).then_some(())?;
        Some((Endpoint::from_bytes(endpoint.try_into().ok()?).ok()?, inbox))
    }
}

/// The peers' segments that are mapped, each once: by rank and device.
struct Mappings {
    rails: usize,
    tried: Vec<Option<Option<Arc<Mapped>>>>,
}

impl Mappings {
    fn new(ranks: u32, rails: usize) -> Self {
        Self {
            rails,
            tried: vec![None; ranks as usize * rails],
        }
    }

    /// A peer's, if it can be mapped.
    fn of(&mut self, peer: Rank, rail: usize, said: &Said<'_>) -> Option<Arc<Mapped>> {
        let open = || said.offer(rail).and_then(Mapped::open).map(Arc::new);
        self.tried[peer.index() * self.rails + rail]
            .get_or_insert_with(open)
            .clone()
    }
}
