//! What works where: each environment that a process may run in × what it does there with a process
//! outside, or in the same one. The table is docs/ENVIRONMENT-MATRIX.md: a cell that changes fails
//! the test, as does a program that hangs, ends by a signal, or fails or falls back in more or less
//! than one line.

mod descriptors;
mod environments;
mod operations;
mod rig;

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fs;
use std::io::{self, Write as _};
use std::mem;
use std::path::Path;
use std::sync::Mutex;
use std::thread;

use environments::{ALL, Environment};
use rig::{Failed, Rig};

const DOCUMENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/ENVIRONMENT-MATRIX.md");

/// How many environments are tested at once: most of their time is waiting.
const WORKERS: usize = 3;

enum Row {
    Cells(Vec<String>),
    /// Why this machine cannot set the environment up.
    Skipped(String),
    /// Neither works nor fails as it should.
    Defects(Vec<String>),
}

#[test]
fn every_environment_works_or_says_why_not_in_one_line() {
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
    compare(rows.into_inner().unwrap());
}

fn row(index: usize, environment: &Environment, programs: &Path) -> Row {
    // A thread of its own: a seccomp filter stays for its life, and is its children's.
    thread::scope(|scope| {
        let thread = scope.spawn(|| match Rig::new(index, environment, programs) {
            Ok(mut rig) => cells(environment, &mut rig),
            Err(error) => Row::Skipped(format!("{error:#}")),
        });
        thread.join().expect("a row does not panic")
    })
}

fn cells(environment: &Environment, rig: &mut Rig) -> Row {
    let (mut cells, mut defects) = (vec![environment.name.to_owned()], Vec::new());
    let mut all_said = BTreeSet::new();
    for (name, run) in operations::ALL {
        let result = run(rig);
        let said = mem::take(&mut rig.said);
        match result {
            Ok(cell) if said.is_empty() && !operations::FULL.contains(&&*cell) => {
                defects.push(format!(
                    "{}: {name}: falls back to {cell} and says nothing",
                    environment.name
                ));
            }
            Ok(cell) => cells.push(cell),
            Err(error) if error.is::<Failed>() => cells.push("fails".to_owned()),
            Err(error) => defects.push(format!("{}: {name}: {error:#}", environment.name)),
        }
        all_said.extend(said);
    }
    cells.push(all_said.into_iter().collect::<Vec<_>>().join("<br>"));
    if defects.is_empty() {
        Row::Cells(cells)
    } else {
        Row::Defects(defects)
    }
}

fn compare(rows: BTreeMap<usize, Row>) {
    let documented = fs::read_to_string(DOCUMENT).unwrap();
    let begin = documented.find("| environment |").unwrap_or(documented.len());
    let names = operations::ALL.map(|(name, _)| name);
    let mut table = format!("| environment | {} | what is printed |\n", names.join(" | "));
    table += &format!("|---{}|\n", "|---".repeat(names.len() + 1));
    let mut all_defects = Vec::new();
    for (environment, row) in ALL.iter().zip(rows.into_values()) {
        match row {
            Row::Cells(cells) => table += &format!("| {} |\n", cells.join(" | ")),
            Row::Skipped(reason) => {
                // Not captured, unlike what print! writes: a test that passes shows it, too.
                let _ = writeln!(io::stderr(), "skipped: {}: {reason}", environment.name);
                let start = format!("| {} |", environment.name);
                let known = documented.lines().find(|line| line.starts_with(&start));
                table += &format!("{}\n", known.expect("the document has a row of every environment"));
            }
            Row::Defects(defects) => all_defects.extend(defects),
        }
    }
    assert!(all_defects.is_empty(), "{}", all_defects.join("\n"));
    if env::var_os("DOORBELL_WRITE_DOCS").is_some() {
        fs::write(DOCUMENT, format!("{}{table}", &documented[..begin])).unwrap();
    } else {
        let there = &documented[begin..];
        assert_eq!(there, table, "{DOCUMENT}: DOORBELL_WRITE_DOCS=1 writes it");
    }
}
