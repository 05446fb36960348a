//! Connection setup of an engine: queue pairs to each other rank, and the mailboxes.

use doorbell_verbs::{
    CompletionQueue, Context, Endpoint, PreparedQueuePair, ProtectionDomain, QueuePair, Remote, WriteAccess,
};

use super::Config;
use super::error::EngineError;
use super::link::{INLINE, Link, MailboxMemory, SEND_DEPTH, STAGING_BYTES};
use crate::bootstrap::Exchange;
use crate::memory::Segment;
use crate::protocol::mailbox;
use crate::types::Rank;

pub(super) struct Rail {
    pub(super) context: Context,
    pub(super) domain: ProtectionDomain,
    pub(super) cq: CompletionQueue,
    pub(super) mailboxes: Option<Segment>,
}

/// The first bytes of an address: version of the format and of the mailbox.
const VERSION: [u8; 8] = *b"DBCOLL\0\x05";
const ADDRESS_BYTES: usize = 32 + 24;
/// Completion queue entries that every device supports.
const CQ_ENTRIES: u32 = 24_000;

/// Bytes of a connection's mailbox and of its staging buffer. The last connection, for
/// point-to-point messages, has no rings of slots.
fn mailbox_sizes(connection: u32, connections: u32) -> (usize, usize) {
    if connection + 1 == connections {
        (mailbox::LINE_RINGS[0].next_multiple_of(64), 0)
    } else {
        (mailbox::LEN, STAGING_BYTES)
    }
}

fn send_depth(queue_pairs: u32) -> u32 {
    (CQ_ENTRIES / queue_pairs.max(1)).clamp(48, SEND_DEPTH)
}

fn connections_on(rail: usize, rails: usize, connections: u32) -> impl Iterator<Item = u32> {
    (rail as u32..connections).step_by(rails)
}

pub(super) fn rails(devices: &[Context], ranks: u32, connections: u32) -> Result<Vec<Rail>, EngineError> {
    let rail = |(index, device): (usize, &Context)| {
        let connections_here = || connections_on(index, devices.len(), connections);
        let queue_pairs = (connections_here().count() as u32 * (ranks - 1)).max(1);
        let domain = device.protection_domain()?;
        let cq = device.completion_queue(queue_pairs * (send_depth(queue_pairs) + 1))?;
        let to_each: usize = connections_here()
            .map(|connection| mailbox_sizes(connection, connections))
            .map(|(mailbox, staging)| mailbox + staging)
            .sum();
        let mailboxes = match to_each * (ranks as usize - 1) {
            0 => None,
            bytes => Some(Segment::new([&domain], bytes)?),
        };
        Ok(Rail {
            context: device.clone(),
            domain,
            cq,
            mailboxes,
        })
    };
    devices.iter().enumerate().map(rail).collect()
}

struct PendingLink {
    peer: Rank,
    connection: u32,
    rail: usize,
    /// Offset of its memory in the rail's, and the lengths of its mailbox and staging buffer.
    offset: usize,
    mailbox_sizes: (usize, usize),
    prepared: PreparedQueuePair,
}

pub(super) fn connect(
    rails: &[Rail],
    (rank, ranks): (Rank, u32),
    connections: u32,
    config: Config,
    exchange: &mut dyn Exchange,
) -> Result<Vec<Vec<Option<Link>>>, EngineError> {
    let mut pending = Vec::new();
    let mut offsets = vec![0; rails.len()];
    let mut addresses = vec![VERSION.to_vec(); ranks as usize];
    for connection in 0..connections {
        let on = connection as usize % rails.len();
        let rail = &rails[on];
        let here = connections_on(on, rails.len(), connections).count() as u32;
        let (mailbox, staging) = mailbox_sizes(connection, connections);
        for peer in (0..ranks).map(Rank).filter(|&peer| peer != rank) {
            let prepared = rail
                .domain
                .queue_pair(&rail.cq)
                .max_send_wr(send_depth(here * (ranks - 1)))
                .max_recv_wr(1)
                .max_inline_data(INLINE as u32)
                .allow_remote_write()
                .timeout(config.timeout)
                .tag(u64::from(connection) << 32 | u64::from(peer.0))
                .rc()
                .map_err(|error| EngineError::QueuePair { peer, error })?;
            let offset = offsets[on];
            offsets[on] += mailbox + staging;
            let Some(mailboxes) = &rail.mailboxes else { continue };
            let inbox = Remote::<WriteAccess>::from_raw(
                mailboxes.start().addr() as u64 + offset as u64,
                mailboxes.rkey(0),
                mailbox as u64,
            );
            let address = &mut addresses[peer.index()];
            address.extend_from_slice(&prepared.endpoint().to_bytes());
            address.extend_from_slice(&inbox.to_bytes());
            pending.push(PendingLink {
                peer,
                connection,
                rail: on,
                offset,
                mailbox_sizes: (mailbox, staging),
                prepared,
            });
        }
    }
    let received = exchange.all_to_all(addresses).map_err(EngineError::Exchange)?;
    let mut links: Vec<Vec<Option<Link>>> = (0..connections).map(|_| (0..ranks).map(|_| None).collect()).collect();
    for pending_link in pending {
        let (peer, connection) = (pending_link.peer, pending_link.connection as usize);
        let address = received
            .get(peer.index())
            .and_then(|all| address(all, connection, pending_link.mailbox_sizes.0));
        let Some((endpoint, peer_mailbox)) = address else {
            return Err(EngineError::BadAddress { peer });
        };
        let qp = pending_link
            .prepared
            .connect(&endpoint)
            .map_err(|error| EngineError::QueuePair { peer, error })?;
        links[connection][peer.index()] = Some(link(
            &rails[pending_link.rail],
            (pending_link.offset, pending_link.mailbox_sizes),
            peer,
            qp,
            peer_mailbox,
        )?);
    }
    // No rank sends before all are connected.
    exchange.barrier().map_err(EngineError::Exchange)?;
    Ok(links)
}

fn link(
    rail: &Rail,
    (offset, (mailbox, len)): (usize, (usize, usize)),
    peer: Rank,
    qp: QueuePair,
    theirs: Remote<WriteAccess>,
) -> Result<Link, EngineError> {
    let staging = offset + mailbox;
    let memory = rail
        .mailboxes
        .as_ref()
        .and_then(|mailboxes| Some((mailboxes, mailboxes.alias(0, staging, len)?)));
    let Some((mailboxes, staging_alias)) = memory else {
        return Err(EngineError::BadAddress { peer });
    };
    let start = mailboxes.start();
    Ok(Link::new(
        peer,
        qp,
        MailboxMemory {
            local: start.wrapping_add(offset),
            remote: theirs,
            staging: start.wrapping_add(staging),
            staging_alias,
        },
    ))
}

/// A peer's endpoint and mailbox of a connection, of its addresses; the mailbox has this length.
fn address(all: &[u8], connection: usize, mailbox: usize) -> Option<(Endpoint, Remote<WriteAccess>)> {
    let (endpoint, range) = all
        .strip_prefix(&VERSION)?
        .get(connection * ADDRESS_BYTES..(connection + 1) * ADDRESS_BYTES)?
        .split_at(32);
    let mailbox_range = Remote::from_bytes(range).ok()?;
    (mailbox_range.len() == mailbox as u64).then_some(())?;
    Some((Endpoint::from_bytes(endpoint.try_into().ok()?).ok()?, mailbox_range))
}
