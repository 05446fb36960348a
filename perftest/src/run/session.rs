//! A test from hello to bye: the client's side and the server's.

use super::bw::{self, atomic::Count, inspect::Slots, passive::Lent, pull::Pull, push::Push, receive::Receives};
use super::lat::{self, pingpong::Ball};
use super::meter::Meter;
use super::station::{Own, Station, Test, usable_inline};
use crate::device::Device;
use crate::exchange::{ANSWER, Accepted, Control, Finish, GpuEnd, Hello, Message, Outcome, check_hello};
use crate::failure::{Failure, one_line};
use crate::plan::{Kind, Plan, Verb};
use crate::report::{BandwidthRow, CoordinatedOmission, LatencyRow, Row, Shape};
use crate::stats::{Clock, CpuMeter, Latency, Timeline, Trip};

/// What a session needs to know beside the plan.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Local<'a> {
    /// The connection to the other end.
    pub(crate) control: &'a Control,
    /// The device.
    pub(crate) device: &'a Device,
    /// Index of the GID to use, if one was asked for.
    pub(crate) gid_index: Option<u8>,
}

/// What a client's session has to tell while it runs.
#[derive(Debug)]
pub(crate) enum Event {
    /// The server will run the test.
    Accepted(Accepted),
    /// A size begins.
    Begins(u64),
    /// A size is done.
    Row(Row),
    /// The clock was off by this fraction while the last size was measured, and is not used any more.
    Drifted(f64),
}

/// Runs the client's side. A size that was interrupted gives a row too, of what was measured until then.
///
/// # Errors
/// [`Failure::Interrupted`]; [`Failure::Test`] when the test failed.
pub(crate) fn client(
    local: Local<'_>,
    plan: &Plan,
    token: Option<String>,
    clock: &mut Clock,
    mut tell: impl FnMut(Event),
) -> Result<(), Failure> {
    let control = local.control;
    let mut run = || {
        control.send(&Message::Hello(Hello::ours(token.clone())))?;
        match control.receive(Some(ANSWER), "its hello")? {
            Message::Hello(theirs) => check_hello(&theirs).map_err(Failure::Test)?,
            other => return Err(control.unexpected(&other, "hello")),
        }
        control.send(&Message::Plan(plan.clone()))?;
        let answer = control.receive(Some(ANSWER), "its answer to the plan");
        match answer.map_err(Failure::before_measuring)? {
            Message::Accepted(accepted) => tell(Event::Accepted(accepted)),
            other => return Err(control.unexpected(&other, "accepted")),
        }
        let inline = usable_inline(plan, local.device)?;
        for &bytes in &plan.sizes {
            tell(Event::Begins(bytes));
            let test = Test {
                plan,
                bytes,
                device: local.device,
                gid_index: local.gid_index,
                inline,
                control,
            };
            let (measured, failure) = measure(&test, clock);
            if let Some(drift) = clock.check() {
                tell(Event::Drifted(drift));
            }
            if let Some(measured) = measured
                && matches!(failure, None | Some(Failure::Interrupted))
            {
                tell(Event::Row(measured));
            }
            failure.map_or(Ok(()), Err)?;
        }
        control.send(&Message::Bye)
    };
    run().inspect_err(|failure| control.send_failure(failure))
}

/// Measures one size, as often as the plan says: what came out of it, and why it ended early, if it did.
pub(super) fn measure(test: &Test<'_>, clock: &Clock) -> (Option<Row>, Option<Failure>) {
    let mut cpu = CpuMeter::default();
    match test.plan.kind {
        Kind::Bw => {
            let (mut repeats, mut failure) = (Vec::new(), None);
            for _ in 0..test.plan.repeat {
                let mut timeline = Timeline::new(u64::from(test.window()) * u64::from(test.plan.qps));
                failure = bandwidth(test, meter(clock, &mut cpu, &mut timeline)).err();
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
            for _ in 0..test.plan.repeat {
                let mut latency = Latency::new(trip);
                failure = latencies(test, meter(clock, &mut cpu, &mut latency)).err();
                repeats.extend(latency.figures());
                all.absorb(&latency);
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

fn meter<'a, T>(clock: &'a Clock, cpu: &'a mut CpuMeter, figures: &'a mut T) -> Meter<'a, T> {
    Meter { clock, cpu, figures }
}

fn shape(test: &Test<'_>) -> Shape {
    Shape {
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

fn bandwidth(test: &Test<'_>, mut meter: Meter<'_, Timeline>) -> Result<(), Failure> {
    let meter = &mut meter;
    match test.plan.verb {
        Verb::Write | Verb::Send => with_station::<Push>(test, |station| bw::stream::run(test, station, meter)),
        Verb::Read => with_station::<Pull>(test, |station| bw::stream::run(test, station, meter)),
        Verb::Atomic(_) => with_station::<Count>(test, |station| bw::stream::run(test, station, meter)),
    }
}

fn latencies(test: &Test<'_>, mut meter: Meter<'_, Latency>) -> Result<(), Failure> {
    let meter = &mut meter;
    match test.plan.verb {
        Verb::Write | Verb::Send => with_station::<Ball>(test, |station| lat::pingpong::run(test, station, meter)),
        Verb::Read => with_station::<Pull>(test, |station| lat::single::run(test, station, meter)),
        Verb::Atomic(_) => with_station::<Count>(test, |station| lat::single::run(test, station, meter)),
    }
}

/// Sets up, runs, and hears from the server that it has seen all.
fn with_station<O: Own>(
    test: &Test<'_>,
    run: impl FnOnce(&mut Station<O>) -> Result<Vec<u64>, Failure>,
) -> Result<(), Failure> {
    let mut station = Station::<O>::establish(test).map_err(Failure::before_measuring)?;
    let messages = run(&mut station).map_err(|failure| station.explain(failure, test.plan))?;
    test.control.send(&Message::Finish(Finish {
        messages: messages.clone(),
    }))?;
    // The queue pairs stay until the server has seen everything: it may still want something of them.
    match test.control.receive(Some(ANSWER + ANSWER), "its outcome")? {
        Message::Outcome(outcome) => judge(test, &messages, &outcome),
        other => Err(test.control.unexpected(&other, "outcome")),
    }
}

/// Compares what the server has seen with what was sent.
fn judge(test: &Test<'_>, sent: &[u64], outcome: &Outcome) -> Result<(), Failure> {
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
            "not verified: size {} B: the peer {} has looked at {} messages of {sent:?}",
            test.bytes,
            test.control.peer(),
            outcome.checked
        )));
    }
    Ok(())
}

/// What a server expects of a client.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expected<'a> {
    /// Bandwidth or latency.
    pub(crate) kind: Kind,
    /// The operation, by its name.
    pub(crate) verb: &'static str,
    /// What the client has to show, if anything.
    pub(crate) token: Option<&'a str>,
}

/// Greets a client: whether it is one to be served at all.
///
/// # Errors
/// [`Failure::Test`] when it is not; then the server may go on waiting. [`Failure::Interrupted`].
pub(crate) fn welcome(control: &Control, expected: &Expected<'_>) -> Result<(), Failure> {
    let greeted = match control.receive(Some(ANSWER), "its hello") {
        Ok(Message::Hello(theirs))
            if expected
                .token
                .is_some_and(|token| theirs.token.as_deref() != Some(token)) =>
        {
            Err(Failure::test(format!(
                "peer {} is not the process that started this one",
                control.peer()
            )))
        }
        Ok(Message::Hello(theirs)) => {
            control.send(&Message::Hello(Hello::ours(None)))?;
            check_hello(&theirs).map_err(Failure::Test)
        }
        Ok(other) => Err(control.unexpected(&other, "hello")),
        Err(failure) => Err(failure),
    };
    greeted.inspect_err(|failure| control.send_failure(failure))
}

/// Serves a client that was welcomed.
///
/// # Errors
/// [`Failure::Interrupted`]; [`Failure::Test`] when the test failed.
pub(crate) fn serve(local: Local<'_>, expected: &Expected<'_>) -> Result<(), Failure> {
    let control = local.control;
    let run = || {
        let plan = match control.receive(Some(ANSWER), "its plan")? {
            Message::Plan(plan) => plan,
            other => return Err(control.unexpected(&other, "plan")),
        };
        accept(&plan, expected).map_err(Failure::Test)?;
        if local.device.gpu.is_some() && !plan.gpu {
            return Err(Failure::test(
                "the server's messages are in GPU memory: the client needs --gpu too, with a GPU or host",
            ));
        }
        let accepted = Accepted {
            device: local.device.context.name().to_owned(),
            link: local.device.link,
            group: local.device.group,
            gpu: local.device.gpu.as_ref().map(GpuEnd::of),
        };
        control.send(&Message::Accepted(accepted))?;
        let inline = usable_inline(&plan, local.device)?;
        for &bytes in &plan.sizes {
            let test = Test {
                plan: &plan,
                bytes,
                device: local.device,
                gid_index: local.gid_index,
                inline,
                control,
            };
            for _ in 0..plan.repeat {
                serve_size(&test)?;
            }
        }
        match control.receive(Some(ANSWER), "its goodbye")? {
            Message::Bye => Ok(()),
            other => Err(control.unexpected(&other, "bye")),
        }
    };
    run().inspect_err(|failure| control.send_failure(failure))
}

/// Judges a client's plan.
fn accept(plan: &Plan, expected: &Expected<'_>) -> Result<(), String> {
    if plan.kind != expected.kind || plan.verb.name() != expected.verb {
        let ours = Plan::command(expected.kind, expected.verb);
        return Err(format!(
            "the server runs 'doorbell {ours}', the client 'doorbell {}': start the same on both ends",
            plan.command_name()
        ));
    }
    plan.check()
        .map_err(|reason| format!("the client's test is refused: {}", one_line(&reason)))
}

pub(super) fn serve_size(test: &Test<'_>) -> Result<(), Failure> {
    let plan = test.plan;
    match (plan.kind, plan.verb) {
        (Kind::Lat, Verb::Write | Verb::Send) => active::<Ball>(test, |station| lat::pingpong::serve(test, station)),
        (Kind::Bw, Verb::Send) => active::<Receives>(test, |station| bw::receive::serve(test, station)),
        (Kind::Bw, Verb::Write) if plan.verify => active::<Slots>(test, |station| bw::inspect::serve(test, station)),
        (Kind::Bw, Verb::Write) | (_, Verb::Read | Verb::Atomic(_)) => passive(test),
    }
}

fn active<O: Own>(
    test: &Test<'_>,
    serve: impl FnOnce(&mut Station<O>) -> Result<Vec<u64>, Failure>,
) -> Result<(), Failure> {
    let mut station = Station::<O>::establish(test)?;
    let messages = serve(&mut station).map_err(|failure| station.explain(failure, test.plan))?;
    let checked = if test.plan.verify { messages.iter().sum() } else { 0 };
    test.control.send(&Message::Outcome(Outcome { messages, checked }))
}

fn passive(test: &Test<'_>) -> Result<(), Failure> {
    let mut station = Station::<Lent>::establish(test)?;
    match test
        .control
        .receive(None, "its finish")
        .map_err(|failure| station.explain(failure, test.plan))?
    {
        Message::Finish(_) => {}
        other => return Err(test.control.unexpected(&other, "finish")),
    }
    let messages = station.lanes.iter().filter_map(|lane| lane.own.counted()).collect();
    test.control.send(&Message::Outcome(Outcome { messages, checked: 0 }))
}
