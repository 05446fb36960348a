//! Bruck's algorithm: ⌈log₂ p⌉ rounds for any number of ranks. In round i each exchanges with the
//! ranks at distance 2^i, and forwards other ranks' data. (J. Bruck et al.: Efficient algorithms
//! for all-to-all communications in multiport message-passing systems, 1997.)

use super::{Members, Recipe, SINGLE_RANK, copy, recv, send};
use crate::plan::{PlanMemory, Span, Step};

/// The distances: 1, 2, 4 … below p.
fn rounds(p: u32) -> std::ops::Range<u32> {
    0..u32::BITS - (p - 1).leading_zeros()
}

/// Each sends all its data to the rank 2^i before it; parts are stored in order of arrival, the own
/// one first, and sorted at the end. ⌈log₂ p⌉ steps, (p−1)/p·n sent and received, n copied.
pub(super) const ALL_GATHER: Recipe = Recipe {
    steps: |members, _, v| {
        let p = members.ranks();
        let parts = |first, parts| Span::new(PlanMemory::Scratch, first, parts);
        let own = copy(Span::block(PlanMemory::Input, 0), parts(0, 1));
        let exchange = rounds(p).flat_map(move |round| {
            let distance = 1 << round;
            let count = distance.min(p - distance);
            let (to, from) = (members.rank(v + p - distance), members.rank(v + distance));
            [send(to, parts(0, count)), recv(from, parts(distance, count))]
        });
        let sort = members.runs(v, p).map(move |run| {
            copy(
                parts(run.at, run.ranks),
                Span::new(PlanMemory::Output, run.rank, run.ranks),
            )
        });
        Box::new(std::iter::once(own).chain(exchange).chain(sort))
    },
    scratch: |members, v| (0..members.ranks()).map(|part| members.rank(v + part).0).collect(),
    ..SINGLE_RANK
};

/// A part for the rank at distance d travels in round i if bit i of d is set; the parts of a round
/// are packed into one message. ⌈log₂ p⌉ steps; about ⌈log₂ p⌉/2·n sent, received and copied. Not
/// for all-to-all-v: all parts have one length.
pub(super) const ALL_TO_ALL: Recipe = Recipe {
    in_place: false,
    steps: |members, _, v| {
        let p = members.ranks();
        let exchange = rounds(p).flat_map(move |round| {
            let (distance, count) = (1 << round, parts_in_round(p, round));
            let packed = move |index| Span::block(PlanMemory::Scratch, packed_area(p, round) + index);
            let travel = (1..p).filter(move |part| part & distance != 0);
            let pack = travel
                .zip(0..)
                .map(move |(part, index)| (location_of(members, v, part, round), packed(index)));
            let message = Span::new(PlanMemory::Scratch, packed_area(p, round), count);
            let into = Span::new(PlanMemory::Scratch, arrivals_begin(p, round), count);
            let (to, from) = (members.rank(v + distance), members.rank(v + p - distance));
            copies(pack).chain([send(to, message), recv(from, into)])
        });
        let sort = (0..p).map(move |part| {
            let from = location_of(members, v, part, u32::BITS);
            (from, Span::block(PlanMemory::Output, members.rank(v + p - part).0))
        });
        Box::new(exchange.chain(copies(sort)))
    },
    scratch: |members, _| {
        let p = members.ranks();
        vec![0; (packed_area(p, 1) + parts_in_round(p, 1)) as usize]
    },
    ..SINGLE_RANK
};

/// The number of parts 0 … p−1 with bit `round` set.
const fn parts_in_round(p: u32, round: u32) -> u32 {
    let distance = 1 << round;
    (p >> (round + 1) << round) + (p & (2 * distance - 1)).saturating_sub(distance)
}

fn arrivals_begin(p: u32, round: u32) -> u32 {
    (0..round).map(|before| parts_in_round(p, before)).sum()
}

/// First block of a round's packed parts, behind all arrivals: two areas, used alternately.
fn packed_area(p: u32, round: u32) -> u32 {
    arrivals_begin(p, rounds(p).end) + round % 2 * parts_in_round(p, 0)
}

/// The location, before `round`, of the part that the member at position `v` holds and that travels
/// `part` in total: its input, or where it arrived in the last round in which it travelled.
fn location_of(members: &Members, v: u32, part: u32, round: u32) -> Span {
    let travelled = part & (1u32.checked_shl(round).unwrap_or(0).wrapping_sub(1));
    match travelled.checked_ilog2() {
        None => Span::block(PlanMemory::Input, members.rank(v + part).0),
        Some(last) => {
            let index = part >> (last + 1) << last | part & ((1 << last) - 1);
            Span::block(PlanMemory::Scratch, arrivals_begin(members.ranks(), last) + index)
        }
    }
}

/// Copies of blocks; consecutive blocks share a step.
fn copies(blocks: impl Iterator<Item = (Span, Span)>) -> impl Iterator<Item = Step> {
    let mut blocks = blocks.peekable();
    std::iter::from_fn(move || {
        let (mut from, mut into) = blocks.next()?;
        let follows = |span: Span, next: Span| next.place == span.place && next.first == span.first + span.blocks;
        while blocks
            .next_if(|next| follows(from, next.0) && follows(into, next.1))
            .is_some()
        {
            from.blocks += 1;
            into.blocks += 1;
        }
        Some(copy(from, into))
    })
}
