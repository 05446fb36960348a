//! `doorbell compare`: what changed between two results, and whether that is more than noise.
//!
//! Rows with the same size and parameters are compared. The noise is that of the repeats, by
//! Welch's t-test for unequal variances; without repeats a given percentage is taken.

mod matching;
mod table;
mod welch;

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::document::{Document, Kind};
use crate::failure::{Failure, one_line};
use crate::report::{ReportedWarning, print_result};

use matching::{Matched, matched};
use welch::Interval;

pub(crate) const NOTES: &str = "\
Figures compared: average bandwidth of bw, latency of lat (the median, or what --figure names), time of coll.
With repeats in both results (--repeat), a change is more than noise when 0 lies outside the confidence interval of the difference of the means (Welch's t). One row in
twenty does so by chance at 95 %: raise --confidence where there are many. Without repeats the noise is unknown, and a change is called one from --noise on; so it is with
figures that a result does not have of each repeat: it has p50 and p99.

Exit status: 0 done, 1 something is worse by more than --fail-over or a file cannot be read, 2 bad usage, no result, or nothing to compare.";

/// The arguments of `doorbell compare`.
#[derive(Args, Debug)]
pub(crate) struct CompareArgs {
    /// The earlier result
    #[arg(value_name = "A.json")]
    pub(crate) before: PathBuf,
    /// The result to compare with it
    #[arg(value_name = "B.json")]
    pub(crate) after: PathBuf,
    /// Exit with status 1 when a row is worse by more than this, as 5%, and by more than noise
    #[arg(long, value_name = "PERCENT", value_parser = parse_percent)]
    pub(crate) fail_over: Option<f64>,
    /// For rows without repeats: changes below this are taken for noise, as 10%
    #[arg(long, value_name = "PERCENT", default_value = "10%", value_parser = parse_percent)]
    pub(crate) noise: f64,
    /// Confidence that a change of repeated rows is not noise
    #[arg(long, value_name = "PERCENT", default_value = "95%", value_parser = parse_confidence)]
    pub(crate) confidence: f64,
    /// For latency: the metric to compare
    #[arg(long, value_name = "FIGURE")]
    pub(crate) figure: Option<LatencyMetric>,
    /// Compare results that are not alike: other kinds of link, other memory, other transports or
    /// directions
    #[arg(long)]
    pub(crate) force: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// The metric of latency rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
pub(crate) enum LatencyMetric {
    /// The shortest
    Min,
    /// The median
    #[default]
    P50,
    /// The mean
    Avg,
    /// The 90th percentile
    P90,
    /// The 99th percentile
    P99,
    /// The 99.9th percentile
    #[value(name = "p99.9")]
    P999,
    /// The 99.99th percentile
    #[value(name = "p99.99")]
    P9999,
    /// The longest
    Max,
}

/// The verdict on a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Verdict {
    /// No change beyond noise.
    Same,
    Better,
    Worse,
}

#[derive(Debug, Serialize)]
struct Change {
    bytes: u64,
    /// The other parameters, as both results have them.
    point: String,
    metric: &'static str,
    before: f64,
    after: f64,
    /// The relative change; absent where the value was 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    change: Option<f64>,
    /// The confidence interval of the change; absent where the noise is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    change_interval: Option<[f64; 2]>,
    /// `measured` or `unknown`.
    noise: &'static str,
    verdict: Verdict,
    /// Whether it is worse by more than `--fail-over`.
    failed: bool,
}

#[derive(Debug, Serialize)]
struct Side {
    file: String,
    device: String,
    link: String,
    memory: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    mode: String,
    version: String,
    warnings: Vec<ReportedWarning>,
}

#[derive(Debug, Serialize)]
struct Comparison {
    test: &'static str,
    /// The test of both.
    of: String,
    before: Side,
    after: Side,
    confidence: f64,
    noise: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    fail_over: Option<f64>,
    results: Vec<Change>,
    only_before: Vec<String>,
    only_after: Vec<String>,
}

/// The metric that rows of a kind are compared by.
struct Metric {
    name: &'static str,
    /// Its value in each repeat; empty where results do not have that.
    samples: &'static str,
    more_is_better: bool,
}

impl Metric {
    fn of(kind: Kind, figure: LatencyMetric) -> Metric {
        let (name, samples, more_is_better) = match kind {
            Kind::Bandwidth => ("bw_avg_bytes_per_s", "bw_samples_bytes_per_s", true),
            Kind::Latency => match figure {
                LatencyMetric::Min => ("lat_min_ns", "", false),
                LatencyMetric::P50 => ("lat_p50_ns", "lat_samples_ns", false),
                LatencyMetric::Avg => ("lat_avg_ns", "", false),
                LatencyMetric::P90 => ("lat_p90_ns", "", false),
                LatencyMetric::P99 => ("lat_p99_ns", "lat_p99_samples_ns", false),
                LatencyMetric::P999 => ("lat_p999_ns", "", false),
                LatencyMetric::P9999 => ("lat_p9999_ns", "", false),
                LatencyMetric::Max => ("lat_max_ns", "", false),
            },
            // Calls are timed together, and have no samples.
            Kind::Collective => ("time_us", "", false),
        };
        Metric {
            name,
            samples,
            more_is_better,
        }
    }
}

/// # Errors
/// [`Failure::Usage`] when there is nothing to compare; [`Failure::Test`] when a row is worse by
/// more than `--fail-over`, or a file cannot be read.
pub(crate) fn run(args: &CompareArgs) -> Result<(), Failure> {
    let (before, after) = (Document::read(&args.before)?, Document::read(&args.after)?);
    check_comparable(args, &before, &after)?;
    let comparison = compare(args, &before, &after)?;
    if args.json {
        print_result(&comparison)?;
    } else {
        table::print(&comparison)?;
    }
    let failed: Vec<_> = comparison.results.iter().filter(|change| change.failed).collect();
    match (args.fail_over, failed.as_slice()) {
        (Some(fail_over), [first, ..]) => Err(Failure::test(format!(
            "{} of {} points are worse by more than {}: the first is {} ({})",
            failed.len(),
            comparison.results.len(),
            percent(fail_over),
            table::point(first),
            table::change(first)
        ))),
        _ => Ok(()),
    }
}

/// Whether the results can be compared at all.
fn check_comparable(args: &CompareArgs, before: &Document, after: &Document) -> Result<(), Failure> {
    if before.test != after.test || before.kind != after.kind {
        return Err(Failure::usage(format!(
            "{} is of {} and {} of {}: there is nothing to compare",
            before.file, before.test, after.file, after.test
        )));
    }
    if args.figure.is_some() && before.kind != Kind::Latency {
        return Err(Failure::usage(format!(
            "--figure chooses among latencies, and {} is of {}",
            before.file, before.test
        )));
    }
    for (what, a, b) in [
        ("link", &before.link, &after.link),
        ("memory", &before.memory, &after.memory),
        ("mode", &mode(before), &mode(after)),
    ] {
        if a != b && !args.force {
            return Err(Failure::usage(format!(
                "the {what} of {} is {a} and that of {} is {b}: these are not alike (--force compares them anyway)",
                before.file, after.file
            )));
        }
    }
    Ok(())
}

fn compare(args: &CompareArgs, before: &Document, after: &Document) -> Result<Comparison, Failure> {
    let Matched {
        both,
        only_before,
        only_after,
    } = matched(before, after);
    if both.is_empty() {
        return Err(Failure::usage(format!(
            "{} and {} have no point in common: there is nothing to compare",
            before.file, after.file
        )));
    }
    let metric = Metric::of(before.kind, args.figure.unwrap_or_default());
    let results: Vec<_> = both
        .into_iter()
        .filter_map(|(point, a, b)| {
            let figures = (a.metric(metric.name)?.value, b.metric(metric.name)?.value);
            let interval =
                Interval::of_difference(&a.samples(metric.samples), &b.samples(metric.samples), args.confidence);
            Some(judge(args, &metric, (a.bytes, point), figures, interval))
        })
        .collect();
    if results.is_empty() {
        return Err(Failure::usage(format!(
            "no point of {} and {} has {} in both: there is nothing to compare",
            before.file, after.file, metric.name
        )));
    }
    Ok(Comparison {
        test: "compare",
        of: before.test.clone(),
        before: side(before),
        after: side(after),
        confidence: args.confidence,
        noise: args.noise,
        fail_over: args.fail_over,
        results,
        only_before,
        only_after,
    })
}

fn mode(document: &Document) -> String {
    if document.mode.is_empty() {
        "one way, rc".to_owned()
    } else {
        document.mode.clone()
    }
}

fn side(document: &Document) -> Side {
    Side {
        file: document.file.clone(),
        device: document.device.clone(),
        link: document.link.clone(),
        memory: document.memory.clone(),
        mode: document.mode.clone(),
        version: document.version.clone(),
        warnings: document.warnings.clone(),
    }
}

fn judge(
    args: &CompareArgs,
    metric: &Metric,
    (bytes, point): (u64, String),
    (before, after): (f64, f64),
    interval: Option<Interval>,
) -> Change {
    // The interval is around the means of the repeats.
    let (before, after) = interval.as_ref().map_or((before, after), |interval| interval.means);
    let of = |difference: f64| (before > 0.0).then_some(difference / before);
    let change = of(after - before);
    let is_more_than_noise = match (&interval, change) {
        (Some(interval), _) => interval.low > 0.0 || interval.high < 0.0,
        (None, Some(change)) => change.abs() > args.noise,
        (None, None) => after > 0.0,
    };
    let is_better = (after > before) == metric.more_is_better;
    let verdict = match (is_more_than_noise, is_better) {
        (false, _) => Verdict::Same,
        (true, true) => Verdict::Better,
        (true, false) => Verdict::Worse,
    };
    let past = args
        .fail_over
        .is_some_and(|most| change.is_none_or(|change| change.abs() > most));
    // With unknown noise only the given threshold counts: below --noise it would have no effect
    // otherwise.
    let failed = past && !is_better && after != before && (interval.is_none() || verdict == Verdict::Worse);
    Change {
        bytes,
        point,
        metric: metric.name,
        before,
        after,
        change,
        change_interval: interval
            .as_ref()
            .and_then(|interval| Some([of(interval.low)?, of(interval.high)?])),
        noise: if interval.is_some() { "measured" } else { "unknown" },
        verdict,
        failed,
    }
}

/// Parses `5%`, `5` or `0.5 %` as a fraction.
fn parse_percent(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('%').unwrap_or(text).trim();
    match number.parse::<f64>() {
        Ok(percent) if (0.0..=1000.0).contains(&percent) => Ok(percent / 100.0),
        _ => Err(format!(
            "'{}' is not a percentage: give a number such as 5%",
            one_line(text)
        )),
    }
}

fn parse_confidence(text: &str) -> Result<f64, String> {
    match parse_percent(text) {
        Ok(confidence) if (0.5..=0.9999).contains(&confidence) => Ok(confidence),
        _ => Err(format!("'{}' is no confidence: give 50% to 99.99%", one_line(text))),
    }
}

fn percent(part: f64) -> String {
    let text = format!("{:.2}", part * 100.0);
    format!("{} %", text.trim_end_matches('0').trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::document::tests::document;

    fn args(fail_over: Option<f64>) -> CompareArgs {
        CompareArgs {
            before: "a".into(),
            after: "b".into(),
            fail_over,
            noise: 0.1,
            confidence: 0.95,
            figure: None,
            force: false,
            json: false,
        }
    }

    fn result(bw: f64, samples: &[f64]) -> Document {
        let samples = match samples {
            [] => String::new(),
            _ => format!(",\"bw_samples_bytes_per_s\":{samples:?}"),
        };
        let row = format!(r#"{{"bytes":64,"qps":1,"bw_avg_bytes_per_s":{bw:?},"msg_rate_per_s":1{samples}}}"#);
        document("x.json", "soft-udp", &row)
    }

    fn verdict(before: &Document, after: &Document, fail_over: Option<f64>) -> (Verdict, &'static str, bool) {
        let comparison = compare(&args(fail_over), before, after).unwrap();
        let change = &comparison.results[0];
        (change.verdict, change.noise, change.failed)
    }

    #[test]
    fn repeats_give_the_noise() {
        let quiet = result(100.0, &[99.0, 100.0, 101.0]);
        let slower = result(94.0, &[93.0, 94.0, 95.0]);
        let wild = result(94.0, &[70.0, 94.0, 118.0]);
        assert_eq!(verdict(&quiet, &slower, Some(0.05)), (Verdict::Worse, "measured", true));
        assert_eq!(
            verdict(&slower, &quiet, Some(0.05)),
            (Verdict::Better, "measured", false)
        );
        assert_eq!(verdict(&quiet, &wild, Some(0.05)), (Verdict::Same, "measured", false));
        assert_eq!(
            verdict(&quiet, &slower, Some(0.07)),
            (Verdict::Worse, "measured", false)
        );
    }

    #[test]
    fn without_repeats_noise_is_unknown_and_a_threshold_decides() {
        let (a, b, c) = (result(100.0, &[]), result(94.0, &[]), result(80.0, &[]));
        assert_eq!(verdict(&a, &b, None), (Verdict::Same, "unknown", false));
        assert_eq!(verdict(&a, &b, Some(0.05)), (Verdict::Same, "unknown", true));
        assert_eq!(verdict(&a, &c, None), (Verdict::Worse, "unknown", false));
        assert_eq!(verdict(&a, &a, Some(0.0)), (Verdict::Same, "unknown", false));
        assert_eq!(verdict(&c, &a, Some(0.0)), (Verdict::Better, "unknown", false));
    }

    #[test]
    fn results_that_are_not_alike_are_refused() {
        let soft = result(1.0, &[]);
        let hard = Document {
            link: "hardware".into(),
            ..soft.clone()
        };
        let refused = check_comparable(&args(None), &soft, &hard).unwrap_err();
        assert!(
            refused.status() == 2 && refused.to_string().contains("--force"),
            "{refused}"
        );
        let forced = CompareArgs {
            force: true,
            ..args(None)
        };
        assert!(check_comparable(&forced, &soft, &hard).is_ok());
        let other = Document {
            test: "read_bw".into(),
            ..soft.clone()
        };
        assert_eq!(check_comparable(&forced, &soft, &other).unwrap_err().status(), 2);
    }

    #[test]
    fn percentages_read() {
        assert_eq!(
            (parse_percent("5%"), parse_percent("5"), parse_percent("0.5 %")),
            (Ok(0.05), Ok(0.05), Ok(0.005))
        );
        for text in ["", "%", "x", "-1", "nan", "inf", "2000"] {
            assert!(parse_percent(text).is_err(), "{text}");
        }
        assert!(parse_confidence("100%").is_err() && parse_confidence("99%") == Ok(0.99));
        assert_eq!(percent(0.05), "5 %");
    }
}
