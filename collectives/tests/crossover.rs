//! The charts of docs/RESULTS.md: simulated times by algorithm.
//!
//! The committed files are the simulator's output; after a change, DOORBELL_WRITE_CHARTS=1 writes
//! them anew.

use std::fmt::Write;
use std::path::Path;

use doorbell_collectives::DataType;
use doorbell_collectives::cost::{Compute, Link};
use doorbell_collectives::plan::Collective;
use doorbell_collectives::simulate::{Fabric, Row, chart, fastest, table};
use doorbell_collectives::tune::Tuner;

/// Ranks, and how many of them share a host and its one adapter.
const CASES: [(u32, u32); 4] = [(4, 1), (16, 1), (64, 1), (64, 8)];

fn rows(ranks: u32, per_host: u32) -> Vec<Row> {
    let (local, remote, compute) = (Link::soft_local(), Link::ndr400(), Compute::default());
    let sizes: Vec<u64> = (3..=30).step_by(3).map(|power| 1 << power).collect();
    let tuner = Tuner::new(local, remote, compute, 4);
    let fabric = Fabric {
        adapters: 1,
        ..Fabric::grouped(ranks, per_host, local, remote, compute)
    };
    table(&tuner, &fabric, Collective::AllReduce, DataType::F32, &sizes)
}

fn title(ranks: u32, per_host: u32) -> String {
    match per_host {
        1 => format!("{ranks} ranks"),
        _ => format!("{ranks} ranks on {} hosts", ranks / per_host),
    }
}

fn size(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..0x10_0000 => format!("{} KiB", bytes >> 10),
        0x10_0000..0x4000_0000 => format!("{} MiB", bytes >> 20),
        _ => format!("{} GiB", bytes >> 30),
    }
}

#[test]
fn the_crossover_chart_matches_the_simulator() {
    let panels: Vec<(String, Vec<Row>)> = CASES
        .iter()
        .map(|&(ranks, per_host)| (format!("all-reduce, {}", title(ranks, per_host)), rows(ranks, per_host)))
        .collect();
    let mut text = String::from("| bytes |");
    for (ranks, per_host) in CASES {
        write!(text, " {} |", title(ranks, per_host)).unwrap();
    }
    text.push_str("\n|---|---|---|---|---|\n");
    let best: Vec<Vec<Row>> = panels.iter().map(|(_, rows)| fastest(rows)).collect();
    for (index, first) in best[0].iter().enumerate() {
        write!(text, "| {} |", size(first.bytes)).unwrap();
        for rows in &best {
            let row = rows[index];
            let digits = if row.ns < 1e5 { 1 } else { 0 };
            let mark = if row.simulated { "" } else { "*" };
            write!(
                text,
                " {}, {} {:.digits$} µs{mark} |",
                row.choice.algorithm,
                row.choice.protocol,
                row.ns / 1e3
            )
            .unwrap();
        }
        text.push('\n');
    }
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
    let performance = docs.join("RESULTS.md");
    let drawing = docs.join("crossover.svg");
    let svg = chart(&panels);
    if std::env::var_os("DOORBELL_WRITE_CHARTS").is_some() {
        std::fs::write(&drawing, &svg).unwrap();
        println!("{text}");
    }
    assert!(
        std::fs::read_to_string(&drawing).unwrap() == svg,
        "docs/crossover.svg is another: DOORBELL_WRITE_CHARTS=1 writes it"
    );
    let page = std::fs::read_to_string(performance).unwrap();
    assert!(
        page.contains(&text),
        "docs/RESULTS.md has another table than this:\n{text}"
    );
    assert!(
        best.iter()
            .flatten()
            .any(|row| row.bytes == 8 && row.choice.algorithm != best[0][9].choice.algorithm)
    );
}
