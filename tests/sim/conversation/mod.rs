//! Seeded conversations: every operation, mixed, over links with every fault.
//!
//! `DOORBELL_SIM_SEEDS`: how many run (default 10,000); `DOORBELL_SIM_SEED` repeats one and prints
//! its packets.

mod oracle;
mod plan;
mod run;

use std::env;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use run::{Outcome, run};

use crate::trace::Trace;

#[test]
fn nothing_is_lost_doubled_or_damaged() {
    if let Some(seed) = variable("DOORBELL_SIM_SEED") {
        match attempt(seed, Trace::on()) {
            Ok(outcome) => return println!("seed {seed}: {outcome:?}"),
            Err((error, trace)) => panic!("{trace}seed {seed}: {error}"),
        }
    }
    let seeds = variable("DOORBELL_SIM_SEEDS").unwrap_or(10_000);
    let (next, failure) = (AtomicU64::new(0), Mutex::new(None));
    let outcomes = std::thread::scope(|scope| {
        let worker = || {
            let mut outcomes = Vec::new();
            loop {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if seed >= seeds {
                    return outcomes;
                }
                match attempt(seed, Trace::default()) {
                    Ok(outcome) => outcomes.push(outcome),
                    Err((error, _)) => {
                        next.store(seeds, Ordering::Relaxed);
                        failure
                            .lock()
                            .expect("nothing panics with it")
                            .get_or_insert((seed, error));
                    }
                }
            }
        };
        let threads: Vec<_> = (0..std::thread::available_parallelism().map_or(4, usize::from))
            .map(|_| scope.spawn(worker))
            .collect();
        threads
            .into_iter()
            .flat_map(|thread| thread.join().expect("workers catch panics"))
            .collect::<Vec<_>>()
    });
    if let Some((seed, error)) = failure.into_inner().expect("nothing panics with it") {
        report(seed, &error);
    }
    assert_eq!(outcomes.len() as u64, seeds);
    check_mixture(&outcomes);
}

/// Fails with the last packets, and the commands that print all of them and repeat it.
fn report(seed: u64, error: &str) -> ! {
    let trace = attempt(seed, Trace::on())
        .err()
        .map_or(String::new(), |(_, trace)| trace);
    let lines: Vec<_> = trace.lines().collect();
    let tail = lines[lines.len().saturating_sub(60)..].join("\n");
    panic!(
        "seed {seed}: {error}\n\nthe last of {} lines of its trace:\n{tail}\n\nrepeat with\n  DOORBELL_SIM_SEED={seed} cargo test -p doorbell-tests --test \
         sim nothing_is_lost",
        lines.len()
    );
}

/// Runs one, with panics as errors.
fn attempt(seed: u64, trace: Trace) -> Result<Outcome, (String, String)> {
    catch_unwind(AssertUnwindSafe(|| run(seed, trace))).unwrap_or_else(|panic| {
        let words = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied());
        Err((format!("panic: {}", words.unwrap_or("without words")), String::new()))
    })
}

/// Most conversations must succeed, and each kind of failure must occur.
fn check_mixture(outcomes: &[Outcome]) {
    let count = |f: fn(&Outcome) -> u64| outcomes.iter().filter(|outcome| f(outcome) > 0).count();
    let (retry, rnr) = (count(|o| o.retry_exceeded), count(|o| o.rnr_exceeded));
    let done: u64 = outcomes.iter().map(|o| o.done).sum();
    let steps: u64 = outcomes.iter().map(|o| o.steps).sum();
    let all = outcomes.len();
    println!(
        "{all} conversations, {steps} steps, {done} requests confirmed; RETRY_EXC in {retry}, RNR_RETRY_EXC in {rnr}"
    );
    if all >= 1000 {
        assert!(retry > all / 100 && rnr > all / 200, "hardly anything fails");
        assert!(retry + rnr < all / 2, "hardly anything succeeds");
    }
}

fn variable(name: &str) -> Option<u64> {
    let value = env::var(name).ok()?;
    Some(
        value
            .parse()
            .unwrap_or_else(|_| panic!("{name}={value} is not a number")),
    )
}
