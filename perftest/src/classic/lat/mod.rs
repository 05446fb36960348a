//! Latency tests, wire-compatible with the C tools.
//!
//! `pingpong` is one end of a ping-pong, with `memory`; `single` is the client of READs and
//! atomics, whose server is passive. Every message is timed (`recorder`). Barriers:
//! one before the first size (before each, for SEND), one after the last followed by closing,
//! except for WRITE.

mod memory;
mod monitor;
mod pingpong;
mod recorder;
mod single;

use std::time::Duration;

use doorbell_verbs::{Connected, ReliableConnection, UnreliableConnection, UnreliableDatagram, WithSrq};

use self::monitor::LoopMonitor;
use self::pingpong::Role;
use self::recorder::LatencyRecorder;
use super::control::open_control;
use super::layout::Latencies;
use super::printer::Printer;
use super::requester::ClassicRequester;
use super::settings::{Settings, TestLength, Transport};
use super::test_end::{Depths, TestEnd};
use super::tool::Verb;
use super::wire::{ControlConnection, QpInfo};
use crate::device::Device;
use crate::engine::message::Cycle;
use crate::engine::one_sided::OneSided;
use crate::engine::pingpong::{BUFFERS, PingPong, PingPongMemory, PingPongParams};
use crate::engine::requester::{AtomicRequester, MessageOp, ReadRequester};
use crate::engine::transport::TestTransport;
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::stats::{Clock, ClockChoice, CpuMeter, Trip};

/// Requests of a round of `--perform_warm_up`.
const WARM_UP: u32 = 100;

/// # Errors
/// [`Failure::Interrupted`], after printing what was measured until then; [`Failure::Usage`] when
/// there is no such test; [`Failure::Test`] and [`Failure::Lost`] when it failed.
pub(crate) fn run(settings: &Settings, device: &Device, interrupt: &Interrupt) -> Result<(), Failure> {
    let mut printer = Printer::new(settings)?;
    let end = LatSetup {
        settings,
        device,
        interrupt,
        printer: &mut printer,
    };
    let shared = settings.shared_receive;
    let result = match (settings.tool.verb, settings.transport) {
        (Verb::Write, Transport::Rc) => end.write::<ReliableConnection>(),
        (Verb::Write, Transport::Uc) => end.write::<UnreliableConnection>(),
        (Verb::Send, Transport::Rc) if shared => end.send::<WithSrq<ReliableConnection>>(),
        (Verb::Send, Transport::Uc) if shared => end.send::<WithSrq<UnreliableConnection>>(),
        (Verb::Send, Transport::Ud) if shared => end.send::<WithSrq<UnreliableDatagram>>(),
        (Verb::Send, Transport::Rc) => end.send::<ReliableConnection>(),
        (Verb::Send, Transport::Uc) => end.send::<UnreliableConnection>(),
        (Verb::Send, Transport::Ud) => end.send::<UnreliableDatagram>(),
        (Verb::Read, Transport::Rc) => end.one_sided::<ReadRequester>(),
        (Verb::Atomic, Transport::Rc) => end.one_sided::<AtomicRequester>(),
        (verb, transport) => Err(Failure::usage(format!(
            "-c {transport:?}: the transport has no {verb:?}: leave it out"
        ))),
    };
    match result {
        Ok(()) => printer.finish(),
        Err(Failure::Interrupted) => printer.finish().and(Err(Failure::Interrupted)),
        Err(failure) => Err(failure),
    }
}

/// This end before it is connected.
struct LatSetup<'a, 'p> {
    settings: &'a Settings,
    device: &'a Device,
    interrupt: &'a Interrupt,
    printer: &'a mut Printer<'p>,
}

impl<'a, 'p> LatSetup<'a, 'p> {
    fn write<T: TestTransport + Connected>(self) -> Result<(), Failure> {
        let settings = self.settings;
        let (mut lat_test, mut test_end) = self.connect::<T>(1)?;
        let mut memory = memory::of_write(settings, &mut test_end)?;
        // Unlike with SEND, the server sends first.
        let end = if settings.is_server() {
            Role::Initiator
        } else {
            Role::Responder
        };
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
        lat_test.run_pingpong(end, &mut test_end, &mut memory, params)?;
        // The peer may be slightly behind: its last WRITE must still find this end's queue pair.
        lat_test.control.linger();
        Ok(())
    }

    fn send<T: TestTransport>(self) -> Result<(), Failure> {
        let settings = self.settings;
        let (mut lat_test, mut test_end) = self.connect::<T>(BUFFERS)?;
        let mut memory = memory::of_send(settings, &mut test_end)?;
        let end = if settings.is_server() {
            Role::Responder
        } else {
            Role::Initiator
        };
        let params = PingPongParams {
            signal_every: 4,
            complete_first: false,
            polls: 1,
            times: 1,
            sleeps: settings.events,
            advice: ": do both ends have the same options (-s, -a)?",
        };
        lat_test.run_pingpong(end, &mut test_end, &mut memory, params)?;
        lat_test.finish()
    }

    fn one_sided<F: ClassicRequester<ReliableConnection>>(self) -> Result<(), Failure> {
        let settings = self.settings;
        let (mut lat_test, mut test_end) = self.connect::<ReliableConnection>(1)?;
        if settings.is_server() {
            lat_test.control.barrier(&lat_test.qp_info)?;
            // The client accesses this end's memory until it reports that it is done.
            lat_test.finish()?;
            drop(test_end);
            return Ok(());
        }
        lat_test.sizes(|size, monitor| {
            let cycle = Cycle {
                slots: 1,
                ..test_end.cycle(size.bytes as u64)
            };
            let mut requester = F::new(settings, &test_end, 0, cycle, 1)?;
            let requests = OneSided::new(&mut test_end.end, &mut requester, settings.events);
            single::run(requests, monitor, size)
        })?;
        lat_test.finish()
    }

    fn connect<T: TestTransport>(self, receive: u32) -> Result<(LatTest<'a, 'p>, TestEnd<T>), Failure> {
        let settings = self.settings;
        let clock = Clock::new(ClockChoice::Auto).map_err(Failure::test)?;
        if settings.output.cycles {
            let cycles = clock.cycles_per_ns().ok_or_else(|| {
                Failure::test("-C: this machine has no counter that counts cycles at one rate; leave it out")
            })?;
            self.printer.set_cycles_per_ns(cycles);
        }
        let (mut control, cm) = open_control(settings, self.device, self.printer, self.interrupt)?;
        let depths = Depths { send: BUFFERS, receive };
        let test_end = TestEnd::<T>::establish(
            settings,
            self.device,
            &mut control,
            cm,
            self.interrupt,
            self.printer,
            depths,
        )?;
        let lat_test = LatTest {
            settings,
            qp_info: test_end.links[0].ours,
            control,
            printer: self.printer,
            clock,
        };
        Ok((lat_test, test_end))
    }
}

struct LatTest<'a, 'p> {
    settings: &'a Settings,
    /// What this end sends at barriers.
    qp_info: QpInfo,
    control: ControlConnection,
    printer: &'a mut Printer<'p>,
    clock: Clock,
}

struct SizeRun<'a> {
    bytes: usize,
    clock: &'a Clock,
    /// Delay between an answer and the next message.
    gap: Option<Duration>,
    recorder: &'a mut LatencyRecorder,
    /// Warm-up requests, where the peer does not count them.
    warm_up: u32,
    /// Messages received, or requests completed.
    count: &'a mut u64,
}

impl LatTest<'_, '_> {
    fn run_pingpong<T: TestTransport, O: MessageOp<T>>(
        &mut self,
        role: Role,
        test_end: &mut TestEnd<T>,
        memory: &mut PingPongMemory<O>,
        params: PingPongParams,
    ) -> Result<(), Failure> {
        let mut pingpong = PingPong::new(&mut test_end.end, memory, params, 0);
        self.sizes(|size, monitor| {
            pingpong.resize(size.bytes);
            pingpong::run(role, &mut pingpong, monitor, size)
        })
    }

    /// Also prints the partial row of an interrupted size.
    fn sizes(
        &mut self,
        mut measure: impl FnMut(SizeRun<'_>, &mut LoopMonitor<'_>) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let settings = self.settings;
        let trip = match settings.tool.verb {
            Verb::Write | Verb::Send => Trip::Half,
            Verb::Read | Verb::Atomic => Trip::Full,
        };
        self.printer.column_heads()?;
        for (index, &bytes) in settings.sizes.iter().enumerate() {
            if index == 0 || settings.tool.verb == Verb::Send {
                self.control.barrier(&self.qp_info)?;
            }
            let keep = settings.output.histogram || settings.output.unsorted;
            let mut recorder = LatencyRecorder::new(trip, settings.length, keep);
            let (mut count, mut cpu) = (0, CpuMeter::default());
            cpu.start();
            let outcome = measure(
                SizeRun {
                    bytes: usize::try_from(bytes).unwrap_or(usize::MAX),
                    clock: &self.clock,
                    gap: settings.gap,
                    recorder: &mut recorder,
                    warm_up: if settings.warm_up { WARM_UP } else { 0 },
                    count: &mut count,
                },
                &mut LoopMonitor::new(&self.control, &self.clock, settings),
            );
            cpu.stop();
            if !matches!(outcome, Ok(()) | Err(Failure::Interrupted)) {
                return outcome;
            }
            let used = cpu.used();
            if let Some(figures) = figures(settings, bytes, count, &recorder) {
                let samples = recorder.samples_ns();
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

fn figures(settings: &Settings, bytes: u64, count: u64, recorder: &LatencyRecorder) -> Option<Latencies> {
    let figures = recorder.figures()?;
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
        trips_per_s: recorder.rate_per_s(),
    })
}
