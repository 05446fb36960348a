//! `--simulate`: predicted times of all algorithms, simulated on a modeled fabric.

use doorbell_collectives::cost::{Compute, Link};
use doorbell_collectives::simulate::{Fabric, Leaves, Row, chart, fastest, table};
use doorbell_collectives::tune::{Overrides, Tuner, TuningFile};
use serde::Serialize;

use super::table::Chosen;
use super::{CollArgs, explain, traffic};
use crate::failure::{Failure, one_line};
use crate::report::{print_line, print_result};

/// The most ranks that a simulation can handle.
const MAX_RANKS: u32 = 16_384;
/// Channels that choices may use.
const CHANNELS: u32 = 4;
/// Latency of the switches above the leaves, ns.
const SPINE_NS: f64 = 600.0;

#[derive(Serialize)]
struct Simulated {
    test: &'static str,
    ranks: u32,
    per_host: u32,
    /// The link kind of results that are not measured.
    link: &'static str,
    results: Vec<AlgorithmRow>,
}

#[derive(Serialize)]
struct AlgorithmRow {
    #[serde(flatten)]
    choice: Chosen,
    time_us: f64,
    busbw_bytes_per_s: f64,
    /// Whether the plan was simulated; else the closed form was used.
    simulated: bool,
    quickest: bool,
}

/// # Errors
/// [`Failure::Usage`] for what cannot be simulated; [`Failure::Test`] when stdout or a file cannot
/// be written.
pub(super) fn run(args: &CollArgs, ranks: u32) -> Result<(), Failure> {
    if ranks > MAX_RANKS {
        return Err(Failure::usage(format!(
            "--ranks {ranks}: at most {MAX_RANKS} are simulated"
        )));
    }
    let usage = |e: &dyn std::fmt::Display| Failure::usage(one_line(&e.to_string()));
    let (from_env, file) = Overrides::from_environment().map_err(|e| usage(&e))?;
    let (local, remote) = (Link::soft_local(), Link::ndr400());
    let mut tuner = Tuner::new(local, remote, Compute::default(), args.channels.unwrap_or(CHANNELS));
    if let Some(file) = file {
        tuner = tuner.with_file(TuningFile::read(&file).map_err(|e| usage(&e))?);
    }
    tuner.overrides = Overrides {
        protocol: args.protocol.0,
        channels: args.channels,
        ..Overrides::default()
    }
    .over(from_env);
    let mut fabric = Fabric::grouped(ranks, args.per_host, tuner.local, tuner.remote, tuner.compute);
    fabric.leaves = args.leaf.map(|hosts| Leaves {
        hosts,
        oversubscription: args.oversubscription,
        latency_ns: SPINE_NS,
    });
    let mut rows = table(&tuner, &fabric, args.collective(), args.dtypes()[0], &args.sizes());
    rows.retain(|row| {
        args.algorithm
            .0
            .is_none_or(|algorithm| row.choice.algorithm == algorithm)
    });
    rows.sort_by_key(|row| row.bytes);
    let best = fastest(&rows);
    if let Some(file) = &args.svg {
        let title = format!("{} of {ranks} ranks, {} a host", args.collective(), args.per_host);
        explain::write(file, &chart(&[(title, rows.clone())]))?;
    }
    let lines: Vec<_> = rows.iter().map(|row| line(args, row, &best)).collect();
    if args.json {
        return print_result(&Simulated {
            test: args.collective().name(),
            ranks,
            per_host: args.per_host,
            link: "simulated",
            results: lines,
        });
    }
    print_line(&format!(
        "# doorbell coll {}: simulated, {ranks} ranks, {} a host, adapters of 400 Gbit/s unless a tuning file says otherwise; * is the quickest\n{} {:>12} {:>9}",
        args.collective(),
        args.per_host,
        Chosen::head(),
        "time[us]",
        "busbw[GB/s]"
    ))?;
    for line in lines {
        let mark = if line.quickest { " *" } else { "" };
        let closed = if line.simulated { "" } else { " (closed form)" };
        print_line(&format!(
            "{} {:>12.2} {:>9.2}{mark}{closed}",
            line.choice.columns(),
            line.time_us,
            line.busbw_bytes_per_s / 1e9
        ))?;
    }
    Ok(())
}

fn line(args: &CollArgs, row: &Row, best: &[Row]) -> AlgorithmRow {
    let factor = traffic::factor(args.collective(), row.ranks);
    AlgorithmRow {
        choice: Chosen::new(row.bytes, &row.choice),
        time_us: row.ns / 1e3,
        busbw_bytes_per_s: if row.ns > 0.0 {
            row.bytes as f64 / row.ns * 1e9 * factor
        } else {
            0.0
        },
        simulated: row.simulated,
        quickest: best.contains(row),
    }
}
