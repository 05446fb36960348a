//! Reports of the suite: text, and JSON for programs.

use serde_json::json;

use super::runner::{CaseResult, Outcome};
use super::{Case, Options};

pub(super) fn list(cases: &[Case]) {
    for case in cases {
        println!("{}  [{}]  {}", case.name, case.clause, case.rule);
    }
}

/// The number of each outcome: passed, failed, waived, not offered.
fn counts(results: &[CaseResult]) -> [usize; 4] {
    let mut counts = [0; 4];
    for result in results {
        counts[match result.outcome {
            Outcome::Passed => 0,
            Outcome::Failed(_) | Outcome::WaivedButPassed(_) => 1,
            Outcome::Waived { .. } => 2,
            Outcome::NotOffered(_) => 3,
        }] += 1;
    }
    counts
}

pub(super) fn print_case(options: &Options, CaseResult { case, outcome, took }: &CaseResult) {
    if options.json {
        return;
    }
    let (word, detail) = match outcome {
        Outcome::Passed => ("ok", String::new()),
        Outcome::Failed(failure) => (
            "FAILED",
            format!("\n    [{}] {}\n    {failure}", case.clause, case.rule),
        ),
        Outcome::Waived { failure, .. } => ("waived", format!(": {failure}")),
        Outcome::WaivedButPassed(reason) => ("PASSED, though waived", format!(": {reason}")),
        Outcome::NotOffered(what) => ("not offered", format!(": {what}")),
    };
    println!("{:7.1} ms  {}  {word}{detail}", took.as_secs_f64() * 1e3, case.name);
}

pub(super) fn print_summary(options: &Options, results: &[CaseResult]) {
    if options.json {
        println!("{}", as_json(options, results));
        return;
    }
    let [passed, failed, waived, not_offered] = counts(results);
    println!("{passed} passed, {failed} failed, {waived} waived, {not_offered} not offered");
}

fn as_json(options: &Options, results: &[CaseResult]) -> serde_json::Value {
    let [passed, failed, waived, not_offered] = counts(results);
    let cases: Vec<_> = results
        .iter()
        .map(|CaseResult { case, outcome, took }| {
            let (word, detail, reason) = match outcome {
                Outcome::Passed => ("passed", None, None),
                Outcome::Failed(failure) => ("failed", Some(failure), None),
                Outcome::Waived { failure, reason } => ("waived", Some(failure), Some(reason)),
                Outcome::WaivedButPassed(reason) => ("passed though waived", None, Some(reason)),
                Outcome::NotOffered(what) => ("not offered", Some(what), None),
            };
            json!({
                "name": case.name,
                "clause": case.clause,
                "rule": case.rule,
                "outcome": word,
                "detail": detail,
                "reason": reason,
                "time_ms": took.as_secs_f64() * 1e3,
            })
        })
        .collect();
    json!({
        "tool": "conformance",
        "device": options.device,
        "seed": options.seed,
        "passed": passed,
        "failed": failed,
        "waived": waived,
        "not_offered": not_offered,
        "cases": cases,
    })
}
