//! Scripts of all ranks, run by a scheduler in any enabled order: correct results, no word written
//! twice before it was read, and no deadlock, even with one stream per rank.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::algorithm::Algorithm;
use crate::plan::Collective;
use crate::reference::{Case, Origin};

/// Elements are 16-bit words and partial results 32-bit, added as integers.
struct Memory {
    user: Vec<u8>,
    input: usize,
    output: usize,
    staging: Vec<u8>,
}

struct Running {
    queues: Vec<VecDeque<(u8, StreamOp)>>,
    events: Vec<bool>,
}

struct World {
    memory: Vec<Memory>,
    /// By rank, peer, kind and index.
    words: Vec<Vec<[Vec<bool>; 2]>>,
}

impl World {
    fn at(&mut self, rank: usize, at: Location) -> (&mut Vec<u8>, usize) {
        match at {
            Location::Input(offset) => {
                let memory = &mut self.memory[rank];
                (&mut memory.user, memory.input + offset as usize)
            }
            Location::Output(offset) => {
                let memory = &mut self.memory[rank];
                (&mut memory.user, memory.output + offset as usize)
            }
            Location::Staging(offset) => (&mut self.memory[rank].staging, offset as usize),
            Location::TheirOutput(peer, offset) => self.at(peer.index(), Location::Output(offset)),
            Location::TheirStaging(peer, offset) => self.at(peer.index(), Location::Staging(offset)),
        }
    }

    fn read(&mut self, rank: usize, (at, form): (Location, BlockForm), index: u64) -> u32 {
        let (memory, start) = self.at(rank, at);
        match form {
            BlockForm::Element => u32::from(u16::from_ne_bytes(
                memory[start + 2 * index as usize..][..2].try_into().unwrap(),
            )),
            BlockForm::Partial => u32::from_ne_bytes(memory[start + 4 * index as usize..][..4].try_into().unwrap()),
        }
    }

    fn write(&mut self, rank: usize, (at, form): (Location, BlockForm), index: u64, value: u32) {
        let (memory, start) = self.at(rank, at);
        match form {
            BlockForm::Element => {
                memory[start + 2 * index as usize..][..2].copy_from_slice(&(value as u16).to_ne_bytes())
            }
            BlockForm::Partial => memory[start + 4 * index as usize..][..4].copy_from_slice(&value.to_ne_bytes()),
        }
    }

    fn op(&mut self, rank: usize, op: &StreamOp, events: &mut [bool]) -> bool {
        match op {
            StreamOp::Signal(word) => {
                let word = &mut self.words[word.peer.index()][rank][usize::from(word.is_credit)][word.index as usize];
                assert!(!*word, "{op:?} of rank {rank} before the last was read");
                *word = true;
            }
            StreamOp::Await(word) => {
                let word = &mut self.words[rank][word.peer.index()][usize::from(word.is_credit)][word.index as usize];
                if !*word {
                    return false;
                }
                *word = false;
            }
            StreamOp::Copy { from, into, bytes } => {
                let (memory, start) = self.at(rank, *from);
                let copied = memory[start..start + *bytes as usize].to_vec();
                let (memory, start) = self.at(rank, *into);
                memory[start..start + *bytes as usize].copy_from_slice(&copied);
            }
            StreamOp::Reduce {
                sources,
                into,
                elements,
            } => {
                for index in 0..*elements {
                    let sum = sources
                        .iter()
                        .map(|source| self.read(rank, *source, index))
                        .fold(0, u32::wrapping_add);
                    self.write(rank, *into, index, sum);
                }
            }
            StreamOp::Record(event) => events[*event as usize] = true,
            StreamOp::Wait(event) => return events[*event as usize],
        }
        true
    }
}

fn places(case: &Case, rank: Rank, in_place: bool) -> (usize, usize, usize) {
    let (input, output) = (case.input(rank) as usize, case.output(rank) as usize);
    if !in_place {
        return (0, input, input + output);
    }
    let own = rank.index() * case.count as usize;
    let (from, into) = match case.collective {
        Collective::AllGather => (own, 0),
        Collective::Gather if rank == case.root => (own, 0),
        Collective::ReduceScatter => (0, own),
        Collective::Scatter if rank == case.root => (0, own),
        _ => (0, 0),
    };
    (from, into, (from + input).max(into + output))
}

fn given(rank: Rank, index: u64, round: u64) -> u16 {
    (u64::from(rank.0) * 7919 + index * 31 + round * 104_729 + 5) as u16
}

/// Runs it `turns` times back to back and compares the results.
fn runs(schedule: &dyn Schedule, case: &Case, params: ScriptParams, single_stream: bool, seed: u64, rounds: u64) {
    let ranks = case.ranks as usize;
    let all = || (0..case.ranks).map(Rank);
    let scripts: Vec<_> = all().map(|rank| Script::new(schedule, rank, params).unwrap()).collect();
    let memory = all().map(|rank| {
        let (input, output, len) = places(case, rank, params.in_place);
        Memory {
            user: vec![0; 2 * len],
            input: 2 * input,
            output: 2 * output,
            staging: vec![0xaa; params.staging as usize],
        }
    });
    let mut world = World {
        memory: memory.collect(),
        words: vec![vec![[vec![false; WORDS], vec![false; WORDS]]; ranks]; ranks],
    };
    let begin = |world: &mut World, rank: usize, round: u64| {
        for index in 0..case.input(Rank(rank as u32)) {
            world.write(
                rank,
                (Location::Input(0), BlockForm::Element),
                index,
                given(Rank(rank as u32), index, round).into(),
            );
        }
        let script = &scripts[rank];
        let mut queues = vec![VecDeque::new(); if single_stream { 1 } else { usize::from(script.streams) }];
        for (stream, op) in &script.ops {
            queues[if single_stream { 0 } else { usize::from(*stream) }].push_back((*stream, op.clone()));
        }
        Running {
            queues,
            events: vec![false; script.events as usize],
        }
    };
    let compare = |world: &mut World, rank: usize, round: u64| {
        let mut index = 0;
        for (len, origin) in case.pieces(Rank(rank as u32)) {
            for at in 0..len {
                let wanted = match origin {
                    Origin::From(from, first) => given(from, first + at, round),
                    Origin::Reduced(first) => all()
                        .map(|from| given(from, first + at, round))
                        .fold(0, u16::wrapping_add),
                };
                let got = world.read(rank, (Location::Output(0), BlockForm::Element), index);
                assert_eq!(
                    got,
                    u32::from(wanted),
                    "element {index} of rank {rank}, {case:?} {params:?}"
                );
                index += 1;
            }
        }
    };
    let mut round = vec![0; ranks];
    let mut running: Vec<_> = (0..ranks).map(|rank| begin(&mut world, rank, 0)).collect();
    let mut state = seed | 1;
    let mut random = move |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 33) as usize % below
    };
    while round.iter().any(|round| *round < rounds) {
        let (first, mut moved) = (random(ranks), false);
        for rank in (0..ranks).map(|at| (first + at) % ranks) {
            if round[rank] == rounds {
                continue;
            }
            let one = &mut running[rank];
            let streams = one.queues.len();
            let begin_at = random(streams);
            let next = (0..streams).map(|at| (begin_at + at) % streams).find(|&stream| {
                let Some((_, op)) = one.queues[stream].front() else {
                    return false;
                };
                world.op(rank, op, &mut one.events)
            });
            if let Some(stream) = next {
                one.queues[stream].pop_front();
                moved = true;
            }
            if running[rank].queues.iter().all(VecDeque::is_empty) {
                compare(&mut world, rank, round[rank]);
                round[rank] += 1;
                moved = true;
                if round[rank] < rounds {
                    running[rank] = begin(&mut world, rank, round[rank]);
                }
            }
            if moved && random(3) > 0 {
                break;
            }
        }
        assert!(
            moved,
            "nothing goes on: {case:?} {params:?}; {:?}",
            running
                .iter()
                .map(|one| one
                    .queues
                    .iter()
                    .map(|queue| queue.front().cloned())
                    .collect::<Vec<_>>())
                .collect::<Vec<_>>()
        );
    }
    let left = world
        .words
        .iter()
        .flatten()
        .flatten()
        .flatten()
        .filter(|word| **word)
        .count();
    assert_eq!(left, 0, "words are left: {case:?} {params:?}");
}

fn known() -> Vec<(Algorithm, Collective)> {
    let all = Algorithm::ALL
        .iter()
        .flat_map(|algorithm| Collective::ALL.iter().map(move |collective| (*algorithm, *collective)));
    let is_implied = |(algorithm, collective): &(Algorithm, Collective)| {
        algorithm.supports(*collective) && *collective != Collective::AllToAllV
    };
    all.filter(is_implied).collect()
}

fn schedule(algorithm: Algorithm, case: &Case) -> Box<dyn Schedule> {
    let order: Vec<_> = (0..case.ranks).map(Rank).collect();
    algorithm.schedule(case.collective, &order, case.root).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 400 } else { 4000 }))]

    #[test]
    fn any_schedule_in_any_order_of_its_streams(
        which in any::<prop::sample::Index>(),
        ranks in 1u32..=8,
        root in any::<u32>(),
        count in prop_oneof![0u64..40, 0u64..3000],
        slice in 64u64..4096,
        (direct, in_place, single_stream) in any::<(bool, bool, bool)>(),
        copiers in 1u8..=3,
        tail_parts in 1u32..=4,
        seed in any::<u64>(),
    ) {
        let known = known();
        let (algorithm, collective) = known[which.index(known.len())];
        let case = Case { collective, ranks, root: Rank(root % ranks), count: if collective == Collective::Barrier { 0 } else { count } };
        let schedule = schedule(algorithm, &case);
        let params = ScriptParams {
            data: DataType::F16,
            count: case.count,
            direct,
            in_place: in_place && schedule.in_place(),
            staging: 1 << 20,
            slice,
            copiers,
            tail_parts,
        };
        runs(&*schedule, &case, params, single_stream, seed, 3);
    }
}

#[test]
fn staging_memory_that_is_too_small_is_an_error() {
    let case = Case {
        collective: Collective::AllReduce,
        ranks: 4,
        root: Rank(0),
        count: 1 << 20,
    };
    let params = ScriptParams {
        data: DataType::F32,
        count: case.count,
        direct: true,
        in_place: false,
        staging: 4096,
        slice: 1 << 20,
        copiers: 1,
        tail_parts: 1,
    };
    let schedule = schedule(Algorithm::FullMesh, &case);
    assert_eq!(
        Script::new(&*schedule, Rank(0), params),
        Err(DoesNotFit { staging: 4096 })
    );
}

fn script(collective: Collective, algorithm: Algorithm, slice: u64, tail_parts: u32, in_place: bool) -> Script {
    let case = Case {
        collective,
        ranks: 4,
        root: Rank(0),
        count: 1 << 16,
    };
    let params = ScriptParams {
        data: DataType::F32,
        count: case.count,
        direct: true,
        in_place,
        staging: 1 << 20,
        slice,
        copiers: 1,
        tail_parts,
    };
    Script::new(&*schedule(algorithm, &case), Rank(1), params).unwrap()
}

fn stream(script: &Script, of: u8) -> Vec<StreamOp> {
    let own = script.ops.iter().filter(|(stream, _)| *stream == of);
    own.map(|(_, op)| op.clone()).collect()
}

#[test]
fn parts_are_reduced_as_soon_as_received() {
    let script = script(Collective::AllReduce, Algorithm::FullMesh, u64::MAX, 2, false);
    let ops = stream(&script, CALLER);
    let ready = ops.iter().position(|op| *op == StreamOp::Record(0)).unwrap();
    let kind: Vec<_> = ops[ready + 1..]
        .iter()
        .map(|op| match op {
            StreamOp::Await(word) => format!("{} from {}", word.index, word.peer.0),
            StreamOp::Reduce { elements, .. } => format!("reduce {elements}"),
            StreamOp::Record(_) => "signal".to_owned(),
            StreamOp::Wait(_) => "end".to_owned(),
            other => format!("{other:?}"),
        })
        .collect();
    // The last one is rank 2's, which sends to three others before.
    let wanted = [
        "0 from 0",
        "0 from 3",
        "0 from 2",
        "reduce 8192",
        "signal",
        "1 from 2",
        "reduce 8192",
        "signal",
        "end",
        "end",
    ];
    assert_eq!(kind, wanted);
    let copied: Vec<_> = stream(&script, 1)
        .into_iter()
        .filter_map(|op| match op {
            StreamOp::Copy { bytes, .. } => Some(bytes >> 10),
            _ => None,
        })
        .collect();
    assert_eq!(copied, [64, 64, 32, 32, 32, 32, 64, 64]);
}

#[test]
fn copies_to_peers_have_their_own_stream() {
    let ops = stream(&script(Collective::Broadcast, Algorithm::Ring, 1 << 16, 1, false), 1);
    let copies = ops.iter().filter(|op| matches!(op, StreamOp::Copy { .. })).count();
    assert_eq!(copies, 4, "{ops:?}");
    assert!(!ops.iter().any(|op| matches!(op, StreamOp::Await(_))), "{ops:?}");
}

#[test]
fn no_credit_is_needed_when_the_old_data_was_received_back() {
    for tail_parts in [1, 3] {
        let script = script(Collective::AllReduce, Algorithm::FullMesh, u64::MAX, tail_parts, true);
        let credit_waits = script.ops.iter().filter(|(_, op)| match op {
            StreamOp::Signal(word) | StreamOp::Await(word) => word.is_credit && word.index != READY,
            _ => false,
        });
        assert_eq!(credit_waits.count(), 0);
    }
    // In a ring, the data that a result overwrites was sent to another rank.
    let ring = script(Collective::AllReduce, Algorithm::Ring, u64::MAX, 1, true);
    assert!(
        ring.ops
            .iter()
            .any(|(_, op)| matches!(op, StreamOp::Await(word) if word.is_credit && word.index != READY))
    );
}
