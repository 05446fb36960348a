//! One rank's steps as groups: placement of received messages, fusion, waits and signals.

use std::collections::HashMap;

use super::{Block, BlockStep, Body, Group, Location, Messages, Operand, Signal, Work};
use crate::plan::{BlockForm, PlanMemory};
use crate::types::Rank;

/// Maximum bodies of a group, and their maximum operands.
pub(super) const MAX_BODIES: usize = 24;
pub(super) const MAX_OPERANDS: usize = 64;
const MAX_SIDE: usize = 20;

#[derive(Clone, Default, Debug)]
pub(super) struct UnfusedBody {
    waits: Vec<Signal>,
    body: Option<Body>,
    signals: Vec<Signal>,
}

#[derive(Clone, Copy)]
struct Arrived {
    at: Location,
    wait: Option<Signal>,
    /// The last step that reads it, and the signal due then.
    until: Option<(usize, Signal)>,
}

/// Binds blocks to memory. Returns each step's accesses and signals, and the scratch blocks.
pub(super) fn bind(steps: &[BlockStep], rank: Rank, messages: &Messages) -> (Vec<UnfusedBody>, u32) {
    let mut scratch: HashMap<Block, u32> = HashMap::new();
    let mut own = |(place, block): Block| match place {
        PlanMemory::Input => Location::Input(block),
        PlanMemory::Output => Location::Output(block),
        PlanMemory::Scratch | PlanMemory::Partial => {
            let next = scratch.len() as u32;
            Location::Scratch(*scratch.entry((place, block)).or_insert(next))
        }
    };
    let mut arrived: HashMap<Block, Arrived> = HashMap::new();
    let mut raws = Vec::new();
    for (index, step) in steps.iter().enumerate() {
        let mut raw = UnfusedBody::default();
        let mut sources = Vec::new();
        if let Some((from, number, form)) = step.takes {
            let message = messages[&(from, rank)][number as usize];
            let (peer, number) = (from, message.number);
            if message.is_direct {
                if let Some(into) = step.into {
                    let wait = Some(Signal::Direct { peer, message: number });
                    let at = own(into);
                    arrived.insert(into, Arrived { at, wait, until: None });
                }
                continue;
            }
            let data = Signal::Staged { peer, message: number };
            let read = Signal::Credit {
                peer,
                staged: message.index,
            };
            let at = Location::Received(from, number);
            if let (Some(into), Some(last)) = (
                step.into.filter(|_| step.work == Work::Move),
                last_reader_in_slot(steps, index, from, rank, messages),
            ) {
                arrived.insert(
                    into,
                    Arrived {
                        at,
                        wait: Some(data),
                        until: Some((last, read)),
                    },
                );
                continue;
            }
            raw.waits.push(data);
            raw.signals.push(read);
            if step.into.is_some() {
                sources.push(Operand { at, form });
            }
        }
        for &block in &step.sources {
            let mut at = own(block);
            if let Some(found) = arrived.get_mut(&block) {
                at = found.at;
                raw.waits.extend(found.wait.take());
                raw.signals
                    .extend(found.until.filter(|(last, _)| *last == index).map(|(_, word)| word));
            }
            sources.push(Operand {
                at,
                form: block.0.form(),
            });
        }
        let mut targets = Vec::new();
        if let Some(into) = step.into {
            arrived.remove(&into);
            targets.push(Operand {
                at: own(into),
                form: into.0.form(),
            });
        }
        if let Some((to, number)) = step.sends {
            let message = messages[&(rank, to)][number as usize];
            let form = sources.first().map_or(BlockForm::Element, |source| source.form);
            let (peer, number) = (to, message.number);
            let at = match message.output.filter(|_| message.is_direct) {
                Some(block) => {
                    raw.waits.push(Signal::Ready { peer });
                    raw.signals.push(Signal::Direct { peer, message: number });
                    Location::TheirOutput(to, block)
                }
                None => {
                    raw.waits.push(Signal::Credit { peer, staged: number });
                    raw.signals.push(Signal::Staged { peer, message: number });
                    Location::TheirSlot(to, number)
                }
            };
            targets.push(Operand { at, form });
        }
        if !sources.is_empty() {
            raw.body = Some(Body {
                data: step.data,
                work: step.work,
                sources,
                targets,
            });
        }
        raws.push(raw);
    }
    (raws, scratch.len() as u32)
}

/// `None` unless the data can stay in its FIFO slot until then: its destination is scratch memory,
/// and no other message from the same rank arrives through the FIFO meanwhile.
fn last_reader_in_slot(
    steps: &[BlockStep],
    index: usize,
    from: Rank,
    rank: Rank,
    messages: &Messages,
) -> Option<usize> {
    let into = steps[index]
        .into
        .filter(|(place, _)| matches!(place, PlanMemory::Scratch | PlanMemory::Partial))?;
    let mut last = None;
    for (at, step) in steps.iter().enumerate().skip(index + 1) {
        if step.sources.contains(&into) {
            last = Some(at);
        }
        if step.into == Some(into) {
            break;
        }
    }
    let last = last?;
    let is_next = |step: &BlockStep| {
        step.takes
            .is_some_and(|(peer, number, _)| peer == from && !messages[&(peer, rank)][number as usize].is_direct)
    };
    (!steps[index + 1..=last].iter().any(is_next)).then_some(last)
}

/// Makes each body store to all receivers of its result, and drops unused bodies.
pub(super) fn fuse(raws: Vec<UnfusedBody>) -> Vec<UnfusedBody> {
    let mut fused: Vec<UnfusedBody> = Vec::new();
    for raw in raws {
        match fused.last_mut() {
            Some(before) if can_fuse(before, &raw) => {
                before.waits.extend(raw.waits);
                before.signals.extend(raw.signals);
                if let (Some(body), Some(more)) = (&mut before.body, raw.body) {
                    body.targets.extend(more.targets);
                }
            }
            _ => fused.push(raw),
        }
    }
    for index in 0..fused.len() {
        let Some(body) = &fused[index].body else { continue };
        let is_read = |target: &Operand| {
            let Location::Scratch(_) = target.at else { return true };
            let later = fused[index + 1..].iter().filter_map(|raw| raw.body.as_ref());
            for body in later {
                if body.sources.iter().any(|source| source.at == target.at) {
                    return true;
                }
                if body.targets.iter().any(|other| other.at == target.at) {
                    return false;
                }
            }
            false
        };
        let targets: Vec<Operand> = body.targets.iter().copied().filter(is_read).collect();
        if let Some(body) = &mut fused[index].body {
            body.targets = targets;
        }
    }
    for raw in &mut fused {
        raw.body = raw.body.take().filter(|body| !body.targets.is_empty());
    }
    fused
}

/// Whether the body that directly follows only stores elsewhere what this one reads or produces.
fn can_fuse(before: &UnfusedBody, next: &UnfusedBody) -> bool {
    let (Some(one), Some(other)) = (&before.body, &next.body) else {
        return false;
    };
    let [source] = other.sources.as_slice() else {
        return false;
    };
    let same = one.work == Work::Move && one.sources == other.sources;
    other.work == Work::Move
        && one.data == other.data
        && one.targets.len() + other.targets.len() <= MAX_SIDE
        && !next.waits.iter().any(|wait| wait.is_data())
        && (same || one.targets.contains(source))
}

pub(super) fn group(raws: Vec<UnfusedBody>, shift: Option<i64>) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for raw in raws {
        let group = match groups.last_mut() {
            Some(group) if can_group(group, &raw, shift) => group,
            _ => {
                groups.push(Group::default());
                let last = groups.len() - 1;
                &mut groups[last]
            }
        };
        for wait in raw.waits {
            record_signal(&mut group.waits, wait);
        }
        for signal in raw.signals {
            record_signal(&mut group.signals, signal);
        }
        group.bodies.extend(raw.body);
    }
    groups
}

/// Whether all only send, or all only receive, and none accesses what another writes.
fn can_group(group: &Group, raw: &UnfusedBody, shift: Option<i64>) -> bool {
    let sends = |waits: &[Signal]| !waits.iter().any(|wait| wait.is_data());
    let receives = |waits: &[Signal], signals: &[Signal]| {
        waits.iter().all(|wait| wait.is_data()) && signals.iter().all(|signal| matches!(signal, Signal::Credit { .. }))
    };
    let alike = sends(&group.waits) && sends(&raw.waits)
        || receives(&group.waits, &group.signals) && receives(&raw.waits, &raw.signals);
    let operands = |body: &Body| body.sources.len() + body.targets.len();
    let Some(body) = &raw.body else { return alike };
    alike
        && group.bodies.len() < MAX_BODIES
        && group.bodies.iter().map(operands).sum::<usize>() + operands(body) <= MAX_OPERANDS
        && !group.bodies.iter().any(|other| conflicts(other, body, shift))
}

fn conflicts(a: &Body, b: &Body, shift: Option<i64>) -> bool {
    let touches = |body: &Body, place| {
        let all = body.sources.iter().chain(&body.targets);
        all.map(|operand| memory(operand.at, shift)).any(|other| other == place)
    };
    let writes = |body: &Body, other: &Body| {
        body.targets
            .iter()
            .any(|target| touches(other, memory(target.at, shift)))
    };
    writes(a, b) || writes(b, a)
}

/// The memory of an operand; in place, an input block as the corresponding output block.
pub(super) fn memory(at: Location, shift: Option<i64>) -> (Location, i64) {
    match (at, shift) {
        (Location::Input(block), Some(shift)) => (Location::Output(0), i64::from(block) + shift),
        (Location::Input(block), None) => (Location::Input(0), i64::from(block)),
        (Location::Output(block), _) => (Location::Output(0), i64::from(block)),
        (other, _) => (other, 0),
    }
}

/// Adds a signal; for each kind and peer the last one covers earlier ones.
fn record_signal(words: &mut Vec<Signal>, word: Signal) {
    for known in &mut *words {
        match (known, word) {
            (
                Signal::Direct { peer, message: known },
                Signal::Direct {
                    peer: other,
                    message: next,
                },
            )
            | (
                Signal::Staged { peer, message: known },
                Signal::Staged {
                    peer: other,
                    message: next,
                },
            )
            | (
                Signal::Credit { peer, staged: known },
                Signal::Credit {
                    peer: other,
                    staged: next,
                },
            ) if *peer == other => {
                *known = next.max(*known);
                return;
            }
            (Signal::Ready { peer }, Signal::Ready { peer: other }) if *peer == other => return,
            _ => {}
        }
    }
    words.push(word);
}

/// Leading groups that may be one slice ahead, and trailing ones that may be one slice behind the
/// others. Direct messages are numbered by slices, so those of leading groups are to be the only
/// ones to their receivers; and so are staged ones, unless they may be `mixed`.
pub(super) fn stages(groups: &[Group], mixed: bool) -> (u32, u32) {
    let leading = groups.iter().take_while(|group| only_sends_input(group)).count();
    let (first, rest) = groups.split_at(leading);
    let channel = |signal: &Signal| match *signal {
        Signal::Direct { peer, .. } => Some((peer, true)),
        Signal::Staged { peer, .. } if !mixed => Some((peer, false)),
        _ => None,
    };
    let channels = |groups: &[Group]| -> Vec<(Rank, bool)> {
        let signals = groups.iter().flat_map(|group| &group.signals);
        signals.filter_map(channel).collect()
    };
    let later = channels(rest);
    if leading == 0 || rest.is_empty() || channels(first).iter().any(|one| later.contains(one)) {
        return (0, 0);
    }
    let trailing = rest.iter().rev().take_while(|group| only_receives(group)).count();
    // What is behind is behind something.
    let behind = if mixed && trailing < rest.len() { trailing } else { 0 };
    (leading as u32, behind as u32)
}

/// From slots to output: nothing that another slice's groups use.
fn only_receives(group: &Group) -> bool {
    let slot = |operand: &Operand| matches!(operand.at, Location::Received(..));
    let output = |operand: &Operand| matches!(operand.at, Location::Output(_));
    group.waits.iter().all(|wait| matches!(wait, Signal::Staged { .. }))
        && group
            .signals
            .iter()
            .all(|signal| matches!(signal, Signal::Credit { .. }))
        && group
            .bodies
            .iter()
            .all(|body| body.sources.iter().all(slot) && body.targets.iter().all(output))
}

/// Whether the last leading group and its successor together stay within the limits of a group.
pub(super) fn joins_next(groups: &[Group], ahead: usize) -> bool {
    let Some(two) = ahead.checked_sub(1).and_then(|last| groups.get(last..last + 2)) else {
        return false;
    };
    let bodies = || two.iter().flat_map(|group| &group.bodies);
    let operands = bodies()
        .map(|body| body.sources.len() + body.targets.len())
        .sum::<usize>();
    bodies().count() <= MAX_BODIES && operands <= MAX_OPERANDS
}

fn only_sends_input(group: &Group) -> bool {
    let input = |operand: &Operand| matches!(operand.at, Location::Input(_));
    let away = |operand: &Operand| !matches!(operand.at, Location::Scratch(_));
    !group.waits.iter().any(|wait| wait.is_data())
        && group
            .bodies
            .iter()
            .all(|body| body.sources.iter().all(input) && body.targets.iter().all(away))
}
