//! Checks of this machine, its devices and the test for conditions that distort results.
//!
//! A command that measures calls it before and after, and prints the warnings on stderr:
//!
//! ```text
//! let sources = Sources::of_this_machine();
//! let subject = Subject::of(name, link, Port::of_context(&context));   // and the test's parameters
//! warnings.extend(diagnose::before(&sources, &subject));               // reads files, busy-polls for 20 ms
//! let monitor = NoiseMonitor::begin(&sources, peer);
//! …                                                                    // the test
//! warnings.extend(diagnose::after(&monitor, &Measured { … }));
//! ```
//!
//! [`Sources`] are the files it reads, so that a test can make up a machine; each other module has
//! the checks of one area, as functions from findings to warnings. `command` is
//! `doorbell diagnose`. [`Code`] has the table of the codes.

mod command;
mod cpu;
mod location;
mod memlock;
mod noise;
mod port;
mod samples;
mod sources;

use crate::report::{Code, LinkKind, PERCENTILES, Row, Warning};

pub(crate) use command::run;
pub(crate) use noise::{NoiseMonitor, Peer};
pub(crate) use port::Port;
pub(crate) use sources::Sources;

#[derive(Clone, Debug)]
pub(crate) struct Subject {
    pub(crate) device: String,
    pub(crate) link: LinkKind,
    pub(crate) port: Option<Port>,
    /// The GID index given; `None` for the best.
    pub(crate) gid_index: Option<u32>,
    /// The path MTU given; `None` for the port's.
    pub(crate) mtu_bytes: Option<u32>,
    /// The most memory that the test registers at this end.
    pub(crate) registers_bytes: u64,
    pub(crate) spinning: usize,
}

impl Subject {
    /// A test on this device, without special parameters and with one thread.
    pub(crate) fn of(device: impl Into<String>, link: LinkKind, port: Option<Port>) -> Subject {
        Subject {
            device: device.into(),
            link,
            port,
            gid_index: None,
            mtu_bytes: None,
            registers_bytes: 0,
            spinning: 1,
        }
    }
}

/// The warnings before a test. Busy-polls for 20 ms to measure jitter.
pub(crate) fn before(sources: &Sources, subject: &Subject) -> Vec<Warning> {
    let mut warnings = Vec::new();
    if subject.link != LinkKind::Hardware {
        warnings.push(Warning::not_hardware(subject.link));
    }
    warnings.extend(standing(sources, subject));
    warnings.extend(of_present_load(sources));
    warnings
}

/// The warnings that do not depend on the test, for a server that does not know its client yet.
pub(crate) fn standing(sources: &Sources, subject: &Subject) -> Vec<Warning> {
    let mut warnings = of_machine(sources, subject.spinning);
    warnings.extend(of_device(sources, subject));
    warnings
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Measured<'a> {
    /// The fewest samples of a size whose percentiles are shown; `None` where none are.
    pub(crate) samples: Option<u64>,
    /// The percentiles that are shown: names, and quantiles in order.
    pub(crate) percentiles: &'a [(&'a str, f64)],
    /// For each size the bytes, and a value per repeat.
    pub(crate) repeats: Vec<(u64, &'a [f64])>,
}

impl<'a> Measured<'a> {
    pub(crate) fn of(rows: &'a [Row]) -> Measured<'a> {
        let samples = rows.iter().filter_map(|row| match row {
            Row::Latency(row) => Some(row.iterations),
            Row::Bandwidth(_) => None,
        });
        let repeats = rows.iter().map(|row| match row {
            Row::Latency(row) => (row.bytes, row.lat_samples_ns.as_slice()),
            Row::Bandwidth(row) => (row.bytes, row.bw_samples_bytes_per_s.as_slice()),
        });
        Measured {
            samples: samples.min(),
            percentiles: &PERCENTILES,
            repeats: repeats.collect(),
        }
    }
}

pub(crate) fn after(monitor: &NoiseMonitor, measured: &Measured<'_>) -> Vec<Warning> {
    let mut warnings = monitor.evaluate();
    let samples = measured.samples;
    warnings.extend(samples.and_then(|samples| samples::few(samples, measured.percentiles)));
    warnings.extend(samples::spread(measured.repeats.iter().copied()));
    warnings
}

pub(crate) fn of_machine(sources: &Sources, spinning: usize) -> Vec<Warning> {
    let mut warnings = Vec::new();
    if cfg!(debug_assertions) {
        warnings
            .push(Code::DebugBuild.warning("this is a debug build: build with --release before you believe a figure"));
    }
    if let Some(root) = sources.fake() {
        warnings.push(Code::FakedMachine.warning(format!(
            "the diagnosis of this machine is read from {}, not from its own files: unset DOORBELL_DIAGNOSE_ROOT",
            root.display()
        )));
    }
    warnings.extend(cpu::settings(sources, spinning));
    warnings
}

fn of_device(sources: &Sources, subject: &Subject) -> Vec<Warning> {
    let device = subject.device.as_str();
    // A userspace device may have the name of a device in sysfs.
    let is_system = matches!(subject.link, LinkKind::Hardware | LinkKind::KernelSoft) && sources::is_file_name(device);
    let mut warnings = Vec::new();
    if let Some(port) = &subject.port {
        let wanted = port::PortUse {
            device,
            is_system,
            gid_index: subject.gid_index,
            mtu_bytes: subject.mtu_bytes,
        };
        warnings.extend(port::of_port(sources, port, &wanted));
    }
    if is_system {
        let rate = subject.port.as_ref().and_then(|port| port.bits_per_s);
        warnings.extend(location::of_device(sources, device, rate));
        warnings.extend(memlock::limit(sources, subject.registers_bytes));
    }
    warnings
}

fn of_present_load(sources: &Sources) -> Vec<Warning> {
    // A core reports its frequency under load only after it has worked.
    let jitter = noise::probe();
    jitter.into_iter().chain(cpu::frequency(sources)).collect()
}

#[cfg(test)]
mod tests {
    use super::sources::fake::FakeMachine;
    use super::*;

    fn subject(link: LinkKind) -> Subject {
        let port = Port {
            mtus_bytes: Some((1024, 4096)),
            ..Port::default()
        };
        Subject {
            registers_bytes: 1 << 30,
            ..Subject::of("mlx5_0", link, Some(port))
        }
    }

    fn machine() -> FakeMachine {
        let machine = FakeMachine::with([
            ("proc/self/limits", "Max locked memory 65536 65536 bytes\n"),
            ("sys/devices/pci0000:00/0000:00:01.0/iommu_group/type", "DMA\n"),
        ]);
        machine.link(
            "sys/class/infiniband/mlx5_0/device",
            "sys/devices/pci0000:00/0000:00:01.0",
        );
        machine
    }

    fn codes(warnings: &[Warning]) -> Vec<Code> {
        warnings.iter().map(|warning| warning.code).collect()
    }

    #[test]
    fn only_system_devices_are_checked_in_sysfs() {
        let machine = machine();
        let of = |link| codes(&of_device(&machine.sources(), &subject(link)));
        assert_eq!(of(LinkKind::Hardware), [Code::Mtu, Code::Iommu, Code::Memlock]);
        assert_eq!(of(LinkKind::KernelSoft), [Code::Mtu, Code::Iommu, Code::Memlock]);
        assert_eq!(of(LinkKind::SoftUdp), [Code::Mtu]);
        assert_eq!(of(LinkKind::SoftLocal), [Code::Mtu]);
    }

    #[test]
    fn a_name_with_a_path_is_no_system_device() {
        let machine = machine();
        for name in ["../infiniband/mlx5_0", "", ".."] {
            let subject = Subject::of(name, LinkKind::Hardware, None);
            assert_eq!(of_device(&machine.sources(), &subject), [], "{name}");
        }
    }

    #[test]
    fn results_of_a_test_are_checked() {
        let monitor = NoiseMonitor::begin(&machine().sources(), Peer::Elsewhere);
        let of = |samples, figures| {
            let measured = Measured {
                samples,
                percentiles: &PERCENTILES,
                repeats: vec![(64, figures)],
            };
            let found = codes(&after(&monitor, &measured));
            [Code::FewSamples, Code::Spread].map(|code| found.contains(&code))
        };
        assert_eq!(of(Some(99_999), &[1.0, 2.0]), [true, true]);
        assert_eq!(of(Some(100_000), &[2.0, 2.0]), [false, false]);
        assert_eq!(of(None, &[1.0]), [false, false]);
    }

    #[test]
    fn software_devices_and_fake_machines_are_reported() {
        let machine = machine();
        let found = codes(&before(&machine.sources(), &subject(LinkKind::SoftUdp)));
        assert!(
            found.contains(&Code::NotHardware) && found.contains(&Code::FakedMachine),
            "{found:?}"
        );
        let found = codes(&before(&machine.sources(), &subject(LinkKind::Hardware)));
        assert!(
            !found.contains(&Code::NotHardware) && found.contains(&Code::Iommu),
            "{found:?}"
        );
        assert!(!codes(&of_machine(&Sources::of_this_machine(), 1)).contains(&Code::FakedMachine));
        assert!(codes(&of_machine(&Sources::of_this_machine(), usize::MAX)).contains(&Code::FewCores));
    }
}
