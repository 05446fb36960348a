//! `cargo xtask instructions`: instructions per call of the data path, beside C and other crates.
//!
//! From `tests/instructions` come a libibverbs that does nothing (`provider.c`), a program for each
//! C column, and ours; from `tests/peers` one for each peer crate ([`columns`]). Each repeats the
//! call that a row names. Callgrind counts inside `measure_*`, less the provider's `stub_*`
//! ([`callgrind`]). Each row runs twice, so that the difference cancels one-time work. Ours must
//! execute no lock, atomic read-modify-write or heap call ([`purity`]).

mod callgrind;
mod columns;
mod purity;

use crate::setup;
use anyhow::{Context, Result, bail};
use callgrind::{Outcome, Profile, Run};
pub(crate) use columns::PEERS;
use columns::{Column, Programs};
use purity::{Disassembly, Objects};
use std::{
    collections::BTreeSet,
    fmt::{self, Display},
    path::Path,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

const HELP: &str = "\
Count instructions per call of the data path, beside C and other crates

Usage: cargo xtask instructions [OPTIONS]

Options:
      --no-peers  leave out the columns of other crates, which take two minutes to build at first
      --report    exit with status 0 even when ours costs too much
  -h, --help      show this

Exit status: 0 when ours keeps its promise; 1 when in any row it takes more than 2 instructions per call above C with accounting, or executes an atomic
read-modify-write, takes a lock or calls the allocator; 2 when something could not be built or counted.
";

/// Instructions per call that ours may take above C with accounting.
const MARGIN: f64 = 2.0;

/// Both runs exceed the queue's 128 entries, and differ by whole rounds of it.
const ITERATIONS: (u64, u64) = (256, 1280);

const OURS: usize = 0;
const ACCOUNTING: usize = 1;

/// The name that programs take, its title, and the prefix of the counted function.
struct Row {
    name: &'static str,
    about: &'static str,
    function: &'static str,
}

/// `_wr` rows post through `ibv_wr_*` instead of a list; `_ex` rows poll an extended CQ.
const ROWS: [Row; 10] = [
    Row {
        name: "write",
        about: "one WRITE, list",
        function: "measure_write",
    },
    Row {
        name: "write_wr",
        about: "one WRITE, ibv_wr",
        function: "measure_write",
    },
    Row {
        name: "inline",
        about: "one inline WRITE of 16 B, list",
        function: "measure_inline",
    },
    Row {
        name: "inline_wr",
        about: "one inline WRITE of 16 B, ibv_wr",
        function: "measure_inline",
    },
    Row {
        name: "batch",
        about: "16 WRITEs, list",
        function: "measure_batch",
    },
    Row {
        name: "batch_wr",
        about: "16 WRITEs, ibv_wr",
        function: "measure_batch",
    },
    Row {
        name: "receive",
        about: "one receive",
        function: "measure_receive",
    },
    Row {
        name: "list",
        about: "16 receives",
        function: "measure_list",
    },
    Row {
        name: "drain",
        about: "drain 16 completions, classic",
        function: "measure_drain",
    },
    Row {
        name: "drain_ex",
        about: "drain 16 completions, extended",
        function: "measure_drain",
    },
];

/// A row's cost in a column, in instructions per call.
#[derive(Debug, Clone, PartialEq)]
enum Cost {
    Counted(f64),
    /// The column has no such call, for this reason.
    Lacking(String),
}

impl Cost {
    fn is_within(&self, accounting: &Self) -> bool {
        matches!((self, accounting), (Self::Counted(ours), Self::Counted(c)) if *ours <= c + MARGIN)
    }
}

impl Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Counted(cost) => f.pad(&format!("{cost:.1}")),
            Self::Lacking(_) => f.pad("–"),
        }
    }
}

struct Cell {
    cost: Cost,
    per_call: Option<Profile>,
}

pub(crate) fn main(arguments: lexopt::Parser) -> Result<u8> {
    let Some(options) = parse(arguments)? else { return Ok(0) };
    let kept = check(options.with_peers)?;
    Ok(u8::from(!kept && !options.report))
}

#[derive(Debug, PartialEq, Eq)]
struct Options {
    with_peers: bool,
    report: bool,
}

/// The options; `None` after `--help`.
fn parse(mut arguments: lexopt::Parser) -> Result<Option<Options>> {
    use lexopt::prelude::*;
    let mut options = Options {
        with_peers: true,
        report: false,
    };
    while let Some(argument) = arguments.next()? {
        match argument {
            Short('h') | Long("help") => {
                print!("{HELP}");
                return Ok(None);
            }
            Long("no-peers") => options.with_peers = false,
            Long("report") => options.report = true,
            other => return Err(other.unexpected().into()),
        }
    }
    Ok(Some(options))
}

/// Builds, counts and prints everything. Returns whether ours is within its limits.
pub(crate) fn check(with_peers: bool) -> Result<bool> {
    if !cfg!(target_arch = "x86_64") {
        bail!("instructions are counted on x86-64 only");
    }
    match setup::provide(&setup::INSTRUCTIONS)?.as_slice() {
        [] => {}
        missing => bail!("missing: {} (as root: apt-get install {0})", missing.join(" ")),
    }
    let programs = Programs::build(with_peers)?;
    let mut objects = Objects::default();
    check_the_check(&programs, &mut objects)?;
    for Column { title, program } in &programs.columns {
        let Ok(program) = program else { continue };
        if let Some(part) = Disassembly::of(program)?.part_of_a_measure() {
            bail!("{title}: {part} is a part of a measured function, and callgrind would not count in it");
        }
    }
    let cells = measure(&programs)?;
    let within = print_table(&programs, &cells);
    let pure = print_faults(&cells, &mut objects)?;
    Ok(within && pure)
}

/// Checks that forbidden operations are found in a program that has them.
fn check_the_check(programs: &Programs, objects: &mut Objects) -> Result<()> {
    let run = Run {
        program: &programs.guilty,
        row: "guilty",
        iterations: 1,
        function: "measure_guilty",
        libraries: &programs.folder,
        output: programs.folder.join("guilty.callgrind"),
    };
    let Outcome::Counted(profile) = run.measure()? else {
        bail!("tests/instructions/guilty.c lacks its only row");
    };
    let faults = objects.faults(&profile)?;
    for expected in ["malloc", "free", "pthread_mutex_lock", "`lock ", "`xchg "] {
        if !faults.iter().any(|fault| fault.contains(expected)) {
            bail!("tests/instructions/guilty.c executes {expected} and it was not found: {faults:?}");
        }
    }
    Ok(())
}

fn measure(programs: &Programs) -> Result<Vec<Vec<Cell>>> {
    let columns = programs.columns.len();
    let next = AtomicUsize::new(0);
    let cells = Mutex::new(Vec::new());
    let work = || {
        loop {
            let n = next.fetch_add(1, Ordering::Relaxed);
            let Some(row) = ROWS.get(n / columns) else { return };
            let cell = cell(programs, row, n % columns);
            cells.lock().unwrap_or_else(PoisonError::into_inner).push((n, cell));
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    let mut cells = cells.into_inner().unwrap_or_else(PoisonError::into_inner);
    cells.sort_by_key(|(n, _)| *n);
    let mut cells = cells.into_iter().map(|(_, cell)| cell);
    ROWS.iter().map(|_| cells.by_ref().take(columns).collect()).collect()
}

fn cell(programs: &Programs, row: &Row, column: usize) -> Result<Cell> {
    let lacking = |reason| Cell {
        cost: Cost::Lacking(reason),
        per_call: None,
    };
    let program: &Path = match &programs.columns[column].program {
        Ok(program) => program,
        Err(reason) => return Ok(lacking(reason.clone())),
    };
    let run = |iterations| {
        Run {
            program,
            row: row.name,
            iterations,
            function: row.function,
            libraries: &programs.folder,
            output: programs.folder.join(format!("{}-{column}.callgrind", row.name)),
        }
        .measure()
    };
    let (few, many) = ITERATIONS;
    match (run(few)?, run(many)?) {
        (Outcome::Counted(least), Outcome::Counted(most)) => {
            let difference = most
                .own_cost()
                .checked_sub(least.own_cost())
                .context("fewer instructions for more calls")?;
            Ok(Cell {
                cost: Cost::Counted(difference as f64 / (many - few) as f64),
                per_call: Some(most.beyond(&least)),
            })
        }
        (Outcome::Lacking(reason), _) | (_, Outcome::Lacking(reason)) => Ok(lacking(reason)),
    }
}

/// Returns whether every row is within its limit.
fn print_table(programs: &Programs, cells: &[Vec<Cell>]) -> bool {
    let width = |title: &str| title.chars().count().max(8);
    print!("{:<34}", "instructions per call");
    for Column { title, .. } in &programs.columns {
        print!(" {title:>0$}", width(title));
    }
    println!();
    let (mut all_within, mut reasons) = (true, Vec::new());
    for (row, cells) in ROWS.iter().zip(cells) {
        print!("{:<34}", row.about);
        for (column, cell) in programs.columns.iter().zip(cells) {
            print!(" {:>1$}", cell.cost, width(column.title));
            if let Cost::Lacking(reason) = &cell.cost {
                let line = format!("– {}: {reason}", column.title);
                if !reasons.contains(&line) {
                    reasons.push(line);
                }
            }
        }
        let within = cells[OURS].cost.is_within(&cells[ACCOUNTING].cost);
        println!("{}", if within { "" } else { "  too many" });
        all_within &= within;
    }
    for line in reasons {
        println!("{line}");
    }
    all_within
}

/// Prints the forbidden operations that ours executed. Returns whether there are none.
fn print_faults(cells: &[Vec<Cell>], objects: &mut Objects) -> Result<bool> {
    let mut pure = true;
    for (row, cells) in ROWS.iter().zip(cells) {
        let Some(profile) = &cells[OURS].per_call else { continue };
        let faults: BTreeSet<String> = objects.faults(profile)?;
        for fault in &faults {
            println!("{}: ours {fault}", row.about);
        }
        pure &= faults.is_empty();
    }
    if pure {
        println!("Calls of ours execute no lock, no atomic read-modify-write and no allocation.");
    }
    Ok(pure)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_instructions_above_c_pass_and_more_do_not() {
        let within = |ours| Cost::Counted(ours).is_within(&Cost::Counted(50.0));
        assert!(within(30.0));
        assert!(within(52.0));
        assert!(!within(52.1));
        assert!(!Cost::Lacking("not written yet".to_owned()).is_within(&Cost::Counted(50.0)));
    }

    #[test]
    fn a_cell_is_a_figure_or_a_dash() {
        assert_eq!(format!("{:>8}", Cost::Counted(47.66)), "    47.7");
        assert_eq!(format!("{:>8}", Cost::Lacking("no such call".to_owned())), "       –");
    }

    #[test]
    fn options_are_read() {
        let read = |arguments: &[&str]| parse(lexopt::Parser::from_args(arguments));
        let options = |with_peers, report| Some(Options { with_peers, report });
        assert_eq!(read(&[]).unwrap(), options(true, false));
        assert_eq!(read(&["--report", "--no-peers"]).unwrap(), options(false, true));
        assert!(read(&["--nope"]).is_err() && read(&["row"]).is_err());
    }

    #[test]
    fn the_function_of_a_row_is_the_beginning_of_its_name() {
        for row in &ROWS {
            assert!(
                format!("measure_{}", row.name).starts_with(row.function),
                "{}",
                row.name
            );
        }
    }
}
