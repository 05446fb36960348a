//! The points of a sweep: every combination of the swept values, each a separate test.

use clap::Parser;

use super::args::{List, SweepArgs};
use crate::cli::{Cli, Command, Operation, TestArgs, Transport};
use crate::failure::Failure;
use crate::plan::{Kind, Plan};

/// The most points of a sweep; more is taken for a mistake in the lists.
const MAX_POINTS: usize = 100_000;

/// One combination. `None` is the test's default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Point {
    pub(super) bytes: u64,
    pub(super) qps: Option<u32>,
    pub(super) tx_depth: Option<u32>,
    pub(super) inline: Option<u32>,
    pub(super) post_list: Option<u32>,
}

/// All points; sizes vary fastest.
///
/// # Errors
/// [`Failure::Usage`] when the swept parameters do not go with the test.
pub(super) fn all(args: &SweepArgs) -> Result<Vec<Point>, Failure> {
    if args.kind == Kind::Lat {
        let given = [
            ("--qps", args.qps.is_some()),
            ("--tx-depth", args.tx_depth.is_some()),
            ("--post-list", args.post_list.is_some()),
            ("--bidirectional", args.bidirectional),
        ];
        if let Some((name, _)) = given.iter().find(|(_, given)| *given) {
            return Err(Failure::usage(format!(
                "{name} is for bw: a latency test has one message in flight on one queue pair"
            )));
        }
    }
    let sizes = match &args.sizes {
        Some(List(sizes)) => sizes.clone(),
        None if args.operation == Operation::Atomic => vec![8],
        None if args.connection.transport == Transport::Ud => (1..=12).map(|power| 1 << power).collect(),
        None => (1..=23).map(|power| 1 << power).collect(),
    };
    let qps = each("--qps", args.qps.as_ref())?;
    let tx_depths = each("--tx-depth", args.tx_depth.as_ref())?;
    let inlines = each("--inline", args.inline.as_ref())?;
    let post_lists = each("--post-list", args.post_list.as_ref())?;
    let count = [qps.len(), tx_depths.len(), inlines.len(), post_lists.len()]
        .iter()
        .fold(sizes.len(), |count, more| count.saturating_mul(*more));
    if count > MAX_POINTS {
        return Err(Failure::usage(format!(
            "this sweep has {count} points: it may have {MAX_POINTS}; shorten a list"
        )));
    }
    let mut points = Vec::with_capacity(count);
    for &qps in &qps {
        for &tx_depth in &tx_depths {
            for &post_list in &post_lists {
                for &inline in &inlines {
                    points.extend(sizes.iter().map(|&bytes| Point {
                        bytes,
                        qps,
                        tx_depth,
                        inline,
                        post_list,
                    }));
                }
            }
        }
    }
    Ok(points)
}

/// The values of a list, or once the default.
fn each(name: &str, list: Option<&List>) -> Result<Vec<Option<u32>>, Failure> {
    let Some(List(values)) = list else {
        return Ok(vec![None]);
    };
    values
        .iter()
        .map(|&value| {
            u32::try_from(value)
                .map(Some)
                .map_err(|_| Failure::usage(format!("{name} {value}: that is more than any device has")))
        })
        .collect()
}

impl Point {
    /// # Errors
    /// [`Failure::Usage`] when its values contradict each other.
    pub(super) fn plan(&self, args: &SweepArgs) -> Result<Plan, Failure> {
        match command(args)? {
            Command::Bw(mut bw) => {
                let (qps, post_list) = (self.qps.unwrap_or(1), self.post_list.unwrap_or(1));
                if qps == 0 || post_list == 0 || self.tx_depth == Some(0) {
                    return Err(Failure::usage("--qps, --tx-depth and --post-list are 1 at least"));
                }
                (bw.qps, bw.post_list, bw.tx_depth) = (qps, post_list, self.tx_depth);
                bw.bidirectional = args.bidirectional;
                (bw.test.size, bw.test.inline) = (Some(self.bytes), self.inline);
                Plan::bw(&bw)
            }
            Command::Lat(mut lat) => {
                (lat.test.size, lat.test.inline) = (Some(self.bytes), self.inline);
                Plan::lat(&lat)
            }
            server => Err(Failure::test(format!("no test to sweep: {server:?}"))),
        }
    }
}

fn command(args: &SweepArgs) -> Result<Command, Failure> {
    // Other parameters have the defaults of that command.
    let parsed = Cli::try_parse_from(["doorbell", args.kind.name(), args.operation.name()]);
    let mut command = parsed.map_err(|e| Failure::test(e.to_string()))?.command;
    match &mut command {
        Command::Bw(bw) => shared(args, &mut bw.test),
        Command::Lat(lat) => shared(args, &mut lat.test),
        _ => {}
    }
    Ok(command)
}

fn shared(args: &SweepArgs, test: &mut TestArgs) {
    test.peer.clone_from(&args.peer);
    test.iterations = args.iterations;
    test.duration = args.duration;
    test.warmup = args.warmup;
    test.rate = args.rate;
    test.repeat = args.repeat;
    test.clock = args.clock;
    test.verify = args.verify;
    test.private_memory = args.private_memory;
    test.atomic_op = args.atomic_op;
    test.seed = args.seed;
    test.no_progress = args.no_progress;
    test.connection = args.connection.clone();
    test.soft = args.soft.clone();
}

pub(super) fn common(args: &SweepArgs) -> Result<TestArgs, Failure> {
    match command(args)? {
        Command::Bw(bw) => Ok(bw.test),
        Command::Lat(lat) => Ok(lat.test),
        server => Err(Failure::test(format!("no test to sweep: {server:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sweep(line: &str) -> SweepArgs {
        match Cli::try_parse_from(format!("doorbell sweep {line}").split(' '))
            .expect(line)
            .command
        {
            Command::Sweep(args) => *args,
            server => panic!("{server:?}"),
        }
    }

    #[test]
    fn every_combination_is_a_point_and_sizes_run_first() {
        let points = all(&sweep("bw write --sizes 64,4K --qps 1,2 --tx-depth 1,16 --inline 0,64")).unwrap();
        assert_eq!(points.len(), 16);
        let first = Point {
            bytes: 64,
            qps: Some(1),
            tx_depth: Some(1),
            inline: Some(0),
            post_list: None,
        };
        let second = Point { bytes: 4096, ..first };
        assert_eq!(points[..2], [first, second]);
        assert_eq!(all(&sweep("bw write")).unwrap().len(), 23);
        assert_eq!(all(&sweep("lat atomic")).unwrap().len(), 1);
    }

    #[test]
    fn a_point_is_the_test_that_the_command_line_would_be() {
        let args = sweep("bw send --sizes 4K --qps 2 --tx-depth 16 --inline 64 -D 0.5 --mtu 1024 --seed 9");
        let point = all(&args).unwrap()[0];
        let line = "doorbell bw send -s 4K -q 2 --tx-depth 16 --inline 64 -D 0.5 --mtu 1024 --seed 9";
        let Command::Bw(same) = Cli::try_parse_from(line.split(' ')).unwrap().command else {
            panic!("it is bw");
        };
        assert_eq!(point.plan(&args).unwrap(), Plan::bw(&same).unwrap());
    }

    #[test]
    fn what_makes_no_sense_is_bad_usage() {
        for line in [
            "lat write --qps 1,2",
            "lat write --tx-depth 4",
            "bw write --qps 1..8G",
            "lat send --post-list 2",
            "lat send --bidirectional",
        ] {
            assert_eq!(all(&sweep(line)).expect_err(line).status(), 2, "{line}");
        }
        for line in [
            "bw write --sizes 64 --qps 0",
            "bw read --sizes 64 --inline 64",
            "bw read --sizes 64 --transport ud",
            "bw write --sizes 2G",
        ] {
            let args = sweep(line);
            assert_eq!(
                all(&args).unwrap()[0].plan(&args).expect_err(line).status(),
                2,
                "{line}"
            );
        }
    }
}
