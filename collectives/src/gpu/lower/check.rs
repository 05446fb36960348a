//! Runs the groups of all ranks by their words alone: whether all come to their end, and what each knows of the others when it does something.

use super::{At, Messages, Strand, Word, fuse};
use crate::types::Rank;

/// Whoever does groups in their order: of each rank one, or two where its first groups are done apart from the rest ([`Strand::apart`]). A rank's two follow each other.
const EACH: usize = 2;

/// A group's place in the order of who does it, and what that one knew when it had waited for what the group needs: of each, how many of its groups were done.
type Knowledge = (u32, Vec<u32>);

/// What ranks knew of each other.
pub(super) struct History {
    /// By rank, slice and group.
    done: Vec<Vec<Vec<Knowledge>>>,
}

/// Between two ranks, seen from one of them.
#[derive(Clone, Default)]
struct Between {
    /// Messages that this one has told the other of, and what it knew then, one after another: staged ones, and direct ones.
    told: [Vec<Vec<u32>>; 2],
    /// Staged messages from the other that this one has read.
    read: u32,
}

/// Runs all ranks for more slices than there are slots.
///
/// # Errors
/// A rank that waits for ever.
pub(super) fn run(strands: &[Strand], slots: u32) -> Result<History, Rank> {
    let ranks = strands.len();
    let slices = slots + ranks as u32 + 2;
    let mut between = vec![vec![Between::default(); ranks]; ranks];
    let mut history = History {
        done: strands
            .iter()
            .map(|strand| vec![vec![(0, Vec::new()); strand.groups.len()]; slices as usize])
            .collect(),
    };
    let doers = ranks * EACH;
    let orders: Vec<Vec<(u32, usize)>> = strands.iter().flat_map(|strand| order(strand, slices)).collect();
    let mut at = vec![0; doers];
    let mut known = vec![vec![0u32; doers]; doers];
    loop {
        let mut moved = false;
        for doer in 0..doers {
            let rank = doer / EACH;
            let strand = &strands[rank];
            while let Some(&(slice, index)) = orders[doer].get(at[doer]) {
                let group = &strand.groups[index];
                let mut next = known[doer].clone();
                let has_come = group.waits.iter().all(|wait| match *wait {
                    Word::Direct { peer, message } | Word::Staged { peer, message } => {
                        let direct = matches!(wait, Word::Direct { .. });
                        let traffic = &strand.peers[peer.index()];
                        let each = if direct {
                            traffic.received_direct
                        } else {
                            traffic.received_staged
                        };
                        let told = &between[peer.index()][rank].told[usize::from(direct)];
                        let told = told.get((slice * each + message) as usize);
                        for (known, theirs) in next.iter_mut().zip(told.into_iter().flatten()) {
                            *known = (*known).max(*theirs);
                        }
                        told.is_some()
                    }
                    Word::Credit { peer, staged } => {
                        let number = slice * strand.peers[peer.index()].sent_staged + staged;
                        number < slots + between[peer.index()][rank].read
                    }
                    Word::Ready { .. } => true,
                });
                if !has_come {
                    break;
                }
                history.done[rank][slice as usize][index] = (at[doer] as u32, next.clone());
                at[doer] += 1;
                next[doer] = at[doer] as u32;
                known[doer] = next;
                for tell in &group.tells {
                    match *tell {
                        Word::Direct { peer, message } | Word::Staged { peer, message } => {
                            let direct = matches!(tell, Word::Direct { .. });
                            let traffic = &strand.peers[peer.index()];
                            let each = if direct {
                                traffic.sent_direct
                            } else {
                                traffic.sent_staged
                            };
                            let number = slice * each + message + 1;
                            let told = &mut between[rank][peer.index()].told[usize::from(direct)];
                            told.resize(told.len().max(number as usize), known[doer].clone());
                        }
                        Word::Credit { peer, staged } => {
                            let number = slice * strand.peers[peer.index()].received_staged + staged + 1;
                            let read = &mut between[rank][peer.index()].read;
                            *read = number.max(*read);
                        }
                        Word::Ready { .. } => {}
                    }
                }
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    match (0..doers).find(|&doer| at[doer] < orders[doer].len()) {
        Some(doer) => Err(Rank((doer / EACH) as u32)),
        None => Ok(history),
    }
}

/// In which order a rank's groups are done, by each who does them: slice and group.
fn order(strand: &Strand, slices: u32) -> [Vec<(u32, usize)>; EACH] {
    let ahead = strand.ahead as usize;
    let every = |groups: core::ops::Range<usize>| {
        let slice = move |slice| groups.clone().map(move |group| (slice, group));
        (0..slices).flat_map(slice).collect()
    };
    if strand.apart {
        return [every(0..ahead), every(ahead..strand.groups.len())];
    }
    let late = u32::from(ahead > 0);
    let turn = |turn: u32| {
        let first = (0..ahead)
            .map(move |group| (turn, group))
            .filter(move |_| turn < slices);
        let rest = (ahead..strand.groups.len()).filter_map(move |group| Some((turn.checked_sub(late)?, group)));
        first.chain(rest)
    };
    [(0..slices + late).flat_map(turn).collect(), Vec::new()]
}

/// Which of all who do groups does this one of a rank's.
fn doer(rank: Rank, strand: &Strand, group: usize) -> usize {
    rank.index() * EACH + usize::from(strand.apart && group >= strand.ahead as usize)
}

/// Messages that are stored into an output which its owner may still have to read, or to write: from, to, and which.
pub(super) fn too_early(
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
                At::TheirOutput(to, block) => Some((index, to, block)),
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
            let place = fuse::memory(At::Output(block), None);
            let theirs = &strands[to.index()];
            let waits = |word: &Word| matches!(*word, Word::Direct { peer, message: last } if peer == sender && last >= message);
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
                    known[doer(to, theirs, other)] <= *turn
                })
            });
            if is_early {
                found.push((sender, to, number as u32));
            }
        }
    }
    found
}
