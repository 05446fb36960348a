//! The protocol of a test from `hello` to `bye`: the client's side and the server's.

use doorbell_verbs::ReliableConnection;

use super::bw::client::{AtomicMemory, ConnectOp, MessageMemory, ReadMemory};
use super::bw::{self, passive::PassiveMemory, receive::ReceiveRing, verify::VerifiedSlots};
use super::lat::{self, pingpong::UnconnectedMemory};
use super::meter::Meter;
use super::test_end::{QpMemory, Test, TestEnd, usable_inline};
use crate::device::Device;
use crate::engine::requester::{MessageOp, SendOp, WriteImmOp, WriteOp};
use crate::engine::samples::{Pace, SampleParams, Samples};
use crate::exchange::{Accepted, Control, Finish, GpuEnd, Message, Outcome, REPLY_TIMEOUT, introduce};
use crate::failure::Failure;
use crate::plan::{Kind, Plan, Verb};
use crate::report::{BandwidthRow, CoordinatedOmission, LatencyRow, Row, RowParams};
use crate::stats::{Clock, CpuMeter, Latency, Timeline, Trip};

#[derive(Clone, Copy, Debug)]
pub(crate) struct SessionContext<'a> {
    pub(crate) control: &'a Control,
    pub(crate) device: &'a Device,
    pub(crate) gid_index: Option<u8>,
}

impl<'a> SessionContext<'a> {
    fn test(self, plan: &'a Plan, bytes: u64, inline: u32, is_server: bool) -> Test<'a> {
        Test {
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
            let test = local.test(plan, bytes, inline, false);
            let (measured, failure) = measure(&test, clock);
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
pub(super) fn measure(test: &Test<'_>, clock: &Clock) -> (Option<Row>, Option<Failure>) {
    let mut cpu = CpuMeter::default();
    match test.plan.kind {
        Kind::Bw => {
            let (mut repeats, mut failure) = (Vec::new(), None);
            for _ in 0..test.plan.repeat {
                let mut timeline = Timeline::new(u64::from(test.window()) * u64::from(test.plan.qps));
                let meter = Meter {
                    clock,
                    cpu: &mut cpu,
                    figures: &mut timeline,
                };
                failure = bandwidth(test, meter).err();
                repeats.extend(timeline.bandwidth());
                if failure.is_some() {
                    break;
                }
            }
            let row = BandwidthRow::new(shape(test), &repeats, cpu.used()).map(|row| BandwidthRow {
                paced_rate_per_s: test.plan.rate_per_s,
                ..row
            });
            (row.map(Row::Bandwidth), failure)
        }
        Kind::Lat => {
            let trip = match test.plan.verb {
                Verb::Write | Verb::Send => Trip::Half,
                Verb::Read | Verb::Atomic(_) => Trip::Full,
            };
            let (mut all, mut repeats, mut failure) = (Latency::new(trip), Vec::new(), None);
            let params = SampleParams {
                trip,
                pace: test.plan.rate_per_s.map_or(Pace::AtOnce, Pace::PerSecond),
                duration: test.plan.duration(),
                margin: None,
                keep: None,
            };
            for _ in 0..test.plan.repeat {
                let mut samples = Samples::new(clock, &mut cpu, params);
                failure = latencies(test, &mut samples).err();
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
                    ..row
                });
            (row.map(Row::Latency), failure)
        }
    }
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

fn bandwidth(test: &Test<'_>, mut meter: Meter<'_>) -> Result<(), Failure> {
    let meter = &mut meter;
    match test.plan.verb {
        Verb::Write => with_test_end::<MessageMemory<WriteOp>>(test, |end| bw::bw_loop::run(test, end, meter)),
        Verb::Send => with_test_end::<MessageMemory<SendOp>>(test, |end| bw::bw_loop::run(test, end, meter)),
        Verb::Read => with_test_end::<ReadMemory>(test, |end| bw::bw_loop::run(test, end, meter)),
        Verb::Atomic(_) => with_test_end::<AtomicMemory>(test, |end| bw::bw_loop::run(test, end, meter)),
    }
}

fn latencies(test: &Test<'_>, samples: &mut Samples<'_>) -> Result<(), Failure> {
    match test.plan.verb {
        Verb::Write if test.plan.gpu => ping_pong::<WriteImmOp>(test, samples),
        Verb::Write => ping_pong::<WriteOp>(test, samples),
        Verb::Send => ping_pong::<SendOp>(test, samples),
        Verb::Read => with_test_end::<ReadMemory>(test, |end| lat::one_sided(test, end, samples)),
        Verb::Atomic(_) => with_test_end::<AtomicMemory>(test, |end| lat::one_sided(test, end, samples)),
    }
}

fn ping_pong<O: ConnectOp + MessageOp<ReliableConnection>>(
    test: &Test<'_>,
    samples: &mut Samples<'_>,
) -> Result<(), Failure> {
    with_test_end::<UnconnectedMemory<O>>(test, |end| {
        lat::run(test, &mut lat::pingpong::pingpong(test, end)?, samples)
    })
}

fn with_test_end<O: QpMemory>(
    test: &Test<'_>,
    run: impl FnOnce(&mut TestEnd<ReliableConnection, O>) -> Result<Vec<u64>, Failure>,
) -> Result<(), Failure> {
    let mut test_end = TestEnd::<ReliableConnection, O>::establish(test).map_err(Failure::before_measuring)?;
    let messages = run(&mut test_end).map_err(|failure| test_end.explain_lost_peer(failure, test.plan))?;
    test.control.send(&Message::Finish(Finish {
        messages: messages.clone(),
    }))?;
    // The queue pairs stay until the server is done: it may still access their memory.
    match test
        .control
        .receive(Some(REPLY_TIMEOUT + REPLY_TIMEOUT), "its outcome")?
    {
        Message::Outcome(outcome) => check_outcome(test, &messages, &outcome),
        other => Err(test.control.unexpected(&other, "outcome")),
    }
}

fn check_outcome(test: &Test<'_>, sent: &[u64], outcome: &Outcome) -> Result<(), Failure> {
    let seen_by_server = match (test.plan.verb, test.plan.kind) {
        (Verb::Atomic(_), _) | (Verb::Send, _) | (Verb::Write, Kind::Lat) => true,
        (Verb::Write, Kind::Bw) => test.plan.verify,
        (Verb::Read, _) => false,
    };
    if seen_by_server && outcome.messages != sent {
        return Err(Failure::test(format!(
            "wrong data: size {} B: {sent:?} messages sent per queue pair, the peer {} counts {:?}",
            test.bytes,
            test.control.peer(),
            outcome.messages
        )));
    }
    let checked_by_server = test.plan.verify && matches!(test.plan.verb, Verb::Write | Verb::Send);
    if checked_by_server && outcome.checked != sent.iter().sum::<u64>() {
        return Err(Failure::test(format!(
            "not verified: size {} B: the peer {} has checked {} messages of {sent:?}",
            test.bytes,
            test.control.peer(),
            outcome.checked
        )));
    }
    Ok(())
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
        let inline = usable_inline(plan, local.device)?;
        for &bytes in &plan.sizes {
            let test = local.test(plan, bytes, inline, true);
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
    let plan = test.plan;
    match (plan.kind, plan.verb) {
        (Kind::Lat, Verb::Write) if plan.gpu => {
            serve_active::<UnconnectedMemory<WriteImmOp>>(test, |end| lat::pingpong::serve(test, end))
        }
        (Kind::Lat, Verb::Write) => {
            serve_active::<UnconnectedMemory<WriteOp>>(test, |end| lat::pingpong::serve(test, end))
        }
        (Kind::Lat, Verb::Send) => {
            serve_active::<UnconnectedMemory<SendOp>>(test, |end| lat::pingpong::serve(test, end))
        }
        (Kind::Bw, Verb::Send) => serve_active::<ReceiveRing>(test, |test_end| bw::receive::serve(test, test_end)),
        (Kind::Bw, Verb::Write) if plan.verify => {
            serve_active::<VerifiedSlots>(test, |test_end| bw::verify::serve(test, test_end))
        }
        (Kind::Bw, Verb::Write) | (_, Verb::Read | Verb::Atomic(_)) => serve_passive(test),
    }
}

fn serve_active<O: QpMemory>(
    test: &Test<'_>,
    serve: impl FnOnce(&mut TestEnd<ReliableConnection, O>) -> Result<Vec<u64>, Failure>,
) -> Result<(), Failure> {
    let mut test_end = TestEnd::<ReliableConnection, O>::establish(test)?;
    let messages = serve(&mut test_end).map_err(|failure| test_end.explain_lost_peer(failure, test.plan))?;
    let checked = if test.plan.verify { messages.iter().sum() } else { 0 };
    test.control.send(&Message::Outcome(Outcome { messages, checked }))
}

fn serve_passive(test: &Test<'_>) -> Result<(), Failure> {
    let mut test_end = TestEnd::<ReliableConnection, PassiveMemory>::establish(test)?;
    match test
        .control
        .receive(None, "its finish")
        .map_err(|failure| test_end.explain_lost_peer(failure, test.plan))?
    {
        Message::Finish(_) => {}
        other => return Err(test.control.unexpected(&other, "finish")),
    }
    let messages = test_end.memory.iter().filter_map(PassiveMemory::atomic_count).collect();
    test.control.send(&Message::Outcome(Outcome { messages, checked: 0 }))
}
