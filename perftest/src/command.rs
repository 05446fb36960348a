//! `doorbell bw` and `doorbell lat`: the roles of the processes, and the output.

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, SystemTime};

use doorbell_gpudirect::Path;

use crate::cli::{SoftArgs, TestArgs};
use crate::device::{self, Device, Gpu, MemoryPlace, PORT, Reach, Side, Soft};
use crate::diagnose::{self, Measured, NoiseMonitor, Peer, Port, Sources, Subject};
use crate::exchange::{Control, ExpectedTest, GpuEnd, Listener, connect};
use crate::failure::{Failure, one_line, refused};
use crate::interrupt::Interrupt;
use crate::orchestrate::{self, Announcement, Server};
use crate::plan::{Kind, MEMORY_BUDGET, Plan, Verb};
use crate::progress::Progress;
use crate::report::{
    self, Caveats, LinkKind, Metrics, OptionalColumns, Report, Row, Settings, Table, Thresholds, Warning,
};
use crate::run::raw;
use crate::run::session::{self, Event, SessionContext};
use crate::stats::Clock;
use crate::units::show_bytes;

/// How long a child waits for its parent to connect.
const PARENT_TIMEOUT: Duration = Duration::from_secs(30);

/// # Errors
/// The test's, with its exit status.
pub(crate) fn run(plan: &Plan, args: &TestArgs, thresholds: Thresholds) -> Result<(), Failure> {
    if args.json && metrics_on_stdout(args) {
        return Err(Failure::usage(
            "--json and --prometheus - both want stdout: give one of them a file",
        ));
    }
    match (&args.peer, args.server, args.child) {
        (_, true, true) => child(plan.kind, args),
        (_, true, false) => server(plan.kind, args),
        (Some(host), false, _) => {
            let metrics = metrics(args)?;
            let interrupt = Interrupt::catch()?;
            let device = open(args, Side::Single, Reach::Elsewhere)?;
            let plan = &plan.fitted(active_mtu(&device)?, args.size.is_some())?;
            let control = connect(host, args.connection.port, &interrupt)?;
            let peer = if control.is_local() {
                Peer::Here
            } else {
                Peer::Elsewhere
            };
            client(plan, args, &device, &control, None, peer)?.with_thresholds(metrics, thresholds)
        }
        (None, false, _) => {
            let metrics = metrics(args)?;
            both(plan, args)?.with_thresholds(metrics, thresholds)
        }
    }
}

fn both(plan: &Plan, args: &TestArgs) -> Result<FinishedTest, Failure> {
    let interrupt = Interrupt::catch()?;
    let device = open(args, Side::First, Reach::Here)?;
    let plan = &plan.fitted(active_mtu(&device)?, args.size.is_some())?;
    let server = start_server(plan.kind, args, &device, &interrupt, false)?;
    let control = connect("127.0.0.1", server.port, &interrupt)?;
    let peer = Peer::Child(server.process());
    client(plan, args, &device, &control, Some(server.token.clone()), peer)
}

/// Starts the server's process, which serves one test, or one after another as long as this process
/// keeps it.
pub(crate) fn start_server(
    kind: Kind,
    args: &TestArgs,
    device: &Device,
    interrupt: &Interrupt,
    forever: bool,
) -> Result<Server, Failure> {
    let second = Soft::second_address(&args.soft)?.filter(|_| device.link == LinkKind::SoftUdp);
    // A capture file is for one process.
    let soft = SoftArgs {
        address: second.into_iter().collect(),
        pcap: None,
        ..args.soft.clone()
    };
    let seed = args.seed.wrapping_add(1);
    let mut arguments = child_arguments(kind, args, device, seed);
    if forever {
        arguments.push("--forever".into());
    }
    Server::start(&arguments, soft.variables(seed), interrupt)
}

pub(crate) fn open(args: &TestArgs, side: Side, reach: Reach) -> Result<Device, Failure> {
    let mut device = device::open(args.connection.device.as_deref(), &args.soft, args.seed, side, reach)?;
    if let Some(MemoryPlace::Gpu(number)) = args.gpu.first() {
        device.gpu = Some(Gpu::open(*number, &device.context)?);
    }
    Ok(device)
}

/// The same test and device, of which the server's address and faults are variables.
fn child_arguments(kind: Kind, args: &TestArgs, device: &Device, seed: u64) -> Vec<String> {
    let options = [
        ("port", Some("0".to_owned())),
        ("device", Some(device.context.name().to_owned())),
        ("gid-index", args.connection.gid_index.map(|index| index.to_string())),
        // The server's is the second; a single one is for both.
        ("gpu", args.gpu.last().map(ToString::to_string)),
        ("seed", Some(seed.to_string())),
    ];
    let given = options
        .into_iter()
        .filter_map(|(name, value)| Some([format!("--{name}"), value?]));
    let test = [kind.name(), args.operation.name(), "--server", "--child"].map(str::to_owned);
    test.into_iter().chain(given.flatten()).collect()
}

fn client(
    plan: &Plan,
    args: &TestArgs,
    device: &Device,
    control: &Control,
    token: Option<String>,
    peer: Peer,
) -> Result<FinishedTest, Failure> {
    let mut clock = Clock::new(args.clock).map_err(|why| Failure::usage(format!("--clock tsc: {why}")))?;
    let mut report = Report::new(plan.test_name(), device.context.name().to_owned(), device.link);
    report.peer = Some(control.peer().ip().to_string());
    report.settings = Some(Settings::of(plan));
    report.clock = Some(clock.report());
    if let Some(gpu) = &device.gpu {
        report.memory = gpu.path.name().to_owned();
        report.gpu = Some(GpuEnd::of(gpu));
    }
    let sources = Sources::of_this_machine();
    let mut caveats = Caveats::new(args.verbose);
    let mut monitor = None;
    let progress = Progress::begin(plan.sizes.len(), "sizes", args.no_progress);
    let mut table = Ok(None);
    let mut printed = Ok(());
    let mut drifted = None;
    let local = SessionContext {
        control,
        device,
        gid_index: args.connection.gid_index,
    };
    let outcome = session::client(local, plan, token, &mut clock, |event| match event {
        Event::Accepted(accepted) => {
            report.link = accepted.link_to(device.link, device.group);
            report.line_rate_bytes_per_s = line_rate(device, report.link);
            report.peer_gpu = accepted.gpu;
            let before = warnings(&sources, plan, args, device, &report, peer);
            progress.suspend(|| {
                caveats.add(before);
                if !args.json && !metrics_on_stdout(args) {
                    let extra = OptionalColumns {
                        repeats: plan.repeat > 1,
                        cpu: args.cpu_util,
                        gbits: args.gbits,
                        lost: plan.verb == Verb::Send && !plan.mode.is_reliable(),
                    };
                    table = Table::begin(plan.kind, extra, &about(plan, device, &report, control)).map(Some);
                }
            });
            monitor = Some(NoiseMonitor::begin(&sources, peer));
        }
        Event::SizeStarted(bytes) => progress.set_current(format!("{} B", show_bytes(bytes))),
        Event::Interval(interval) => {
            if let (Ok(Some(table)), Ok(())) = (&table, &printed) {
                printed = progress.suspend(|| table.interval(&interval));
            }
        }
        Event::Row(mut row) => {
            if let (Row::Bandwidth(row), Some(gpu), Some(peer)) = (&mut row, &device.gpu, &report.peer_gpu) {
                row.raw_copy_bytes_per_s = raw::peer_copy(gpu, peer, row.bytes);
            }
            progress.done_one(Some(row.figure()));
            if let (Ok(Some(table)), Ok(())) = (&table, &printed) {
                printed = progress.suspend(|| table.row(&row));
            }
            report.results.push(row);
        }
        Event::ClockDrift(drift) => drifted = Some(drift),
    });
    drop(progress);
    if let Some(drift) = drifted {
        report.clock = Some(clock.report());
        caveats.add([Warning::clock_drift(drift)]);
    }
    if let (Some(monitor), false) = (&monitor, report.results.is_empty()) {
        caveats.add(diagnose::after(monitor, &Measured::of(&report.results)));
    }
    report.warnings = caveats.finish();
    if args.json && (outcome.is_ok() || !report.results.is_empty()) {
        report::print_json(&report)?;
    }
    Ok(FinishedTest {
        report,
        outcome: outcome.and(table.map(drop)).and(printed),
    })
}

struct FinishedTest {
    report: Report,
    outcome: Result<(), Failure>,
}

impl FinishedTest {
    fn with_thresholds(self, metrics: Option<Metrics>, thresholds: Thresholds) -> Result<(), Failure> {
        let FinishedTest { report, outcome } = self;
        let written = match metrics {
            Some(metrics) if outcome.is_ok() || !report.results.is_empty() => {
                metrics.finish(&report::exposition(&report, SystemTime::now()))
            }
            _ => Ok(()),
        };
        let met = outcome.and_then(|()| {
            let mut missed = thresholds.missed(&report);
            let last = missed.pop();
            for line in &missed {
                eprintln!("doorbell: {line}");
            }
            last.map_or(Ok(()), |line| Err(Failure::test(line)))
        });
        match (met, written) {
            (Err(failure), Err(unwritten)) => {
                eprintln!("doorbell: {unwritten}");
                Err(failure)
            }
            (met, written) => met.and(written),
        }
    }
}

fn metrics(args: &TestArgs) -> Result<Option<Metrics>, Failure> {
    args.prometheus.as_deref().map(Metrics::begin).transpose()
}

fn metrics_on_stdout(args: &TestArgs) -> bool {
    args.prometheus.as_deref() == Some(std::path::Path::new("-"))
}

fn about(plan: &Plan, device: &Device, report: &Report, control: &Control) -> String {
    let port = device.context.port(PORT).ok();
    let mtu = plan
        .mtu
        .or(port.map(|port| port.active_mtu.bytes()))
        .map_or_else(|| "?".into(), |mtu| mtu.to_string());
    let qps = if plan.qps == 1 {
        String::new()
    } else {
        format!(" | {} queue pairs", plan.qps)
    };
    let mode = match plan.mode.name() {
        name if name.is_empty() => name,
        name => format!(" | {name}"),
    };
    let verified = if plan.verify { " | verified" } else { "" };
    let pace = match (plan.rate_per_s, plan.kind) {
        (Some(rate), _) => format!(" | {rate} messages/s in an open loop"),
        (None, Kind::Lat) => " | closed loop".to_owned(),
        (None, Kind::Bw) => String::new(),
    };
    let repeats = match plan.repeat {
        1 => String::new(),
        repeat => format!(" | {repeat} repeats"),
    };
    let memory = |gpu: &Option<GpuEnd>| match gpu {
        Some(gpu) => format!("{} of GPU {} ({})", gpu.memory, gpu.number, one_line(&gpu.name)),
        None => "host".to_owned(),
    };
    let mut memories = memory(&report.gpu);
    if plan.gpu {
        memories = format!("{memories} to {}", memory(&report.peer_gpu));
    }
    format!(
        "{}{mode} | device {} | link {} | memory {memories} | MTU up to {mtu} B{qps}{verified}{pace}{repeats} | peer {}",
        plan.test_name(),
        device.context.name(),
        report.link.name(),
        control.peer().ip()
    )
}

/// The MTU of the port that a test uses, in bytes.
///
/// # Errors
/// [`Failure::Test`] when the port cannot be queried.
pub(crate) fn active_mtu(device: &Device) -> Result<u32, Failure> {
    let port = device.context.port(PORT).map_err(refused)?;
    Ok(port.active_mtu.bytes())
}

/// The port's line rate on hardware. A software device reports a nominal rate, which means nothing.
pub(crate) fn line_rate(device: &Device, link: LinkKind) -> Option<f64> {
    let port = device.context.port(PORT).ok()?;
    (link == LinkKind::Hardware)
        .then(|| port.bits_per_s.map(|bits| bits as f64 / 8.0))
        .flatten()
}

pub(crate) fn warnings(
    sources: &Sources,
    plan: &Plan,
    args: &TestArgs,
    device: &Device,
    report: &Report,
    peer: Peer,
) -> Vec<Warning> {
    let per_end = if device.link == LinkKind::SoftUdp { 2 } else { 1 };
    let ends = if peer == Peer::Elsewhere { 1 } else { 2 };
    let subject = Subject {
        gid_index: args.connection.gid_index.map(u32::from),
        mtu_bytes: plan.mtu,
        registers_bytes: plan.registers_bytes(),
        spinning: if plan.events { 0 } else { per_end * ends },
        ..Subject::of(device.context.name(), report.link, Port::of_context(&device.context))
    };
    let mut warnings = diagnose::before(sources, &subject);
    warnings.extend(device.faults.as_deref().map(Warning::faults));
    let is_staged = |gpu: &Option<GpuEnd>| gpu.as_ref().is_some_and(|gpu| gpu.memory == Path::Staged.name());
    if is_staged(&report.gpu) || is_staged(&report.peer_gpu) {
        let target = plan.kind == Kind::Bw && plan.verb == Verb::Write && !plan.verify && is_staged(&report.peer_gpu);
        warnings.push(Warning::staged(target));
    }
    if plan.verify {
        warnings.push(Warning::verifying());
    }
    warnings
}

fn expected<'a>(kind: Kind, args: &'a TestArgs, device: &Device, token: Option<&'a str>) -> ExpectedTest<'a> {
    ExpectedTest {
        kind,
        verb: args.operation.name(),
        gpu: device.gpu.is_some(),
        token,
        // This process's own test has the limits of every plan.
        limits: token.is_none().then_some(&args.limits),
    }
}

/// Waits for a client and serves its test.
fn server(kind: Kind, args: &TestArgs) -> Result<(), Failure> {
    let interrupt = Interrupt::catch()?;
    let device = open(args, Side::Single, Reach::Elsewhere)?;
    let mut listener = Listener::bind(args.bind, args.connection.port)?;
    eprintln!(
        "doorbell: {} on {} waits for a client on {}",
        Plan::command(kind, args.operation.name()),
        device.context.name(),
        listener.address()
    );
    let subject = Subject {
        gid_index: args.connection.gid_index.map(u32::from),
        registers_bytes: MEMORY_BUDGET,
        ..Subject::of(device.context.name(), device.link, Port::of_context(&device.context))
    };
    let mut caveats = Caveats::new(args.verbose);
    caveats.add(diagnose::standing(&Sources::of_this_machine(), &subject));
    caveats.finish();
    let expected = expected(kind, args, &device, None);
    serve(&mut listener, &device, args, &expected, None, &interrupt)
}

fn child(kind: Kind, args: &TestArgs) -> Result<(), Failure> {
    let token = orchestrate::adopt()?;
    let interrupt = Interrupt::leave_to_parent()?;
    let ready = || {
        let device = open(args, Side::Single, Reach::Here)?;
        let listener = Listener::bind(IpAddr::V4(Ipv4Addr::LOCALHOST), args.connection.port)?;
        Ok((device, listener))
    };
    let (device, mut listener) = ready().inspect_err(|failure: &Failure| {
        drop(orchestrate::announce(&Announcement::Failed(
            failure.to_string(),
            failure.status(),
        )))
    })?;
    orchestrate::announce(&Announcement::Port(listener.address().port()))?;
    serve(
        &mut listener,
        &device,
        args,
        &expected(kind, args, &device, Some(&token)),
        Some(PARENT_TIMEOUT),
        &interrupt,
    )
}

/// Serves the first client with a valid plan; with `--forever` one after the other, past failed
/// tests.
fn serve(
    listener: &mut Listener,
    device: &Device,
    args: &TestArgs,
    expected: &ExpectedTest<'_>,
    within: Option<Duration>,
    interrupt: &Interrupt,
) -> Result<(), Failure> {
    let mut within = within;
    loop {
        let (control, plan) = listener.accept(within, expected, interrupt)?;
        let local = SessionContext {
            control: &control,
            device,
            gid_index: args.connection.gid_index,
        };
        let served = session::serve(local, &plan);
        if !args.forever {
            return served;
        }
        // A parent may pause between two tests, and ends this process when it has no more.
        within = None;
        match served {
            Err(Failure::Interrupted) => return Err(Failure::Interrupted),
            // The parent process reports it.
            Err(_) if args.child => {}
            Err(failure) => eprintln!("doorbell: the test of {} failed: {failure}", control.peer()),
            Ok(()) => {}
        }
    }
}
