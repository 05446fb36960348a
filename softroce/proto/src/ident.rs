//! Receive side of the IPv4 Identification, which the ICRC covers and a UDP socket does not report
//! (decision 15).
//!
//! Every intact packet has an Identification that makes its ICRC right ([`icrc::solve_ident`]), and
//! so does one in 2^16 damaged packets. So [`IdentTracker`] remembers, per pair of IPv4 addresses,
//! which Identifications are plausible:
//!
//! - *Exact* sources, such as this crate's device: 0, the datagram's index in its coalesced
//!   receive, and all below `MAX_SEGMENTS`, as a network may deliver segments in other groups.
//! - *Counting* sources, such as Linux' rxe: the kernel counts per source, destination and
//!   protocol, and after *t* ticks of at least 1 ms without a packet first adds a random number
//!   below *t*. Plausible are 0, the index, the `MAX_AHEAD` + *t* after the last one and the
//!   `MAX_BEHIND` before it.
//! - The first packet of a pair: any, as refusing it would cost a retransmission timeout.
//! - An implausible one is refused, but the next packet is accepted within `MAX_CANDIDATE_GAP` +
//!   *t* after it: a source that changes its counting (a reboot) loses one packet.
//!
//! Random damage to a packet passes with probability 2^-25 from an exact source, (4162 + *t* in ms)
//! · 2^-32 ≈ 2^-20 from a counting one (at most 2^-16, after a minute's silence), 2^-16 in the
//! first packet of a pair, (64 + *t*) · 2^-48 by two implausible packets in a row, and 2^-32 with a
//! known Identification. This is no defence against forgery.
//!
//! The table has a fixed size and evicts the least recently used pair, those with a single packet
//! first: a flood of sources weakens the check of others to that of a first packet.

#[cfg(test)]
mod tests;

use core::net::IpAddr;
use core::time::Duration;

use crate::icrc::{self, FlowCache, solve_ident};
use crate::{Datagram, Ident, Instant};

/// More segments than the kernel accepts in one send (`UDP_MAX_SEGMENTS`).
const MAX_SEGMENTS: u16 = 128;
/// How far ahead a counting source may be at once: READ responses, which no window bounds, are lost
/// together when they overflow the socket buffer.
const MAX_AHEAD: u64 = 4096;
/// How far behind it may be, by reordering.
const MAX_BEHIND: u16 = 64;
const MAX_CANDIDATE_GAP: u64 = 64;

const SETS: usize = 256;
const WAYS: usize = 4;

/// The result of an ICRC check.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[must_use]
pub enum Verdict {
    /// Intact.
    Valid,
    /// Damaged: no Identification makes the ICRC right, or the known one does not.
    Corrupt,
    /// Right with an implausible Identification: to be dropped, but the next one may confirm it.
    Unproven,
}

/// Checks the ICRC of received datagrams and learns their Identifications: see the [module](self).
#[derive(Clone, Debug)]
pub struct IdentTracker {
    flows: FlowCache,
    sets: Box<[[Option<AddressPair>; WAYS]; SETS]>,
}

#[derive(Clone, Debug)]
struct AddressPair {
    /// Source and destination address.
    pair: u64,
    /// The Identification accepted last; late packets do not lower it.
    last: u16,
    at: Instant,
    /// A counting source, as opposed to an exact one.
    counting: bool,
    /// More than one packet was accepted.
    proven: bool,
    /// The implausible Identification of the previous packet.
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
    /// Checks a datagram received at `now`. One CRC over it if the Identification is as guessed.
    pub fn check(&mut self, now: Instant, datagram: &Datagram<'_>) -> Verdict {
        let &Datagram {
            src,
            dst,
            src_port,
            dst_port,
            ident,
            payload,
            ..
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

    fn guess(&self, segment: u16) -> u16 {
        if self.counting {
            self.last.wrapping_add(1)
        } else {
            segment
        }
    }

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
            // An equal one does not confirm it: a damaged packet may be duplicated.
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

/// The entry for a new pair: a free one, else the least recently used, unproven ones first.
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

/// The maximum number of ticks in `time`, with HZ of 1000 or less.
fn ticks(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX - MAX_AHEAD)
}

/// Both addresses, if they are IPv4 (including mapped ones).
fn pair_of(src: IpAddr, dst: IpAddr) -> Option<u64> {
    match (src.to_canonical(), dst.to_canonical()) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => Some(u64::from(src.to_bits()) << 32 | u64::from(dst.to_bits())),
        _ => None,
    }
}

fn known(valid: bool) -> Verdict {
    if valid { Verdict::Valid } else { Verdict::Corrupt }
}
