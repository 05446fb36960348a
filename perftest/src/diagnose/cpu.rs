//! Checks of the CPU: the frequency of its cores, and their number.
//!
//! Not checked, because they do not distort results: turbo off (steadier, and the maximum above is
//! then the lower one), and idle states (both ends busy-poll).

use std::num::NonZero;
use std::thread;

use super::sources::{Sources, list, show_list};
use crate::report::{Code, Warning};

/// A core below this percentage of its base frequency is slow; the reading itself is inexact.
const MIN_OF_BASE_PERCENT: u64 = 95;
/// The same of its maximum frequency, which all cores together may not reach.
const MIN_OF_MAXIMUM_PERCENT: u64 = 67;

pub(super) fn allowed(sources: &Sources) -> Vec<usize> {
    status(sources, "Cpus_allowed_list").map_or_else(Vec::new, |text| list(&text))
}

pub(super) fn status(sources: &Sources, key: &str) -> Option<String> {
    sources.lines("proc/self/status").into_iter().find_map(|line| {
        let value = line.strip_prefix(key)?.strip_prefix(':')?.trim();
        Some(value.to_owned())
    })
}

pub(super) fn settings(sources: &Sources, spinning: usize) -> Vec<Warning> {
    let cores = allowed(sources);
    let mut warnings = Vec::new();
    warnings.extend(few(usable(sources, &cores), spinning));
    warnings.extend(governor(sources, &cores));
    warnings.extend(capped(sources, &cores));
    warnings.extend(load(sources));
    warnings
}

/// How many of the cores it may use at a time, by the limits of its container on this machine.
fn usable(sources: &Sources, cores: &[usize]) -> usize {
    let limit = match sources.fake() {
        None => thread::available_parallelism().map_or(usize::MAX, NonZero::get),
        Some(_) => usize::MAX,
    };
    cores.len().min(limit)
}

fn few(have: usize, want: usize) -> Option<Warning> {
    (have > 0 && have < want).then(|| {
        Code::FewCores.warning(format!("{want} threads busy-poll on {have} cores (oversubscribed): give the test {want} cores, or run the ends on two machines"))
    })
}

fn attribute(core: usize, name: &str) -> String {
    format!("sys/devices/system/cpu/cpu{core}/cpufreq/{name}")
}

/// No warning on a machine without a governor (a guest, a container).
fn governor(sources: &Sources, cores: &[usize]) -> Option<Warning> {
    let slow = |core: &usize| {
        let name = sources.text(&attribute(*core, "scaling_governor"))?;
        (name != "performance").then_some((*core, name))
    };
    let found: Vec<(usize, String)> = cores.iter().filter_map(slow).collect();
    let name = &found.first()?.1;
    let on = if found.len() == cores.len() {
        String::new()
    } else {
        let cores: Vec<usize> = found.iter().map(|(core, _)| *core).collect();
        format!(" of cores {}", show_list(&cores))
    };
    Some(Code::CpuGovernor.warning(format!(
            "the CPU frequency governor{on} is '{name}': figures vary until it is 'performance' (cpupower frequency-set -g performance)"
        )))
}

fn capped(sources: &Sources, cores: &[usize]) -> Option<Warning> {
    let limits = |core: &usize| {
        let limit_khz: u64 = sources.number(&attribute(*core, "scaling_max_freq"))?;
        let most_khz: u64 = sources.number(&attribute(*core, "cpuinfo_max_freq"))?;
        (limit_khz < most_khz).then_some((*core, limit_khz, most_khz))
    };
    let found: Vec<(usize, u64, u64)> = cores.iter().filter_map(limits).collect();
    let (core, limit_khz, most_khz) = *found.first()?;
    let on = match found.len() {
        1 => format!("core {core}"),
        _ => show_list(&found.iter().map(|(core, ..)| *core).collect::<Vec<_>>()).replacen("", "cores ", 1),
    };
    Some(Code::CpuFrequencyCapped.warning(format!(
        "the frequency of {on} is limited to {} of {}: cpupower frequency-set -u {most_khz}kHz",
        show_khz(limit_khz),
        show_khz(most_khz)
    )))
}

fn load(sources: &Sources) -> Option<Warning> {
    let load: f64 = sources.text("proc/loadavg")?.split(' ').next()?.parse().ok()?;
    let cores = sources
        .text("sys/devices/system/cpu/online")
        .map(|text| list(&text).len())?;
    (cores > 0 && load > cores as f64).then(|| {
        Code::Load.warning(format!(
            "the load of the last minute is {load:.1} on {cores} cores: wait, or stop what top shows"
        ))
    })
}

/// The frequency of this thread's core; to be called after busy-polling for a while.
pub(super) fn frequency(sources: &Sources) -> Option<Warning> {
    let core = current(sources)?;
    let now_khz: u64 = sources.number(&attribute(core, "scaling_cur_freq"))?;
    let base = sources.number::<u64>(&attribute(core, "base_frequency"));
    let most = sources.number::<u64>(&attribute(core, "cpuinfo_max_freq"));
    let (what, of_khz, percent) = match (base, most) {
        (Some(base_khz), _) => ("base frequency", base_khz, MIN_OF_BASE_PERCENT),
        (None, Some(most_khz)) => ("maximum", most_khz, MIN_OF_MAXIMUM_PERCENT),
        (None, None) => return None,
    };
    let slow = u128::from(now_khz) * 100 < u128::from(of_khz) * u128::from(percent);
    slow.then(|| {
        Code::CpuFrequency.warning(format!(
                "core {core}, which the test is on, runs at {} under load, its {what} is {}: set the governor (cpupower frequency-set -g performance), else check cooling and power limits (turbostat)",
                show_khz(now_khz),
                show_khz(of_khz)
            ))
    })
}

/// The core of this thread (proc_pid_stat(5), field 39). The name, in parentheses, may contain
/// anything.
fn current(sources: &Sources) -> Option<usize> {
    let stat = sources.text("proc/self/stat")?;
    stat.rsplit(')').next()?.split_whitespace().nth(36)?.parse().ok()
}

fn show_khz(khz: u64) -> String {
    format!("{:.2} GHz", khz as f64 / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnose::sources::fake::FakeMachine;

    const STATUS: (&str, &str) = (
        "proc/self/status",
        "Name:\tdoorbell\nCpus_allowed:\tc\nCpus_allowed_list:\t2-3\n",
    );

    fn codes(warnings: &[Warning]) -> Vec<Code> {
        warnings.iter().map(|warning| warning.code).collect()
    }

    #[test]
    fn few_cores_are_noticed() {
        let sources = FakeMachine::with([STATUS]);
        let few = |spinning| codes(&settings(&sources.sources(), spinning));
        assert_eq!((few(3), few(2)), (vec![Code::FewCores], vec![]));
    }

    #[test]
    fn a_machine_that_shows_nothing_has_no_warning() {
        let machine = FakeMachine::with([]);
        assert_eq!(settings(&machine.sources(), 64), []);
        assert_eq!(frequency(&machine.sources()), None);
    }

    #[test]
    fn a_slow_governor_is_noticed_where_the_process_may_run() {
        let machine = FakeMachine::with([STATUS]);
        let governor = |core| format!("sys/devices/system/cpu/cpu{core}/cpufreq/scaling_governor");
        machine.put(&governor(0), "powersave\n");
        machine.put(&governor(2), "performance\n");
        machine.put(&governor(3), "performance\n");
        assert_eq!(settings(&machine.sources(), 1), []);
        machine.put(&governor(3), "schedutil\n");
        let [warning] = &settings(&machine.sources(), 1)[..] else {
            panic!()
        };
        assert_eq!(warning.code, Code::CpuGovernor);
        assert!(warning.to_string().contains("of cores 3 is 'schedutil'"), "{warning}");
        machine.put(&governor(2), "power\nsave\u{1b}[1m");
        let text = settings(&machine.sources(), 1)[0].to_string();
        assert!(
            text.starts_with("the CPU frequency governor is 'power save [1m'")
                && text.contains("cpupower frequency-set -g performance"),
            "{text}"
        );
    }

    #[test]
    fn a_limited_frequency_is_noticed() {
        let machine = FakeMachine::with([STATUS]);
        for (core, limit) in [(2, "3700000"), (3, "2000000")] {
            machine.put(&attribute(core, "scaling_max_freq"), limit);
            machine.put(&attribute(core, "cpuinfo_max_freq"), "3700000\n");
        }
        let [warning] = &settings(&machine.sources(), 1)[..] else {
            panic!()
        };
        assert_eq!(
            (warning.code, warning.to_string().as_str()),
            (
                Code::CpuFrequencyCapped,
                "the frequency of core 3 is limited to 2.00 GHz of 3.70 GHz: cpupower frequency-set -u 3700000kHz"
            )
        );
        machine.put(&attribute(2, "scaling_max_freq"), "1");
        assert!(
            settings(&machine.sources(), 1)[0]
                .to_string()
                .contains("of cores 2-3 is")
        );
        for core in [2, 3] {
            machine.put(&attribute(core, "scaling_max_freq"), "3700000");
        }
        assert_eq!(settings(&machine.sources(), 1), []);
    }

    #[test]
    fn a_core_that_is_slow_now_is_noticed() {
        let fields = "S 1 ".to_owned() + &"0 ".repeat(34) + "3 0 0";
        let machine = FakeMachine::with([("proc/self/stat", format!("7 (a) b ( 9) {fields}").as_str())]);
        machine.put(&attribute(3, "cpuinfo_max_freq"), "4000000");
        for (now, slow) in [("3999999", false), ("2700000", false), ("2600000", true), ("x", false)] {
            machine.put(&attribute(3, "scaling_cur_freq"), now);
            let found = frequency(&machine.sources());
            assert_eq!(found.is_some(), slow, "{now}: {found:?}");
            assert!(found.is_none_or(|warning| {
                warning
                    .to_string()
                    .contains("core 3, which the test is on, runs at 2.60 GHz")
            }));
        }
        // The base frequency, which all cores can reach together, takes precedence.
        for (base, slow) in [("2500000", false), ("2800000", true)] {
            machine.put(&attribute(3, "scaling_cur_freq"), "2600000");
            machine.put(&attribute(3, "base_frequency"), base);
            assert_eq!(
                frequency(&machine.sources()).map(|w| w.code),
                slow.then_some(Code::CpuFrequency),
                "{base}"
            );
        }
    }

    #[test]
    fn a_high_load_is_noticed() {
        let machine = FakeMachine::with([("sys/devices/system/cpu/online", "0-3\n")]);
        for (load, high) in [
            ("3.99 1 1 2/120 99", false),
            ("4.25 1 1 2/120 99", true),
            ("nan", false),
            ("", false),
        ] {
            machine.put("proc/loadavg", load);
            assert_eq!(
                codes(&settings(&machine.sources(), 1)),
                if high { vec![Code::Load] } else { vec![] },
                "{load}"
            );
        }
    }
}
