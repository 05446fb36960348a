//! A matrix product whose rows are distributed over ranks, in unequal parts.
//!
//! ```text
//! cargo run --release -p doorbell-examples --bin 10_matrix_multiply -- --ranks 4
//! mpirun -np 4 10_matrix_multiply
//! ```
//!
//! Each rank gets its rows of A by a scatterv, and all of B by a broadcast, concurrently in one
//! group. Rank 0 compares the product with its own: sums of small integers are exact.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use doorbell::Context;
use doorbell::collectives::{Communicator, Rank};
use doorbell_examples::{Error, ranks};

/// Rows of A and of the product: a prime.
const ROWS: usize = 509;
const INNER: usize = 96;
const COLUMNS: usize = 130;
/// The rank that has A and B, and gets the product.
const ROOT: Rank = Rank(0);

fn main() -> ExitCode {
    ranks::run(
        "Multiplies two matrices, whose rows are shared out over ranks.",
        3,
        rank,
    )
}

fn rank(device: &Context) -> Result<(), Error> {
    let comm = Communicator::from_env(device)?;
    let (a, mut b) = if comm.rank() == ROOT {
        (matrix(ROWS, INNER, 7), matrix(INNER, COLUMNS, 11))
    } else {
        (Vec::new(), vec![0.0; INNER * COLUMNS])
    };
    // Elements of each rank, of a matrix with rows of this length.
    let counts = |row: usize| -> Vec<usize> {
        let rows = |rank| ranks::share(ROWS, comm.size(), Rank(rank)).len();
        (0..comm.size()).map(|rank| rows(rank) * row).collect()
    };

    let mut own = vec![0.0; counts(INNER)[comm.rank().index()]];
    comm.group(|group| {
        group.add(comm.scatter_v(&a, &counts(INNER), &mut own, ROOT))?;
        group.add(comm.broadcast(&mut b, ROOT))
    })?;
    let product = multiply(&own, &b);

    let mut whole = vec![0.0; if comm.rank() == ROOT { ROWS * COLUMNS } else { 0 }];
    comm.gather_v(&product, &mut whole, &counts(COLUMNS), ROOT).wait()?;
    if comm.rank() == ROOT {
        if whole != multiply(&a, &b) {
            return Err("the product is not the one that a single rank computes".into());
        }
        let rows: Vec<_> = counts(1).iter().map(usize::to_string).collect();
        println!(
            "{ROWS} rows over {} ranks, {} each: the product is right",
            comm.size(),
            rows.join(" and ")
        );
    }
    Ok(comm.destroy()?)
}

fn matrix(rows: usize, columns: usize, seed: usize) -> Vec<f64> {
    (0..rows * columns)
        .map(|at| (at * seed % 17) as f64 - (at / columns * 3 % 13) as f64)
        .collect()
}

/// The given rows of A, times B.
fn multiply(a: &[f64], b: &[f64]) -> Vec<f64> {
    let mut product = vec![0.0; a.len() / INNER * COLUMNS];
    for (row, into) in a.chunks_exact(INNER).zip(product.chunks_exact_mut(COLUMNS)) {
        for (factor, line) in row.iter().zip(b.chunks_exact(COLUMNS)) {
            into.iter_mut()
                .zip(line)
                .for_each(|(sum, value)| *sum += factor * value);
        }
    }
    product
}
