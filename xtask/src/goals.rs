//! `cargo xtask goals`: judges the project's goals by what `doorbell limits --json` measured.

use crate::{ci, target_folder};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::{
    fs,
    path::PathBuf,
    process::{Command, Stdio},
};

const HELP: &str = "\
Judge the project's goals by what `doorbell limits --json` measures

Usage: cargo xtask goals [FILE]

Arguments:
  FILE        judge this output of `doorbell limits --json`; without it, doorbell is built and run

Options:
  -h, --help  show this

Exit status: 0 when every goal is met, 1 when one is missed or not measured, 2 on bad usage or a
failure.
";

/// A bound for a value, by the name of its unit, or for its ratio to a limit.
struct Goal {
    name: &'static str,
    bytes: u64,
    key: &'static str,
    bound: Bound,
}

#[derive(Clone, Copy)]
enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

const fn goal(name: &'static str, bytes: u64, key: &'static str, bound: Bound) -> Goal {
    Goal {
        name,
        bytes,
        key,
        bound,
    }
}

const GOALS: [Goal; 13] = [
    goal("soft_local_write_bw", 64 << 10, "ratio", Bound::AtLeast(0.9)),
    goal("soft_local_write_bw", 256 << 10, "ratio", Bound::AtLeast(0.9)),
    goal("soft_local_write_bw", 1 << 20, "ratio", Bound::AtLeast(0.95)),
    goal("soft_local_write_bw_foreign", 64 << 10, "ratio", Bound::AtLeast(0.9)),
    goal("soft_local_write_bw_foreign", 256 << 10, "ratio", Bound::AtLeast(0.9)),
    goal("soft_local_write_bw_foreign", 1 << 20, "ratio", Bound::AtLeast(0.9)),
    goal("soft_udp_write_bw", 1 << 20, "ratio", Bound::AtLeast(0.8)),
    goal("soft_local_write_lat", 2, "ratio", Bound::AtMost(4.0)),
    goal("soft_local_write_lat", 2, "ns", Bound::AtMost(250.0)),
    goal("soft_local_write_lat_foreign", 2, "ns", Bound::AtMost(2500.0)),
    goal("soft_local_send_lat", 2, "ns", Bound::AtMost(600.0)),
    goal("soft_local_msg_rate", 64, "per_s", Bound::AtLeast(5e6)),
    goal("idle_cpu", 0, "ratio", Bound::AtMost(0.001)),
];

impl Goal {
    /// Whether it is met, and a line that says so.
    fn judge(&self, results: &[Value]) -> (bool, String) {
        let row = results
            .iter()
            .find(|row| row["name"] == self.name && row["bytes"] == self.bytes);
        let value = row.and_then(|row| row[self.key].as_f64());
        let (relation, bound, met) = match self.bound {
            Bound::AtLeast(least) => (">=", least, value.is_some_and(|value| value >= least)),
            Bound::AtMost(most) => ("<=", most, value.is_some_and(|value| value <= most)),
        };
        let verdict = if met { "met" } else { "missed" };
        let value = value.map_or_else(|| "not measured".to_owned(), |value| format!("{value:.4}"));
        let Goal { name, bytes, key, .. } = self;
        (
            met,
            format!("{verdict:<6} {name} {bytes}: {key} {value}, goal {relation} {bound}"),
        )
    }
}

/// The command-line form. Returns the exit status.
pub(crate) fn main(mut arguments: lexopt::Parser) -> Result<u8> {
    use lexopt::prelude::*;
    let mut file = None;
    while let Some(argument) = arguments.next()? {
        match argument {
            Short('h') | Long("help") => {
                print!("{HELP}");
                return Ok(0);
            }
            Value(path) if file.is_none() => file = Some(PathBuf::from(path)),
            other => return Err(other.unexpected().into()),
        }
    }
    let json = match file {
        Some(file) => fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?,
        None => measure()?,
    };
    let (status, lines) = judge(&json)?;
    lines.iter().for_each(|line| println!("{line}"));
    Ok(status)
}

/// The exit status, and a line for each goal.
fn judge(json: &[u8]) -> Result<(u8, Vec<String>)> {
    let report: Value = serde_json::from_slice(json).context("not the JSON of doorbell limits")?;
    let results = report["results"].as_array().context("no results of doorbell limits")?;
    let (met, lines): (Vec<_>, Vec<_>) = GOALS.iter().map(|goal| goal.judge(results)).unzip();
    Ok((u8::from(met.contains(&false)), lines))
}

fn measure() -> Result<Vec<u8>> {
    let build = [
        "build",
        "--profile",
        "dist",
        "--locked",
        "--package",
        "doorbell-perftest",
    ];
    let status = ci::command(&build).status().context("cannot run cargo")?;
    ensure!(status.success(), "cargo build: {status}");
    let output = Command::new(target_folder()?.join("dist/doorbell"))
        .args(["limits", "--json"])
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run doorbell")?;
    ensure!(output.status.success(), "doorbell limits: {}", output.status);
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A report in which every goal is just met.
    fn report() -> Value {
        let mut results: Vec<Value> = Vec::new();
        for goal in &GOALS {
            let (Bound::AtLeast(bound) | Bound::AtMost(bound)) = goal.bound;
            let same = |row: &&mut Value| row["name"] == goal.name && row["bytes"] == goal.bytes;
            match results.iter_mut().find(same) {
                Some(row) => row[goal.key] = bound.into(),
                None => results.push(serde_json::json!({"name": goal.name, "bytes": goal.bytes, goal.key: bound})),
            }
        }
        serde_json::json!({ "results": results })
    }

    fn judged(report: &Value) -> (u8, Vec<String>) {
        let (status, lines) = judge(report.to_string().as_bytes()).unwrap();
        let missed = lines.into_iter().filter(|line| !line.starts_with("met"));
        (status, missed.collect())
    }

    #[test]
    fn a_value_just_beyond_its_bound_is_one_missed_goal() {
        assert_eq!(judged(&report()), (0, vec![]));
        for goal in &GOALS {
            let mut report = report();
            let rows = report["results"].as_array_mut().unwrap();
            let mut rows = rows.iter_mut();
            let row = rows
                .find(|row| row["name"] == goal.name && row["bytes"] == goal.bytes)
                .unwrap();
            row[goal.key] = match goal.bound {
                Bound::AtLeast(least) => (least * 0.99).into(),
                Bound::AtMost(most) => (most * 1.01).into(),
            };
            let (status, missed) = judged(&report);
            assert!(
                status == 1 && missed.len() == 1 && missed[0].contains(goal.name),
                "{missed:?}"
            );
        }
    }

    #[test]
    fn the_command_fails_with_the_line_of_a_missed_goal() {
        let mut report = report();
        report["results"]
            .as_array_mut()
            .unwrap()
            .retain(|row| row["name"] != "idle_cpu");
        let line = "missed idle_cpu 0: ratio not measured, goal <= 0.001".to_owned();
        assert_eq!(judged(&report), (1, vec![line]));
        let file = std::env::temp_dir().join(format!("xtask-goals-{}.json", std::process::id()));
        fs::write(&file, report.to_string()).unwrap();
        let status = main(lexopt::Parser::from_args([&file]));
        fs::remove_file(&file).unwrap();
        assert_eq!(status.unwrap(), 1);
        assert!(judge(b"{}").is_err());
    }
}
