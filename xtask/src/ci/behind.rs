//! Steps that run behind the others: builds, and checks for which it does not matter when they run.
//!
//! Tests and guests wait for one another most of the time, and leave processors idle. What is here takes those: each step is a process of its own, one
//! after the other, which yields to all that is in its turn (`nice`). What it prints goes to a file, and is shown in one piece when it has ended.

use super::{Line, Step, judge};
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

/// How much these yield: to whoever wants a processor as well they leave nine tenths of it. With less, tests among them would never end on a machine that has one processor.
const NICENESS: &str = "10";

/// The steps that run behind.
pub(super) struct Behind {
    /// Each when it has ended, with what it printed.
    ended: Receiver<(&'static Step, Line, PathBuf)>,
}

impl Behind {
    /// Begins with them.
    pub(super) fn start(steps: Vec<&'static Step>) -> Result<Self> {
        let folder = target_folder()?.join("ci");
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let (tell, ended) = mpsc::channel();
        thread::spawn(move || {
            for step in steps {
                let log = folder.join(step.name).with_extension("log");
                let line = run(step, &folder, &log);
                if tell.send((step, line, log)).is_err() {
                    return;
                }
            }
        });
        Ok(Self { ended })
    }

    /// Shows those that have ended since it was last asked.
    pub(super) fn ended(&mut self) -> Vec<Line> {
        self.ended.try_iter().map(show).collect()
    }

    /// Waits for all that are left, and shows each.
    pub(super) fn rest(self) -> Vec<Line> {
        self.ended.iter().map(show).collect()
    }
}

/// Runs a step in a process.
fn run(step: &'static Step, folder: &Path, log: &Path) -> Line {
    let started = Instant::now();
    let verdict = folder.join(step.name).with_extension("verdict");
    let told = || -> Result<String> {
        // One of an earlier run says nothing of this one.
        let _ = fs::remove_file(&verdict);
        let output = File::create(log).with_context(|| format!("cannot make {}", log.display()))?;
        let status = Command::new("nice")
            // By our number, as what is running may no longer be the file of this name: cargo builds xtask, too.
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
            .stdin(Stdio::null())
            .stderr(output.try_clone()?)
            .stdout(output)
            .status()
            .context("cannot run nice")?;
        fs::read_to_string(&verdict).map_err(|_| anyhow!("its process ended without a verdict: {status}"))
    };
    let told = told();
    let took = started.elapsed();
    let read = told.and_then(|text| Line::read(step.name, &text, took).context("its process left half a verdict"));
    read.unwrap_or_else(|error| judge(step.name, Err(error), took))
}

/// Shows what a step has printed, and how it ended.
fn show((step, line, log): (&'static Step, Line, PathBuf)) -> Line {
    let shown = File::open(&log).and_then(|mut file| io::copy(&mut file, &mut io::stdout()));
    if let Err(error) = shown {
        println!(
            "== {}: what it printed cannot be shown: {}: {error}",
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
    fn a_process_that_tells_no_verdict_has_failed() {
        let folder = std::env::temp_dir().join(format!("doorbell-ci-{}", process::id()));
        fs::create_dir_all(&folder).unwrap();
        let log = folder.join("log");
        // One that an earlier run left is not taken for this one's.
        let verdict = folder.join(ALL[0].name).with_extension("verdict");
        fs::write(&verdict, "ok\n1 0 0\n").unwrap();
        // What runs is this program of tests, which knows no `--only`.
        let line = run(&ALL[0], &folder, &log);
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
