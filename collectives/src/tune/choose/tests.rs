//! Choices and their explanations.

use super::*;

fn tuner() -> Tuner {
    Tuner::new(Link::soft_local(), Link::ndr400(), Compute::default(), 8)
}

fn question(collective: Collective, bytes: u64) -> TuningRequest {
    TuningRequest {
        collective,
        bytes,
        data: DataType::F32,
        root: Rank(0),
        deterministic: false,
    }
}

fn order(ranks: u32) -> Vec<Rank> {
    (0..ranks).map(Rank).collect()
}

fn apart(tuner: &Tuner, question: &TuningRequest, ranks: u32) -> Decision {
    tuner
        .choose(question, &(0..ranks).collect::<Vec<_>>(), &order(ranks))
        .unwrap()
}

#[test]
fn short_operations_use_few_steps_and_long_ones_few_bytes() {
    let short = apart(&tuner(), &question(Collective::AllReduce, 8), 16).choice;
    assert_eq!(short.protocol, Protocol::Ll);
    assert!(
        matches!(short.algorithm, Algorithm::RecursiveDoubling | Algorithm::OneShot),
        "{short}"
    );
    assert_eq!(short.channels, 1);
    let long = apart(&tuner(), &question(Collective::AllReduce, 256 << 20), 16).choice;
    assert_eq!(long.protocol, Protocol::Simple);
    assert!(
        matches!(
            long.algorithm,
            Algorithm::Ring | Algorithm::HalvingDoubling | Algorithm::FullMesh
        ),
        "{long}"
    );
    let chain = apart(&tuner(), &question(Collective::Broadcast, 256 << 20), 8).choice;
    assert!(
        chain.slice_bytes < 256 << 20 && matches!(chain.algorithm, Algorithm::Ring | Algorithm::DoubleBinaryTree),
        "{chain}"
    );
}

#[test]
fn every_collective_of_any_ranks_has_a_choice() {
    for &collective in Collective::ALL {
        for ranks in [1, 2, 3, 5, 100] {
            for bytes in [0, 8, 1 << 20] {
                let decision = apart(&tuner(), &question(collective, bytes), ranks);
                assert!(decision.choice.algorithm.supports(collective) && decision.predicted_ns.is_finite());
                let best = decision
                    .candidates
                    .iter()
                    .filter_map(|candidate| candidate.simulated_ns)
                    .fold(f64::INFINITY, f64::min);
                assert!(
                    decision.predicted_ns <= best,
                    "{collective} of {ranks}: {}",
                    decision.explain()
                );
            }
        }
    }
    assert_eq!(
        tuner().choose(&question(Collective::Barrier, 0), &[], &[]),
        Err(NoChoice::NoRanks)
    );
}

#[test]
fn deterministic_calls_use_deterministic_algorithms() {
    let question = TuningRequest {
        deterministic: true,
        ..question(Collective::AllReduce, 64 << 20)
    };
    let decision = apart(&tuner(), &question, 8);
    assert!(
        decision
            .candidates
            .iter()
            .all(|candidate| candidate.choice.algorithm.deterministic(Collective::AllReduce))
    );
    assert!(decision.choice.algorithm != Algorithm::Ring);
}

#[test]
fn overrides_are_not_chosen() {
    let mut tuner = tuner();
    tuner.overrides = Overrides {
        algorithm: Some(Algorithm::Tree),
        protocol: Some(Protocol::Ll128),
        channels: Some(3),
        slice_bytes: Some(12345),
    };
    let decision = apart(&tuner, &question(Collective::AllReduce, 64 << 20), 8);
    let forced = Choice {
        algorithm: Algorithm::Tree,
        protocol: Protocol::Ll128,
        channels: 3,
        slice_bytes: 12345,
    };
    assert_eq!(decision.choice, forced);
    assert!(
        decision.reason.ends_with("as its algorithm was selected"),
        "{}",
        decision.reason
    );
    let decision = apart(&tuner, &question(Collective::AllToAll, 1 << 20), 8);
    assert!(
        decision
            .reason
            .ends_with("; tree was selected, which does not do alltoall"),
        "{}",
        decision.reason
    );
    tuner.overrides.algorithm = Some(Algorithm::Ring);
    let deterministic = TuningRequest {
        deterministic: true,
        ..question(Collective::AllReduce, 1 << 20)
    };
    let decision = apart(&tuner, &deterministic, 8);
    assert!(
        decision
            .reason
            .ends_with("; ring was selected, which is not deterministic for allreduce"),
        "{}",
        decision.reason
    );
}

#[test]
fn rules_of_a_file_are_followed_and_the_environment_is_stronger() {
    let rule =
        r#"{"rules": [{"collective": "allreduce", "to_bytes": 1024, "ranks": 4, "algorithm": "tree", "channels": 2}]}"#;
    let file: TuningFile = serde_json::from_str(rule).unwrap();
    let mut tuner = tuner().with_file(file);
    let decision = apart(&tuner, &question(Collective::AllReduce, 1024), 4);
    assert_eq!(
        (decision.choice.algorithm, decision.choice.channels),
        (Algorithm::Tree, 2)
    );
    assert!(
        decision
            .reason
            .ends_with("; the tuning file's rule for allreduce to 1024 bytes of 4 ranks was followed"),
        "{}",
        decision.reason
    );
    for (bytes, ranks) in [(1025, 4), (1024, 5)] {
        assert!(
            apart(&tuner, &question(Collective::AllReduce, bytes), ranks)
                .choice
                .algorithm
                != Algorithm::Tree
        );
    }
    tuner.overrides.algorithm = Some(Algorithm::Ring);
    assert_eq!(
        apart(&tuner, &question(Collective::AllReduce, 1024), 4)
            .choice
            .algorithm,
        Algorithm::Ring
    );
}

#[test]
fn the_explanation_shows_each_algorithm_once_for_each_protocol() {
    let decision = apart(&tuner(), &question(Collective::Broadcast, 4096), 5);
    let text = decision.explain();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 1 + decision.candidates.len() + 1, "{text}");
    assert_eq!(
        decision.candidates.len(),
        4 * 3,
        "four algorithms by three protocols: {text}"
    );
    assert!(
        lines[0].starts_with("#algorithm") && lines[1].starts_with(decision.choice.algorithm.name()),
        "{text}"
    );
    let reason = lines[lines.len() - 1];
    assert!(
        reason.starts_with(&decision.choice.to_string()) && reason.contains("times as quick as the next algorithm"),
        "{reason}"
    );
}

#[test]
fn the_first_slices_predict_the_whole() {
    let fabric = Fabric::uniform(8, Link::ndr400(), Compute::default());
    for &collective in Collective::ALL {
        for algorithm in Algorithm::of(collective) {
            let schedule = algorithm.schedule(collective, &order(8), Rank(0)).unwrap();
            for channels in [1, 4] {
                let work = Work {
                    bytes: 64 << 20,
                    data: DataType::Bf16,
                    protocol: Protocol::Simple,
                    channels,
                    slice_bytes: 1 << 17,
                };
                let all = simulate::run(schedule.as_ref(), &fabric, &work).unwrap().time.ns();
                let predicted = simulate::predict_ns(schedule.as_ref(), &fabric, &work).unwrap();
                assert!(
                    (predicted / all - 1.0).abs() < 0.12,
                    "{collective} {algorithm} {channels}: {predicted} of {all}"
                );
            }
        }
    }
}
