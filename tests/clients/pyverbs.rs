//! rdma-core's tests: each that fails is in `docs/waivers/pyverbs.txt` with its reason.
//!
//! The table has what the same suite gives on the kernel's rxe, in a guest, beside it.

use anyhow::{Result, bail, ensure};
use doorbell_tests::conformance::waivers::{self, Waiver};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

const WAIVERS: &str = "docs/waivers/pyverbs.txt";

/// What `unittest -v` printed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Suite {
    run: usize,
    skipped: usize,
    /// As [`failed`](Self::failed).
    succeeded: BTreeSet<String>,
    /// `tests.MODULE.CLASS.NAME`.
    failed: BTreeSet<String>,
    /// Of each reason, numbers replaced, how many tests were skipped.
    reasons: BTreeMap<String, usize>,
}

impl Suite {
    pub(crate) fn read(output: &str) -> Result<Self> {
        let mut suite = Suite::default();
        let mut latest = String::new();
        for line in output.lines() {
            // A test with a description has its name on the line before.
            let named = line.split(" ... ").next().filter(|name| name.contains(" (tests."));
            latest = named.map_or(latest, full_name);
            // A warning of Python's may come between the name and its result.
            if line.ends_with(" ... ok") || line == "ok" {
                suite.succeeded.insert(latest.clone());
            } else if let Some((_, reason)) = line.split_once(" ... skipped ") {
                let reason = reason.trim_matches(['\'', '"']);
                *suite.reasons.entry(generic(reason)).or_default() += 1;
            } else if let Some(name) = line.strip_prefix("FAIL: ").or(line.strip_prefix("ERROR: ")) {
                suite.failed.insert(full_name(name));
            } else if let Some(rest) = line.strip_prefix("Ran ") {
                suite.run = rest.split(' ').next().unwrap_or_default().parse()?;
            } else if let Some((_, rest)) = line.split_once("skipped=") {
                let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
                suite.skipped = digits.parse()?;
            }
        }
        ensure!(suite.run > 0, "no line of the number of tests");
        let (named, counted) = (suite.succeeded.len(), suite.passed());
        ensure!(named == counted, "{named} tests are ok, and {counted} of the count");
        Ok(suite)
    }

    fn passed(&self) -> usize {
        self.run.saturating_sub(self.skipped + self.failed.len())
    }
}

/// `NAME (tests.MODULE.CLASS.NAME)` or `NAME (tests.MODULE.CLASS)`.
fn full_name(shown: &str) -> String {
    let (name, place) = shown.split_once(" (").unwrap_or((shown, ""));
    let place = place.trim_end_matches(')');
    match place.strip_suffix(name) {
        Some(_) => place.to_owned(),
        None => format!("{place}.{name}"),
    }
}

/// One reason for all devices and sizes.
fn generic(reason: &str) -> String {
    let mut text = String::new();
    for letter in reason.chars() {
        match letter {
            '0'..='9' if text.ends_with('N') => {}
            '0'..='9' => text.push('N'),
            other => text.push(other),
        }
    }
    text
}

fn listed() -> Result<Vec<Waiver>> {
    waivers::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(WAIVERS))
}

/// The counts; an error when a failure is not listed, or one that is listed passes.
pub(crate) fn judged(suite: &Suite) -> Result<String> {
    let waivers = listed()?;
    let covered = |name: &String| waivers.iter().any(|waiver| waiver.covers(name));
    let unlisted: Vec<_> = suite
        .failed
        .iter()
        .filter(|name| !covered(name))
        .map(String::as_str)
        .collect();
    ensure!(unlisted.is_empty(), "fails, not in {WAIVERS}: {}", unlisted.join(" "));
    let stale = waivers
        .iter()
        .find(|waiver| !suite.failed.iter().any(|name| waiver.covers(name)));
    if let Some(waiver) = stale {
        bail!("{} is in {WAIVERS}, and passes", waiver.pattern);
    }
    let passed = suite.passed();
    ensure!(passed > 0, "no test passed");
    let (run, failed, skipped) = (suite.run, suite.failed.len(), suite.skipped);
    Ok(format!("{passed} of {run} pass, {failed} fail, {skipped} are skipped"))
}

/// The suite beside the same on rxe, and the reasons of skipped and failed tests, for the document.
pub(crate) fn tables(suite: &Suite, rxe: &Suite) -> Result<String> {
    let mut text = "| device | pass | fail | are skipped |\n|---|---|---|---|\n".to_owned();
    for (device, suite) in [("soft0", suite), ("rxe0, Linux 6.1", rxe)] {
        let Suite { failed, skipped, .. } = suite;
        text += &format!("| {device} | {} | {} | {skipped} |\n", suite.passed(), failed.len());
    }
    let list = |names: Vec<&String>| match names[..] {
        [] => "none".to_owned(),
        _ => names
            .iter()
            .map(|name| format!("`{name}`"))
            .collect::<Vec<_>>()
            .join(", "),
    };
    let missing = list(rxe.succeeded.difference(&suite.succeeded).collect());
    text += &format!("\nPass on rxe0 and not on soft0: {missing}. ");
    text += &format!("Fail on rxe0: {}.\n", list(rxe.failed.iter().collect()));
    text += "\n| tests skipped on soft0 | reason |\n|---|---|\n";
    for (reason, count) in &suite.reasons {
        text += &format!("| {count} | {reason} |\n");
    }
    let waivers = listed()?;
    if !waivers.is_empty() {
        text += "\n| test that fails on soft0 | reason |\n|---|---|\n";
    }
    for waiver in waivers {
        text += &format!("| `{}` | {} |\n", waiver.pattern, waiver.reason);
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\
test_a (tests.test_mr.MRTest.test_a) ... ok
test_b (tests.test_mr.MRTest.test_b) ... skipped 'No mlx5 device'
test_c (tests.test_mr.MRTest.test_c)
Does something. ... ERROR
test_d (tests.test_mr.MRTest) ... FAIL
test_e (tests.test_mr.MRTest.test_e)
Does something else. ... file.py:1: Warning
ok
ERROR: test_c (tests.test_mr.MRTest.test_c)
FAIL: test_d (tests.test_mr.MRTest)
Ran 5 tests in 0.459s
FAILED (failures=1, errors=1, skipped=1)";

    #[test]
    fn the_suites_output_is_read() {
        let suite = Suite::read(OUTPUT).unwrap();
        let failed: Vec<_> = suite.failed.iter().map(String::as_str).collect();
        assert_eq!(failed, ["tests.test_mr.MRTest.test_c", "tests.test_mr.MRTest.test_d"]);
        assert_eq!((suite.run, suite.skipped, suite.passed()), (5, 1, 2));
        let passed: Vec<_> = suite.succeeded.iter().map(String::as_str).collect();
        assert_eq!(passed, ["tests.test_mr.MRTest.test_a", "tests.test_mr.MRTest.test_e"]);
        assert_eq!(suite.reasons, BTreeMap::from([("No mlxN device".to_owned(), 1)]));
        assert!(Suite::read("").is_err());
        assert!(Suite::read(&OUTPUT.replace("Ran 5", "Ran 6")).is_err());
    }

    #[test]
    fn a_failure_that_is_not_listed_is_named() {
        let error = judged(&Suite::read(OUTPUT).unwrap()).unwrap_err().to_string();
        assert!(error.contains("tests.test_mr.MRTest.test_c"), "{error}");
    }

    #[test]
    fn what_only_rxe_passes_is_named() {
        let rxe = Suite::read(
            &OUTPUT
                .replace("skipped 'No mlx5 device'", "ok")
                .replace(", skipped=1", ""),
        )
        .unwrap();
        let text = tables(&Suite::read(OUTPUT).unwrap(), &rxe).unwrap();
        assert!(text.contains("not on soft0: `tests.test_mr.MRTest.test_b`. "), "{text}");
        assert!(text.contains("| rxe0, Linux 6.1 | 3 | 2 | 0 |"), "{text}");
    }
}
