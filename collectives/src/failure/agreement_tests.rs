//! Agreements in virtual time: words take their time and overtake one another between different pairs, members die and stop at any advance.

use std::collections::{BTreeMap, VecDeque};

use super::*;

/// xorshift64*: a schedule is its seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % n
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Life {
    Runs,
    Stopped,
    Dead,
}

/// Members and the words between them: in order between two, as TCP has them.
struct World {
    start: Instant,
    now: Instant,
    members: Vec<Agreement>,
    lives: Vec<Life>,
    wires: BTreeMap<(u32, u32), VecDeque<Item>>,
    made: u32,
    steps: usize,
}

enum Item {
    ShrinkMessage(ShrinkMessage),
    End,
}

const PATIENCE: Duration = Duration::from_secs(16);

impl World {
    fn new(ranks: u32) -> Self {
        let start = Instant::now();
        Self {
            start,
            now: start,
            members: (0..ranks).map(|rank| Agreement::new(Rank(rank), ranks)).collect(),
            lives: vec![Life::Runs; ranks as usize],
            wires: BTreeMap::new(),
            made: 0,
            steps: 0,
        }
    }

    /// Lets `rank` do something, and puts what it says on the wires.
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
            let mut bytes = Vec::new();
            message.encode(&mut bytes);
            assert_eq!(ShrinkMessage::decode(&bytes), Some(message.clone()));
            self.wires
                .entry((rank, to.0))
                .or_default()
                .push_back(Item::ShrinkMessage(message));
        }
    }

    fn join(&mut self, rank: u32, excluded: &[u32]) {
        let excluded: Vec<_> = excluded.iter().copied().map(Rank).collect();
        self.act(rank, |agreement, now, next, out| {
            agreement.join(excluded, PATIENCE, now, next, out)
        });
    }

    /// Its process ends: what it has said arrives, and then its end does.
    fn kill(&mut self, rank: u32) {
        self.lives[rank as usize] = Life::Dead;
        for other in (0..self.lives.len() as u32).filter(|other| *other != rank) {
            self.wires.entry((rank, other)).or_default().push_back(Item::End);
        }
    }

    /// Whether something is on its way to somebody who runs.
    fn talks(&self) -> bool {
        let runs = |rank: u32| self.lives[rank as usize] == Life::Runs;
        self.wires.iter().any(|((_, to), items)| runs(*to) && !items.is_empty())
    }

    /// Delivers one item of some wire, or lets time pass to what is due next. False if nothing is member_left to happen.
    fn advance(&mut self, dice: &mut Dice) -> bool {
        self.steps += 1;
        let lives = &self.lives;
        let runs = |rank: u32| lives[rank as usize] == Life::Runs;
        let open: Vec<_> = self
            .wires
            .iter()
            .filter(|((_, to), items)| runs(*to) && !items.is_empty())
            .map(|(wire, _)| *wire)
            .collect();
        if let Some(wire) = (!open.is_empty()).then(|| open[dice.below(open.len())]) {
            let (from, to) = wire;
            match self.wires.get_mut(&wire).and_then(VecDeque::pop_front) {
                Some(Item::ShrinkMessage(message)) => self.act(to, |agreement, now, next, out| {
                    agreement.receive(Rank(from), message, now, next, out)
                }),
                Some(Item::End) => self.act(to, |agreement, now, next, out| {
                    agreement.member_lost(Rank(from), now, next, out)
                }),
                None => {}
            }
            return true;
        }
        let due = (0..self.lives.len() as u32)
            .filter(|rank| runs(*rank))
            .filter_map(|rank| self.members[rank as usize].due());
        let Some(due) = due.min() else {
            return false;
        };
        self.now = self.now.max(due);
        for rank in 0..self.lives.len() as u32 {
            if self.lives[rank as usize] == Life::Runs {
                self.act(rank, |agreement, now, next, out| agreement.tick(now, next, out));
            }
        }
        true
    }

    fn outcome(&self, rank: u32) -> Option<&Outcome> {
        self.members[rank as usize].outcome()
    }

    /// What must be so in the end: all who run have an outcome in time, and all of a group that was agreed on, who run, have agreed on it.
    fn check(&self, seed: u64) {
        let running = (0..self.lives.len() as u32).filter(|rank| self.lives[*rank as usize] == Life::Runs);
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

fn settle(world: &mut World, dice: &mut Dice) {
    while world.advance(dice) {
        assert!(world.steps < 1_000_000, "they never stop talking");
    }
}

#[test]
fn all_who_join_are_in_it_and_nobody_waits() {
    for seed in 1..200 {
        let mut dice = Dice(seed);
        let ranks = 1 + dice.below(8) as u32;
        let mut world = World::new(ranks);
        (0..ranks).for_each(|rank| world.join(rank, &[]));
        settle(&mut world, &mut dice);
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
fn members_that_die_at_any_step_leave_one_group_of_all_the_others() {
    for seed in 1..3000 {
        let mut dice = Dice(seed);
        let ranks = 2 + dice.below(7) as u32;
        let mut world = World::new(ranks);
        let mut dying: Vec<u32> = (0..ranks).filter(|_| dice.below(3) == 0).collect();
        if dying.len() == ranks as usize {
            dying.pop();
        }
        // The first of them died before, and made them shrink; each knows of it in its own time.
        let mut deaths: Vec<_> = dying
            .iter()
            .map(|rank| (dice.below(ranks as usize * ranks as usize * 4), *rank))
            .collect();
        let mut waiting: Vec<u32> = (0..ranks).collect();
        while world.steps < 1_000_000 {
            deaths.retain(|(advance, rank)| {
                if *advance <= world.steps {
                    world.kill(*rank);
                }
                *advance > world.steps
            });
            if !waiting.is_empty() && (dice.below(3) == 0 || !world.talks()) {
                let rank = waiting.swap_remove(dice.below(waiting.len()));
                if world.lives[rank as usize] == Life::Runs {
                    world.join(rank, &[]);
                }
                continue;
            }
            if !world.advance(&mut dice) && waiting.is_empty() && deaths.is_empty() {
                break;
            }
        }
        world.check(seed);
        for rank in (0..ranks).filter(|rank| world.lives[*rank as usize] == Life::Runs) {
            let Some(Outcome::Agreed(proposal)) = world.outcome(rank) else {
                panic!("seed {seed}: rank {rank}: {:?}", world.outcome(rank));
            };
            for other in (0..ranks).filter(|other| world.lives[*other as usize] == Life::Runs) {
                assert!(
                    proposal.members.contains(&Rank(other)),
                    "seed {seed}: {other} is missing"
                );
            }
        }
    }
}

#[test]
fn members_that_stop_are_left_behind_and_learn_of_it() {
    for seed in 1..1000 {
        let mut dice = Dice(seed);
        let ranks = 2 + dice.below(6) as u32;
        let mut world = World::new(ranks);
        let stopped = dice.below(ranks as usize) as u32;
        let when = dice.below(ranks as usize * ranks as usize * 3);
        (0..ranks).for_each(|rank| world.join(rank, &[]));
        while world.steps < 1_000_000 {
            if world.steps >= when && world.steps < 500_000 {
                world.lives[stopped as usize] = Life::Stopped;
            }
            if !world.advance(&mut dice) {
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
        // It goes on, and is told.
        world.lives[stopped as usize] = Life::Runs;
        settle(&mut world, &mut dice);
        let theirs = world.outcome((stopped + 1) % ranks).cloned();
        match (world.outcome(stopped), theirs) {
            // Stopped as coordinator with all acknowledgements unread, it believes in a group that all others have given up, and tell it so when it writes to it.
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
fn who_does_not_want_to_go_on_is_left_behind() {
    let mut dice = Dice(1);
    let mut world = World::new(4);
    for rank in [0, 1, 3] {
        world.join(rank, &[1]);
    }
    settle(&mut world, &mut dice);
    assert_eq!(world.outcome(1), Some(&Outcome::Excluded));
    assert_eq!(world.outcome(2), None, "it was never asked");
    let Some(Outcome::Agreed(proposal)) = world.outcome(3) else {
        panic!("{:?}", world.outcome(3));
    };
    assert_eq!(proposal.members, [Rank(0), Rank(3)]);
    // The absent one comes at last.
    world.join(2, &[]);
    settle(&mut world, &mut dice);
    assert_eq!(world.outcome(2), Some(&Outcome::Excluded));
}

#[test]
fn nonsense_changes_nothing() {
    let message = |group: u32, members: &[u32]| Proposal {
        epoch: 1,
        group: GroupId {
            creator: 0,
            number: group,
        },
        members: members.iter().copied().map(Rank).collect(),
    };
    let mut world = World::new(3);
    world.join(1, &[]);
    for members in [&[][..], &[0, 1, 7], &[0, 0, 1], &[1, 0], &[1, 2]] {
        for message in [
            ShrinkMessage::Propose(message(1, members)),
            ShrinkMessage::Commit(message(1, members)),
        ] {
            // Of those only a proposal of a group without its proposer could be told from nonsense, and it is.
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
    assert_eq!(ShrinkMessage::decode(&[1, 0xff, 0xff, 0xff, 0xff]), None);
    assert_eq!(ShrinkMessage::decode(&[1, 0xff, 0xff, 0xff, 0x3f, 0]), None);
    assert_eq!(ShrinkMessage::decode(&[9]), None);
}
