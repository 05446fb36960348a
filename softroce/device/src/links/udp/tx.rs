//! A batch of outgoing packets for few system calls.
//!
//! The engine writes packets into the batch's arena. Consecutive packets of equal size (the last
//! may be shorter) to one address, with equal traffic class and hop limit, form a *run*, which the
//! kernel segments (`UDP_SEGMENT` of udp(7)). Segment *i* leaves with IPv4 Identification *i*,
//! which the ICRC covers: a packet is sealed on entry, when its index is known.

use doorbell_roce_proto::wire::HOP_LIMIT;
use std::net::SocketAddr;
use std::ops::{Deref, DerefMut};

#[cfg(test)]
mod tests;

/// Bytes of a [`Slot`]: a payload of 4096 and the longest headers, pad and ICRC, rounded up.
pub(crate) const MAX_PACKET: usize = 4096 + 128;

/// The arena's bytes: they stay in a second-level cache between writing and sending.
pub(crate) const ARENA: usize = 256 << 10;

/// The most segments of a run: `UDP_MAX_SEGMENTS` of kernels before 6.9 (128 since).
pub const MAX_SEGMENTS: usize = 64;

/// The most bytes of a run: an IPv4 datagram's 65535, less 20 of IP and 8 of UDP header.
pub const MAX_RUN: usize = 65535 - 28;

/// Where a packet goes, and what its queue pair or address handle chose of its IP header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UdpDestination {
    /// The receiver's address and UDP port.
    pub addr: SocketAddr,
    /// IPv4 TOS or IPv6 traffic class: the DSCP in the upper six bits, ECN in the others.
    pub traffic_class: u8,
    /// TTL or hop limit, not 0.
    pub hop_limit: u8,
}

impl UdpDestination {
    /// The traffic class of a socket without options.
    pub(super) const TRAFFIC_CLASS: u8 = 0;
}

/// With the traffic class and hop limit of the link's socket.
impl From<SocketAddr> for UdpDestination {
    fn from(addr: SocketAddr) -> Self {
        Self {
            addr,
            traffic_class: Self::TRAFFIC_CLASS,
            hop_limit: HOP_LIMIT,
        }
    }
}

/// The IP and UDP header fields that the ICRC covers and the packet does not hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Envelope {
    /// The sender's address and UDP port.
    pub src: SocketAddr,
    /// The receiver's address and UDP port, and fields that the ICRC does not cover.
    pub dst: UdpDestination,
    /// The IPv4 Identification; meaningless over IPv6.
    pub ident: u16,
}

/// Computes the last 4 bytes of a packet, its ICRC. May be called again for the same packet with
/// another envelope. A packet whose Identification is not 0 directly follows the packet before it
/// in its run: same source, same destination.
pub trait Seal: FnMut(&mut [u8], &Envelope) + Send {
    /// A clone of it.
    fn boxed_clone(&self) -> Box<dyn Seal>;
}

impl<F: FnMut(&mut [u8], &Envelope) + Send + Clone + 'static> Seal for F {
    fn boxed_clone(&self) -> Box<dyn Seal> {
        Box::new(self.clone())
    }
}

/// A run: consecutive packets for one address that the kernel takes as one message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Run {
    dst: UdpDestination,
    start: usize,
    end: usize,
    /// The size of every packet but the last, which may be shorter.
    segment: usize,
    packets: usize,
}

impl Run {
    /// Whether no further packet fits, however short.
    fn is_full(&self, max_segments: usize) -> bool {
        self.packets == max_segments || self.end - self.start + self.segment > MAX_RUN
    }

    /// Whether a packet of `len` bytes may follow as the next segment.
    fn takes(&self, len: usize, dst: UdpDestination, max_segments: usize) -> bool {
        let last_is_full = self.end - self.start == self.packets * self.segment;
        self.dst == dst
            && len <= self.segment
            && last_is_full
            && self.packets < max_segments
            && self.end - self.start + len <= MAX_RUN
    }
}

/// A run as a link sends it.
#[derive(Clone, Copy, Debug)]
pub struct RunRef<'a> {
    /// The destination of all its packets.
    pub dst: UdpDestination,
    /// Its packets, one after another.
    pub bytes: &'a [u8],
    /// The size of every packet but the last, in bytes.
    pub segment: usize,
    /// The number of packets.
    pub packets: usize,
}

/// A batch of outgoing packets. Allocates nothing after [`TxBatch::new`].
pub struct TxBatch {
    local: SocketAddr,
    seal: Box<dyn Seal>,
    arena: Box<[u8]>,
    filled: usize,
    runs: Vec<Run>,
    sent: usize,
    max_segments: usize,
    /// How many of the unsent packets, from the front, a capture has written.
    pub(super) captured: usize,
}

impl TxBatch {
    /// An empty batch for a link bound to `local`, whose packets are sealed by `seal`.
    pub fn new(local: SocketAddr, seal: impl Seal + 'static) -> Self {
        Self::sealed_by(local, Box::new(seal))
    }

    fn sealed_by(local: SocketAddr, seal: Box<dyn Seal>) -> Self {
        Self {
            local,
            seal,
            arena: vec![0; ARENA].into_boxed_slice(),
            filled: 0,
            // Runs of one small packet each are rare: grown when needed.
            runs: Vec::with_capacity(ARENA / 256),
            sent: 0,
            max_segments: MAX_SEGMENTS,
            captured: 0,
        }
    }

    pub(super) fn clone_empty(&self) -> Self {
        Self::sealed_by(self.local, (*self.seal).boxed_clone())
    }

    /// Whether no packet is unsent.
    pub fn is_empty(&self) -> bool {
        self.sent == self.runs.len()
    }

    /// The number of unsent packets.
    pub fn len(&self) -> usize {
        self.runs().map(|run| run.packets).sum()
    }

    /// Space for one more packet, or `None` when the batch must be sent first. A run that the end
    /// of the batch would cut short is not begun: each costs the kernel as much as three packets.
    pub fn slot(&mut self) -> Option<Slot<'_>> {
        let left = ARENA - self.filled;
        let cut_short = |run: &Run| run.is_full(self.max_segments) && left < run.end - run.start;
        (left >= MAX_PACKET && !self.runs.last().is_some_and(cut_short)).then_some(Slot { batch: self })
    }

    /// The unsent runs, in order.
    pub fn runs(&self) -> impl Iterator<Item = RunRef<'_>> {
        self.runs[self.sent..].iter().map(|run| RunRef {
            dst: run.dst,
            bytes: &self.arena[run.start..run.end],
            segment: run.segment,
            packets: run.packets,
        })
    }

    /// The unsent packets, in order, each with its envelope.
    pub fn packets(&self) -> impl Iterator<Item = (Envelope, &[u8])> {
        self.runs().flat_map(|run| {
            let (src, dst) = (self.local, run.dst);
            (0..)
                .zip(run.bytes.chunks(run.segment))
                .map(move |(ident, packet)| (Envelope { src, dst, ident }, packet))
        })
    }

    /// Removes the first `runs` runs, sent or dropped.
    pub fn consume(&mut self, runs: usize) {
        let packets: usize = self.runs().take(runs).map(|run| run.packets).sum();
        self.captured = self.captured.saturating_sub(packets);
        self.sent = self.runs.len().min(self.sent.saturating_add(runs));
        if self.is_empty() {
            self.clear();
        }
    }

    /// Removes everything.
    pub fn clear(&mut self) {
        self.runs.clear();
        self.sent = 0;
        self.filled = 0;
        self.captured = 0;
    }

    /// Splits every unsent run, and every later one, into single packets: for a link without GSO. A
    /// single packet leaves with Identification 0, so that each is sealed anew.
    pub fn separate(&mut self) {
        self.max_segments = 1;
        let waiting: Vec<Run> = self.runs.drain(self.sent..).collect();
        for run in waiting {
            for start in (run.start..run.end).step_by(run.segment) {
                let end = run.end.min(start + run.segment);
                self.runs.push(Run {
                    dst: run.dst,
                    start,
                    end,
                    segment: end - start,
                    packets: 1,
                });
                let envelope = Envelope {
                    src: self.local,
                    dst: run.dst,
                    ident: 0,
                };
                (self.seal)(&mut self.arena[start..end], &envelope);
            }
        }
    }

    /// Adds the packet in the first `len` free bytes of the arena to a run, and seals it there.
    fn append(&mut self, len: usize, dst: UdpDestination) -> &mut [u8] {
        assert!((1..=MAX_PACKET).contains(&len), "a packet of {len} bytes");
        let (start, end) = (self.filled, self.filled + len);
        self.filled = end;
        let max_segments = self.max_segments;
        let open = self.runs[self.sent..]
            .last_mut()
            .filter(|run| run.takes(len, dst, max_segments));
        let index = if let Some(run) = open {
            run.end = end;
            run.packets += 1;
            run.packets - 1
        } else {
            self.runs.push(Run {
                dst,
                start,
                end,
                segment: len,
                packets: 1,
            });
            0
        };
        let envelope = Envelope {
            src: self.local,
            dst,
            // Below MAX_SEGMENTS.
            ident: index as u16,
        };
        let packet = &mut self.arena[start..end];
        (self.seal)(packet, &envelope);
        packet
    }
}

/// `MAX_PACKET` bytes of unspecified content for one packet. Dropping it adds nothing.
pub struct Slot<'a> {
    batch: &'a mut TxBatch,
}

impl<'a> Slot<'a> {
    /// Adds the first `len` bytes as a packet, the last 4 for the ICRC, and returns it sealed.
    ///
    /// # Panics
    /// When `len` is 0 or more than `MAX_PACKET`.
    pub fn send(self, len: usize, dst: impl Into<UdpDestination>) -> &'a mut [u8] {
        self.batch.append(len, dst.into())
    }
}

impl Deref for Slot<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.batch.arena[self.batch.filled..][..MAX_PACKET]
    }
}

impl DerefMut for Slot<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        let filled = self.batch.filled;
        &mut self.batch.arena[filled..][..MAX_PACKET]
    }
}
