//! Latency tests, wire-compatible with the C tools.
//!
//! `write` and `send` are the ends of a ping-pong, which `pingpong` runs; `one_sided` is the client
//! of READs and atomics, whose loop is `single` and whose server is passive. Every message is timed
//! by itself (`recorder`), so percentiles are of all messages; `monitor` polls for time-up, Ctrl-C
//! and a lost peer while a loop waits. Barriers: one before the first size (before each, for SEND),
//! one after the last followed by closing, except for WRITE.

mod ask;
mod messages;
mod rally;
mod send;
mod single;
mod tally;
mod watch;
mod write;

use std::time::Duration;

use doorbell_verbs::{Connected, Rc, SharedReceive, Uc, Ud};

use self::messages::SOURCES;
use self::rally::{End, Racket};
use self::tally::Tally;
use self::watch::Watch;
use super::begin::begin;
use super::layout::Latencies;
use super::printer::Printer;
use super::settings::{Length, Settings, Transport};
use super::station::{Depths, Service, Station};
use super::tool::Verb;
use super::wire::{Conversation, Key};
use crate::device::Device;
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::stats::{Clock, ClockChoice, CpuMeter, Trip};

/// Requests of a round of `--perform_warm_up`.
const WARM_UP: u32 = 100;

/// Runs a latency test and prints it.
///
/// # Errors
/// [`Failure::Interrupted`], after printing what was measured until then; [`Failure::Usage`] when
/// there is no such test; [`Failure::Test`] and [`Failure::Lost`] when it failed.
pub(crate) fn run(settings: &Settings, device: &Device, interrupt: &Interrupt) -> Result<(), Failure> {
    let mut printer = Printer::new(settings)?;
    let end = Here {
        settings,
        device,
        interrupt,
        printer: &mut printer,
    };
    let shared = settings.shared_receive;
    let result = match (settings.tool.verb, settings.transport) {
        (Verb::Write, Transport::Rc) => end.write::<Rc>(),
        (Verb::Write, Transport::Uc) => end.write::<Uc>(),
        (Verb::Send, Transport::Rc) if shared => end.send::<SharedReceive<Rc>>(),
        (Verb::Send, Transport::Uc) if shared => end.send::<SharedReceive<Uc>>(),
        (Verb::Send, Transport::Ud) if shared => end.send::<SharedReceive<Ud>>(),
        (Verb::Send, Transport::Rc) => end.send::<Rc>(),
        (Verb::Send, Transport::Uc) => end.send::<Uc>(),
        (Verb::Send, Transport::Ud) => end.send::<Ud>(),
        (Verb::Read | Verb::Atomic, Transport::Rc) => end.ask(),
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
struct Here<'a, 'p> {
    settings: &'a Settings,
    device: &'a Device,
    interrupt: &'a Interrupt,
    printer: &'a mut Printer<'p>,
}

impl<'a, 'p> Here<'a, 'p> {
    fn write<T: Service + Connected>(self) -> Result<(), Failure> {
        let settings = self.settings;
        let (mut course, station) = self.meet::<T>(1)?;
        let mut racket = write::Writes::new(settings, station)?;
        // Unlike with SEND, the server sends first.
        let end = if settings.is_server() {
            End::Begins
        } else {
            End::Answers
        };
        course.play(end, &mut racket)?;
        // The peer may be slightly behind: its last WRITE must still find this end's queue pair.
        course.conversation.linger();
        Ok(())
    }

    fn send<T: Service>(self) -> Result<(), Failure> {
        let settings = self.settings;
        let (mut course, station) = self.meet::<T>(SOURCES)?;
        let mut racket = send::Sends::new(settings, station)?;
        let end = if settings.is_server() {
            End::Answers
        } else {
            End::Begins
        };
        course.play(end, &mut racket)?;
        course.part()
    }

    fn ask(self) -> Result<(), Failure> {
        let settings = self.settings;
        let (mut course, station) = self.meet::<Rc>(1)?;
        if settings.is_server() {
            course.conversation.barrier(&course.key)?;
            // The client accesses this end's memory until it reports that it is done.
            course.part()?;
            drop(station);
            return Ok(());
        }
        let mut asker = ask::Asks::new(settings, station)?;
        course.sizes(|size, watch| {
            asker.resize(size.bytes);
            single::run(&mut asker, watch, size)
        })?;
        course.part()
    }

    /// Connects to the peer.
    fn meet<T: Service>(self, receive: u32) -> Result<(Course<'a, 'p>, Station<T>), Failure> {
        let settings = self.settings;
        let clock = Clock::new(ClockChoice::Auto).map_err(Failure::test)?;
        if settings.output.cycles {
            let cycles = clock.cycles_per_ns().ok_or_else(|| {
                Failure::test("-C: this machine has no counter that counts cycles at one rate; leave it out")
            })?;
            self.printer.set_cycles_per_ns(cycles);
        }
        let (mut conversation, managed) = begin(settings, self.device, self.printer, self.interrupt)?;
        let depths = Depths { send: SOURCES, receive };
        let station = Station::<T>::establish(
            settings,
            self.device,
            &mut conversation,
            managed,
            self.interrupt,
            self.printer,
            depths,
        )?;
        let course = Course {
            settings,
            key: station.lanes[0].ours,
            conversation,
            printer: self.printer,
            clock,
        };
        Ok((course, station))
    }
}

/// A test from its first size to its last.
struct Course<'a, 'p> {
    settings: &'a Settings,
    /// What this end sends at barriers.
    key: Key,
    conversation: Conversation,
    printer: &'a mut Printer<'p>,
    clock: Clock,
}

/// What the loop of one message size uses.
struct Size<'a> {
    /// Message size.
    bytes: usize,
    clock: &'a Clock,
    /// Delay between an answer and the next message.
    gap: Option<Duration>,
    /// Receives the samples.
    tally: &'a mut Tally,
    /// Warm-up requests, where the peer does not count them.
    warm_up: u32,
    /// Messages received, or requests completed.
    count: &'a mut u64,
}

impl Course<'_, '_> {
    fn play(&mut self, end: End, racket: &mut impl Racket) -> Result<(), Failure> {
        self.sizes(|size, watch| rally::play(end, racket, watch, size))
    }

    /// Measures all sizes with `measure` and prints their rows, also the partial row of an
    /// interrupted one.
    fn sizes(
        &mut self,
        mut measure: impl FnMut(Size<'_>, &mut Watch<'_>) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let settings = self.settings;
        let trip = match settings.tool.verb {
            Verb::Write | Verb::Send => Trip::Half,
            Verb::Read | Verb::Atomic => Trip::Full,
        };
        self.printer.heads()?;
        for (index, &bytes) in settings.sizes.iter().enumerate() {
            if index == 0 || settings.tool.verb == Verb::Send {
                self.conversation.barrier(&self.key)?;
            }
            let keep = settings.output.histogram || settings.output.unsorted;
            let mut tally = Tally::new(trip, settings.length, keep);
            let (mut count, mut cpu) = (0, CpuMeter::default());
            cpu.start();
            let outcome = measure(
                Size {
                    bytes: usize::try_from(bytes).unwrap_or(usize::MAX),
                    clock: &self.clock,
                    gap: settings.gap,
                    tally: &mut tally,
                    warm_up: if settings.warm_up { WARM_UP } else { 0 },
                    count: &mut count,
                },
                &mut Watch::new(&self.conversation, &self.clock, settings),
            );
            cpu.stop();
            if !matches!(outcome, Ok(()) | Err(Failure::Interrupted)) {
                return outcome;
            }
            let used = cpu.used();
            if let Some(figures) = figures(settings, bytes, count, &tally) {
                let samples = tally.samples_ns();
                let percent = (used.user_cores + used.system_cores) * 100.0;
                self.printer.latencies(figures, samples.as_deref(), percent)?;
            }
            outcome?;
        }
        Ok(())
    }

    /// Barrier after the last size, without a deadline, then closes the control connection.
    fn part(mut self) -> Result<(), Failure> {
        self.conversation.barrier_after_test(&self.key)?;
        std::thread::sleep(self.settings.wait_destroy);
        self.conversation.goodbye();
        Ok(())
    }
}

fn figures(settings: &Settings, bytes: u64, count: u64, tally: &Tally) -> Option<Latencies> {
    let figures = tally.figures()?;
    Some(Latencies {
        bytes,
        // Both ends of a ping-pong have measured one trip less; a timed test counts only what lies
        // between the margins.
        iterations: match settings.length {
            Length::Iterations(_) => count,
            Length::Duration { .. } => figures.count,
        },
        min_ns: figures.min,
        max_ns: figures.max,
        p50_ns: figures.p50,
        avg_ns: figures.avg,
        stddev_ns: figures.stddev,
        p99_ns: figures.p99,
        p999_ns: figures.p999,
        trips_per_s: tally.rate_per_s(),
    })
}
