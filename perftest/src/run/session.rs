//! The protocol of a test from `hello` to `bye`: the client's side and the server's.

use doorbell_verbs::{ReliableConnection, UnreliableConnection, UnreliableDatagram};

use super::bw::bw_loop::Ended;
use super::bw::client::{AtomicMemory, ConnectOp, MessageMemory, ReadMemory};
use super::bw::credit::CreditWriter;
use super::bw::memory::{BwMemory, Served, Service};
use super::bw::receive::{Arrived, ReceiveRing};
use super::bw::{self, passive::PassiveMemory, verify::VerifiedSlots};
use super::lat::{self, pingpong::UnconnectedMemory};
use super::meter::{Intervals, Meter};
use super::test_end::{QpMemory, Test, TestEnd, usable_inline};
use crate::cli::Transport;
use crate::device::Device;
use crate::engine::requester::{MessageOp, Requester, SendOp, WriteImmOp, WriteOp};
use crate::engine::samples::{Pace, SampleParams, Samples};
use crate::engine::transport::TestTransport;
use crate::exchange::{Accepted, Control, GpuEnd, Message, Outcome, REPLY_TIMEOUT, introduce};
use crate::failure::Failure;
use crate::plan::{Kind, Plan, Verb};
use crate::report::{
    BandwidthInterval, BandwidthRow, CoordinatedOmission, Interval, LatencyInterval, LatencyRow, Row, RowParams,
};
use crate::stats::{Clock, ClockChoice, CpuMeter, Latency, LatencySummary, Timeline, Trip};

#[derive(Clone, Copy, Debug)]
pub(crate) struct SessionContext<'a> {
    pub(crate) control: &'a Control,
    pub(crate) device: &'a Device,
    pub(crate) gid_index: Option<u8>,
}

impl<'a> SessionContext<'a> {
    fn test(self, plan: &'a Plan, clock: &'a Clock, bytes: u64, inline: u32, is_server: bool) -> Test<'a> {
        Test {
            clock,
            plan,
            bytes,
            device: self.device,
            gid_index: self.gid_index,
            inline,
            control: self.control,
            is_server,
        }
    }
}

#[derive(Debug)]
pub(crate) enum Event {
    Accepted(Accepted),
    SizeStarted(u64),
    Interval(Interval),
    Row(Row),
    /// The clock drifted by this fraction during the last size, and is not used any more.
    ClockDrift(f64),
}

/// An interrupted size yields a row as well.
///
/// # Errors
/// [`Failure::Interrupted`]; [`Failure::Test`] when the test failed.
pub(crate) fn client(
    local: SessionContext<'_>,
    plan: &Plan,
    token: Option<String>,
    clock: &mut Clock,
    mut report: impl FnMut(Event),
) -> Result<(), Failure> {
    let control = local.control;
    let mut run = || {
        introduce(control, plan, token.clone())?;
        let answer = control.receive(Some(REPLY_TIMEOUT), "its answer to the plan");
        match answer.map_err(Failure::before_measuring)? {
            Message::Accepted(accepted) => report(Event::Accepted(accepted)),
            other => return Err(control.unexpected(&other, "accepted")),
        }
        let inline = usable_inline(plan, local.device)?;
        for &bytes in &plan.sizes {
            report(Event::SizeStarted(bytes));
            let (measured, failure) = measure(&local.test(plan, clock, bytes, inline, false), &mut report);
            if let Some(drift) = clock.check() {
                report(Event::ClockDrift(drift));
            }
            if let Some(measured) = measured
                && matches!(failure, None | Some(Failure::Interrupted))
            {
                report(Event::Row(measured));
            }
            failure.map_or(Ok(()), Err)?;
        }
        control.send(&Message::Bye)
    };
    run().inspect_err(|failure| control.send_failure(failure))
}

/// Measures one size, with its repeats. Returns the row, and the failure if it ended early.
pub(super) fn measure(test: &Test<'_>, report: &mut dyn FnMut(Event)) -> (Option<Row>, Option<Failure>) {
    match test.plan.kind {
        Kind::Bw => measure_bandwidth(test, report),
        Kind::Lat => measure_latency(test, report),
    }
}

fn measure_bandwidth(test: &Test<'_>, report: &mut dyn FnMut(Event)) -> (Option<Row>, Option<Failure>) {
    let mut cpu = CpuMeter::default();
    let (mut repeats, mut lost, mut failure) = (Vec::new(), None, None);
    let mut intervals = Vec::new();
    let mut note = |interval: BandwidthInterval| {
        intervals.push(interval);
        report(Event::Interval(Interval::Bandwidth(interval)));
    };
    for _ in 0..test.plan.repeat {
        let mut timeline = timeline(test);
        let mut meter = Meter {
            clock: test.clock,
            cpu: &mut cpu,
            figures: &mut timeline,
            intervals: None,
        };
        if let Some(every) = test.plan.interval() {
            meter.intervals = Some(Intervals::new(every, test.bytes, &mut note));
        }
        match bandwidth(test, &mut meter) {
            Ok(ended) => {
                repeats.extend(ended.figures);
                lost = ended.lost.map(|messages| messages + lost.unwrap_or(0));
            }
            Err(ended_early) => {
                // What this end has measured stands for itself alone.
                let counts = !test.plan.mode.bidirectional && !test.counts_arrivals();
                repeats.extend(timeline.bandwidth().filter(|_| counts));
                failure = Some(ended_early);
                break;
            }
        }
    }
    if repeats.is_empty() && failure.is_none() {
        failure = Some(Failure::test(format!(
            "nothing was measured with messages of {} B: too few have arrived",
            test.bytes
        )));
    }
    let row = BandwidthRow::new(shape(test), &repeats, cpu.used()).map(|row| BandwidthRow {
        paced_rate_per_s: test.plan.rate_per_s,
        lost_messages: lost,
        intervals,
        ..row
    });
    (row.map(Row::Bandwidth), failure)
}

fn measure_latency(test: &Test<'_>, report: &mut dyn FnMut(Event)) -> (Option<Row>, Option<Failure>) {
    let mut cpu = CpuMeter::default();
    let trip = match test.plan.verb {
        Verb::Write | Verb::Send => Trip::Half,
        Verb::Read | Verb::Atomic(_) => Trip::Full,
    };
    let (mut all, mut repeats, mut failure) = (Latency::new(trip), Vec::new(), None);
    let mut intervals = Vec::new();
    let mut note = |end_s: f64, figures: LatencySummary| {
        let interval = LatencyInterval {
            end_s,
            iterations: figures.count,
            lat_p50_ns: figures.p50,
            lat_avg_ns: figures.avg,
            lat_p99_ns: figures.p99,
            lat_max_ns: figures.max,
        };
        intervals.push(interval);
        report(Event::Interval(Interval::Latency(interval)));
    };
    let params = SampleParams {
        trip,
        pace: test.plan.rate_per_s.map_or(Pace::AtOnce, Pace::PerSecond),
        duration: test.plan.duration(),
        margin: None,
        keep: None,
    };
    for _ in 0..test.plan.repeat {
        let mut samples = Samples::new(test.clock, &mut cpu, params);
        if let Some(every) = test.plan.interval() {
            samples.report_every(every, &mut note);
        }
        failure = latencies(test, Some(&mut samples)).err();
        repeats.extend(samples.latency().figures());
        all.absorb(samples.latency());
        if failure.is_some() {
            break;
        }
    }
    let row = all
        .figures()
        .and_then(|figures| LatencyRow::new(shape(test), figures, &repeats, cpu.used()))
        .map(|row| LatencyRow {
            paced_rate_per_s: test.plan.rate_per_s,
            coordinated_omission: match test.plan.rate_per_s {
                Some(_) => CoordinatedOmission::Corrected,
                None => CoordinatedOmission::ClosedLoop,
            },
            intervals,
            ..row
        });
    (row.map(Row::Latency), failure)
}

fn shape(test: &Test<'_>) -> RowParams {
    RowParams {
        bytes: test.bytes,
        qps: test.plan.qps,
        tx_depth: match test.plan.kind {
            Kind::Bw => test.window(),
            Kind::Lat => 1,
        },
        inline_bytes: test.inline,
        post_list: test.plan.post_list,
    }
}

/// Runs one end of a bandwidth test at one size.
fn bandwidth(test: &Test<'_>, meter: &mut Meter<'_>) -> Result<Ended, Failure> {
    use Transport::{Rc, Uc, Ud};
    type Message<O> = MessageMemory<O>;
    match (test.plan.verb, test.plan.mode.transport) {
        (Verb::Write, Rc) if test.plan.verify => {
            bw_end::<ReliableConnection, Message<WriteOp>, VerifiedSlots, _>(test, meter)
        }
        (Verb::Write, Uc) if test.plan.verify => {
            bw_end::<UnreliableConnection, Message<WriteOp>, VerifiedSlots, _>(test, meter)
        }
        (Verb::Write, Rc) => bw_end::<ReliableConnection, Message<WriteOp>, PassiveMemory, _>(test, meter),
        (Verb::Write, Uc) => bw_end::<UnreliableConnection, Message<WriteOp>, PassiveMemory, _>(test, meter),
        (Verb::Send, Rc) => bw_end::<ReliableConnection, Message<SendOp>, ReceiveRing<CreditWriter>, _>(test, meter),
        (Verb::Send, Uc) => bw_end::<UnreliableConnection, Message<SendOp>, ReceiveRing<Arrived>, _>(test, meter),
        (Verb::Send, Ud) => bw_end::<UnreliableDatagram, Message<SendOp>, ReceiveRing<Arrived>, _>(test, meter),
        (Verb::Read, Rc) => bw_end::<ReliableConnection, ReadMemory, PassiveMemory, _>(test, meter),
        (Verb::Atomic(_), Rc) => bw_end::<ReliableConnection, AtomicMemory, PassiveMemory, _>(test, meter),
        (Verb::Write, Ud) | (Verb::Read | Verb::Atomic(_), Uc | Ud) => Err(no_such_test(test)),
    }
}

/// Runs one end of a latency test at one size; the client's has `samples`.
fn latencies(test: &Test<'_>, samples: Option<&mut Samples<'_>>) -> Result<(), Failure> {
    use Transport::{Rc, Uc, Ud};
    let gpu = test.plan.gpu;
    match (test.plan.verb, test.plan.mode.transport) {
        (Verb::Write, Rc) if gpu => ping_pong::<ReliableConnection, WriteImmOp>(test, samples),
        (Verb::Write, Uc) if gpu => ping_pong::<UnreliableConnection, WriteImmOp>(test, samples),
        (Verb::Write, Rc) => ping_pong::<ReliableConnection, WriteOp>(test, samples),
        (Verb::Write, Uc) => ping_pong::<UnreliableConnection, WriteOp>(test, samples),
        (Verb::Send, Rc) => ping_pong::<ReliableConnection, SendOp>(test, samples),
        (Verb::Send, Uc) => ping_pong::<UnreliableConnection, SendOp>(test, samples),
        (Verb::Send, Ud) => ping_pong::<UnreliableDatagram, SendOp>(test, samples),
        (Verb::Read, Rc) => one_sided::<ReadMemory>(test, samples),
        (Verb::Atomic(_), Rc) => one_sided::<AtomicMemory>(test, samples),
        (Verb::Write, Ud) | (Verb::Read | Verb::Atomic(_), Uc | Ud) => Err(no_such_test(test)),
    }
}

/// A plan of this is refused.
fn no_such_test(test: &Test<'_>) -> Failure {
    let (verb, transport) = (test.plan.verb.name(), test.plan.mode.transport);
    Failure::usage(format!("--transport {transport:?}: the transport has no {verb}"))
}

fn bw_end<T, R, M, S>(test: &Test<'_>, meter: &mut Meter<'_>) -> Result<Ended, Failure>
where
    T: TestTransport,
    R: QpMemory<Connected: Requester<T>>,
    M: QpMemory<Connected = Served<S>>,
    S: Service<T>,
{
    let mut test_end = establish::<T, BwMemory<R, M>>(test)?;
    bw::bw_loop::run(test, &mut test_end, meter).map_err(|failure| test_end.explain_lost_peer(failure, test.plan))
}

fn establish<T: TestTransport, O: QpMemory>(test: &Test<'_>) -> Result<TestEnd<T, O>, Failure> {
    TestEnd::establish(test).map_err(|failure| match test.is_server {
        true => failure,
        false => failure.before_measuring(),
    })
}

fn ping_pong<T: TestTransport, O: ConnectOp + MessageOp<T>>(
    test: &Test<'_>,
    samples: Option<&mut Samples<'_>>,
) -> Result<(), Failure> {
    let mut test_end = establish::<T, UnconnectedMemory<O>>(test)?;
    let messages = match samples {
        Some(samples) => {
            lat::pingpong::pingpong(test, &mut test_end).and_then(|mut pingpong| lat::run(test, &mut pingpong, samples))
        }
        None => lat::pingpong::serve(test, &mut test_end),
    };
    let messages = messages.map_err(|failure| test_end.explain_lost_peer(failure, test.plan))?;
    if test.is_server {
        let checked = if test.plan.verify { messages.iter().sum() } else { 0 };
        return test.control.send(&Message::Outcome(Outcome {
            messages,
            checked,
            measured: None,
        }));
    }
    bw::bw_loop::conclude(test, &messages)
}

/// The server is passive, and that of a bandwidth test.
fn one_sided<R: QpMemory<Connected: Requester<ReliableConnection>>>(
    test: &Test<'_>,
    samples: Option<&mut Samples<'_>>,
) -> Result<(), Failure> {
    let mut test_end = establish::<ReliableConnection, BwMemory<R, PassiveMemory>>(test)?;
    let result = match samples {
        Some(samples) => {
            lat::one_sided(test, &mut test_end, samples).and_then(|messages| bw::bw_loop::conclude(test, &messages))
        }
        None => bw::bw_loop::wait::<ReliableConnection, _, _>(test, &test_end.memory),
    };
    result.map_err(|failure| test_end.explain_lost_peer(failure, test.plan))
}

/// Serves a client whose plan is accepted.
///
/// # Errors
/// [`Failure::Interrupted`]; [`Failure::Test`] when the test failed.
pub(crate) fn serve(local: SessionContext<'_>, plan: &Plan) -> Result<(), Failure> {
    let control = local.control;
    let run = || {
        let accepted = Accepted {
            device: local.device.context.name().to_owned(),
            link: local.device.link,
            group: local.device.group,
            gpu: local.device.gpu.as_ref().map(GpuEnd::of),
        };
        control.send(&Message::Accepted(accepted))?;
        // Only a rate or figures of this end need a good clock.
        let measures = plan.mode.bidirectional || !plan.mode.is_reliable();
        let choice = if measures {
            ClockChoice::Auto
        } else {
            ClockChoice::System
        };
        let clock = Clock::new(choice).map_err(Failure::test)?;
        let inline = usable_inline(plan, local.device)?;
        for &bytes in &plan.sizes {
            let test = local.test(plan, &clock, bytes, inline, true);
            for _ in 0..plan.repeat {
                serve_size(&test)?;
            }
        }
        match control.receive(Some(REPLY_TIMEOUT), "its goodbye")? {
            Message::Bye => Ok(()),
            other => Err(control.unexpected(&other, "bye")),
        }
    };
    run().inspect_err(|failure| control.send_failure(failure))
}

pub(super) fn serve_size(test: &Test<'_>) -> Result<(), Failure> {
    match test.plan.kind {
        Kind::Lat => latencies(test, None),
        Kind::Bw => {
            let (mut cpu, mut timeline) = (CpuMeter::default(), timeline(test));
            let mut meter = Meter {
                clock: test.clock,
                cpu: &mut cpu,
                figures: &mut timeline,
                intervals: None,
            };
            bandwidth(test, &mut meter).map(drop)
        }
    }
}

fn timeline(test: &Test<'_>) -> Timeline {
    Timeline::new(u64::from(test.window()) * u64::from(test.plan.qps))
}
