//! The text form and plans convert into each other without loss.

use proptest::prelude::*;

use super::{BlockForm, Collective, Plan, PlanMemory, Program, Shape, Span, Step};
use crate::algorithm::Algorithm;
use crate::types::Rank;

#[test]
fn every_algorithm_is_written_and_read() {
    for &collective in Collective::ALL {
        for algorithm in Algorithm::of(collective) {
            for ranks in 1..=9 {
                let order: Vec<_> = (0..ranks).rev().map(Rank).collect();
                let plan = Plan::of(&*algorithm.schedule(collective, &order, Rank(0)).expect("a schedule"));
                assert_eq!(
                    plan.to_string().parse(),
                    Ok(plan),
                    "{algorithm} {collective} of {ranks}"
                );
            }
        }
    }
}

fn span() -> impl Strategy<Value = Span> {
    let some = (prop::sample::select(PlanMemory::ALL), 0..u32::MAX / 2, 1..u32::MAX / 2);
    let some = some.prop_map(|(place, first, blocks)| Span::new(place, first, blocks));
    prop_oneof![9 => some, 1 => Just(Span::empty())]
}

fn step() -> impl Strategy<Value = Step> {
    let rank = || any::<u32>().prop_map(Rank);
    let form = prop_oneof![Just(BlockForm::Element), Just(BlockForm::Partial)];
    prop_oneof![
        (rank(), span()).prop_map(|(to, span)| Step::Send { to, span }),
        (rank(), span()).prop_map(|(from, into)| Step::Recv { from, into }),
        (rank(), form, span(), span()).prop_map(|(from, form, with, into)| Step::RecvReduce { from, form, with, into }),
        (prop::collection::vec(span(), 0..5), span()).prop_map(|(sources, into)| Step::Reduce {
            sources: sources.into(),
            into
        }),
        (span(), span()).prop_map(|(from, into)| Step::Copy { from, into }),
    ]
}

fn plan() -> impl Strategy<Value = Plan> {
    let numbers = || prop::collection::vec(any::<u32>(), 0..4);
    let strands = prop::collection::vec(prop::collection::vec(step(), 0..6), 0..3);
    let program = (strands, numbers(), numbers()).prop_map(|(strands, scratch, partial)| Program {
        strands,
        scratch,
        partial,
    });
    let ranks = prop::collection::vec((any::<u32>(), program), 0..4);
    let collective = prop::sample::select(Collective::ALL);
    (collective, any::<bool>(), any::<u32>(), any::<u32>(), ranks).prop_map(
        |(collective, in_place, root, blocks, ranks)| {
            let (order, programs): (Vec<_>, _) = ranks.into_iter().map(|(rank, program)| (Rank(rank), program)).unzip();
            let shape = Shape {
                collective,
                order: order.into(),
                root: Rank(root),
                blocks,
            };
            Plan {
                shape,
                in_place,
                programs,
            }
        },
    )
}

proptest! {
    #[test]
    fn any_plan_is_written_and_read(plan in plan()) {
        prop_assert_eq!(plan.to_string().parse(), Ok(plan));
    }

    /// Any text is a plan or an error, and any plan is proved or has a flaw.
    #[test]
    fn any_text_is_a_plan_or_not(lines in prop::collection::vec(line(), 0..30)) {
        if let Ok(plan) = lines.join("\n").parse::<Plan>() {
            let _ = super::check::prove(&plan);
            let _ = super::census::PlanStatistics::of(&plan);
        }
    }
}

/// Lines that can be in a plan, and some that cannot.
fn line() -> impl Strategy<Value = String> {
    let words = [
        "allreduce",
        "barrier in place",
        "order 0 1",
        "order",
        "root 0",
        "blocks 1",
        "rank 0",
        "rank 1",
        "strand 0",
        "strand 1",
        "scratch 0",
        "partial 4294967295",
        "send nothing to 1",
        "send input[0] to 4294967295",
        "recv output[0] from 0",
        "copy input[0..4294967295] into output[1..4294967295]",
        "recv-reduce element from 0 with input[0] into output[0]",
        "reduce into",
        "#",
        "send input[9..3] to 0",
    ];
    prop::sample::select(words.to_vec()).prop_map(str::to_owned)
}

#[test]
fn errors_of_a_line_are_reported() {
    let head = "barrier\norder 0\nroot 0\nblocks 0\nrank 0\nstrand 0\n";
    assert!(format!("{head}# nothing to do\n\n").parse::<Plan>().is_ok());
    let heads = [
        "",
        "alreduce",
        "allreduce out of place",
        "barrier\nrank 1",
        "barrier\nsend nothing to 1",
        "barrier\norder 0 one",
        "barrier\norder 0\nroot 0\nblocks 0",
        "barrier\norder 0\nroot 0\norder 0",
        "barrier\nrank 0\nsend nothing to 0",
        "barrier\nrank 0\nstrand 1",
    ];
    let steps = [
        "throw input[0] to 1",
        "send input to 1",
        "send input[1..1] to 1",
        "send input[0] 1",
        "send input[0] to 1 2",
        "send elsewhere[0] to 1",
        "recv-reduce whole from 1 with input[0] into output[0]",
        "reduce input[0]",
        "recv output[0] from none",
    ];
    let texts = heads
        .iter()
        .map(|&text| text.to_owned())
        .chain(steps.map(|step| format!("{head}{step}")));
    let said = texts.map(|text| text.parse::<Plan>().expect_err("an error").to_string());
    insta::assert_snapshot!(said.collect::<Vec<_>>().join("\n"));
}

proptest! {
    /// A plan's text with a word replaced is a plan or an error, and then proved or flawed; in any
    /// case it can be counted and drawn.
    #[test]
    fn damaged_text_is_harmless(which in any::<prop::sample::Index>(), ranks in 1..6u32, at in any::<prop::sample::Index>(), other in word()) {
        let pairs: Vec<_> = Collective::ALL.iter().flat_map(|&collective| Algorithm::of(collective).map(move |algorithm| (algorithm, collective))).collect();
        let (algorithm, collective) = *which.get(&pairs);
        let order: Vec<_> = (0..ranks).map(Rank).collect();
        let text = Plan::of(&*algorithm.schedule(collective, &order, Rank(0)).expect("a schedule")).to_string();
        let words: Vec<_> = text.split_inclusive(char::is_whitespace).collect();
        let at = at.index(words.len());
        let end: String = words[at].chars().filter(|char| char.is_whitespace()).collect();
        let damaged = [&words[..at], &[&*other, &*end], &words[at + 1..]].concat().concat();
        if let Ok(plan) = damaged.parse::<Plan>() {
            let census = super::census::PlanStatistics::of(&plan);
            prop_assert_eq!(super::draw::svg(&plan, None).matches("<circle").count() as u64, census.ranks.iter().map(|count| count.steps).sum::<u64>());
            prop_assert!(super::draw::table(&plan, None).lines().count() > 2);
            if super::check::prove(&plan).is_err() {
                prop_assert_eq!(plan.to_string().parse(), Ok(plan));
            }
        }
    }
}

fn word() -> impl Strategy<Value = String> {
    let words = [
        "0",
        "1",
        "2",
        "5",
        "4294967295",
        "input[0]",
        "output[0]",
        "output[1..3]",
        "scratch[0]",
        "partial[0]",
        "scratch[4294967294]",
        "nothing",
        "partial",
        "element",
        "barrier",
        "reduce",
        "alltoallv",
        "send",
        "recv",
        "#",
    ];
    prop::sample::select(words.to_vec()).prop_map(str::to_owned)
}
