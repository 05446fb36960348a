//! `doorbell limits`: how far the machine itself could go, so a test's figures have something to be held against.

use std::time::Duration;

use doorbell_softroce::limits;
use serde::Serialize;

use crate::cli::LimitsArgs;
use crate::failure::{Failure, one_line};
use crate::report;

/// One limit.
#[derive(Debug, PartialEq, Serialize)]
struct Limit {
    name: &'static str,
    #[serde(flatten)]
    figure: Figure,
}

/// A limit's figure, under its unit.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Figure {
    /// Bytes per second.
    BytesPerS(f64),
    /// Nanoseconds.
    Ns(f64),
}

#[derive(Debug, Serialize)]
struct Limits {
    tool: &'static str,
    version: &'static str,
    test: &'static str,
    memory: &'static str,
    results: Vec<Limit>,
}

/// Measures and prints. A limit that cannot be measured here is left out, with a line on stderr that says why.
///
/// # Errors
/// [`Failure::Test`] when nothing could be measured or printed.
pub(crate) fn run(args: &LimitsArgs) -> Result<(), Failure> {
    let duration = Duration::from_secs_f64(args.duration);
    for warning in report::of_this_machine(2) {
        eprintln!("doorbell: warning: {warning}");
    }
    if !args.json {
        report::print_line(&format!(
            "{:<18} {:>18} {:>12}  what it is",
            "#limit", "bandwidth[GB/s]", "time[ns]"
        ))?;
    }
    let mut results = Vec::new();
    for (name, what, measure) in MEASUREMENTS {
        match measure(duration) {
            Ok(figure) => {
                let limit = Limit { name, figure };
                if !args.json {
                    report::print_line(&line(&limit, what))?;
                }
                results.push(limit);
            }
            Err(reason) => eprintln!("doorbell: {name} left out: {reason}"),
        }
    }
    if results.is_empty() {
        return Err(Failure::test("no limit could be measured on this machine"));
    }
    if args.json {
        let version = env!("CARGO_PKG_VERSION");
        report::print_json(&Limits {
            tool: "doorbell",
            version,
            test: "limits",
            memory: "host",
            results,
        })?;
    }
    Ok(())
}

type Measurement = fn(Duration) -> Result<Figure, String>;

const MEASUREMENTS: [(&str, &str, Measurement); 4] = [
    ("memcpy", "one thread copies 1 MiB blocks", |duration| {
        Ok(Figure::BytesPerS(limits::memcpy(duration).bytes_per_s))
    }),
    (
        "udp_gso",
        "UDP over loopback in GSO batches, CRC and one copy at each end",
        |duration| {
            limits::udp_gso(duration)
                .map(|limit| Figure::BytesPerS(limit.bytes_per_s))
                .map_err(reason)
        },
    ),
    (
        "shm_pingpong",
        "half a round trip of two threads that spin on shared memory",
        |duration| {
            limits::shm_pingpong(duration)
                .map(|limit| Figure::Ns(limit.ns))
                .map_err(reason)
        },
    ),
    ("process_vm_writev", "1 MiB copies into another process", |duration| {
        limits::process_vm_writev(duration)
            .map(|limit| Figure::BytesPerS(limit.bytes_per_s))
            .map_err(reason)
    }),
];

/// An error and what lies under it, in one line.
fn reason(error: limits::LimitError) -> String {
    match std::error::Error::source(&error) {
        Some(source) => one_line(&format!("{error}: {source}")),
        None => one_line(&error.to_string()),
    }
}

fn line(limit: &Limit, what: &str) -> String {
    let (bandwidth, time) = match limit.figure {
        Figure::BytesPerS(rate) => (format!("{:.2}", rate / 1e9), "-".into()),
        Figure::Ns(ns) => ("-".to_owned(), format!("{ns:.1}")),
    };
    format!("{:<18} {bandwidth:>18} {time:>12}  {what}", limit.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_the_contracts() {
        let limits = [
            Limit {
                name: "memcpy",
                figure: Figure::BytesPerS(1.5),
            },
            Limit {
                name: "shm_pingpong",
                figure: Figure::Ns(90.0),
            },
        ];
        assert_eq!(
            serde_json::to_string(&limits).unwrap(),
            r#"[{"name":"memcpy","bytes_per_s":1.5},{"name":"shm_pingpong","ns":90.0}]"#
        );
        let names = MEASUREMENTS.map(|(name, ..)| name);
        assert_eq!(names, ["memcpy", "udp_gso", "shm_pingpong", "process_vm_writev"]);
    }
}
