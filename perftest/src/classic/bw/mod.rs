//! Bandwidth tests, wire-compatible with the C tools: `test_loop` measures one size, this module is
//! the order of the test.
//!
//! docs/CLASSIC.md has the table of barriers: before each size where both ends work (SEND,
//! bidirectional tests), and after the last. Then the ends exchange reports.

mod test_loop;

use doorbell_verbs::{ReliableConnection, UnreliableConnection, UnreliableDatagram, WithSrq};

use self::test_loop::{Outcome, TestLoop, requesters};
use super::control::TestStart;
use super::layout::{Rates, bandwidth};
use super::printer::{Directions, Printer};
use super::requester::{ClassicRequester, receiver};
use super::settings::{Output, Settings, Transport};
use super::test_end::{Depths, TestEnd};
use super::tool::Verb;
use super::wire::{BwReport, ControlConnection};
use crate::engine::receiver::Receiver;
use crate::engine::requester::{AtomicRequester, MessageRequester, ReadRequester, SendOp, WriteOp};
use crate::engine::test_end;
use crate::engine::transport::TestTransport;
use crate::failure::Failure;
use crate::stats::{Bandwidth, Clock, ClockChoice};

type Write = MessageRequester<WriteOp>;
type Send = MessageRequester<SendOp>;

/// # Errors
/// [`Failure::Interrupted`], with what was measured until then printed; [`Failure::Usage`] when
/// there is no such test; [`Failure::Test`] and [`Failure::Lost`] when it failed.
pub(crate) fn run(start: TestStart<'_, '_>) -> Result<(), Failure> {
    let settings = start.settings;
    let shared = settings.shared_receive;
    match (settings.tool.verb, settings.transport) {
        (Verb::Write, Transport::Rc) => run_test::<ReliableConnection, Write>(start),
        (Verb::Write, Transport::Uc) => run_test::<UnreliableConnection, Write>(start),
        (Verb::Read, Transport::Rc) => run_test::<ReliableConnection, ReadRequester>(start),
        (Verb::Atomic, Transport::Rc) => run_test::<ReliableConnection, AtomicRequester>(start),
        (Verb::Send, Transport::Rc) if shared => run_test::<WithSrq<ReliableConnection>, Send>(start),
        (Verb::Send, Transport::Uc) if shared => run_test::<WithSrq<UnreliableConnection>, Send>(start),
        (Verb::Send, Transport::Ud) if shared => run_test::<WithSrq<UnreliableDatagram>, Send>(start),
        (Verb::Send, Transport::Rc) => run_test::<ReliableConnection, Send>(start),
        (Verb::Send, Transport::Uc) => run_test::<UnreliableConnection, Send>(start),
        (Verb::Send, Transport::Ud) => run_test::<UnreliableDatagram, Send>(start),
        _ => Err(start.no_such_test()),
    }
}

fn run_test<T: TestTransport, F: ClassicRequester<T>>(mut start: TestStart<'_, '_>) -> Result<(), Failure> {
    let settings = start.settings;
    let clock = Clock::new(ClockChoice::Auto).map_err(Failure::test)?;
    let (mut control, mut test_end) = start.connect::<T>(Depths::of(settings))?;
    start.printer.column_heads()?;
    let mut bw_test = BwTest {
        settings,
        receivers: receivers(settings, &mut test_end)?,
        test_end: &mut test_end,
        control: &mut control,
        printer: start.printer,
        clock: &clock,
    };
    let last = if is_passive(settings) {
        BwReport::default()
    } else {
        bw_test.sizes::<F>()?
    };
    if settings.tool.verb != Verb::Send && !settings.bidirectional {
        bw_test.exchange_final_reports(&last)?;
    }
    test_end.barrier_after_test(&mut control)?;
    std::thread::sleep(settings.wait_destroy);
    control.close();
    Ok(())
}

fn is_passive(settings: &Settings) -> bool {
    settings.tool.verb != Verb::Send && settings.receives() && !settings.bidirectional
}

/// The receives, as long as the longest message; they stay posted from size to size.
fn receivers<T: TestTransport>(settings: &Settings, test_end: &mut TestEnd<T>) -> Result<Vec<Receiver>, Failure> {
    if settings.tool.verb != Verb::Send || !(settings.receives() || settings.bidirectional) {
        return Ok(Vec::new());
    }
    let longest = settings.sizes.iter().max().copied().unwrap_or(0);
    let queues = if test_end.end.shared.is_some() {
        1
    } else {
        test_end.links.len()
    };
    let mut receivers = (0..queues)
        .map(|_| receiver(settings, test_end, longest, settings.rx_depth.max(1)))
        .collect::<Result<Vec<_>, _>>()?;
    let test_end::TestEnd { qps, shared, .. } = &mut test_end.end;
    for (test_qp, receiver) in qps.iter_mut().zip(&mut receivers) {
        receiver.post(test_qp, shared.as_mut())?;
    }
    Ok(receivers)
}

struct BwTest<'a, 'p, T: TestTransport> {
    settings: &'a Settings,
    test_end: &'a mut TestEnd<T>,
    receivers: Vec<Receiver>,
    control: &'a mut ControlConnection,
    printer: &'a mut Printer<'p>,
    clock: &'a Clock,
}

impl<T: TestTransport> BwTest<'_, '_, T> {
    fn sizes<F: ClassicRequester<T>>(&mut self) -> Result<BwReport, Failure> {
        let settings = self.settings;
        let sends = settings.tool.verb == Verb::Send;
        let mut last = BwReport::default();
        for &bytes in &settings.sizes {
            if sends || settings.bidirectional {
                self.test_end.barrier(self.control)?;
            }
            loop {
                last = self.size::<F>(bytes)?;
                if !settings.forever {
                    break;
                }
            }
            if sends && settings.all {
                self.test_end.barrier_after_test(self.control)?;
            }
        }
        Ok(last)
    }

    fn size<F: ClassicRequester<T>>(&mut self, bytes: u64) -> Result<BwReport, Failure> {
        let settings = self.settings;
        let mut outcome = Outcome::default();
        let result = {
            let monitor = self.control.monitor();
            let mut requesters = requesters::<T, F>(settings, self.test_end, bytes)?;
            let mut test_loop = TestLoop::new(
                settings,
                self.test_end,
                &mut requesters,
                &mut self.receivers,
                bytes,
                self.clock,
                monitor,
            );
            test_loop.run(&mut outcome)
        };
        let cpu = outcome.cpu.used();
        let cpu_percent = (cpu.user_cores + cpu.system_cores) * 100.0;
        let row =
            |figures: Option<Bandwidth>| figures.map(|figures| rates(settings, bytes, outcome.iterations, &figures));
        let (sent, received) = (row(outcome.sent), row(outcome.received));
        match result {
            Ok(()) => {}
            Err(Failure::Interrupted) => {
                if let Some(row) = sent.or(received) {
                    self.printer.rates(row, None, cpu_percent)?;
                }
                return Err(Failure::Interrupted);
            }
            Err(failure) => return Err(failure),
        }
        let nothing = || {
            Failure::test(format!(
                "nothing was measured with messages of {bytes} B: give it longer (-n, -D)"
            ))
        };
        let local = sent.or(received).ok_or_else(nothing)?;
        let ours = figures(settings, &local);
        if !settings.bidirectional {
            self.printer.rates(local, None, cpu_percent)?;
            return Ok(ours);
        }
        let is_send = settings.tool.verb == Verb::Send;
        if !is_send && settings.all {
            self.test_end.barrier_after_test(self.control)?;
        }
        let remote = if is_send && settings.is_timed() {
            // The C tools exchange no report here, so the received rate stands for the peer's
            // direction.
            received.ok_or_else(nothing)?
        } else {
            self.exchange_reports(&ours, bytes)?
        };
        self.printer
            .rates(sum(&local, &remote), Some(Directions { local, remote }), cpu_percent)?;
        Ok(ours)
    }

    /// Exchanges the reports of one size. Returns the peer's.
    fn exchange_reports(&mut self, ours: &BwReport, bytes: u64) -> Result<Rates, Failure> {
        let theirs = self.control.exchange_report(ours)?;
        if !theirs.are_plausible() || theirs.size != bytes {
            return Err(Failure::test(format!(
                "peer {}: its results make no sense: are both ends given the same options?",
                self.control.peer()
            )));
        }
        Ok(rates_of(&theirs))
    }

    /// Barrier after the last size of a one-sided test, then exchanges the reports.
    fn exchange_final_reports(&mut self, ours: &BwReport) -> Result<(), Failure> {
        self.test_end.barrier_after_test(self.control)?;
        let theirs = self.control.exchange_report(ours)?;
        // Only one of the two ends has measured. The other reports what its memory held.
        if is_passive(self.settings) && theirs.are_plausible() && theirs.average > 0.0 {
            self.printer.rates(rates_of(&theirs), None, 0.0)?;
        }
        Ok(())
    }
}

fn rates(settings: &Settings, bytes: u64, iterations: u64, figures: &Bandwidth) -> Rates {
    let of = |per_s: f64| per_s * bytes as f64;
    Rates {
        bytes,
        iterations,
        peak_bytes_per_s: (!settings.output.no_peak).then(|| of(figures.peak_per_s)),
        average_bytes_per_s: of(figures.average_per_s),
        messages_per_s: figures.average_per_s,
    }
}

fn figures(settings: &Settings, rates: &Rates) -> BwReport {
    let output: &Output = &settings.output;
    BwReport {
        size: rates.bytes,
        iterations: rates.iterations,
        peak: rates.peak_bytes_per_s.map_or(0.0, |peak| bandwidth(output, peak)),
        average: bandwidth(output, rates.average_bytes_per_s),
        rate: rates.messages_per_s / 1e6,
    }
}

/// The peer's report. Its bandwidth is in the unit the peer prints; the message rate has only one
/// unit, so the bandwidth is computed from it.
fn rates_of(theirs: &BwReport) -> Rates {
    let messages_per_s = theirs.rate * 1e6;
    let average_bytes_per_s = messages_per_s * theirs.size as f64;
    Rates {
        bytes: theirs.size,
        iterations: theirs.iterations,
        peak_bytes_per_s: (theirs.peak > 0.0 && theirs.average > 0.0)
            .then(|| average_bytes_per_s * theirs.peak / theirs.average),
        average_bytes_per_s,
        messages_per_s,
    }
}

fn sum(local: &Rates, remote: &Rates) -> Rates {
    Rates {
        bytes: local.bytes,
        iterations: local.iterations,
        peak_bytes_per_s: local
            .peak_bytes_per_s
            .map(|peak| peak + remote.peak_bytes_per_s.unwrap_or(0.0)),
        average_bytes_per_s: local.average_bytes_per_s + remote.average_bytes_per_s,
        messages_per_s: local.messages_per_s + remote.messages_per_s,
    }
}
