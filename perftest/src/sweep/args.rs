//! The arguments of `doorbell sweep`.

use std::path::PathBuf;

use clap::Args;

use crate::cli::{AtomicOperation, ConnectionArgs, Operation, SoftArgs};
use crate::plan::Kind;
use crate::stats::ClockChoice;
use crate::units::{parse_bytes, parse_rate, parse_seconds};

pub(crate) const EXAMPLES: &str = "\
Examples:
  doorbell sweep bw write -o write.json                           every size from 2 B to 8 MiB
  doorbell sweep bw write --sizes 64,4K,1M --qps 1,2,8 --tx-depth 1,16,128 -o write.json
  doorbell sweep lat send --sizes 2..4K --inline 0,220 -D 0.2 -o send.json
  doorbell sweep bw read --sizes 64K --tx-depth 1..128 192.0.2.7  against doorbell bw read --server --forever there
  doorbell report write.json -o report.html                       what came out, as charts

Ctrl-C ends a sweep early: what is measured by then is written all the same. A point that the device refuses is no failure: it is in \"skipped\", with the reason.

Exit status: 0 done, 1 a point failed while it was measured or none could be, 2 bad usage, 130 interrupted.";

/// A list of numbers as `64,4K,1M`, or a range of powers of two as `2..8M`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct List(pub(crate) Vec<u64>);

/// The arguments of `doorbell sweep`.
#[derive(Args, Debug)]
// fields: one per command line option
pub(crate) struct SweepArgs {
    /// What to measure
    #[arg(value_enum)]
    pub(crate) kind: Kind,
    /// The operation to measure
    #[arg(value_enum)]
    pub(crate) operation: Operation,
    /// Host name or address of the machine where the same test waits with --server --forever;
    /// without it both ends run here
    pub(crate) peer: Option<String>,

    /// Message sizes, as 64,4K,1M; 2..8M is every power of two between [default: 2..8M, 8 for
    /// atomic]
    #[arg(short, long, value_name = "SIZES", value_parser = parse_list, help_heading = "Sweep")]
    pub(crate) sizes: Option<List>,
    /// Numbers of queue pairs, as 1,2,8 or 1..64 [default: 1]
    #[arg(short, long, value_name = "LIST", value_parser = parse_list, help_heading = "Sweep")]
    pub(crate) qps: Option<List>,
    /// tx depth: requests in flight per queue pair, as 1,16,128 or 1..128 [default: 128]
    #[arg(long, value_name = "LIST", value_parser = parse_list, help_heading = "Sweep")]
    pub(crate) tx_depth: Option<List>,
    /// Inline sizes: messages up to this size are sent inline, as 0,64 [default: 0 for bw, 220 for
    /// lat]
    #[arg(long, value_name = "SIZES", value_parser = parse_list, help_heading = "Sweep")]
    pub(crate) inline: Option<List>,
    /// Requests posted with one doorbell, as 1,16 [default: 1]
    #[arg(long, value_name = "LIST", value_parser = parse_list, help_heading = "Sweep")]
    pub(crate) post_list: Option<List>,

    /// Both ends send, read or do atomics at once; the figures are the sums of what each has
    /// measured
    #[arg(short, long, help_heading = "Test")]
    pub(crate) bidirectional: bool,
    /// Iterations: messages measured per point and queue pair [default: as doorbell bw and lat]
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), conflicts_with = "duration", help_heading = "Test")]
    pub(crate) iterations: Option<u64>,
    /// Measure each point for a time instead of a number of messages
    #[arg(short = 'D', long, value_name = "SECONDS", value_parser = parse_seconds, help_heading = "Test")]
    pub(crate) duration: Option<f64>,
    /// Warm-up messages before measuring starts [default: 100, at most a tenth of the iterations]
    #[arg(long, value_name = "N", help_heading = "Test")]
    pub(crate) warmup: Option<u64>,
    /// Rate limit in messages per second over all queue pairs, in an open loop, as 5000, 20k or 1M
    #[arg(long, value_name = "PER_SECOND", value_parser = parse_rate, help_heading = "Test")]
    pub(crate) rate: Option<f64>,
    /// Repeat each point so often, so that doorbell compare can distinguish changes from noise
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000), help_heading = "Test")]
    pub(crate) repeat: u32,
    /// Clock to measure with
    #[arg(long, value_enum, value_name = "CLOCK", default_value_t = ClockChoice::Auto, help_heading = "Test")]
    pub(crate) clock: ClockChoice,
    /// Check every byte of every message
    #[arg(long, help_heading = "Test")]
    pub(crate) verify: bool,
    /// Messages in private memory, as in most programs, at both ends
    #[arg(long, help_heading = "Test")]
    pub(crate) private_memory: bool,
    /// The atomic operation
    #[arg(long, value_enum, value_name = "OP", help_heading = "Test")]
    pub(crate) atomic_op: Option<AtomicOperation>,
    /// Seed of the payload, and of the faults
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Test")]
    pub(crate) seed: u64,
    /// Do not measure the machine's own limits, which takes a second and adds "limits" to the
    /// result
    #[arg(long, help_heading = "Test")]
    pub(crate) no_limits: bool,

    /// Write the result, one JSON object, to this file when the sweep ends, instead of stdout
    #[arg(short, long, value_name = "FILE", help_heading = "Output")]
    pub(crate) output: Option<PathBuf>,
    /// Explain each caveat of the figures, with advice, instead of naming all in one line
    #[arg(short, long, help_heading = "Output")]
    pub(crate) verbose: bool,
    /// Nothing on stderr while points are measured
    #[arg(long, help_heading = "Output")]
    pub(crate) no_progress: bool,

    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(flatten)]
    pub(crate) soft: SoftArgs,
}

/// Parses a [`List`]. Duplicates are removed.
fn parse_list(text: &str) -> Result<List, String> {
    let mut values = Vec::new();
    for item in text.split(',') {
        match item.split_once("..") {
            None => values.push(parse_bytes(item)?),
            Some((first, last)) => {
                let (first, last) = (parse_bytes(first)?, parse_bytes(last)?);
                if !first.is_power_of_two() || first > last {
                    return Err(format!(
                        "'{item}' is no range: give two numbers, the first a power of two and not more than the second, as 2..8M"
                    ));
                }
                values.extend(
                    std::iter::successors(Some(first), |value| value.checked_mul(2)).take_while(|value| *value <= last),
                );
            }
        }
    }
    let mut seen = std::collections::BTreeSet::new();
    values.retain(|value| seen.insert(*value));
    Ok(List(values))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_ranges_read() {
        for (text, values) in [
            ("64", vec![64]),
            ("64,4K,1M", vec![64, 4096, 1 << 20]),
            ("1M,64,64", vec![1 << 20, 64]),
            ("1..8", vec![1, 2, 4, 8]),
            ("2..7,4K", vec![2, 4, 4096]),
            ("0,64", vec![0, 64]),
        ] {
            assert_eq!(parse_list(text), Ok(List(values)), "{text}");
        }
        let default = parse_list("2..8M").unwrap().0;
        assert_eq!((default.len(), default[22]), (23, 8 << 20));
        assert_eq!(parse_list("1..18446744073709551615").unwrap().0.len(), 64);
        for text in ["", ",", "64,", "3..8", "8..2", "0..8", "1..", "..8", "1...8", "x"] {
            assert!(parse_list(text).is_err(), "{text}");
        }
    }
}
