//! What works where: each environment that a process may run in × each thing that it does there
//! with a process outside, or in the same one. The table is docs/ENVIRONMENT-MATRIX.md: a cell that
//! changes fails the test, as does anything that falls back or fails in more than one line.

mod environments;
mod rig;

use std::collections::BTreeMap;
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::thread;

use environments::{ALL, Environment};
use rig::Rig;

const DOCUMENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/ENVIRONMENT-MATRIX.md");

/// How many environments are tested at once: most of their time is waiting.
const WORKERS: usize = 3;

type Operation = (&'static str, fn(&mut Rig) -> anyhow::Result<String>);

const OPERATIONS: [Operation; 5] = [
    ("join", rig::join),
    ("same-host traffic", rig::traffic),
    ("connection manager", rig::manager),
    ("bootstrap", rig::bootstrap),
    ("perftest", rig::perftest),
];

#[test]
fn every_environment_works_or_falls_back_in_one_line() {
    let programs = rig::programs().unwrap();
    let (todo, rows) = (Mutex::new(ALL.iter().enumerate()), Mutex::new(BTreeMap::new()));
    thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(|| {
                loop {
                    let Some((index, environment)) = todo.lock().unwrap().next() else {
                        return;
                    };
                    let row = row(index, environment, programs.path());
                    rows.lock().unwrap().insert(index, row);
                }
            });
        }
    });
    let rows = rows.into_inner().unwrap();
    assert_eq!(rows.len(), ALL.len(), "a worker failed");
    compare(&rows);
}

/// `Err` has the reason why this machine cannot set the environment up.
fn row(index: usize, environment: &Environment, programs: &Path) -> Result<Vec<String>, String> {
    // A thread of its own: a seccomp filter stays for its life, and is its children's.
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let mut rig = Rig::new(index, environment, programs).map_err(|error| format!("{error:#}"))?;
            let cell = |(_, run): &Operation| run(&mut rig).unwrap_or_else(|error| format!("{error:#}"));
            Ok(OPERATIONS.iter().map(cell).collect())
        });
        thread.join().expect("a row does not panic")
    })
}

fn compare(rows: &BTreeMap<usize, Result<Vec<String>, String>>) {
    let documented = fs::read_to_string(DOCUMENT).unwrap_or_default();
    let mut table = format!("| environment | {} |\n", OPERATIONS.map(|(name, _)| name).join(" | "));
    let _ = writeln!(table, "|---{}|", "|---".repeat(OPERATIONS.len()));
    for (environment, row) in ALL.iter().zip(rows.values()) {
        let start = format!("| {} | ", environment.name);
        match row {
            Ok(cells) => _ = writeln!(table, "{start}{} |", cells.join(" | ")),
            Err(reason) => {
                eprintln!("skipped: {}: {reason}", environment.name);
                let known = documented.lines().find(|line| line.starts_with(&start));
                _ = writeln!(table, "{}", known.expect("the document has a row of every environment"));
            }
        }
    }
    let begin = documented.find("| environment |").unwrap_or(documented.len());
    if env::var_os("DOORBELL_WRITE_DOCS").is_some() {
        fs::write(DOCUMENT, format!("{}{table}", &documented[..begin])).unwrap();
    } else {
        assert_eq!(
            &documented[begin..],
            table,
            "{DOCUMENT}; DOORBELL_WRITE_DOCS=1 writes it"
        );
    }
}
