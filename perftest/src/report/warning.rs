//! Warnings: caveats of a result, as values with advice.
//!
//! [`Code`] is the table of the codes with their conditions, for `doorbell diagnose --codes` and
//! docs/book/src/diagnosis.md; [`crate::diagnose`] checks most of them.

use std::fmt;

use super::{LinkKind, ReportedWarning};
use crate::failure::one_line;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Warning {
    pub(crate) code: Code,
    /// The finding and the advice, in one line.
    message: String,
}

impl Warning {
    pub(crate) fn not_hardware(link: LinkKind) -> Warning {
        let what = match link {
            // Some tests warn before they know whether the peer is on this host.
            LinkKind::SoftUdp => "the userspace device is",
            LinkKind::SoftLocal => "the userspace device between processes of this host is",
            LinkKind::KernelSoft | LinkKind::Hardware => "a software device of the kernel is",
        };
        Code::NotHardware.warning(format!(
            "{what} measured, not hardware: name an adapter with --device to measure one"
        ))
    }

    pub(crate) fn faults(faults: &str) -> Warning {
        Code::Faults.warning(format!(
            "faults are injected ({faults}): the figures measure recovery, not the device"
        ))
    }

    /// GPU memory is staged through the host, at this end or the other. `target`: whether the
    /// target of a WRITE lies there, whose incoming data is never copied.
    pub(crate) fn staged(target: bool) -> Warning {
        let but = if target {
            ", but for those out of the mirror that the peer writes: that end does not know when"
        } else {
            ""
        };
        Code::Staged.warning(format!(
                "GPU memory is staged through the host, and its copies are in the figures (doorbell gpu says what the better paths lack){but}"
            ))
    }

    /// Every byte was filled and checked during the measurement.
    pub(crate) fn verifying() -> Warning {
        Code::Verifying
            .warning("--verify fills and checks every byte while the clock runs: leave it out to measure speed")
    }

    /// The processor's counter drifted by this fraction.
    pub(crate) fn clock_drift(drift: f64) -> Warning {
        Code::ClockDrift.warning(format!(
                "the processor's counter was off by {:.2} % while a size was measured, and clock_gettime is used from there on: give --clock system, and measure again",
                drift * 100.0
            ))
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<&Warning> for ReportedWarning {
    fn from(warning: &Warning) -> ReportedWarning {
        ReportedWarning {
            code: warning.code.name().to_owned(),
            message: warning.message.clone(),
        }
    }
}

/// Defines [`Code`] with the table of each code: name, what is checked, when it warns, advice.
macro_rules! codes {
    ($($(#[$doc:meta])* $code:ident = $name:literal, $checks:literal, $condition:literal, $todo:literal;)*) => {
        /// The code of a warning. The names are part of the JSON, and stable.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
        pub(crate) enum Code {
            $($(#[$doc])* $code,)*
        }

        impl Code {
            pub(crate) const ALL: &[Code] = &[$(Code::$code,)*];

            pub(crate) fn name(self) -> &'static str {
                match self { $(Code::$code => $name,)* }
            }

            /// A warning of this code. Control characters in the message are removed, so that it is
            /// one line.
            pub(crate) fn warning(self, message: impl AsRef<str>) -> Warning {
                Warning {
                    code: self,
                    message: one_line(message.as_ref()),
                }
            }

            /// What is checked, when it warns, and the advice.
            pub(crate) fn explanation(self) -> [&'static str; 3] {
                match self { $(Code::$code => [$checks, $condition, $todo],)* }
            }
        }
    };
}

codes! {
    DebugBuild = "debug-build",
        "how the command was built",
        "without optimisation",
        "`cargo build --release`";
    FakedMachine = "faked-machine",
        "`DOORBELL_DIAGNOSE_ROOT`",
        "it is set: /sys and /proc of a folder are read, for tests of the diagnosis itself",
        "unset it";
    FewCores = "few-cores",
        "the cores that the process may use",
        "fewer than the busy-polling threads of the test on this machine",
        "more cores (`taskset`, the container's limit), or the ends on two machines";
    CpuGovernor = "cpu-governor",
        "`scaling_governor` of each core that the process may use",
        "any is not `performance`",
        "`cpupower frequency-set -g performance`";
    CpuFrequencyCapped = "cpu-frequency-capped",
        "`scaling_max_freq` and `cpuinfo_max_freq` of those cores",
        "a core's limit is below what it can do",
        "`cpupower frequency-set -u` with the frequency it names";
    CpuFrequency = "cpu-frequency",
        "`scaling_cur_freq` of the core that the test is on, after 20 ms of busy-polling, against `base_frequency`, or where there is none `cpuinfo_max_freq`",
        "below 95 % of the base, or 67 % of the maximum",
        "the governor; cooling and power limits (`turbostat`, the BMC)";
    Load = "load",
        "the load average over a minute, before the test",
        "above the number of cores",
        "wait, or stop what `top` shows";
    Jitter = "jitter",
        "gaps of more than 10 µs in 20 ms of reading the clock before the test",
        "they exceed 1 % of that time in total, or one is over 1 ms",
        "idle cores for the test (`isolcpus=`, `nohz_full=`, interrupts moved away); a hypervisor that does not share them";
    NotHardware = "not-hardware",
        "what carries the packets",
        "it is no adapter",
        "`--device` with one of `doorbell devices`";
    Faults = "faults",
        "`--drop` and its like, `DOORBELL_FAULTS`",
        "any is set",
        "leave them out to measure speed";
    PortNotActive = "port-not-active",
        "the port's state",
        "it is not active",
        "the cable; `ip link set DEV up`; on InfiniBand the subnet manager (`sminfo`)";
    Mtu = "mtu",
        "`active_mtu` and `max_mtu` of the port; on RoCE the MTU of its interface",
        "the port could have a larger one",
        "`ip link set dev DEV mtu 4200` on both hosts, and on the switches; on InfiniBand the partition's MTU at the subnet manager";
    PathMtu = "path-mtu",
        "the requested path MTU",
        "it is below the port's",
        "leave `--mtu` (`-m`) out";
    GidRoceV1 = "gid-roce-v1",
        "the type of the GID that the test uses (`gid_attrs/types`)",
        "RoCE v1, which is not routed and is often slower in switches",
        "`--gid-index` (`-x`) with the RoCE v2 entry that it names, or an address for the interface";
    GidLinkLocal = "gid-link-local",
        "the address of that GID",
        "link-local, where the table has a routable one of the same type",
        "`--gid-index` (`-x`) with the entry that it names";
    GidLoopback = "gid-loopback",
        "the address of that GID, of a system device",
        "a loopback address",
        "an address for the interface, or another GID";
    NumaCpus = "numa-cpus",
        "`numa_node` of the adapter, and the nodes of the cores that the process may use",
        "any of these is another node's",
        "`numactl --cpunodebind=N --membind=N`, or `taskset -c` with the cores that it names";
    NumaMemory = "numa-memory",
        "`Mems_allowed_list`, and policies in `/proc/self/numa_maps`",
        "memory may not come from the adapter's node, or is bound to another",
        "`numactl --membind=N`, or the container's `cpuset.mems`";
    PcieLink = "pcie-link",
        "`current_link_speed`, `current_link_width` of the adapter against `max_link_speed`, `max_link_width`",
        "either is less",
        "seat it again, or move it to a slot that is wide and fast enough; see the BIOS for bifurcation and link speed";
    PcieBandwidth = "pcie-bandwidth",
        "the slowest PCIe link between the host bridge and the adapter (lanes × rate × line code) against the port's rate",
        "less than the port's rate: no test can reach it",
        "another slot";
    Iommu = "iommu",
        "`iommu_group/type` of the adapter",
        "`DMA` or `DMA-FQ`: every address that it uses is translated",
        "`iommu=pt` on the kernel's command line, where the host is trusted";
    Memlock = "memlock",
        "`Max locked memory` in `/proc/self/limits`, for system devices, without `CAP_IPC_LOCK`",
        "less than the test registers (`doorbell diagnose`: than the largest default test, 256 MiB)",
        "`ulimit -l unlimited`, or `* - memlock unlimited` in /etc/security/limits.conf; `LimitMEMLOCK=infinity` of a service";
    Staged = "staged",
        "how GPU memory is reached",
        "by copies through the host",
        "`doorbell gpu` says what the better paths lack";
    Verifying = "verifying",
        "`--verify`",
        "it is set",
        "leave it out to measure speed";
    FewSamples = "few-samples",
        "how many round trips each percentile rests on",
        "fewer than ten lie above it: n < 10 ÷ (1 − q)",
        "`-n` with the number it names, or `-D`";
    ClockDrift = "clock-drift",
        "the processor's counter against `clock_gettime`, over each size",
        "they differ by more than 0.1 %",
        "`--clock system`";
    Preempted = "preempted",
        "involuntary context switches during the test (`getrusage`), of this end's threads",
        "more than ten, and more than a hundred a second",
        "stop other programs; `taskset -c` with cores of its own, `chrt -f 1`";
    BusyMachine = "busy-machine",
        "processor time on the cores that the process may use (`/proc/stat`), less that of both ends, in tests of 0.2 s and more; not when the peer is another command of this host",
        "other programs used more than half a core and an eighth of these cores",
        "stop what `top` shows";
    Steal = "steal",
        "stolen time of those cores during the test (`/proc/stat`)",
        "over 1 % of the time that they worked, and 20 ms at least",
        "a host that is not shared, or cores that are the guest's alone";
    Spread = "spread",
        "the averages (medians of latencies) of `--repeat`, per size",
        "their coefficient of variation is over 5 %",
        "find out what else runs; judge by the confidence interval, with more repeats";
}

/// The table of docs/book/src/diagnosis.md.
pub(crate) fn table() -> String {
    let mut lines = vec!["| code | checked | warns when | what to do |\n|---|---|---|---|".to_owned()];
    lines.extend(Code::ALL.iter().map(|code| {
        let [checks, condition, what] = code.explanation();
        format!("| `{}` | {checks} | {condition} | {what} |", code.name())
    }));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn codes_are_distinct_and_scriptable() {
        let mut names: Vec<&str> = Code::ALL.iter().map(|code| code.name()).collect();
        for name in &names {
            assert!(
                name.bytes()
                    .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-'),
                "{name}"
            );
        }
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Code::ALL.len());
    }

    #[test]
    fn the_document_has_the_table() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/book/src/diagnosis.md");
        let document = fs::read_to_string(file).unwrap();
        let table = table();
        assert!(
            document.contains(&format!("<!-- begin codes -->\n\n{table}\n\n<!-- end codes -->")),
            "docs/book/src/diagnosis.md has to have, between its marks, what `doorbell diagnose --codes` prints:\n{table}"
        );
    }

    #[test]
    fn a_warning_is_one_line_and_two_keys() {
        let warning = Code::CpuGovernor.warning("a\nb\u{1b}[2J");
        assert_eq!(
            serde_json::to_string(&ReportedWarning::from(&warning)).unwrap(),
            r#"{"code":"cpu-governor","message":"a b [2J"}"#
        );
    }
}
