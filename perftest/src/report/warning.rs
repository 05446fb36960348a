//! What casts doubt on a figure, as values that say what to do about it.

use std::fmt;
use std::fs;
use std::path::Path;

use super::LinkKind;

/// A reason not to take a figure at face value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Warning {
    /// The device is not hardware.
    NotHardware(LinkKind),
    /// The command was built without optimisation.
    DebugBuild,
    /// More threads spin than there are cores for.
    FewCores {
        /// Cores that this process may use.
        have: usize,
        /// Threads that spin while the test runs.
        want: usize,
    },
    /// The CPU does not run at full speed.
    Governor(String),
    /// The packets were tampered with on purpose.
    Faults(String),
    /// Messages lie in GPU memory that the device does not reach, at this end or the other.
    Staged {
        /// Whether the target of a WRITE lies there, so that nobody copies what has come.
        target: bool,
    },
    /// Every byte was filled and checked while the clock ran.
    Verifying,
    /// There were too few messages for these percentiles, at some size.
    FewSamples(Vec<&'static str>),
    /// The processor's counter went wrong by so many percent.
    ClockDrift(String),
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Warning::NotHardware(LinkKind::SoftUdp) => {
                f.write_str("the userspace device over UDP is measured, not hardware: name an adapter with --device to measure one")
            }
            Warning::NotHardware(LinkKind::SoftLocal) => f.write_str(
                "the userspace device between processes of this host is measured, not hardware: name an adapter with --device to measure one",
            ),
            Warning::NotHardware(_) => {
                f.write_str("a software device of the kernel is measured, not hardware: name an adapter with --device to measure one")
            }
            Warning::DebugBuild => f.write_str("this is a debug build: build with --release before you believe a figure"),
            Warning::FewCores { have, want } => write!(
                f,
                "{want} threads spin on {have} cores and take turns: give the test {want} cores, or run the ends on two machines"
            ),
            Warning::Governor(name) => write!(
                f,
                "the CPU frequency governor is '{name}': figures vary until it is 'performance' (cpupower frequency-set -g performance)"
            ),
            Warning::Faults(faults) => write!(f, "faults are injected ({faults}): the figures measure recovery, not the device"),
            Warning::Staged { target } => {
                f.write_str("GPU memory is staged through the host, and its copies are in the figures (doorbell gpu says what the better paths lack)")?;
                if *target {
                    f.write_str(", but for those out of the mirror that the peer writes: that end does not know when")?;
                }
                Ok(())
            }
            Warning::ClockDrift(percent) => write!(
                f,
                "the processor's counter was off by {percent} % while a size was measured, and clock_gettime is used from there on: give --clock system, and measure again"
            ),
            Warning::FewSamples(percentiles) => write!(
                f,
                "{} stand on less than ten messages: raise -n, or give -D, until there are ten times as many as one in how many they are of",
                percentiles.join(", ")
            ),
            Warning::Verifying => f.write_str("--verify fills and checks every byte while the clock runs: leave it out to measure speed"),
        }
    }
}

/// What there is to say about this machine and build, for a test in which so many threads spin here.
pub(crate) fn of_this_machine(spinning: usize) -> Vec<Warning> {
    let mut warnings = Vec::new();
    if cfg!(debug_assertions) {
        warnings.push(Warning::DebugBuild);
    }
    if let Ok(have) = std::thread::available_parallelism()
        && have.get() < spinning
    {
        warnings.push(Warning::FewCores {
            have: have.get(),
            want: spinning,
        });
    }
    warnings.extend(governor(Path::new(
        "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
    )));
    warnings
}

/// A machine that shows no governor (a guest, a container) gives no cause for complaint.
fn governor(path: &Path) -> Option<Warning> {
    let name = fs::read_to_string(path).ok()?;
    let name = name.trim();
    (!name.is_empty() && name != "performance").then(|| Warning::Governor(crate::failure::one_line(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_cores_are_noticed() {
        let few = |warnings: Vec<Warning>| warnings.iter().any(|w| matches!(w, Warning::FewCores { .. }));
        assert!(few(of_this_machine(usize::MAX)));
        assert!(!few(of_this_machine(1)));
    }

    #[test]
    fn only_a_slow_governor_is_noticed() {
        let file = std::env::temp_dir().join(format!("doorbell-governor-{}", std::process::id()));
        fs::write(&file, "powersave\n").unwrap();
        assert_eq!(governor(&file), Some(Warning::Governor("powersave".into())));
        fs::write(&file, "performance\n").unwrap();
        assert_eq!(governor(&file), None);
        fs::remove_file(&file).unwrap();
        assert_eq!(governor(&file), None);
    }
}
