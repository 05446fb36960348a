//! Building the targets with instrumentation, running one for a time, and minimizing its corpus.

use super::folder;
use crate::{
    ci::{command, succeed},
    sanitize, workspace,
};
use anyhow::{Context, Result};
use std::{
    ffi::OsStr,
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

/// Coverage as libFuzzer takes it, and the checks of a debug build at the speed of a release.
const FLAGS: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Cdebug-assertions -Coverflow-checks";
const ADDRESS: &str = "-Zsanitizer=address";

/// Of an input, in bytes.
const MAX_LEN: usize = 4096;
/// Of an execution, in seconds: most take microseconds.
const TIMEOUT: u64 = 20;
/// Bytes of a target's committed corpus.
const BUDGET: u64 = 20 << 10;

/// Of one target's run.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub(super) target: String,
    pub(super) executions: u64,
    pub(super) per_second: u64,
    /// Inputs that covered something new.
    pub(super) new_units: u64,
    pub(super) edges: u64,
    pub(super) features: u64,
    /// Executions of all runs in this target folder.
    pub(super) all_runs: u64,
    /// The input that failed, or the folder that has it.
    pub(super) finding: Option<PathBuf>,
}

/// Builds the targets; returns the folder of the programs.
pub(super) fn build(targets: &[String], is_plain: bool) -> Result<PathBuf> {
    let (name, sanitizer) = if is_plain {
        ("build-plain", "")
    } else {
        ("build", ADDRESS)
    };
    let (host, folder) = (sanitize::host()?, folder()?.join(name));
    let mut cargo = command(&["build", "--release", "--locked", "--package", "doorbell-fuzz"]);
    cargo.args(["--features", "libfuzzer", "--target", &host]);
    cargo.args(targets.iter().flat_map(|target| ["--bin", target]));
    cargo.arg("--target-dir").arg(&folder);
    succeed(
        cargo
            .env("RUSTFLAGS", format!("{FLAGS} {sanitizer}"))
            .env("RUSTC_BOOTSTRAP", "1"),
    )?;
    Ok(folder.join(host).join("release"))
}

fn committed(target: &str) -> PathBuf {
    workspace().join("tests/fuzz/corpus").join(target)
}

/// What runs have found so far.
fn grown(target: &str) -> Result<PathBuf> {
    let grown = folder()?.join("corpus").join(target);
    fs::create_dir_all(&grown).with_context(|| format!("cannot make {}", grown.display()))?;
    Ok(grown)
}

fn libfuzzer(program: &Path, target: &str, options: &[String]) -> Result<Command> {
    let findings = folder()?.join("findings").join(target);
    fs::create_dir_all(&findings).with_context(|| format!("cannot make {}", findings.display()))?;
    let mut command = Command::new(program);
    command
        .arg(format!("-artifact_prefix={}/", findings.display()))
        .arg(format!("-timeout={TIMEOUT}"))
        .args(["-rss_limit_mb=4096", "-detect_leaks=0", "-print_final_stats=1"])
        .args(options)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    Ok(command)
}

/// Runs a target for a time; a finding ends it early.
pub(super) fn run(program: &Path, target: &str, time: Duration) -> Result<Outcome> {
    let seconds = time.as_secs().max(1);
    let options = [format!("-max_total_time={seconds}"), format!("-max_len={MAX_LEN}")];
    let mut command = libfuzzer(program, target, &options)?;
    let mut child = command
        .arg(grown(target)?)
        .arg(committed(target))
        .spawn()
        .with_context(|| format!("cannot run {}", program.display()))?;
    let mut outcome = Outcome {
        target: target.to_owned(),
        ..Outcome::default()
    };
    let output = child.stderr.take().context("it has no stderr")?;
    let mut said = Vec::new();
    for line in BufReader::new(output).split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        if !take(&mut outcome, &line) {
            said.push(line);
        }
    }
    if !child.wait()?.success() {
        said.iter().for_each(|line| println!("{line}"));
        outcome.finding.get_or_insert(folder()?.join("findings").join(target));
    }
    outcome.all_runs = count(target, outcome.executions)?;
    Ok(outcome)
}

/// Takes the numbers of a line of libFuzzer's; false for a line of another kind.
fn take(outcome: &mut Outcome, line: &str) -> bool {
    let number = |text: &str| text.trim().parse().ok();
    let stat = |name: &str| line.strip_prefix("stat::")?.strip_prefix(name).and_then(number);
    if let Some(executions) = stat("number_of_executed_units:") {
        outcome.executions = executions;
    } else if let Some(per_second) = stat("average_exec_per_sec:") {
        outcome.per_second = per_second;
    } else if let Some(units) = stat("new_units_added:") {
        outcome.new_units = units;
    } else if let Some((_, path)) = line.split_once("Test unit written to ") {
        outcome.finding = Some(path.into());
        return false;
    } else if line.starts_with('#') {
        // `#1234 NEW cov: 56 ft: 78 corp: …`
        let words: Vec<_> = line.split_whitespace().collect();
        let after = |name: &str| {
            words
                .iter()
                .position(|word| *word == name)
                .and_then(|at| words.get(at + 1))
        };
        let of = |name: &str| after(name).and_then(|word| number(word));
        outcome.edges = of("cov:").unwrap_or(outcome.edges);
        outcome.features = of("ft:").unwrap_or(outcome.features);
    } else {
        return line.starts_with("stat::");
    }
    true
}

/// Adds to the executions of all runs; returns the sum.
fn count(target: &str, executions: u64) -> Result<u64> {
    let file = folder()?.join("executions").join(target);
    fs::create_dir_all(folder()?.join("executions"))?;
    let before = fs::read_to_string(&file)
        .ok()
        .and_then(|text| text.trim().parse::<u64>().ok());
    let sum = before.unwrap_or(0) + executions;
    fs::write(&file, format!("{sum}\n")).with_context(|| format!("cannot write {}", file.display()))?;
    Ok(sum)
}

/// Replaces the found inputs of the committed corpus by fewer with the coverage of all that was
/// found; beyond the budget the longest are left out. Inputs with a name of ours stay.
pub(super) fn minimize(program: &Path, target: &str) -> Result<()> {
    let (merged, committed) = (folder()?.join("merged").join(target), committed(target));
    let _ = fs::remove_dir_all(&merged);
    fs::create_dir_all(&merged)?;
    let mut command = libfuzzer(program, target, &["-set_cover_merge=1".to_owned()])?;
    command.arg(&merged).arg(&committed).arg(grown(target)?);
    command.stderr(Stdio::null());
    succeed(&mut command)?;
    let mut inputs = Vec::new();
    for file in fs::read_dir(&merged)? {
        let file = file?;
        inputs.push((file.metadata()?.len(), file.file_name()));
    }
    let kept = within_budget(inputs, BUDGET);
    for file in fs::read_dir(&committed)? {
        let file = file?;
        if is_found(&file.file_name()) {
            fs::remove_file(file.path())?;
        }
    }
    for name in &kept {
        fs::copy(merged.join(name), committed.join(name))?;
    }
    println!("{target}: {} inputs committed", kept.len());
    Ok(())
}

/// Whether libFuzzer has named an input: by a SHA-1.
fn is_found(name: &OsStr) -> bool {
    name.len() == 40 && name.as_encoded_bytes().iter().all(u8::is_ascii_hexdigit)
}

fn within_budget<N: AsRef<OsStr> + Ord>(mut inputs: Vec<(u64, N)>, budget: u64) -> Vec<N> {
    inputs.sort();
    let mut used = 0;
    let fits = |(len, _): &(u64, N)| {
        used += len;
        used <= budget
    };
    inputs.into_iter().take_while(fits).map(|(_, name)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_from_the_lines_of_libfuzzer() {
        let mut outcome = Outcome::default();
        for line in [
            "INFO: Seed: 1",
            "#2\tINITED cov: 12 ft: 13 corp: 1/1b exec/s: 0 rss: 30Mb",
            "#65536\tpulse  cov: 345 ft: 678 corp: 90/1Kb lim: 100 exec/s: 32768 rss: 40Mb",
            "stat::number_of_executed_units: 123456",
            "stat::average_exec_per_sec:     1234",
            "stat::new_units_added:          56",
            "stat::slowest_unit_time_sec:    0",
            "artifact_prefix='x/'; Test unit written to x/crash-0123",
        ] {
            take(&mut outcome, line);
        }
        assert_eq!(
            (outcome.executions, outcome.per_second, outcome.new_units),
            (123_456, 1234, 56)
        );
        assert_eq!((outcome.edges, outcome.features), (345, 678));
        assert_eq!(outcome.finding.as_deref(), Some(Path::new("x/crash-0123")));
    }

    #[test]
    fn inputs_with_a_name_of_ours_stay() {
        assert!(is_found("da39a3ee5e6b4b0d3255bfef95601890afd80709".as_ref()));
        assert!(!is_found("seed".as_ref()));
    }

    #[test]
    fn the_longest_inputs_are_left_out() {
        let inputs = vec![(50, "a"), (10, "b"), (41, "c"), (30, "d")];
        assert_eq!(within_budget(inputs, 100), ["b", "d", "c"]);
    }
}
