//! Lowers every schedule, and checks structural properties; tests/gpu verifies results.

use super::*;
use crate::algorithm::Algorithm;
use crate::plan::Collective;

fn schedule(algorithm: Algorithm, collective: Collective, ranks: u32) -> Box<dyn Schedule> {
    let order: Vec<Rank> = (0..ranks).map(Rank).collect();
    algorithm.schedule(collective, &order, Rank(ranks / 2)).unwrap()
}

fn counts_agree(lowered: &[Lowered]) -> bool {
    let ranks = lowered.len();
    (0..lowered[0].strands.len()).all(|strand| {
        (0..ranks * ranks).all(|pair| {
            let (a, b) = (pair / ranks, pair % ranks);
            let (one, other) = (
                &lowered[a].strands[strand].peers[b],
                &lowered[b].strands[strand].peers[a],
            );
            (one.sent_direct, one.sent_staged) == (other.received_direct, other.received_staged)
        })
    })
}

#[test]
fn every_schedule_lowers_with_slots_for_its_longest_spans() {
    for &collective in Collective::ALL {
        for algorithm in Algorithm::of(collective) {
            for ranks in 1..=9 {
                let schedule = schedule(algorithm, collective, ranks);
                for in_place in [false, true]
                    .into_iter()
                    .filter(|in_place| !in_place || schedule.in_place())
                {
                    for (direct, pipelined) in [(false, false), (false, true), (true, false), (true, true)] {
                        let options = Options {
                            in_place,
                            direct,
                            slots: 16,
                            pipelined,
                        };
                        let lowered = lower(&*schedule, options).unwrap_or_else(|error| {
                            panic!("{collective} {algorithm} among {ranks}, {options:?}: {error}")
                        });
                        assert!(
                            counts_agree(&lowered),
                            "{collective} {algorithm} among {ranks}, {options:?}"
                        );
                        assert!(lowered.iter().all(|rank| rank.all == lowered[0].all));
                        for strand in lowered.iter().flat_map(|rank| &rank.strands) {
                            assert!(
                                check::credits_are_true(strand),
                                "{collective} {algorithm} among {ranks}, {options:?}"
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn four_slots_suffice_for_direct_and_ring_schedules() {
    for algorithm in [
        Algorithm::FullMesh,
        Algorithm::OneShot,
        Algorithm::Ring,
        Algorithm::Tree,
    ] {
        for collective in Collective::ALL.iter().copied().filter(|one| algorithm.supports(*one)) {
            for ranks in 2..=8 {
                for direct in [false, true] {
                    let options = Options {
                        in_place: false,
                        direct,
                        slots: 4,
                        pipelined: true,
                    };
                    let found = lower(&*schedule(algorithm, collective, ranks), options);
                    assert!(
                        found.is_ok(),
                        "{collective} {algorithm} among {ranks}: {:?}",
                        found.err()
                    );
                }
            }
        }
    }
}

#[test]
fn too_few_slots_are_an_error_and_no_deadlock() {
    let options = Options {
        in_place: false,
        direct: false,
        slots: 2,
        pipelined: false,
    };
    let halving = schedule(Algorithm::HalvingDoubling, Collective::AllReduce, 8);
    assert!(matches!(
        lower(&*halving, options),
        Err(LowerError::Deadlock { slots: 2, .. })
    ));
}

#[test]
fn full_mesh_groups_sends_and_fuses_stores() {
    let mesh = schedule(Algorithm::FullMesh, Collective::AllReduce, 4);
    for in_place in [false, true] {
        let options = Options {
            in_place,
            direct: true,
            slots: 4,
            pipelined: true,
        };
        for (rank, lowered) in lower(&*mesh, options).unwrap().iter().enumerate() {
            let [strand] = lowered.strands.as_slice() else {
                panic!("one strand")
            };
            let [send, reduce] = strand.groups.as_slice() else {
                panic!("rank {rank}: {strand:#?}")
            };
            assert_eq!(strand.ahead, 1, "sending waits for nothing but slots");
            assert!(strand.joined, "and is done while the slice before is reduced");
            assert!(lowered.all.staged);
            assert_eq!(send.bodies.len(), 3);
            let [sum] = reduce.bodies.as_slice() else {
                panic!("one sum")
            };
            assert_eq!(sum.work, Work::Reduce { whole: true });
            assert_eq!((sum.sources.len(), sum.targets.len()), (4, 4));
            // In place, too: that rank's sum arrives only after the input was received.
            let direct = sum
                .targets
                .iter()
                .filter(|target| matches!(target.at, Location::TheirOutput(..)));
            assert_eq!(direct.count(), 3);
            // The sum is waited for only at the end; slot credits are returned with every slice.
            let is_direct = |word: &Signal| matches!(word, Signal::Direct { .. });
            assert_eq!(reduce.last_signals.len(), 3);
            assert!(reduce.last_signals.iter().all(is_direct) && !reduce.signals.iter().any(is_direct));
            assert!(send.last_signals.is_empty() && send.signals.len() == 3);
        }
    }
}

/// Without mapped outputs sums go through the FIFOs, as the parts of later slices do.
#[test]
fn a_full_mesh_of_fifos_is_pipelined() {
    let options = Options {
        in_place: false,
        direct: false,
        slots: 4,
        pipelined: true,
    };
    for lowered in lower(&*schedule(Algorithm::FullMesh, Collective::AllReduce, 4), options).unwrap() {
        let strand = &lowered.strands[0];
        assert_eq!((strand.groups.len(), strand.ahead, strand.behind), (3, 1, 1));
        assert!(strand.joined && lowered.all.slots == 8);
        let late: Vec<_> = strand
            .peers
            .iter()
            .map(|peer| (peer.sent_late, peer.received_late))
            .collect();
        assert_eq!(late.iter().filter(|late| **late == (1, 1)).count(), 3, "{late:?}");
    }
}

#[test]
fn leading_sends_join_the_reduction() {
    let options = Options {
        in_place: false,
        direct: true,
        slots: 4,
        pipelined: true,
    };
    let of = |algorithm, collective, options| lower(&*schedule(algorithm, collective, 4), options).unwrap();
    for (algorithm, collective, joined) in [
        (Algorithm::FullMesh, Collective::ReduceScatter, true),
        (Algorithm::FullMesh, Collective::AllReduce, true),
        // All groups send, or forwarded data uses the same connection as the first sends.
        (Algorithm::FullMesh, Collective::AllGather, false),
        (Algorithm::Ring, Collective::AllReduce, false),
    ] {
        let all_joined = |options| {
            let ranks = of(algorithm, collective, options);
            ranks.iter().all(|rank| rank.strands.iter().all(|strand| strand.joined))
        };
        assert_eq!(all_joined(options), joined, "{collective} {algorithm}");
        let in_step = Options {
            pipelined: false,
            ..options
        };
        assert!(!all_joined(in_step), "{collective} {algorithm}: nothing is ahead");
    }
    // Stores into a chain's outputs are forwarded in every slice, except the last rank's.
    let chain = of(Algorithm::Ring, Collective::Broadcast, options);
    let groups = chain
        .iter()
        .flat_map(|rank| &rank.strands)
        .flat_map(|strand| &strand.groups);
    let signaled: Vec<_> = groups
        .map(|group| (group.signals.len(), group.last_signals.len()))
        .collect();
    assert_eq!(
        signaled.iter().filter(|signaled| **signaled == (1, 0)).count(),
        2,
        "{signaled:?}"
    );
    assert_eq!(
        signaled.iter().filter(|signaled| **signaled == (0, 1)).count(),
        1,
        "{signaled:?}"
    );
    assert!(!chain[0].all.staged, "slices of any length");
}

fn ahead_of_each_other(slots: u32) -> Result<(), Rank> {
    let strand = |peer| {
        let staged = Signal::Staged { peer, message: 0 };
        let credit = Signal::Credit { peer, staged: 0 };
        let group = |waits: Signal, signals: Signal| Group {
            waits: vec![waits],
            signals: vec![signals],
            ..Group::default()
        };
        let traffic = Traffic {
            sent_staged: 1,
            received_staged: 1,
            ..Traffic::default()
        };
        Strand {
            groups: vec![group(credit, staged), group(staged, credit)],
            ahead: 1,
            behind: 0,
            joined: true,
            peers: vec![traffic; 2],
            scratch: 0,
        }
    };
    check::run(&[strand(Rank(1)), strand(Rank(0))], slots).map(drop)
}

#[test]
fn mutual_sends_need_two_slots() {
    assert_eq!(ahead_of_each_other(1), Err(Rank(0)));
    assert_eq!(ahead_of_each_other(2), Ok(()));
}

/// Rank 0 stores into what rank 1 reads in place, and waits for rank 1's signal or not.
fn store_into_what_is_read(waits: bool) -> [Strand; 2] {
    let element = |at| Operand {
        at,
        form: BlockForm::Element,
    };
    let body = |from, into| Body {
        data: 0,
        work: Work::Move,
        sources: vec![element(from)],
        targets: vec![element(into)],
    };
    let read = Signal::Staged {
        peer: Rank(1),
        message: 0,
    };
    let store = Group {
        waits: if waits { vec![read] } else { Vec::new() },
        bodies: vec![body(Location::Input(0), Location::TheirOutput(Rank(1), 0))],
        signals: vec![Signal::Direct {
            peer: Rank(1),
            message: 0,
        }],
        ..Group::default()
    };
    let send = Group {
        waits: Vec::new(),
        bodies: vec![body(Location::Input(0), Location::TheirSlot(Rank(0), 0))],
        signals: vec![Signal::Staged {
            peer: Rank(0),
            message: 0,
        }],
        ..Group::default()
    };
    let strand = |group, peers: [(u32, u32); 2]| Strand {
        groups: vec![group],
        peers: peers
            .map(|(direct, staged)| Traffic {
                sent_direct: direct,
                sent_staged: staged,
                ..Traffic::default()
            })
            .into(),
        ..Strand::default()
    };
    let mut strands = [strand(store, [(0, 0), (1, 0)]), strand(send, [(0, 1), (0, 0)])];
    strands[0].peers[1].received_staged = 1;
    strands[1].peers[0].received_direct = 1;
    strands
}

#[test]
fn premature_stores_are_detected() {
    let message = |is_direct: bool| Message {
        output: is_direct.then_some(0),
        is_direct,
        index: 0,
        late: 0,
        number: 0,
    };
    let messages = Messages::from([
        ((Rank(0), Rank(1)), vec![message(true)]),
        ((Rank(1), Rank(0)), vec![message(false)]),
    ]);
    let early = |waits, shift| {
        let strands = store_into_what_is_read(waits);
        let history = check::run(&strands, 16).unwrap_or_else(|rank| panic!("rank {rank} waits for ever"));
        check::premature_stores(&strands, &history, &messages, |_| shift)
    };
    assert_eq!(early(false, Some(0)), [(Rank(0), Rank(1), 0)]);
    assert!(early(true, Some(0)).is_empty(), "it waits for who reads");
    assert!(early(false, None).is_empty(), "input is no output");
}
