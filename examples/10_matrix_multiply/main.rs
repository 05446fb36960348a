//! A matrix product shared among ranks: each has some of the rows, and not all have as many.
//!
//! ```text
//! cargo run --release -p doorbell-examples --bin 10_matrix_multiply
//! mpirun -n 4 target/release/10_matrix_multiply
//! ```
//!
//! Rank 0 has A and B. A's rows are dealt out (scatter_v), B goes to all (broadcast), each multiplies what it has, and the rows of the product come together again at rank 0 (gather_v), which
//! checks them: the entries are small integers, so that the product is exact.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use doorbell_collectives::{Communicator, Rank};
use doorbell_examples::{Error, as_ranks, report};

/// The ranks that are started, if nobody else has started any.
const RANKS: u32 = 3;
/// A is ROWS × INNER, B is INNER × COLUMNS. The rows divide by neither two nor three.
const ROWS: usize = 101;
const INNER: usize = 64;
const COLUMNS: usize = 48;
const ROOT: Rank = Rank(0);

fn main() -> ExitCode {
    report(as_ranks(RANKS, false, run))
}

fn run(comm: &Communicator) -> Result<(), Error> {
    let ranks = comm.size() as usize;
    // The first ranks have one row more.
    let rows = |rank: usize| ROWS / ranks + usize::from(rank < ROWS % ranks);
    let counts = |columns: usize| (0..ranks).map(|rank| rows(rank) * columns).collect::<Vec<_>>();
    let mine = rows(comm.rank().index());

    let at_root = comm.rank() == ROOT;
    let a: Vec<f64> = if at_root { matrix(ROWS, INNER, 7) } else { Vec::new() };
    let mut b = if at_root {
        matrix(INNER, COLUMNS, 5)
    } else {
        vec![0.0; INNER * COLUMNS]
    };

    let mut my_a = vec![0.0; mine * INNER];
    comm.scatter_v(&a, &counts(INNER), &mut my_a, ROOT).wait()?;
    comm.broadcast(&mut b, ROOT).wait()?;
    let my_c = product(&my_a, &b);
    let mut c = vec![0.0; if at_root { ROWS * COLUMNS } else { 0 }];
    comm.gather_v(&my_c, &mut c, &counts(COLUMNS), ROOT).wait()?;

    if at_root {
        if c != product(&a, &b) {
            return Err("the product is another than what one rank alone gets".into());
        }
        let shares: Vec<_> = (0..ranks).map(|rank| rows(rank).to_string()).collect();
        println!("{ROWS} rows as {}: the product is right", shares.join(" + "));
    }
    Ok(())
}

/// Small integers, which differ from place to place.
fn matrix(rows: usize, columns: usize, step: usize) -> Vec<f64> {
    (0..rows * columns).map(|at| (at * step % 19) as f64 - 9.0).collect()
}

/// The product of some rows of A with B.
fn product(a: &[f64], b: &[f64]) -> Vec<f64> {
    let mut c = vec![0.0; a.len() / INNER * COLUMNS];
    for (row, into) in a.chunks(INNER).zip(c.chunks_mut(COLUMNS)) {
        for (factor, of) in row.iter().zip(b.chunks(COLUMNS)) {
            for (entry, value) in into.iter_mut().zip(of) {
                *entry += factor * value;
            }
        }
    }
    c
}
