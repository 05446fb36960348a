//! Background steps: builds, and checks that do not depend on time.
//!
//! Tests and guests mostly wait. Background steps use the idle processors: processes at a low
//! priority, one after another, whose output is printed in one piece.

use super::{Line, Scope, Step, judge};
use crate::target_folder;
use anyhow::{Context, Result, anyhow};
use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    process::{self, Command, Stdio},
    sync::mpsc::{self, Receiver},
    thread,
    time::Instant,
};

/// Leaves nine tenths of a contended processor; at a lower priority its tests would not end.
const NICENESS: &str = "10";

pub(super) struct Background {
    /// Each step when it has ended, with its output.
    ended: Receiver<(&'static Step, Line, PathBuf)>,
}

impl Background {
    pub(super) fn start(steps: Vec<&'static Step>, scope: Scope) -> Result<Self> {
        let folder = target_folder()?.join("ci");
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let (report, ended) = mpsc::channel();
        thread::spawn(move || {
            for step in steps {
                let log = folder.join(step.name).with_extension("log");
                let line = run(step, scope, &folder, &log);
                if report.send((step, line, log)).is_err() {
                    return;
                }
            }
        });
        Ok(Self { ended })
    }

    pub(super) fn ended(&mut self) -> Vec<Line> {
        self.ended.try_iter().map(show).collect()
    }

    pub(super) fn wait(self) -> Vec<Line> {
        self.ended.iter().map(show).collect()
    }
}

fn run(step: &'static Step, scope: Scope, folder: &Path, log: &Path) -> Line {
    let started = Instant::now();
    let verdict = folder.join(step.name).with_extension("verdict");
    let process = || -> Result<String> {
        // An earlier run may have left one.
        let _ = fs::remove_file(&verdict);
        let output = File::create(log).with_context(|| format!("cannot make {}", log.display()))?;
        let status = Command::new("nice")
            // By process id: cargo may have replaced the file that is running.
            .args([
                "-n",
                NICENESS,
                &format!("/proc/{}/exe", process::id()),
                "ci",
                "--only",
                step.name,
                "--verdict",
            ])
            .arg(&verdict)
            .args((scope == Scope::Full).then_some("--full"))
            .stdin(Stdio::null())
            .stderr(output.try_clone()?)
            .stdout(output)
            .status()
            .context("cannot run nice")?;
        fs::read_to_string(&verdict).map_err(|_| anyhow!("its process ended without a verdict: {status}"))
    };
    let text = process();
    let took = started.elapsed();
    let line = text.and_then(|text| Line::parse(step.name, &text, took).context("its process left half a verdict"));
    line.unwrap_or_else(|error| judge(step.name, Err(error), took))
}

fn show((step, line, log): (&'static Step, Line, PathBuf)) -> Line {
    let shown = File::open(&log).and_then(|mut file| io::copy(&mut file, &mut io::stdout()));
    if let Err(error) = shown {
        println!(
            "== {}: its output cannot be read: {}: {error}",
            step.name,
            log.display()
        );
    }
    line.show_end();
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ci::{Counts, steps::ALL};

    #[test]
    fn a_process_without_a_verdict_has_failed() {
        let folder = std::env::temp_dir().join(format!("doorbell-ci-{}", process::id()));
        fs::create_dir_all(&folder).unwrap();
        let log = folder.join("log");
        // One of an earlier run is ignored.
        let verdict = folder.join(ALL[0].name).with_extension("verdict");
        fs::write(&verdict, "ok\n1 0 0\n").unwrap();
        // The process is this test program, which has no `--only`.
        let line = run(&ALL[0], Scope::Short, &folder, &log);
        let printed = fs::read_to_string(&log).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        let failed = Counts {
            failed: 1,
            ..Counts::default()
        };
        assert_eq!((line.mark, line.counts), ("FAILED", failed), "{}", line.note);
        assert!(line.note.contains("without a verdict"), "{}", line.note);
        assert!(printed.contains("only"), "{printed}");
    }
}
