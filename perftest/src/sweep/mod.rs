//! `doorbell sweep`: a test over message sizes, queue pairs, depths and inline sizes, as one
//! result.
//!
//! Each point is a separate test, with its own control connection, so its failure does not affect
//! the next. The device is opened once. The machine's own limits are measured first, for charts.

mod args;
mod points;

use std::collections::BTreeSet;
use std::io::IsTerminal;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::cli::TestArgs;
use crate::command;
use crate::device::{Device, Reach, Side};
use crate::diagnose::{self, Measured, NoiseMonitor, Peer, Sources};
use crate::exchange::{Control, connect};
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::limits;
use crate::orchestrate::Server;
use crate::output::Output;
use crate::plan::{Kind, Mode, Plan};
use crate::progress::Progress;
use crate::report::{Caveats, Report, Row, Settings, Warning, print_line};
use crate::run::session::{self, Event, SessionContext};
use crate::stats::Clock;
use crate::units::show_bytes;

pub(crate) use args::{EXAMPLES, SweepArgs};
use points::Point;

/// Duration of a round of measuring one of the machine's own limits.
const LIMIT: Duration = Duration::from_millis(100);

/// A point that was not measured, in the result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Skipped {
    bytes: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    qps: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tx_depth: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    inline_bytes: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    post_list: Option<u32>,
    /// In one line.
    reason: String,
}

impl Skipped {
    fn new(point: &Point, reason: &Failure) -> Skipped {
        Skipped {
            bytes: point.bytes,
            qps: point.qps,
            tx_depth: point.tx_depth,
            inline_bytes: point.inline,
            post_list: point.post_list,
            reason: reason.to_string(),
        }
    }
}

/// The parameters of a sweep: every value of what is swept, and what all points have in common.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct SweepSettings {
    #[serde(flatten)]
    mode: Mode,
    bytes: Vec<u64>,
    qps: Vec<u32>,
    tx_depth: Vec<u32>,
    inline_bytes: Vec<u32>,
    post_list: Vec<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    mtu: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    iterations: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    duration_s: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    warmup: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rate_per_s: Option<f64>,
    repeat: u32,
}

impl SweepSettings {
    fn of(plans: &[&Plan]) -> Option<SweepSettings> {
        let common = Settings::of(plans.first()?);
        Some(SweepSettings {
            mode: common.mode,
            bytes: distinct(plans.iter().flat_map(|plan| plan.sizes.iter().copied())),
            qps: distinct(plans.iter().map(|plan| plan.qps)),
            tx_depth: distinct(plans.iter().map(|plan| match plan.kind {
                Kind::Bw => plan.tx_depth,
                // The rest of the depth is room for flow control.
                Kind::Lat => 1,
            })),
            inline_bytes: distinct(plans.iter().map(|plan| plan.inline)),
            post_list: distinct(plans.iter().map(|plan| plan.post_list)),
            mtu: common.mtu,
            iterations: common.iterations,
            duration_s: common.duration_s,
            warmup: common.warmup,
            rate_per_s: common.rate_per_s,
            repeat: common.repeat,
        })
    }
}

fn distinct<T: Ord>(values: impl Iterator<Item = T>) -> Vec<T> {
    values.collect::<BTreeSet<_>>().into_iter().collect()
}

struct ServerEndpoint<'a> {
    host: &'a str,
    port: u16,
    token: Option<String>,
    peer: Peer,
}

/// Runs a sweep, and writes the results even when it failed.
///
/// # Errors
/// [`Failure::Usage`] when nothing can be measured; [`Failure::Test`] when a point failed while it
/// was measured, the peer is gone or the result cannot be written; [`Failure::Interrupted`].
pub(crate) fn run(args: &SweepArgs) -> Result<(), Failure> {
    let points = points::all(args)?;
    let test = points::common(args)?;
    let plans: Vec<_> = points.iter().map(|point| (*point, point.plan(args))).collect();
    let Some(first) = plans.iter().find_map(|(_, plan)| plan.as_ref().ok()) else {
        // All points are refused by this program itself: then the command line is wrong.
        let refused = plans.into_iter().find_map(|(_, plan)| plan.err());
        return Err(refused.unwrap_or_else(|| Failure::usage("there is no point in this sweep")));
    };
    let (kind, name) = (first.kind, first.test_name());
    let output = args.output.as_deref().map(Output::begin).transpose()?;
    let interrupt = Interrupt::catch()?;
    // Before the device has threads: some of the measurements fork.
    let limits = if args.no_limits {
        Vec::new()
    } else {
        limits::ceilings(LIMIT)
    };
    let reach = if args.peer.is_some() {
        Reach::Elsewhere
    } else {
        Reach::Here
    };
    let side = if reach == Reach::Here {
        Side::First
    } else {
        Side::Single
    };
    let device = command::open(&test, side, reach)?;
    let mtu = command::active_mtu(&device)?;
    let plans: Vec<_> = plans
        .into_iter()
        .map(|(point, plan)| (point, plan.and_then(|plan| plan.fitted(mtu, true))))
        .collect();
    let server = (reach == Reach::Here)
        .then(|| command::start_server(kind, &test, &device, &interrupt, true))
        .transpose()?;
    let endpoint = ServerEndpoint {
        host: args.peer.as_deref().unwrap_or("127.0.0.1"),
        port: server.as_ref().map_or(args.connection.port, |server| server.port),
        token: server.as_ref().map(|server: &Server| server.token.clone()),
        peer: server
            .as_ref()
            .map_or(Peer::Elsewhere, |server| Peer::Child(server.process())),
    };
    let mut report = Report::new(name, device.context.name().to_owned(), device.link);
    let good: Vec<_> = plans.iter().filter_map(|(_, plan)| plan.as_ref().ok()).collect();
    report.sweep = SweepSettings::of(&good);
    report.limits = limits;
    let mut clock = Clock::new(test.clock).map_err(|why| Failure::usage(format!("--clock tsc: {why}")))?;
    let local = Sweep {
        plans: &plans,
        test: &test,
        device: &device,
        endpoint: &endpoint,
        interrupt: &interrupt,
        sources: Sources::of_this_machine(),
    };
    let mut monitor = None;
    let mut caveats = Caveats::new(args.verbose);
    let outcome = local.measure(&mut clock, &mut report, &mut monitor, &mut caveats);
    report.clock = Some(clock.report());
    if let (Some(monitor), false) = (&monitor, report.results.is_empty()) {
        caveats.add(diagnose::after(monitor, &Measured::of(&report.results)));
    }
    report.warnings = caveats.finish();
    if report.results.is_empty() {
        return outcome.and(Err(none(&report)));
    }
    let text = serde_json::to_string(&report).map_err(|e| Failure::test(format!("cannot write the result: {e}")))?;
    match output {
        None => print_line(&text)?,
        Some(output) => {
            output.finish(format!("{text}\n").as_bytes())?;
            if let Some(path) = args.output.as_deref().filter(|_| !args.no_progress) {
                eprintln!(
                    "doorbell: {} points in {1}; doorbell report {1} -o report.html makes charts of them",
                    report.results.len(),
                    path.display()
                );
            }
        }
    }
    outcome
}

fn none(report: &Report) -> Failure {
    let first = report.skipped.first().map_or("", |skipped| &skipped.reason);
    Failure::test(format!("no point could be measured: {first}"))
}

struct Sweep<'a> {
    plans: &'a [(Point, Result<Plan, Failure>)],
    test: &'a TestArgs,
    device: &'a Device,
    endpoint: &'a ServerEndpoint<'a>,
    interrupt: &'a Interrupt,
    sources: Sources,
}

impl Sweep<'_> {
    /// Failures of single points are reported at the end. `monitor` is started with the first
    /// point.
    fn measure(
        &self,
        clock: &mut Clock,
        report: &mut Report,
        monitor: &mut Option<NoiseMonitor>,
        caveats: &mut Caveats,
    ) -> Result<(), Failure> {
        let progress = SweepProgress::begin(self.plans.len(), self.test.no_progress);
        let mut failed = Vec::new();
        for (number, (point, plan)) in self.plans.iter().enumerate() {
            progress.line.set_current(describe(point));
            let before = report.results.len();
            let outcome = match plan {
                Err(refused) => Err(Failure::usage(refused.to_string())),
                Ok(plan) => {
                    if self.interrupt.requested() {
                        return Err(Failure::Interrupted);
                    }
                    // Without a server the sweep cannot continue.
                    let control = connect(self.endpoint.host, self.endpoint.port, self.interrupt)?;
                    self.one(plan, &control, clock, report, &progress, (&mut *monitor, &mut *caveats))
                }
            };
            if let (Some(row), Ok(plan)) = (report.results.get_mut(before), plan) {
                with_requested_params(row, point, plan);
                progress.row(number, row, point);
            }
            let Err(failure) = outcome else { continue };
            match failure {
                Failure::Interrupted | Failure::Lost { .. } => return Err(failure),
                Failure::Test(_) => failed.push(format!("{}: {failure}", describe(point))),
                Failure::Usage(_) | Failure::Refused(_) | Failure::NotRun(..) => {
                    progress.message(&format!("{} left out: {failure}", describe(point)));
                }
            }
            report.skipped.push(Skipped::new(point, &failure));
        }
        match failed.first() {
            None => Ok(()),
            Some(first) => Err(Failure::test(format!(
                "{} of {} points failed while they were measured, the first with {first}",
                failed.len(),
                self.plans.len()
            ))),
        }
    }

    fn one(
        &self,
        plan: &Plan,
        control: &Control,
        clock: &mut Clock,
        report: &mut Report,
        progress: &SweepProgress,
        (monitor, caveats): (&mut Option<NoiseMonitor>, &mut Caveats),
    ) -> Result<(), Failure> {
        let device = self.device;
        report.peer = Some(control.peer().ip().to_string());
        let local = SessionContext {
            control,
            device,
            gid_index: self.test.connection.gid_index,
        };
        session::client(local, plan, self.endpoint.token.clone(), clock, |event| match event {
            Event::Accepted(accepted) => {
                report.link = accepted.link_to(device.link, device.group);
                report.line_rate_bytes_per_s = command::line_rate(device, report.link);
                if monitor.is_none() {
                    let before = command::warnings(&self.sources, plan, self.test, device, report, self.endpoint.peer);
                    progress.line.suspend(|| caveats.add(before));
                    *monitor = Some(NoiseMonitor::begin(&self.sources, self.endpoint.peer));
                }
            }
            Event::SizeStarted(_) | Event::Interval(_) => {}
            Event::Row(row) => report.results.push(row),
            Event::ClockDrift(drift) => {
                let warning = Warning::clock_drift(drift);
                progress.line.suspend(|| caveats.add([warning]));
            }
        })
    }
}

/// A row of a sweep has the requested parameters of its point, even where a test used less, such as
/// a smaller depth for large messages, so that rows can be distinguished.
fn with_requested_params(row: &mut Row, point: &Point, plan: &Plan) {
    let inline = match row {
        Row::Bandwidth(row) => {
            row.tx_depth = plan.tx_depth;
            &mut row.inline_bytes
        }
        Row::Latency(row) => &mut row.inline_bytes,
    };
    // A default is dropped where a device has no inline.
    if let Some(requested) = point.inline {
        *inline = requested;
    }
}

fn describe(point: &Point) -> String {
    let mut words = format!("{} B", show_bytes(point.bytes));
    for (name, value) in [
        ("qps", point.qps),
        ("tx-depth", point.tx_depth),
        ("inline", point.inline),
        ("post-list", point.post_list),
    ] {
        if let Some(value) = value {
            words.push_str(&format!(", {name} {value}"));
        }
    }
    words
}

/// Progress on stderr: a line for each point, or on a terminal one that changes.
struct SweepProgress {
    line: Progress,
    lines: bool,
    of: usize,
}

impl SweepProgress {
    fn begin(of: usize, none: bool) -> SweepProgress {
        SweepProgress {
            line: Progress::begin(of, "points", none),
            lines: !none && !std::io::stderr().is_terminal(),
            of,
        }
    }

    fn row(&self, number: usize, row: &Row, point: &Point) {
        self.line.done_one(Some(row.figure()));
        if self.lines {
            eprintln!(
                "doorbell: {}/{}: {}: {}",
                number + 1,
                self.of,
                describe(point),
                row.figure()
            );
        }
    }

    /// Reports a point without a result; it is in the report, too.
    fn message(&self, text: &str) {
        self.line.done_one(None);
        self.line.suspend(|| eprintln!("doorbell: {text}"));
    }
}
