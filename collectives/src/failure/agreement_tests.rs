//! Shrink agreements in virtual time: messages are delayed and overtake one another between
//! different pairs; members die and stop at any step.

use std::collections::{BTreeMap, VecDeque};

use super::*;

/// xorshift64*, so that a seed determines a schedule.
struct Prng(u64);

impl Prng {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % n
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ProcessState {
    Runs,
    Stopped,
    Dead,
}

/// Members and the messages between them: in order between two members, as over TCP.
struct Simulation {
    start: Instant,
    now: Instant,
    members: Vec<Agreement>,
    states: Vec<ProcessState>,
    wires: BTreeMap<(u32, u32), VecDeque<WireItem>>,
    made: u32,
    steps: usize,
}

enum WireItem {
    ShrinkMessage(ShrinkMessage),
    End,
}

const PATIENCE: Duration = Duration::from_secs(16);

impl Simulation {
    fn new(ranks: u32) -> Self {
        let start = Instant::now();
        Self {
            start,
            now: start,
            members: (0..ranks).map(|rank| Agreement::new(Rank(rank), ranks)).collect(),
            states: vec![ProcessState::Runs; ranks as usize],
            wires: BTreeMap::new(),
            made: 0,
            steps: 0,
        }
    }

    fn act(
        &mut self,
        rank: u32,
        act: impl FnOnce(&mut Agreement, Instant, &mut dyn FnMut() -> GroupId, &mut Vec<AddressedMessage>),
    ) {
        let mut out = Vec::new();
        let made = &mut self.made;
        let mut next = || {
            *made += 1;
            GroupId {
                creator: rank,
                number: *made,
            }
        };
        act(&mut self.members[rank as usize], self.now, &mut next, &mut out);
        for (to, message) in out {
            assert_eq!(ShrinkMessage::decode(&message.encode()), Some(message.clone()));
            self.wires
                .entry((rank, to.0))
                .or_default()
                .push_back(WireItem::ShrinkMessage(message));
        }
    }

    fn join(&mut self, rank: u32, excluded: &[u32]) {
        let excluded: Vec<_> = excluded.iter().copied().map(Rank).collect();
        self.act(rank, |agreement, now, next, out| {
            agreement.join(excluded, PATIENCE, now, next, out)
        });
    }

    fn kill(&mut self, rank: u32) {
        self.states[rank as usize] = ProcessState::Dead;
        for other in (0..self.states.len() as u32).filter(|other| *other != rank) {
            self.wires.entry((rank, other)).or_default().push_back(WireItem::End);
        }
    }

    /// Whether a message to a running member is in flight.
    fn has_traffic(&self) -> bool {
        let runs = |rank: u32| self.states[rank as usize] == ProcessState::Runs;
        self.wires.iter().any(|((_, to), items)| runs(*to) && !items.is_empty())
    }

    /// Delivers one item, or advances time to the next timer; false at the end.
    fn advance(&mut self, prng: &mut Prng) -> bool {
        self.steps += 1;
        let states = &self.states;
        let runs = |rank: u32| states[rank as usize] == ProcessState::Runs;
        let open: Vec<_> = self
            .wires
            .iter()
            .filter(|((_, to), items)| runs(*to) && !items.is_empty())
            .map(|(wire, _)| *wire)
            .collect();
        if let Some(wire) = (!open.is_empty()).then(|| open[prng.below(open.len())]) {
            let (from, to) = wire;
            match self.wires.get_mut(&wire).and_then(VecDeque::pop_front) {
                Some(WireItem::ShrinkMessage(message)) => self.act(to, |agreement, now, next, out| {
                    agreement.receive(Rank(from), message, now, next, out)
                }),
                Some(WireItem::End) => self.act(to, |agreement, now, next, out| {
                    agreement.member_lost(Rank(from), now, next, out)
                }),
                None => {}
            }
            return true;
        }
        let due = (0..self.states.len() as u32)
            .filter(|rank| runs(*rank))
            .filter_map(|rank| self.members[rank as usize].due());
        let Some(due) = due.min() else {
            return false;
        };
        self.now = self.now.max(due);
        for rank in 0..self.states.len() as u32 {
            if self.states[rank as usize] == ProcessState::Runs {
                self.act(rank, |agreement, now, next, out| agreement.tick(now, next, out));
            }
        }
        true
    }

    fn outcome(&self, rank: u32) -> Option<&Outcome> {
        self.members[rank as usize].outcome()
    }

    /// All running members have an outcome in time, and those of an agreed group agree on it.
    fn check(&self, seed: u64) {
        let running = (0..self.states.len() as u32).filter(|rank| self.states[*rank as usize] == ProcessState::Runs);
        let mut groups: BTreeMap<GroupId, Proposal> = BTreeMap::new();
        for rank in running.clone() {
            let outcome = self
                .outcome(rank)
                .unwrap_or_else(|| panic!("seed {seed}: rank {rank} hangs"));
            if let Outcome::Agreed(proposal) = outcome {
                assert!(
                    proposal.members.contains(&Rank(rank)),
                    "seed {seed}: rank {rank} is in a group without it"
                );
                let known = groups.entry(proposal.group).or_insert_with(|| proposal.clone());
                assert_eq!(known, proposal, "seed {seed}: one id, two groups");
            }
        }
        assert!(self.now <= self.start + PATIENCE, "seed {seed}: it took too long");
        assert!(groups.len() <= 1, "seed {seed}: two groups: {groups:?}");
    }
}

fn run_to_end(world: &mut Simulation, prng: &mut Prng) {
    while world.advance(prng) {
        assert!(world.steps < 1_000_000, "they never stop talking");
    }
}

#[test]
fn all_joined_members_are_in_the_group() {
    for seed in 1..200 {
        let mut prng = Prng(seed);
        let ranks = 1 + prng.below(8) as u32;
        let mut world = Simulation::new(ranks);
        (0..ranks).for_each(|rank| world.join(rank, &[]));
        run_to_end(&mut world, &mut prng);
        world.check(seed);
        for rank in 0..ranks {
            let Some(Outcome::Agreed(proposal)) = world.outcome(rank) else {
                panic!("seed {seed}: {:?}", world.outcome(rank));
            };
            assert_eq!(proposal.members.len(), ranks as usize);
        }
        assert_eq!(world.now, world.start, "seed {seed}: it took no time-out");
    }
}

#[test]
fn members_that_die_at_any_step_leave_one_group_of_survivors() {
    for seed in 1..3000 {
        let mut prng = Prng(seed);
        let ranks = 2 + prng.below(7) as u32;
        let mut world = Simulation::new(ranks);
        let mut dying: Vec<u32> = (0..ranks).filter(|_| prng.below(3) == 0).collect();
        if dying.len() == ranks as usize {
            dying.pop();
        }
        // The first death preceded the shrink; each member learns of it at its own time.
        let mut deaths: Vec<_> = dying
            .iter()
            .map(|rank| (prng.below(ranks as usize * ranks as usize * 4), *rank))
            .collect();
        let mut waiting: Vec<u32> = (0..ranks).collect();
        while world.steps < 1_000_000 {
            deaths.retain(|(advance, rank)| {
                if *advance <= world.steps {
                    world.kill(*rank);
                }
                *advance > world.steps
            });
            if !waiting.is_empty() && (prng.below(3) == 0 || !world.has_traffic()) {
                let rank = waiting.swap_remove(prng.below(waiting.len()));
                if world.states[rank as usize] == ProcessState::Runs {
                    world.join(rank, &[]);
                }
                continue;
            }
            if !world.advance(&mut prng) && waiting.is_empty() && deaths.is_empty() {
                break;
            }
        }
        world.check(seed);
        for rank in (0..ranks).filter(|rank| world.states[*rank as usize] == ProcessState::Runs) {
            let Some(Outcome::Agreed(proposal)) = world.outcome(rank) else {
                panic!("seed {seed}: rank {rank}: {:?}", world.outcome(rank));
            };
            for other in (0..ranks).filter(|other| world.states[*other as usize] == ProcessState::Runs) {
                assert!(
                    proposal.members.contains(&Rank(other)),
                    "seed {seed}: {other} is missing"
                );
            }
        }
    }
}

#[test]
fn stopped_members_are_excluded_and_informed() {
    for seed in 1..1000 {
        let mut prng = Prng(seed);
        let ranks = 2 + prng.below(6) as u32;
        let mut world = Simulation::new(ranks);
        let stopped = prng.below(ranks as usize) as u32;
        let when = prng.below(ranks as usize * ranks as usize * 3);
        (0..ranks).for_each(|rank| world.join(rank, &[]));
        while world.steps < 1_000_000 {
            if world.steps >= when && world.steps < 500_000 {
                world.states[stopped as usize] = ProcessState::Stopped;
            }
            if !world.advance(&mut prng) {
                break;
            }
        }
        world.check(seed);
        let survivors = (0..ranks).filter(|rank| *rank != stopped);
        for rank in survivors {
            assert!(
                matches!(world.outcome(rank), Some(Outcome::Agreed(_))),
                "seed {seed}: rank {rank}: {:?}",
                world.outcome(rank)
            );
        }
        // It continues, and learns that it was excluded.
        world.states[stopped as usize] = ProcessState::Runs;
        run_to_end(&mut world, &mut prng);
        let theirs = world.outcome((stopped + 1) % ranks).cloned();
        match (world.outcome(stopped), theirs) {
            // It commits a group that all others have abandoned; they reply when it writes to it.
            (Some(Outcome::Agreed(mine)), Some(Outcome::Agreed(theirs))) => {
                assert!(
                    *mine == theirs || mine.members[0] == Rank(stopped),
                    "seed {seed}: {mine:?}, {theirs:?}"
                );
            }
            (Some(Outcome::Excluded | Outcome::TimedOut), Some(Outcome::Agreed(theirs))) => {
                assert!(!theirs.members.contains(&Rank(stopped)), "seed {seed}");
            }
            other => panic!("seed {seed}: {other:?}"),
        }
    }
}

#[test]
fn a_member_that_does_not_join_is_excluded() {
    let mut prng = Prng(1);
    let mut world = Simulation::new(4);
    for rank in [0, 1, 3] {
        world.join(rank, &[1]);
    }
    run_to_end(&mut world, &mut prng);
    assert_eq!(world.outcome(1), Some(&Outcome::Excluded));
    assert_eq!(world.outcome(2), None, "it never received a proposal");
    let Some(Outcome::Agreed(proposal)) = world.outcome(3) else {
        panic!("{:?}", world.outcome(3));
    };
    assert_eq!(proposal.members, [Rank(0), Rank(3)]);
    // The absent member arrives.
    world.join(2, &[]);
    run_to_end(&mut world, &mut prng);
    assert_eq!(world.outcome(2), Some(&Outcome::Excluded));
}

#[test]
fn invalid_messages_are_ignored() {
    let message = |group: u32, members: &[u32]| Proposal {
        epoch: 1,
        group: GroupId {
            creator: 0,
            number: group,
        },
        members: members.iter().copied().map(Rank).collect(),
    };
    let mut world = Simulation::new(3);
    world.join(1, &[]);
    for members in [&[][..], &[0, 1, 7], &[0, 0, 1], &[1, 0], &[1, 2]] {
        for message in [
            ShrinkMessage::Propose(message(1, members)),
            ShrinkMessage::Commit(message(1, members)),
        ] {
            // Only a proposal of a group without its proposer can be recognised as invalid.
            if members == [1, 2] && matches!(message, ShrinkMessage::Commit(_)) {
                continue;
            }
            world.act(1, |agreement, now, next, out| {
                agreement.receive(Rank(0), message, now, next, out)
            });
        }
    }
    let excluded = vec![Rank(9), Rank(u32::MAX)];
    world.act(1, |agreement, now, next, out| {
        agreement.receive(Rank(0), ShrinkMessage::Join { excluded }, now, next, out)
    });
    world.act(1, |agreement, now, next, out| {
        agreement.receive(Rank(2), ShrinkMessage::Ready { epoch: 0 }, now, next, out)
    });
    assert_eq!(world.outcome(1), None);
    assert!(world.members[1].proposal().is_none());
    assert_eq!(
        ShrinkMessage::decode(br#"{"Ready":{"epoch":0}}"#),
        Some(ShrinkMessage::Ready { epoch: 0 })
    );
    for invalid in [
        r#"{"Ready":{"epoch":4294967296}}"#,
        r#"{"Ready":{"epoch":0,"more":1}}"#,
        r#"{"Join":{}}"#,
        "9",
    ] {
        assert_eq!(ShrinkMessage::decode(invalid.as_bytes()), None, "{invalid}");
    }
}
