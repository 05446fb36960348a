//! Point-to-point messages between two ranks, beside the plans.
//!
//! Each message is an operation that only its two ends begin. Messages between two ranks in one
//! direction are ordered; nothing else is.
//!
//! A message uses [Simple](crate::Protocol::Simple) by rendezvous, in parts of one fragment. Each
//! grant carries the number of bytes that the receiver still expects, so two ends with different
//! lengths detect it before anything is written; even an empty message is granted and sent. Memory
//! that is not registered is copied through a few staged parts.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Engine;
use super::error::{EngineError, Failed, Waiting};
use super::link::Link;
use super::operation::{Data, Ticket};
use crate::failure::{Awaited, MESSAGES, Wait};
use crate::memory::Segment;
use crate::plan::Collective;
use crate::types::Rank;
use doorbell_verbs::Qpn;

const STAGED_PARTS: usize = 4;

/// The direction of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// Sent to the peer.
    Send,
    /// Received from the peer.
    Receive,
}

/// One end of a point-to-point message.
#[derive(Clone, Debug)]
pub struct Message {
    /// The other rank; or this one, for a message to itself.
    pub peer: Rank,
    /// The direction.
    pub direction: Direction,
    /// The source or target.
    pub data: Data,
    /// Its length; the other end has the same.
    pub bytes: usize,
    /// The timeout after which it fails.
    pub deadline: Option<Duration>,
}

struct Transfer {
    message: Message,
    number: u64,
    /// Parts: all, granted to the peer, and sent or received.
    parts: usize,
    granted: usize,
    moved: usize,
    /// The number of requests whose completion frees a staged part; the last one is always set.
    posted: [u64; STAGED_PARTS],
    staging: Option<Arc<Segment>>,
    began: Option<Instant>,
    result: Option<Result<(), Failed>>,
    taken: bool,
}

impl Transfer {
    fn part(&self, part: usize, fragment: usize) -> (usize, usize) {
        let at = part * fragment;
        (at, fragment.min(self.message.bytes - at))
    }

    fn slot(part: usize, fragment: usize) -> usize {
        part % STAGED_PARTS * fragment
    }
}

#[derive(Default)]
struct PeerQueue {
    sends: VecDeque<u64>,
    posted: VecDeque<u64>,
    /// Not completely received; the first `granted` of them are completely granted.
    receives: VecDeque<u64>,
    granted: usize,
    sent: u64,
    received: u64,
}

impl PeerQueue {
    fn is_idle(&self) -> bool {
        self.sends.is_empty() && self.posted.is_empty() && self.receives.is_empty()
    }
}

pub(super) struct PointToPoint {
    rank: Rank,
    connection: usize,
    rail: usize,
    fragment: usize,
    transfers: VecDeque<Transfer>,
    first: u64,
    peers: Vec<PeerQueue>,
    busy: Vec<Rank>,
    free_segments: Vec<Arc<Segment>>,
}

impl PointToPoint {
    pub(super) fn new(rank: Rank, ranks: u32, connection: usize, rail: usize, fragment: usize) -> Self {
        Self {
            rank,
            connection,
            rail,
            fragment: fragment / 4096 * 4096,
            transfers: VecDeque::new(),
            first: 1,
            peers: (0..ranks).map(|_| PeerQueue::default()).collect(),
            busy: Vec::new(),
            free_segments: Vec::new(),
        }
    }

    fn index(&self, ticket: Ticket) -> Option<usize> {
        usize::try_from((ticket.0 & !MESSAGES).checked_sub(self.first)?).ok()
    }

    pub(super) fn is_idle(&self) -> bool {
        self.transfers
            .iter()
            .all(|transfer| transfer.taken || matches!(transfer.result, Some(Ok(()))))
    }

    #[inline]
    pub(super) fn is_busy(&self) -> bool {
        !self.busy.is_empty()
    }

    pub(super) fn outstanding(&self) -> usize {
        self.transfers.iter().filter(|transfer| !transfer.taken).count()
    }

    pub(super) fn has(&self, ticket: Ticket) -> bool {
        self.index(ticket)
            .and_then(|index| self.transfers.get(index))
            .is_some_and(|transfer| !transfer.taken)
    }

    pub(super) fn take(&mut self, ticket: Ticket) -> Option<Result<(), Failed>> {
        let index = self.index(ticket)?;
        let transfer = self.transfers.get_mut(index).filter(|transfer| !transfer.taken)?;
        let result = transfer.result.clone()?;
        transfer.taken = true;
        (transfer.message.data, transfer.staging) = (Data::None, None);
        while self.transfers.front().is_some_and(|transfer| transfer.taken) {
            self.transfers.pop_front();
            self.first += 1;
        }
        Some(result)
    }

    /// When each was first seen in flight, and its timeout; also of those failed and not taken.
    pub(super) fn expiring(&mut self) -> impl Iterator<Item = (Instant, Duration)> + '_ {
        let open = self
            .transfers
            .iter_mut()
            .filter(|transfer| !transfer.taken && !matches!(transfer.result, Some(Ok(()))));
        open.filter_map(|transfer| {
            let deadline = transfer.message.deadline?;
            Some((*transfer.began.get_or_insert_with(Instant::now), deadline))
        })
    }

    pub(super) fn fail(&mut self, why: &Failed) {
        for transfer in &mut self.transfers {
            transfer.result.get_or_insert_with(|| Err(why.clone()));
        }
        self.busy.clear();
        self.peers.iter_mut().for_each(|queue| *queue = PeerQueue::default());
    }

    pub(super) fn drive(&mut self, links: &mut [Option<Link>]) -> Result<bool, Failed> {
        let mut moved = false;
        for index in 0..self.busy.len() {
            let peer = self.busy[index];
            if peer == self.rank {
                moved |= self.copy_to_self()?;
            } else if let Some(link) = links.get_mut(peer.index()).and_then(Option::as_mut) {
                moved |= self.confirm(peer, link);
                moved |= self.send(peer, link)?;
                moved |= self.receive(peer, link);
                moved |= self.grant(peer, link);
                link.flush_control_writes()?;
            }
        }
        if moved {
            let peers = &self.peers;
            self.busy.retain(|peer| !peers[peer.index()].is_idle());
        }
        Ok(moved)
    }

    fn confirm(&mut self, peer: Rank, link: &Link) -> bool {
        let queue = &mut self.peers[peer.index()];
        let mut moved = false;
        while let Some(&number) = queue.posted.front() {
            let transfer = &mut self.transfers[(number - self.first) as usize];
            if link.completed < transfer.posted[(transfer.parts - 1) % STAGED_PARTS] {
                break;
            }
            transfer.result = Some(Ok(()));
            queue.posted.pop_front();
            moved = true;
        }
        moved
    }

    fn send(&mut self, peer: Rank, link: &mut Link) -> Result<bool, Failed> {
        let queue = &mut self.peers[peer.index()];
        let mut moved = false;
        while let Some(&number) = queue.sends.front() {
            let transfer = &mut self.transfers[(number - self.first) as usize];
            while transfer.moved < transfer.parts {
                if !link.is_granted() {
                    return Ok(moved);
                }
                let (at, len) = transfer.part(transfer.moved, self.fragment);
                let rest = link.granted_rest();
                if rest != (transfer.message.bytes - at) as u64 {
                    return Err(Failed::Length {
                        peer,
                        message: transfer.number,
                        bytes: transfer.message.bytes as u64,
                        expected: at as u64 + rest,
                    });
                }
                let slot = transfer.moved % STAGED_PARTS;
                let source = match (&transfer.message.data, &transfer.staging) {
                    _ if len == 0 => None,
                    (Data::Registered(segment, offset), _) => segment.alias(self.rail, offset + at, len),
                    (data, Some(staging)) => {
                        if transfer.moved >= STAGED_PARTS && link.completed < transfer.posted[slot] {
                            return Ok(moved);
                        }
                        let place = Transfer::slot(transfer.moved, self.fragment);
                        let from = data.start().wrapping_add(at);
                        // SAFETY: the part lies in the source, by `submit_message`'s contract; its
                        // staging buffer is as long, and its previous contents are acknowledged.
                        unsafe { core::ptr::copy_nonoverlapping(from, staging.start().add(place), len) };
                        staging.alias(0, place, len)
                    }
                    (_, None) => None,
                };
                transfer.posted[slot] = link.send_granted(source.map(|source| (source, len)))?;
                transfer.moved += 1;
                moved = true;
            }
            queue.sends.pop_front();
            queue.posted.push_back(number);
        }
        Ok(moved)
    }

    fn receive(&mut self, peer: Rank, link: &mut Link) -> bool {
        let queue = &mut self.peers[peer.index()];
        let mut moved = false;
        while let Some(&number) = queue.receives.front() {
            let transfer = &mut self.transfers[(number - self.first) as usize];
            while transfer.moved < transfer.granted && link.has_arrived() {
                link.receive_granted();
                if let Some(staging) = &transfer.staging {
                    let (at, len) = transfer.part(transfer.moved, self.fragment);
                    let into = transfer.message.data.start().wrapping_add(at);
                    // SAFETY: the part lies in the target, by `submit_message`'s contract; it has
                    // arrived in its staging buffer, which is not written before it is granted
                    // again.
                    unsafe {
                        let from = staging.start().add(Transfer::slot(transfer.moved, self.fragment));
                        core::ptr::copy_nonoverlapping(from, into, len);
                    }
                }
                transfer.moved += 1;
                moved = true;
            }
            if transfer.moved < transfer.parts {
                break;
            }
            transfer.result = Some(Ok(()));
            queue.receives.pop_front();
            queue.granted -= 1;
        }
        moved
    }

    fn grant(&mut self, peer: Rank, link: &mut Link) -> bool {
        let queue = &mut self.peers[peer.index()];
        let mut moved = false;
        while let Some(&number) = queue.receives.get(queue.granted) {
            let transfer = &mut self.transfers[(number - self.first) as usize];
            while transfer.granted < transfer.parts {
                let full = transfer.staging.is_some() && transfer.granted - transfer.moved == STAGED_PARTS;
                if full || !link.may_grant() {
                    return moved;
                }
                let (at, len) = transfer.part(transfer.granted, self.fragment);
                let (addr, rkey) = match (&transfer.message.data, &transfer.staging) {
                    (Data::Registered(segment, offset), _) => (
                        segment.start().wrapping_add(offset + at).addr(),
                        segment.rkey(self.rail),
                    ),
                    (_, Some(staging)) => {
                        let place = Transfer::slot(transfer.granted, self.fragment);
                        (staging.start().wrapping_add(place).addr(), staging.rkey(0))
                    }
                    (_, None) => (0, 0),
                };
                let rest = (transfer.message.bytes - at) as u64;
                link.grant(addr as u64, rkey, len as u32, rest);
                transfer.granted += 1;
                moved = true;
            }
            queue.granted += 1;
        }
        moved
    }

    fn copy_to_self(&mut self) -> Result<bool, Failed> {
        let queue = &mut self.peers[self.rank.index()];
        let mut moved = false;
        while let (Some(&sent), Some(&received)) = (queue.sends.front(), queue.receives.front()) {
            let transfer = |number: u64| &self.transfers[(number - self.first) as usize];
            let (from, into) = (&transfer(sent).message, &transfer(received).message);
            if from.bytes != into.bytes {
                return Err(Failed::Length {
                    peer: self.rank,
                    message: transfer(sent).number,
                    bytes: from.bytes as u64,
                    expected: into.bytes as u64,
                });
            }
            if from.bytes > 0 {
                // SAFETY: both are as long, by `submit_message`'s contract.
                unsafe { core::ptr::copy(from.data.start(), into.data.start(), from.bytes) };
            }
            for number in [sent, received] {
                self.transfers[(number - self.first) as usize].result = Some(Ok(()));
            }
            queue.sends.pop_front();
            queue.receives.pop_front();
            moved = true;
        }
        Ok(moved)
    }

    pub(super) fn waits(&self, links: &[Vec<Option<Link>>]) -> Vec<(u64, Wait)> {
        let mut waits = Vec::new();
        let links = links.get(self.connection);
        for &peer in &self.busy {
            let Some(link) = links.and_then(|links| links.get(peer.index())?.as_ref()) else {
                continue;
            };
            let queue = &self.peers[peer.index()];
            let first = [
                (queue.receives.front(), Awaited::Message),
                (queue.sends.front(), Awaited::Credit),
                (queue.posted.front(), Awaited::Acknowledgement),
            ];
            for (number, awaited) in first {
                let Some(&number) = number else { continue };
                let transfer = &self.transfers[(number - self.first) as usize];
                let wait = Wait {
                    operation: MESSAGES | transfer.number,
                    connection: self.connection as u32,
                    slice: transfer.moved as u64,
                    step: 0,
                    peer,
                    qpn: link.qpn().get(),
                    awaited,
                };
                waits.push((number, wait));
            }
        }
        waits
    }

    pub(super) fn waiting(&self, links: &[Vec<Option<Link>>], channel: u32) -> Option<Waiting> {
        let (_, wait) = self.waits(links).into_iter().min_by_key(|(number, _)| *number)?;
        Some(Waiting {
            operation: wait.operation,
            collective: Collective::SendRecv,
            channel,
            strand: 0,
            slice: wait.slice,
            step: wait.step,
            peer: wait.peer,
            qpn: Qpn::truncated(wait.qpn),
        })
    }
}

impl Engine {
    /// Submits a message, to be driven by [`progress`](Self::progress). Only its two ranks do; both
    /// submit messages of one direction in the same order.
    ///
    /// # Errors
    /// When the engine has failed, there is no such rank, or no memory; then it was not submitted.
    ///
    /// # Safety
    /// The data is valid for the message's length until the result is taken or the engine is
    /// dropped. Until then no other code writes it, or reads what is received; other operations in
    /// flight have other outputs.
    pub unsafe fn submit_message(&mut self, message: Message) -> Result<Ticket, EngineError> {
        if let Some(broken) = &self.failed {
            return Err(broken.why.clone().into());
        }
        let (rank, ranks, peer) = (self.rank, self.ranks, message.peer);
        if peer.0 >= ranks {
            return Err(EngineError::NoRank { rank: peer, ranks });
        }
        let refuse = |what| {
            Err(EngineError::Operation {
                collective: Collective::SendRecv,
                what,
            })
        };
        match &message.data {
            _ if message.bytes == 0 => {}
            Data::None => return refuse("a message has bytes, and no memory was given"),
            Data::Registered(segment, offset) => {
                if offset
                    .checked_add(message.bytes)
                    .is_none_or(|queue| queue > segment.len())
                {
                    return refuse("a message goes beyond its segment");
                }
            }
            Data::Plain(_) => {}
        }
        let p2p = &mut self.p2p;
        let staging = match message.data {
            Data::Plain(_) if message.bytes > 0 && peer != rank => {
                let len = message.bytes.min(STAGED_PARTS * p2p.fragment).next_multiple_of(4096);
                let free =
                    |free_segments: &&Arc<Segment>| free_segments.len() >= len && Arc::strong_count(free_segments) == 1;
                let free_segments = p2p.free_segments.iter().find(free).cloned();
                let segment = match free_segments {
                    Some(free_segments) => free_segments,
                    None => {
                        p2p.free_segments
                            .retain(|free_segments| Arc::strong_count(free_segments) > 1);
                        let segment = Arc::new(Segment::new([&self.rails[p2p.rail].domain], len)?);
                        p2p.free_segments.push(Arc::clone(&segment));
                        segment
                    }
                };
                Some(segment)
            }
            _ => None,
        };
        let ticket = p2p.first + p2p.transfers.len() as u64;
        let queue = &mut p2p.peers[peer.index()];
        if queue.is_idle() {
            p2p.busy.push(peer);
        }
        let (queue, count) = match message.direction {
            Direction::Send => (&mut queue.sends, &mut queue.sent),
            Direction::Receive => (&mut queue.receives, &mut queue.received),
        };
        queue.push_back(ticket);
        *count += 1;
        p2p.transfers.push_back(Transfer {
            number: *count,
            parts: message.bytes.div_ceil(p2p.fragment).max(1),
            granted: 0,
            moved: 0,
            posted: [0; STAGED_PARTS],
            staging,
            began: None,
            result: None,
            taken: false,
            message,
        });
        Ok(Ticket(MESSAGES | ticket))
    }
}
