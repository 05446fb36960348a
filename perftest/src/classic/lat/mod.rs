//! Latency tests, wire-compatible with the C tools.
//!
//! Both ends of a ping-pong know the number of messages or the duration, so neither reports its
//! end. The responder's round trip runs from its answer to the next message. The server of READs
//! and atomics is passive. Barriers: one before the first size (before each, for SEND), one after
//! the last followed by closing, except for WRITE.

mod memory;
mod monitor;

use doorbell_verbs::{Connected, ReliableConnection, UnreliableConnection, UnreliableDatagram, WithSrq};

use self::monitor::LoopMonitor;
use super::control::TestStart;
use super::layout::Latencies;
use super::printer::Printer;
use super::requester::{ClassicRequester, Context};
use super::settings::{Settings, TestLength, Transport};
use super::test_end::{Depths, TestEnd};
use super::tool::Verb;
use super::wire::{ControlConnection, QpInfo};
use crate::engine::lat::{self, LatParams, Monitor};
use crate::engine::message::Cycle;
use crate::engine::one_sided::OneSided;
use crate::engine::pingpong::{BUFFERS, PingPong, PingPongMemory, PingPongParams};
use crate::engine::requester::{AtomicRequester, MessageOp, ReadRequester};
use crate::engine::samples::{Pace, SampleParams, Samples};
use crate::engine::transport::TestTransport;
use crate::failure::Failure;
use crate::stats::{Clock, ClockChoice, CpuMeter, Trip};

/// Requests of a round of `--perform_warm_up`.
const WARM_UP: u64 = 100;

/// # Errors
/// [`Failure::Interrupted`], with what was measured until then printed; [`Failure::Usage`] when
/// there is no such test; [`Failure::Test`] and [`Failure::Lost`] when it failed.
pub(crate) fn run(start: TestStart<'_, '_>) -> Result<(), Failure> {
    let settings = start.settings;
    let shared = settings.shared_receive;
    match (settings.tool.verb, settings.transport) {
        (Verb::Write, Transport::Rc) => write::<ReliableConnection>(start),
        (Verb::Write, Transport::Uc) => write::<UnreliableConnection>(start),
        (Verb::Send, Transport::Rc) if shared => send::<WithSrq<ReliableConnection>>(start),
        (Verb::Send, Transport::Uc) if shared => send::<WithSrq<UnreliableConnection>>(start),
        (Verb::Send, Transport::Ud) if shared => send::<WithSrq<UnreliableDatagram>>(start),
        (Verb::Send, Transport::Rc) => send::<ReliableConnection>(start),
        (Verb::Send, Transport::Uc) => send::<UnreliableConnection>(start),
        (Verb::Send, Transport::Ud) => send::<UnreliableDatagram>(start),
        (Verb::Read, Transport::Rc) => one_sided::<ReadRequester>(start),
        (Verb::Atomic, Transport::Rc) => one_sided::<AtomicRequester>(start),
        _ => Err(start.no_such_test()),
    }
}

fn write<T: TestTransport + Connected>(start: TestStart<'_, '_>) -> Result<(), Failure> {
    let settings = start.settings;
    let (mut lat_test, mut test_end) = connect::<T>(start, 1)?;
    let mut memory = memory::of_write(settings, &mut test_end)?;
    // Unlike with SEND, the server sends first.
    let initiates = settings.is_server();
    // As the C tools do: polls for the completion of what was sent, then memory and only memory.
    // An idle queue pair completes something only when it fails.
    let params = PingPongParams {
        signal_every: 1,
        complete_first: true,
        polls: 16,
        times: 1 << 12,
        sleeps: false,
        advice: "",
    };
    lat_test.run_pingpong(initiates, &mut test_end, &mut memory, params)?;
    // The peer may be slightly behind: its last WRITE must still find this end's queue pair.
    lat_test.control.linger();
    Ok(())
}

fn send<T: TestTransport>(start: TestStart<'_, '_>) -> Result<(), Failure> {
    let settings = start.settings;
    let (mut lat_test, mut test_end) = connect::<T>(start, BUFFERS)?;
    let mut memory = memory::of_send(settings, &mut test_end)?;
    let initiates = !settings.is_server();
    let params = PingPongParams {
        signal_every: 4,
        complete_first: false,
        polls: 1,
        times: 1,
        sleeps: settings.events,
        advice: ": do both ends have the same options (-s, -a)?",
    };
    lat_test.run_pingpong(initiates, &mut test_end, &mut memory, params)?;
    lat_test.finish()
}

fn one_sided<F: ClassicRequester<ReliableConnection>>(start: TestStart<'_, '_>) -> Result<(), Failure> {
    let settings = start.settings;
    let (mut lat_test, mut test_end) = connect::<ReliableConnection>(start, 1)?;
    if settings.is_server() {
        lat_test.control.barrier(&lat_test.qp_info)?;
        // The client accesses this end's memory until it reports that it is done.
        lat_test.finish()?;
        drop(test_end);
        return Ok(());
    }
    // The peer does not count these.
    let warmup = if settings.warm_up { WARM_UP } else { 0 };
    lat_test.sizes(|size| {
        let cycle = Cycle {
            slots: 1,
            ..test_end.cycle(size.bytes)
        };
        let mut requester = F::new(&Context {
            settings,
            test_end: &test_end,
            qp_index: 0,
            cycle,
            window: 1,
        })?;
        let mut requests = OneSided::new(&mut test_end.end, &mut requester, settings.events);
        let params = LatParams {
            initiates: true,
            warmup,
            total: total(settings).saturating_add(warmup),
        };
        let result = lat::run(&mut requests, size.monitor, size.samples, params, size.count);
        *size.count = size.count.saturating_sub(warmup);
        result
    })?;
    lat_test.finish()
}

fn connect<'a, 'p, T: TestTransport>(
    mut start: TestStart<'a, 'p>,
    receive: u32,
) -> Result<(LatTest<'a, 'p>, TestEnd<T>), Failure> {
    let settings = start.settings;
    let clock = Clock::new(ClockChoice::Auto).map_err(Failure::test)?;
    if settings.output.cycles {
        let cycles = clock.cycles_per_ns().ok_or_else(|| {
            Failure::test("-C: this machine has no counter that counts cycles at one rate; leave it out")
        })?;
        start.printer.set_cycles_per_ns(cycles);
    }
    let (control, test_end) = start.connect::<T>(Depths { send: BUFFERS, receive })?;
    let lat_test = LatTest {
        settings,
        qp_info: test_end.links[0].ours,
        control,
        printer: start.printer,
        clock,
    };
    Ok((lat_test, test_end))
}

struct LatTest<'a, 'p> {
    settings: &'a Settings,
    /// What this end sends at barriers.
    qp_info: QpInfo,
    control: ControlConnection,
    printer: &'a mut Printer<'p>,
    clock: Clock,
}

struct SizeRun<'a, 'm> {
    bytes: u64,
    monitor: &'a mut LoopMonitor<'m>,
    samples: &'a mut Samples<'m>,
    /// Messages received, or requests completed.
    count: &'a mut u64,
}

impl LatTest<'_, '_> {
    fn run_pingpong<T: TestTransport, O: MessageOp<T>>(
        &mut self,
        initiates: bool,
        test_end: &mut TestEnd<T>,
        memory: &mut PingPongMemory<O>,
        params: PingPongParams,
    ) -> Result<(), Failure> {
        let mut pingpong = PingPong::new(&mut test_end.end, memory, params, 0);
        let params = LatParams {
            initiates,
            // The time starts with the first message: a C tool starts its clock up to 250 ms after
            // the barrier.
            warmup: 1,
            total: total(self.settings),
        };
        self.sizes(|size| {
            pingpong.resize(usize::try_from(size.bytes).unwrap_or(usize::MAX));
            let result = lat::run(&mut pingpong, size.monitor, size.samples, params, size.count).and_then(|()| {
                // In a timed test the ends stop anywhere.
                if params.total < u64::MAX {
                    drain(&mut pingpong, size.monitor)
                } else {
                    Ok(())
                }
            });
            match result {
                // In a timed test each end stops by itself and sends nothing about it: the end that
                // started first is gone while the other's last message is in flight.
                Err(failure) if !matches!(failure, Failure::Interrupted) && size.monitor.peer_ended_first() => Ok(()),
                result => result,
            }
        })
    }

    /// Also prints the partial row of an interrupted size.
    fn sizes(&mut self, mut measure: impl FnMut(SizeRun<'_, '_>) -> Result<(), Failure>) -> Result<(), Failure> {
        let settings = self.settings;
        let trip = match settings.tool.verb {
            Verb::Write | Verb::Send => Trip::Half,
            Verb::Read | Verb::Atomic => Trip::Full,
        };
        let (duration, margin) = match settings.length {
            TestLength::Iterations(_) => (None, None),
            TestLength::Duration { duration, margin } => (Some(duration), Some(margin)),
        };
        let keep = settings.output.histogram || settings.output.unsorted;
        let params = SampleParams {
            trip,
            pace: settings.gap.map_or(Pace::AtOnce, Pace::Gap),
            duration,
            margin,
            keep: keep.then(|| duration.is_none().then(|| total(settings))),
        };
        self.printer.column_heads()?;
        for (index, &bytes) in settings.sizes.iter().enumerate() {
            if index == 0 || settings.tool.verb == Verb::Send {
                self.control.barrier(&self.qp_info)?;
            }
            let (mut count, mut cpu) = (0, CpuMeter::default());
            let mut samples = Samples::new(&self.clock, &mut cpu, params);
            let outcome = measure(SizeRun {
                bytes,
                monitor: &mut LoopMonitor::new(&self.control, &self.clock, settings),
                samples: &mut samples,
                count: &mut count,
            });
            if !matches!(outcome, Ok(()) | Err(Failure::Interrupted)) {
                return outcome;
            }
            let (figures, samples) = (figures(settings, bytes, count, &samples), samples.samples_ns());
            let used = cpu.used();
            if let Some(figures) = figures {
                let percent = (used.user_cores + used.system_cores) * 100.0;
                self.printer.latencies(figures, samples.as_deref(), percent)?;
            }
            outcome?;
        }
        Ok(())
    }

    fn finish(mut self) -> Result<(), Failure> {
        self.control.barrier_after_test(&self.qp_info)?;
        std::thread::sleep(self.settings.wait_destroy);
        self.control.close();
        Ok(())
    }
}

/// Messages of a size; `u64::MAX` in a timed test.
fn total(settings: &Settings) -> u64 {
    match settings.length {
        TestLength::Iterations(count) => count,
        TestLength::Duration { .. } => u64::MAX,
    }
}

/// Drains the send queue, so that the peer has the last message.
fn drain<T: TestTransport>(
    pingpong: &mut PingPong<'_, T, impl MessageOp<T>>,
    monitor: &mut LoopMonitor<'_>,
) -> Result<(), Failure> {
    loop {
        match pingpong.is_drained() {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            // The peer may be gone before its device has acknowledged the last message.
            Err(_) if monitor.peer_closes() => return Ok(()),
            Err(failure) => return Err(failure),
        }
        match monitor.idle() {
            Ok(_) => {}
            Err(Failure::Lost { .. }) => return Ok(()),
            Err(failure) => return Err(failure),
        }
    }
}

fn figures(settings: &Settings, bytes: u64, count: u64, samples: &Samples<'_>) -> Option<Latencies> {
    let figures = samples.latency().figures()?;
    Some(Latencies {
        bytes,
        // Both ends of a ping-pong have measured one trip less; a timed test counts only what lies
        // between the margins.
        iterations: match settings.length {
            TestLength::Iterations(_) => count,
            TestLength::Duration { .. } => figures.count,
        },
        min_ns: figures.min,
        max_ns: figures.max,
        p50_ns: figures.p50,
        avg_ns: figures.avg,
        stddev_ns: figures.stddev,
        p99_ns: figures.p99,
        p999_ns: figures.p999,
        trips_per_s: samples.rate_per_s(),
    })
}
