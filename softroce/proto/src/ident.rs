//! The receive side of the IPv4 Identification, which the ICRC covers and a UDP socket does not show.
//!
//! The CRC is linear, so a packet's ICRC tells which Identification would make it right ([`icrc::solve_ident`]): every whole packet has one, and of damaged
//! packets one in 2^16 has one too. To accept whatever has one would leave 16 bits of the check. So [`IdentTracker`] remembers, per pair of IPv4 addresses,
//! which Identifications are plausible:
//!
//! - *Exact* sources, such as this crate's own device: a socket that forbids fragmentation sends 0, and segment *i* of a segmented send has *i*. Plausible are 0,
//!   the datagram's place in its coalesced receive, and all below `MAX_SEGMENTS`, as a network may deliver segments in other groups than they were sent.
//! - *Counting* sources, such as Linux' rxe: the kernel counts per source, destination and protocol, and when it last did so *t* ticks ago, first adds a random
//!   number below *t*, to hide how much is sent. A tick is 1 ms at least. Plausible are 0, the place, the `AHEAD` + *t* after the last and the `BEHIND` before.
//!   `AHEAD` allows for 4095 packets lost in one burst: a READ's responses keep to no window, and what of them finds the socket full is lost in one piece. `BEHIND` is for reordering.
//! - The first packet of a pair is accepted with any Identification: to refuse it would cost each new peer a retransmission timeout.
//! - An implausible one is refused, but the next packet is accepted when its Identification lies within `FOLLOWS` + *t* after it. So a source that
//!   changes its ways (a reboot, another device behind the address) loses one packet, which the transport sends again.
//!
//! What this costs: random damage to a packet passes with probability 2^-25 from an exact source, (4162 + *t* in ms) · 2^-32 ≈ 2^-20 from a counting
//! one (2^-16 at most, after a minute's silence), 2^-16 in the first packet of a pair, and (64 + *t*) · 2^-48 by two
//! implausible packets in a row. A check with a known Identification, or over IPv6, has 2^-32. Nothing here is a defence against forgery, nor is the ICRC.
//!
//! The table is of fixed size and forgets the pair that has been silent longest, those with a single packet first: a flood of sources makes the check of others as
//! weak as that of a first packet, but costs no memory.

#[cfg(test)]
mod tests;

use core::net::IpAddr;
use core::time::Duration;

use crate::icrc::{self, FlowCache, solve_ident};
use crate::{Datagram, Ident, Instant};

/// More segments than the kernel makes of one send (`UDP_MAX_SEGMENTS`).
const MAX_SEGMENTS: u16 = 128;
/// How far ahead of the last Identification a counting source may be, in packets, when no time has passed.
const MAX_AHEAD: u64 = 4096;
/// How far behind it, in packets.
const MAX_BEHIND: u16 = 64;
/// How far after an implausible Identification the next one proves it.
const MAX_CANDIDATE_GAP: u64 = 64;

const SETS: usize = 256;
const WAYS: usize = 4;

/// What a datagram's ICRC says of it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[must_use]
pub enum Verdict {
    /// It is whole.
    Valid,
    /// It is damaged: no Identification makes its ICRC right, or not the known one.
    Corrupt,
    /// The ICRC is right with an implausible Identification. It is to be dropped; the next datagram may prove that the source now counts from there.
    Unproven,
}

/// Checks the ICRC of received datagrams. See the [module](self) for how it learns their Identifications.
#[derive(Clone, Debug)]
pub struct IdentTracker {
    flows: FlowCache,
    sets: Box<[[Option<AddressPair>; WAYS]; SETS]>,
}

/// What is known of a pair of addresses.
#[derive(Clone, Debug)]
struct AddressPair {
    /// Source and destination address.
    pair: u64,
    /// The Identification accepted last, or before those that came late.
    last: u16,
    /// When.
    at: Instant,
    /// It counts, as opposed to being exact.
    counting: bool,
    /// More than one packet was accepted.
    proven: bool,
    /// The implausible Identification of the packet before.
    candidate: Option<(u16, Instant)>,
}

impl Default for IdentTracker {
    fn default() -> Self {
        Self {
            flows: FlowCache::default(),
            sets: Box::new([const { [const { None }; WAYS] }; SETS]),
        }
    }
}

impl IdentTracker {
    /// Checks a datagram that arrived at `now`. Costs one CRC over it, where the Identification is as guessed.
    pub fn check(&mut self, now: Instant, datagram: &Datagram<'_>) -> Verdict {
        let &Datagram {
            src,
            dst,
            src_port,
            dst_port,
            ident,
            payload,
        } = datagram;
        let flow = self.flows.flow(src, dst, src_port, dst_port);
        let (segment, pair) = match (ident, pair_of(src, dst)) {
            (Ident::Unknown { segment }, Some(pair)) => (segment, pair),
            (Ident::Known(ident), _) => return known(flow.verify(ident, payload)),
            (_, None) => return known(flow.verify(0, payload)),
        };
        let set = &mut self.sets[icrc::mix(pair) as usize % SETS];
        let source = set.iter_mut().flatten().find(|source| source.pair == pair);
        let guess = source.as_ref().map_or(segment, |source| source.guess(segment));
        let ident = match flow.syndrome(guess, payload) {
            Some(0) => guess,
            Some(syndrome) => match solve_ident(syndrome, payload.len() - icrc::LEN) {
                Some(change) => guess ^ change,
                None => return Verdict::Corrupt,
            },
            None => return Verdict::Corrupt,
        };
        match source {
            Some(source) => source.evaluate(ident, segment, now),
            None => {
                *victim(set) = Some(AddressPair::new(pair, ident, segment, now));
                Verdict::Valid
            }
        }
    }
}

impl AddressPair {
    fn new(pair: u64, ident: u16, segment: u16, now: Instant) -> Self {
        let counts = ident != 0 && ident != segment;
        Self {
            pair,
            last: ident,
            at: now,
            counting: counts,
            proven: false,
            candidate: None,
        }
    }

    /// The most likely Identification of the next packet.
    fn guess(&self, segment: u16) -> u16 {
        if self.counting {
            self.last.wrapping_add(1)
        } else {
            segment
        }
    }

    /// Decides on a packet whose ICRC is right with `ident`, and learns from it.
    fn evaluate(&mut self, ident: u16, segment: u16, now: Instant) -> Verdict {
        let ahead = ident.wrapping_sub(self.last);
        if self.counting && u64::from(ahead) < MAX_AHEAD + ticks(now.since(self.at)) {
            return self.accept(ident, now, true);
        }
        if self.counting && ahead.wrapping_neg() <= MAX_BEHIND {
            return self.accept(self.last, now, true);
        }
        if ident == 0 || ident == segment || !self.counting && ident < MAX_SEGMENTS {
            return self.accept(ident, now, false);
        }
        if let Some((candidate, since)) = self.candidate {
            let after = u64::from(ident.wrapping_sub(candidate));
            // Not the same again: that may be the same damaged packet, duplicated behind where it was damaged.
            if after > 0 && after <= MAX_CANDIDATE_GAP + ticks(now.since(since)) {
                return self.accept(ident, now, true);
            }
        }
        self.candidate = Some((ident, now));
        Verdict::Unproven
    }

    fn accept(&mut self, last: u16, now: Instant, counts: bool) -> Verdict {
        *self = Self {
            pair: self.pair,
            last,
            at: now,
            counting: counts,
            proven: true,
            candidate: None,
        };
        Verdict::Valid
    }
}

/// The place for a new source: a free one, else that of the longest silent, those never proven first.
fn victim(set: &mut [Option<AddressPair>; WAYS]) -> &mut Option<AddressPair> {
    let mut oldest = 0;
    for (way, slot) in set.iter().enumerate() {
        let age = |slot: &Option<AddressPair>| slot.as_ref().map(|source| (source.proven, source.at));
        if age(slot) < age(&set[oldest]) {
            oldest = way;
        }
    }
    &mut set[oldest]
}

/// The most ticks in `time` that a kernel may have counted, with HZ of 1000 or less.
fn ticks(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX - MAX_AHEAD)
}

/// Both addresses, where they are IPv4 (mapped ones included).
fn pair_of(src: IpAddr, dst: IpAddr) -> Option<u64> {
    match (src.to_canonical(), dst.to_canonical()) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => Some(u64::from(src.to_bits()) << 32 | u64::from(dst.to_bits())),
        _ => None,
    }
}

fn known(valid: bool) -> Verdict {
    if valid { Verdict::Valid } else { Verdict::Corrupt }
}
