//! rdma-core's tests: each that fails is in `docs/waivers/pyverbs.txt` with its reason.

use anyhow::{Result, bail, ensure};
use doorbell_tests::conformance::waivers::{self, Waiver};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

const WAIVERS: &str = "docs/waivers/pyverbs.txt";

/// What `unittest -v` printed.
#[derive(Debug, Default, PartialEq, Eq)]
struct Suite {
    run: usize,
    skipped: usize,
    /// `tests.MODULE.CLASS.NAME`.
    failed: BTreeSet<String>,
    /// Of each reason, numbers replaced, how many tests were skipped.
    reasons: BTreeMap<String, usize>,
}

impl Suite {
    fn read(output: &str) -> Result<Self> {
        let mut suite = Suite::default();
        for line in output.lines() {
            if let Some((_, reason)) = line.split_once(" ... skipped ") {
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
pub(crate) fn judged(output: &str) -> Result<String> {
    let suite = Suite::read(output)?;
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

/// The reasons of skipped and failed tests, for the document.
pub(crate) fn tables(output: &str) -> Result<String> {
    let suite = Suite::read(output)?;
    let mut text = "| tests of pyverbs skipped | reason |\n|---|---|\n".to_owned();
    for (reason, count) in &suite.reasons {
        text += &format!("| {count} | {reason} |\n");
    }
    let waivers = listed()?;
    if !waivers.is_empty() {
        text += "\n| test of pyverbs that fails | reason |\n|---|---|\n";
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
Does something. ... ERROR
ERROR: test_c (tests.test_mr.MRTest.test_c)
FAIL: test_d (tests.test_mr.MRTest)
Ran 4 tests in 0.459s
FAILED (failures=1, errors=1, skipped=1)";

    #[test]
    fn the_suites_output_is_read() {
        let suite = Suite::read(OUTPUT).unwrap();
        let failed: Vec<_> = suite.failed.iter().map(String::as_str).collect();
        assert_eq!(failed, ["tests.test_mr.MRTest.test_c", "tests.test_mr.MRTest.test_d"]);
        assert_eq!((suite.run, suite.skipped, suite.passed()), (4, 1, 1));
        assert_eq!(suite.reasons, BTreeMap::from([("No mlxN device".to_owned(), 1)]));
        assert!(Suite::read("").is_err());
    }

    #[test]
    fn a_failure_that_is_not_listed_is_named() {
        let error = judged(OUTPUT).unwrap_err().to_string();
        assert!(error.contains("tests.test_mr.MRTest.test_c"), "{error}");
    }
}
