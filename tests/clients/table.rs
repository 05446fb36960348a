//! The tables of `docs/CLIENTS.md`: a row replaces that of the same client and mode.

use crate::{
    cases::{self, Case, Package},
    pyverbs::{self, Suite},
    rig::Outcome,
};
use anyhow::{Context, Result, ensure};
use doorbell_tests::section::{replaced, span};
use std::{path::Path, process::Command};

const ROWS: &str = "rows";
const PYVERBS: &str = "pyverbs";

const HEAD: &str = "\
| client | version | mode | verified | figure | without RDMA | the server killed: the client | the client killed: the server |
|---|---|---|---|---|---|---|---|
";

/// A line of the table; [`cell`] finds its columns.
fn line(case: &Case, version: &str, outcome: &Outcome) -> String {
    let Outcome { report, beside, killed } = outcome;
    let [server, client] = killed;
    let Case { client: name, mode, .. } = case;
    let (verified, figure) = (&report.verified, &report.figure);
    format!("| {name} | {version} | {mode} | {verified} | {figure} | {beside} | {server} | {client} |")
}

fn cell(line: &str, column: usize) -> &str {
    line.split('|').nth(column + 1).unwrap_or_default().trim()
}

fn is_of(line: &str, case: &Case) -> bool {
    (cell(line, 0), cell(line, 2)) == (case.client, &*case.mode)
}

/// The version of a package that is installed; of a wheel, in the folder `wheels`; of a crate.
pub(crate) fn version(package: Package, wheels: Option<&Path>) -> Result<String> {
    const OF_WHEEL: &str = "import importlib.metadata as m, sys; sys.stdout.write(m.version(sys.argv[1]))";
    let (name, mut command) = match package {
        Package::Debian(name) => (name, Command::new("dpkg-query")),
        Package::Wheel(name) => (name, Command::new("/usr/bin/python3")),
        Package::Crate(version) => return Ok(version.to_owned()),
    };
    match package {
        Package::Wheel(_) => command
            .args(["-c", OF_WHEEL])
            .envs(wheels.map(|folder| ("PYTHONPATH", folder))),
        _ => command.args(["-W", "-f", "${Version}"]),
    };
    let output = command
        .arg(name)
        .output()
        .with_context(|| format!("cannot find {name}"))?;
    ensure!(output.status.success(), "{name} is not installed");
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The text with the rows that were run in place of those that it had.
pub(crate) fn written(
    text: &str,
    rows: &[(&Case, Outcome)],
    rxe: Option<&Suite>,
    version: impl Fn(Package) -> Result<String>,
) -> Result<String> {
    let old = &text[span(text, ROWS)?];
    let mut body = HEAD.to_owned();
    for case in cases::all() {
        let new = rows
            .iter()
            .find(|(run, _)| (run.client, &run.mode) == (case.client, &case.mode));
        let line = match new {
            Some((case, outcome)) => Some(line(case, &version(case.package)?, outcome)),
            None => old.lines().find(|line| is_of(line, &case)).map(str::to_owned),
        };
        body.extend(line.map(|line| line + "\n"));
    }
    let text = replaced(text, ROWS, &format!("\n{body}"))?;
    match (rows.iter().find_map(|(_, outcome)| outcome.report.suite.as_ref()), rxe) {
        (Some(suite), Some(rxe)) => replaced(&text, PYVERBS, &format!("\n{}", pyverbs::tables(suite, rxe)?)),
        _ => Ok(text),
    }
}

/// What the rows verified, and the table does not say so.
pub(crate) fn differences(text: &str, rows: &[(&Case, Outcome)]) -> Result<Vec<String>> {
    let old = &text[span(text, ROWS)?];
    let mut all = Vec::new();
    for (case, outcome) in rows {
        let verified = &outcome.report.verified;
        let found = old.lines().find(|line| is_of(line, case)).map(|line| cell(line, 3));
        if found != Some(verified.as_str()) {
            let found = found.unwrap_or("no such row");
            all.push(format!("{}, {}: {found}; was run: {verified}", case.client, case.mode));
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::read::Report;

    const FILE: &str = "<!-- begin rows -->\n<!-- end rows -->\n<!-- begin pyverbs -->\n<!-- end pyverbs -->\n";

    fn outcome(verified: &str) -> Outcome {
        let text = str::to_owned;
        Outcome {
            report: Report {
                verified: text(verified),
                figure: text("1 GB/s"),
                suite: None,
            },
            beside: text("–"),
            killed: [text("–"), text("–")],
        }
    }

    #[test]
    fn rows_replace_their_own_and_keep_the_order() {
        let cases: Vec<Case> = cases::all()
            .into_iter()
            .filter(|case| case.client == "ucmatose" || case.client == "udaddy")
            .collect();
        let [ucmatose, udaddy] = &cases[..] else {
            panic!("{cases:?}")
        };
        let written = |text: &str, case, verified| {
            written(text, &[(case, outcome(verified))], None, |_| Ok("1.0".to_owned())).unwrap()
        };
        let text = written(&written(FILE, udaddy, "three"), ucmatose, "ten");
        let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("| ")).collect();
        assert!(
            is_of(lines[1], ucmatose) && is_of(lines[2], udaddy) && lines.len() == 3,
            "{text}"
        );
        assert!(differences(&text, &[(ucmatose, outcome("ten"))]).unwrap().is_empty());
        let changed = differences(&text, &[(ucmatose, outcome("nine"))]).unwrap();
        assert!(changed.len() == 1 && changed[0].contains("nine"), "{changed:?}");
    }

    #[test]
    fn the_committed_table_has_every_row() {
        let text = include_str!("../../docs/CLIENTS.md");
        let rows = &text[span(text, ROWS).unwrap()];
        for case in cases::all() {
            assert!(
                rows.lines().any(|line| is_of(line, &case)),
                "{}, {}",
                case.client,
                case.mode
            );
        }
    }
}
