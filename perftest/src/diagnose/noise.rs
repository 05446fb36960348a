//! Measures disturbances of a test on this machine: before it by reading the clock, during it by
//! the kernel's counters.
//!
//! - **Jitter** ([`probe`]): a thread that only reads the clock sees a gap when its core runs
//!   something else. 20 ms find frequent disturbances; no finding is no proof.
//! - **Preemption**: `nivcsw` of getrusage(2); a yield without another runnable thread is not
//!   counted.
//! - **Others**: time of the allowed cores that was neither idle nor ours, in units of 10 ms.
//! - **Steal**: time in which the hypervisor ran something else though one of these cores had work.

use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};
use nix::time::{ClockId, clock_gettime};

use super::cpu;
use super::sources::Sources;
use crate::report::{Code, Warning};

/// How long the clock is read before a test.
const PROBE: Duration = Duration::from_millis(20);
/// A gap between two readings that indicates a disturbance.
const GAP: Duration = Duration::from_micros(10);
/// A single gap of this length is a warning.
const LONG_GAP: Duration = Duration::from_millis(1);
const MAX_GAP_PERCENT: f64 = 1.0;
/// Preemptions that a test may have: in total, and per second. The kernel's own threads cause some
/// tens a second on a quiet machine; a hundred show in the 99.9th percentile.
const MAX_PREEMPTIONS: f64 = 10.0;
const MAX_PREEMPTIONS_PER_S: f64 = 100.0;
/// Shorter tests are not judged by counters with a resolution of 10 ms.
const MIN_DURATION: Duration = Duration::from_millis(200);
/// CPU use of others without a warning: cores, and their share of the allowed cores.
const MAX_OTHERS: f64 = 0.5;
const MAX_OTHERS_SHARE: f64 = 0.125;
/// Steal time without a warning: two ticks, and a percentage of the time worked.
const MIN_STOLEN: Duration = Duration::from_millis(20);
const MAX_STOLEN_PERCENT: f64 = 1.0;

/// Gaps in the readings of a clock.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct Gaps {
    count: u32,
    longest: Duration,
    sum: Duration,
    over: Duration,
}

impl Gaps {
    /// Adds the time from one reading to the next.
    fn add(&mut self, step: Duration) {
        self.over += step;
        if step > GAP {
            self.count += 1;
            self.longest = self.longest.max(step);
            self.sum += step;
        }
    }

    fn evaluate(&self) -> Option<Warning> {
        let percent = 100.0 * self.sum.as_secs_f64() / self.over.as_secs_f64().max(f64::MIN_POSITIVE);
        (percent > MAX_GAP_PERCENT || self.longest > LONG_GAP).then(|| {
            Code::Jitter.warning(format!(
                    "a thread that only reads the clock lost its core {} times in {:.0} ms, for {:.0} us at most and {percent:.1} % in all: figures, long latencies most of all, are the machine's in part; give the test idle cores",
                    self.count,
                    self.over.as_secs_f64() * 1e3,
                    self.longest.as_secs_f64() * 1e6
                ))
        })
    }
}

pub(super) fn probe() -> Option<Warning> {
    let mut gaps = Gaps::default();
    let began = Instant::now();
    let mut last = began;
    while last.duration_since(began) < PROBE {
        let now = Instant::now();
        gaps.add(now.duration_since(last));
        last = now;
    }
    gaps.evaluate()
}

/// Where the peer of a test is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Peer {
    /// A child process of this one.
    Child(u32),
    /// Another process of this machine.
    Here,
    /// Another machine.
    Elsewhere,
}

#[derive(Clone, Copy, PartialEq, Debug, Default)]
struct Counters {
    /// CLOCK_MONOTONIC.
    at: Duration,
    preemptions: u64,
    /// CPU time of both ends; `None` where the peer's is not known.
    ours: Option<Duration>,
    /// Busy time of the allowed cores, of all processes.
    worked: Duration,
    stolen: Duration,
    cores: usize,
}

impl Counters {
    fn read(sources: &Sources, peer: Peer) -> Counters {
        let (worked, stolen, cores) = of_cores(sources);
        let usage = getrusage(UsageWho::RUSAGE_SELF).ok();
        let used = |clock: ClockId| clock_gettime(clock).ok().map(Duration::from);
        let own = used(ClockId::CLOCK_PROCESS_CPUTIME_ID);
        let theirs = match peer {
            Peer::Elsewhere => Some(Duration::ZERO),
            Peer::Child(process) => of_process(sources, process),
            Peer::Here => None,
        };
        Counters {
            at: used(ClockId::CLOCK_MONOTONIC).unwrap_or_default(),
            preemptions: usage.map_or(0, |usage| {
                u64::try_from(usage.involuntary_context_switches()).unwrap_or(0)
            }),
            ours: own.zip(theirs).map(|(own, theirs)| own.saturating_add(theirs)),
            worked,
            stolen,
            cores,
        }
    }
}

/// A counter of the kernel in units of 10 ms (USER_HZ).
fn ticks(field: Option<&str>) -> Option<Duration> {
    field?.parse::<u64>().ok()?.checked_mul(10).map(Duration::from_millis)
}

/// Busy time, steal time and number of the allowed cores (proc_stat(5)).
fn of_cores(sources: &Sources) -> (Duration, Duration, usize) {
    let cores = cpu::allowed(sources);
    let (mut worked, mut stolen, mut found) = (Duration::ZERO, Duration::ZERO, 0);
    for line in sources.lines("proc/stat") {
        let mut fields = line.split_whitespace();
        let number = fields
            .next()
            .and_then(|name| name.strip_prefix("cpu")?.parse::<usize>().ok());
        if !number.is_some_and(|number| cores.contains(&number)) {
            continue;
        }
        let fields: Vec<Option<Duration>> = fields.map(|field| ticks(Some(field))).collect();
        let of = |index: usize| fields.get(index).copied().flatten().unwrap_or_default();
        // user, nice, system; without idle and iowait; irq, softirq; steal. Guest time is in user
        // and nice.
        worked = [0, 1, 2, 5, 6]
            .into_iter()
            .fold(worked, |sum, index| sum.saturating_add(of(index)));
        stolen = stolen.saturating_add(of(7));
        found += 1;
    }
    (worked, stolen, found)
}

/// The CPU time of a process (proc_pid_stat(5), fields 14 and 15).
fn of_process(sources: &Sources, process: u32) -> Option<Duration> {
    let stat = sources.text(&format!("proc/{process}/stat"))?;
    let mut fields = stat.rsplit(')').next()?.split_whitespace().skip(11);
    ticks(fields.next())?.checked_add(ticks(fields.next())?)
}

#[derive(Debug)]
pub(crate) struct NoiseMonitor {
    sources: Sources,
    peer: Peer,
    began: Counters,
}

impl NoiseMonitor {
    pub(crate) fn begin(sources: &Sources, peer: Peer) -> NoiseMonitor {
        NoiseMonitor {
            sources: sources.clone(),
            peer,
            began: Counters::read(sources, peer),
        }
    }

    pub(super) fn evaluate(&self) -> Vec<Warning> {
        evaluate(&self.began, &Counters::read(&self.sources, self.peer))
    }
}

fn evaluate(began: &Counters, ended: &Counters) -> Vec<Warning> {
    let over = ended.at.saturating_sub(began.at);
    let seconds = over.as_secs_f64();
    let mut warnings = Vec::new();
    let preemptions = ended.preemptions.saturating_sub(began.preemptions);
    if preemptions as f64 > MAX_PREEMPTIONS.max(MAX_PREEMPTIONS_PER_S * seconds) {
        warnings.push(Code::Preempted.warning(format!(
                "this end lost its core to other threads {preemptions} times in {seconds:.1} s: stop other programs, or give the test cores of its own (taskset -c)"
            )));
    }
    let worked = ended.worked.saturating_sub(began.worked);
    if over >= MIN_DURATION
        && seconds > 0.0
        && let (Some(before), Some(after)) = (began.ours, ended.ours)
    {
        let others = worked.saturating_sub(after.saturating_sub(before)).as_secs_f64() / seconds;
        let cores = ended.cores;
        if others > MAX_OTHERS && others > MAX_OTHERS_SHARE * cores as f64 {
            warnings.push(Code::BusyMachine.warning(format!("other programs used {others:.1} of the {cores} cores that there are for the test, in {seconds:.1} s: stop what top shows")));
        }
    }
    let stolen = ended.stolen.saturating_sub(began.stolen);
    let percent = 100.0 * stolen.as_secs_f64() / worked.saturating_add(stolen).as_secs_f64().max(f64::MIN_POSITIVE);
    if stolen >= MIN_STOLEN && percent > MAX_STOLEN_PERCENT {
        warnings.push(Code::Steal.warning(format!(
                "the hypervisor took {percent:.0} % of the time that these cores had work, in {seconds:.1} s: figures say as much about its other guests"
            )));
    }
    warnings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnose::sources::fake::FakeMachine;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn codes(began: Counters, ended: Counters) -> Vec<Code> {
        evaluate(&began, &ended).iter().map(|warning| warning.code).collect()
    }

    #[test]
    fn gaps_are_counted_and_evaluated() {
        let quiet = |steps: &[u64]| {
            let mut gaps = Gaps::default();
            // 20 ms of readings every 50 ns.
            (0..400_000).for_each(|_| gaps.add(Duration::from_nanos(50)));
            steps.iter().for_each(|us| gaps.add(Duration::from_micros(*us)));
            gaps
        };
        assert_eq!((quiet(&[]).evaluate(), quiet(&[]).count), (None, 0));
        // A timer interrupt.
        assert_eq!((quiet(&[11, 9, 12]).count, quiet(&[11, 9, 12]).evaluate()), (2, None));
        let often = quiet(&[30; 10]).evaluate().unwrap();
        assert!(
            often
                .to_string()
                .contains("lost its core 10 times in 20 ms, for 30 us at most and 1.5 %"),
            "{often}"
        );
        assert_eq!(
            (often.code, quiet(&[1001]).evaluate().unwrap().code),
            (Code::Jitter, Code::Jitter)
        );
        assert_eq!(Gaps::default().evaluate(), None);
    }

    #[test]
    fn a_quiet_test_has_no_warning() {
        let began = Counters {
            at: ms(5000),
            ours: Some(ms(100)),
            cores: 4,
            ..Counters::default()
        };
        let ended = Counters {
            at: ms(6000),
            preemptions: 10,
            ours: Some(ms(2100)),
            worked: ms(2400),
            stolen: ms(20),
            ..began
        };
        assert_eq!(codes(began, ended), []);
        assert_eq!(codes(began, began), []);
        // Counters that decrease are not an error.
        assert_eq!(codes(ended, began), []);
    }

    #[test]
    fn preemptions_are_evaluated_per_second() {
        let with = |preemptions, over| Counters {
            at: ms(over),
            preemptions,
            ..Counters::default()
        };
        let nothing = Counters::default();
        assert_eq!(codes(nothing, with(10, 5)), []);
        assert_eq!(codes(nothing, with(11, 5)), [Code::Preempted]);
        assert_eq!(codes(nothing, with(1000, 10_000)), []);
        assert_eq!(codes(nothing, with(1001, 10_000)), [Code::Preempted]);
    }

    #[test]
    fn others_count_only_with_known_own_time_in_a_long_test() {
        let with = |ours, worked, over| Counters {
            at: ms(over),
            ours,
            worked: ms(worked),
            cores: 4,
            ..Counters::default()
        };
        let began = with(Some(ms(0)), 0, 0);
        assert_eq!(codes(began, with(Some(ms(1000)), 2000, 1000)), [Code::BusyMachine]);
        let text = evaluate(&began, &with(Some(ms(1000)), 2500, 1000))[0].to_string();
        assert!(text.starts_with("other programs used 1.5 of the 4 cores"), "{text}");
        assert_eq!(codes(began, with(Some(ms(2000)), 2100, 1000)), []);
        assert_eq!(codes(began, with(Some(ms(100)), 1000, 199)), []);
        assert_eq!(codes(with(None, 0, 0), with(None, 2000, 1000)), []);
        // One and a half of 64 cores disturb little.
        let many = Counters {
            cores: 64,
            ..with(Some(ms(1000)), 2500, 1000)
        };
        assert_eq!(codes(began, many), []);
    }

    #[test]
    fn stolen_time_is_a_share_of_work() {
        let with = |worked, stolen| Counters {
            at: ms(100),
            worked: ms(worked),
            stolen: ms(stolen),
            ..Counters::default()
        };
        let nothing = Counters::default();
        assert_eq!(codes(nothing, with(1000, 10)), []);
        assert_eq!(codes(nothing, with(10_000, 50)), []);
        assert_eq!(codes(nothing, with(900, 100)), [Code::Steal]);
        let text = evaluate(&nothing, &with(900, 100))[0].to_string();
        assert!(text.starts_with("the hypervisor took 10 % of the time"), "{text}");
    }

    #[test]
    fn counters_are_of_the_allowed_cores() {
        let machine = FakeMachine::with([
            ("proc/self/status", "Cpus_allowed_list:\t1-2\n"),
            (
                "proc/stat",
                "cpu  9 9 9 9 9 9 9 9\ncpu0 9 9 9 9 9 9 9 9 9 9\ncpu1 1 2 3 1000 1000 4 5 6 1 1\ncpu2 10 0 0 50\ncpux 7\nintr 5\n",
            ),
            ("proc/7/stat", "7 (a b) c) S 1 1 1 0 -1 0 0 0 0 0 120 30 0 0 20"),
        ]);
        let sources = machine.sources();
        assert_eq!(of_cores(&sources), (ms(250), ms(60), 2));
        assert_eq!(of_process(&sources, 7), Some(ms(1500)));
        assert_eq!(of_process(&sources, 8), None);
        machine.put("proc/stat", "cpu1 99999999999999999999 -1 x\n");
        assert_eq!(of_cores(&sources), (ms(0), ms(0), 1));
    }

    /// On this machine, whatever it is.
    #[test]
    fn counters_of_this_process_grow() {
        let sources = Sources::of_this_machine();
        let began = Counters::read(&sources, Peer::Elsewhere);
        while Counters::read(&sources, Peer::Elsewhere).ours < began.ours.map(|ours| ours + ms(5)) {}
        let ended = Counters::read(&sources, Peer::Elsewhere);
        assert!(
            ended.at > began.at && ended.worked >= began.worked,
            "{began:?} {ended:?}"
        );
        assert!(Counters::read(&sources, Peer::Child(std::process::id())).ours >= ended.ours);
        assert_eq!(Counters::read(&sources, Peer::Here).ours, None);
    }
}
