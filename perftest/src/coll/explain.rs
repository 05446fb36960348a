//! `--explain`: the choice for an operation with the predictions behind it, and its plan.

use std::fs;
use std::path::Path;

use doorbell_collectives::plan::{Collective, draw};
use doorbell_collectives::{Communicator, Rank};
use serde::Serialize;

use super::table::Chosen;
use super::{CollArgs, traffic};
use crate::failure::{Failure, one_line, refused};
use crate::report::{print_line, print_result};

#[derive(Serialize)]
struct Explained {
    test: &'static str,
    ranks: u32,
    results: Vec<Row>,
    /// Of the first size.
    plan: String,
}

#[derive(Serialize)]
struct Row {
    #[serde(flatten)]
    chosen: Chosen,
    predicted_us: f64,
    reason: String,
}

pub(super) fn run(args: &CollArgs, comm: &Communicator) -> Result<(), Failure> {
    let data = args.dtypes()[0];
    let root = Rank(args.root().unwrap_or(0));
    let mut rows = Vec::new();
    let mut first = None;
    for bytes in args.sizes() {
        let case = traffic::case(args.collective(), comm.size(), root, bytes, data);
        let moved = match args.collective() {
            // Its counts differ per pair of ranks, so sizes do not determine the choice.
            Collective::AllToAllV => 0,
            other => case.count * data.bytes() as u64 * traffic::parts(other, case.ranks),
        };
        let decision = comm.explain(args.collective(), root, data, moved).map_err(refused)?;
        if !args.json {
            print_line(&format!("# {bytes} B\n{}", decision.explain()))?;
        }
        let choice = decision.choice;
        first.get_or_insert(choice);
        rows.push(Row {
            chosen: Chosen::new(bytes, &choice),
            predicted_us: decision.predicted_ns / 1e3,
            reason: decision.reason,
        });
    }
    let Some(choice) = first else { return Ok(()) };
    let schedule = choice
        .algorithm
        .schedule(args.collective(), &comm.order(), root)
        .map_err(|e| Failure::test(e.to_string()))?;
    if let Some(file) = &args.svg {
        write(file, &draw::svg(&*schedule, Some(choice.algorithm)))?;
    }
    let plan = draw::table(&*schedule, Some(choice.algorithm));
    if args.json {
        return print_result(&Explained {
            test: args.collective().name(),
            ranks: comm.size(),
            results: rows,
            plan,
        });
    }
    print_line(plan.trim_end())
}

pub(super) fn write(file: &Path, text: &str) -> Result<(), Failure> {
    fs::write(file, text).map_err(|e| Failure::test(format!("cannot write {}: {e}", one_line(&file.to_string_lossy()))))
}
