//! Simulates the groups of all ranks by their signals alone: detects deadlock, and records what
//! each rank knows about the others at each group.

use std::collections::HashMap;

use super::{Group, Location, Messages, Operand, Signal, Strand, fuse};
use crate::types::Rank;

/// A group's position in its rank's order, and the rank's knowledge after the group's waits: per
/// rank, the number of its groups known to be done.
type Knowledge = (u32, Vec<u32>);

pub(super) struct History {
    done: Vec<Vec<Vec<Knowledge>>>,
}

#[derive(Clone, Default)]
struct PairState {
    /// Messages signaled, staged and direct, each with the knowledge at that point.
    signaled: [Vec<Vec<u32>>; 2],
    read: u32,
}

/// Simulates all ranks for more slices than there are slots.
///
/// # Errors
/// A deadlocked rank.
pub(super) fn run(strands: &[Strand], slots: u32) -> Result<History, Rank> {
    let ranks = strands.len();
    let slices = slots + ranks as u32 + 2;
    let mut between = vec![vec![PairState::default(); ranks]; ranks];
    let mut history = History {
        done: strands
            .iter()
            .map(|strand| vec![vec![(0, Vec::new()); strand.groups.len()]; slices as usize])
            .collect(),
    };
    let orders: Vec<Vec<Step>> = strands.iter().map(|strand| order(strand, slices)).collect();
    let mut at = vec![0; ranks];
    let mut known = vec![vec![0u32; ranks]; ranks];
    loop {
        let mut moved = false;
        for (rank, strand) in strands.iter().enumerate() {
            while let Some(step) = orders[rank].get(at[rank]) {
                let mut next = known[rank].clone();
                let is_satisfied = step.iter().all(|&(slice, index)| {
                    let mut waits = strand.groups[index].waits.iter();
                    waits.all(|&wait| is_satisfied(wait, slice, rank, strand, &between, slots, &mut next))
                });
                if !is_satisfied {
                    break;
                }
                let turn = at[rank] as u32;
                for &(slice, index) in step {
                    history.done[rank][slice as usize][index] = (turn, next.clone());
                }
                at[rank] += 1;
                next[rank] = at[rank] as u32;
                known[rank] = next;
                for &(slice, index) in step {
                    for &signal in &strand.groups[index].signals {
                        record_signal(signal, slice, rank, strand, &mut between, &known[rank]);
                    }
                }
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    match (0..ranks).find(|&rank| at[rank] < orders[rank].len()) {
        Some(rank) => Err(Rank(rank as u32)),
        None => Ok(history),
    }
}

/// The waiting rank then also has the signaling rank's knowledge.
fn is_satisfied(
    wait: Signal,
    slice: u32,
    rank: usize,
    strand: &Strand,
    between: &[Vec<PairState>],
    slots: u32,
    known: &mut [u32],
) -> bool {
    match wait {
        Signal::Direct { peer, message } | Signal::Staged { peer, message } => {
            let direct = matches!(wait, Signal::Direct { .. });
            let traffic = &strand.peers[peer.index()];
            let each = if direct {
                traffic.received_direct
            } else {
                traffic.received_staged
            };
            let signaled = &between[peer.index()][rank].signaled[usize::from(direct)];
            let signaled = signaled.get((slice * each + message) as usize);
            for (known, theirs) in known.iter_mut().zip(signaled.into_iter().flatten()) {
                *known = (*known).max(*theirs);
            }
            signaled.is_some()
        }
        Signal::Credit { peer, staged } => {
            let number = slice * strand.peers[peer.index()].sent_staged + staged;
            number < slots + between[peer.index()][rank].read
        }
        Signal::Ready { .. } => true,
    }
}

fn record_signal(
    signal: Signal,
    slice: u32,
    rank: usize,
    strand: &Strand,
    between: &mut [Vec<PairState>],
    known: &[u32],
) {
    match signal {
        Signal::Direct { peer, message } | Signal::Staged { peer, message } => {
            let direct = matches!(signal, Signal::Direct { .. });
            let traffic = &strand.peers[peer.index()];
            let each = if direct {
                traffic.sent_direct
            } else {
                traffic.sent_staged
            };
            let number = slice * each + message + 1;
            let signaled = &mut between[rank][peer.index()].signaled[usize::from(direct)];
            signaled.resize(signaled.len().max(number as usize), known.to_vec());
        }
        Signal::Credit { peer, staged } => {
            let number = slice * strand.peers[peer.index()].received_staged + staged + 1;
            let read = &mut between[rank][peer.index()].read;
            *read = number.max(*read);
        }
        Signal::Ready { .. } => {}
    }
}

type Step = Vec<(u32, usize)>;

fn order(strand: &Strand, slices: u32) -> Vec<Step> {
    let mut order = Vec::new();
    for turn in 0..slices + strand.latest() {
        for group in 0..strand.groups.len() {
            let slice = turn.checked_sub(strand.lateness(group)).filter(|slice| *slice < slices);
            let Some(slice) = slice else { continue };
            match order.last_mut() {
                Some(last) if strand.joined && group == strand.ahead as usize && turn < slices => {
                    Step::push(last, (slice, group))
                }
                _ => order.push(vec![(slice, group)]),
            }
        }
    }
    order
}

/// Whether each credit is returned when all messages below it have been read, and the last ones
/// when all have been.
pub(super) fn credits_are_true(strand: &Strand) -> bool {
    const SLICES: u32 = 4;
    let each = |from: Rank| strand.peers[from.index()].received_staged;
    let read = |group: &Group| -> Vec<(Rank, u32)> {
        let sources = group.bodies.iter().flat_map(|body| &body.sources);
        let received = |source: &Operand| match source.at {
            Location::Received(from, number) => Some((from, number)),
            _ => None,
        };
        sources.filter_map(received).collect()
    };
    // By message, the group that reads it last.
    let mut last = HashMap::new();
    for (index, group) in strand.groups.iter().enumerate() {
        last.extend(read(group).into_iter().map(|message| (message, index)));
    }
    let messages = last
        .keys()
        .flat_map(|&(from, number)| (0..SLICES).map(move |slice| (from, slice, number)));
    let mut unread: Vec<(Rank, u32)> = messages
        .map(|(from, slice, number)| (from, slice * each(from) + number))
        .collect();
    let mut returned = vec![0; strand.peers.len()];
    for (slice, index) in order(strand, SLICES).into_iter().flatten() {
        let group = &strand.groups[index];
        for (from, number) in read(group) {
            if last[&(from, number)] == index {
                unread.retain(|message| *message != (from, slice * each(from) + number));
            }
        }
        let in_last = group.last_signals.iter().filter(|_| slice + 1 == SLICES);
        for signal in group.signals.iter().chain(in_last) {
            let Signal::Credit { peer, staged } = *signal else {
                continue;
            };
            let until = slice * each(peer) + staged + 1;
            if unread.iter().any(|(from, number)| *from == peer && *number < until) {
                return false;
            }
            returned[peer.index()] = until.max(returned[peer.index()]);
        }
    }
    let sent = strand
        .peers
        .iter()
        .map(|peer| (SLICES + peer.received_late) * peer.received_staged);
    unread.is_empty() && returned.into_iter().eq(sent)
}

/// Messages stored into an output that its owner may still access: sender, receiver, index.
pub(super) fn premature_stores(
    strands: &[Strand],
    history: &History,
    messages: &Messages,
    shift: impl Fn(Rank) -> Option<i64>,
) -> Vec<(Rank, Rank, u32)> {
    let mut found = Vec::new();
    for (from, strand) in strands.iter().enumerate() {
        let stores = strand.groups.iter().enumerate().flat_map(|(index, group)| {
            let targets = group.bodies.iter().flat_map(|body| &body.targets);
            targets.filter_map(move |target| match target.at {
                Location::TheirOutput(to, block) => Some((index, to, block)),
                _ => None,
            })
        });
        for (index, to, block) in stores {
            let sender = Rank(from as u32);
            let is_it = |message: &super::Message| message.is_direct && message.output == Some(block);
            let Some(number) = messages.get(&(sender, to)).and_then(|list| list.iter().position(is_it)) else {
                continue;
            };
            let message = messages[&(sender, to)][number].number;
            let place = fuse::memory(Location::Output(block), None);
            let theirs = &strands[to.index()];
            let waits = |word: &Signal| matches!(*word, Signal::Direct { peer, message: last } if peer == sender && last >= message);
            let before = theirs
                .groups
                .iter()
                .enumerate()
                .take_while(|(_, group)| !group.waits.iter().any(waits));
            let touching = before.filter(|(_, group)| {
                let operands = group
                    .bodies
                    .iter()
                    .flat_map(|body| body.sources.iter().chain(&body.targets));
                operands
                    .map(|operand| fuse::memory(operand.at, shift(to)))
                    .any(|touched| touched == place)
            });
            let is_early = touching.into_iter().any(|(other, _)| {
                (0..history.done[from].len()).any(|slice| {
                    let (_, known) = &history.done[from][slice][index];
                    let (turn, _) = &history.done[to.index()][slice][other];
                    known[to.index()] <= *turn
                })
            });
            if is_early {
                found.push((sender, to, number as u32));
            }
        }
    }
    found
}
