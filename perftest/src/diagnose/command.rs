//! `doorbell diagnose`: the warnings that a test on a device would print, without a test.
//!
//! System devices are queried through the system's library, else through sysfs. Userspace devices
//! are checked only by name, since all that concerns them concerns the machine.

use std::thread;
use std::time::Duration;

use doorbell_verbs::{Context, Library};
use serde::Serialize;

use super::sources::is_file_name;
use super::{NoiseMonitor, Peer, Port, Sources, Subject, of_device, of_machine, of_present_load};
use crate::cli::{DiagnoseArgs, SoftArgs};
use crate::device::{self, Side, Soft};
use crate::failure::{Failure, one_line};
use crate::plan::MEMORY_BUDGET;
use crate::report::{self, Code, LinkKind, ReportedWarning, Warning};

/// How long the machine is observed for the activity of others: the kernel's counters have a
/// resolution of 10 ms.
const OBSERVATION: Duration = Duration::from_millis(300);
/// The subject of findings about no particular device.
const MACHINE: &str = "machine";

#[derive(Debug, Serialize)]
struct Diagnosis {
    devices: Vec<String>,
    warnings: Vec<Finding>,
}

#[derive(Debug, Serialize)]
struct Finding {
    /// The device that it concerns, or `machine`.
    about: String,
    #[serde(flatten)]
    warning: ReportedWarning,
}

/// # Errors
/// [`Failure::Usage`] when there is no such device or code; [`Failure::Test`] with `--strict` when
/// there is a warning, and when stdout cannot be written.
pub(crate) fn run(args: &DiagnoseArgs) -> Result<(), Failure> {
    if args.codes {
        return report::print_line(&report::warning_table());
    }
    let ignored = args
        .ignore
        .iter()
        .map(|name| code(name))
        .collect::<Result<Vec<Code>, Failure>>()?;
    let sources = Sources::of_this_machine();
    let subjects = subjects(&sources, args)?;
    let about = |name: &str, warnings: &[Warning]| {
        let name = one_line(name);
        warnings
            .iter()
            .filter(|warning| !ignored.contains(&warning.code))
            .map(|warning| Finding {
                about: name.clone(),
                warning: ReportedWarning::from(warning),
            })
            .collect::<Vec<_>>()
    };
    let mut warnings = about(MACHINE, &of_machine(&sources, 1));
    let monitor = NoiseMonitor::begin(&sources, Peer::Elsewhere);
    thread::sleep(OBSERVATION);
    warnings.extend(about(MACHINE, &monitor.evaluate()));
    warnings.extend(about(MACHINE, &of_present_load(&sources)));
    for subject in &subjects {
        warnings.extend(about(&subject.device, &of_device(&sources, subject)));
    }
    let diagnosis = Diagnosis {
        devices: subjects.iter().map(|subject| one_line(&subject.device)).collect(),
        warnings,
    };
    if args.json {
        report::print_result(&diagnosis)?;
    } else {
        report::print_line(&text(&diagnosis))?;
    }
    match diagnosis.warnings.len() {
        0 => Ok(()),
        1 if args.strict => Err(Failure::test("1 warning (--ignore CODE leaves it out)")),
        found if args.strict => Err(Failure::test(format!(
            "{found} warnings (--ignore CODE,… leaves some out)"
        ))),
        _ => Ok(()),
    }
}

fn code(name: &str) -> Result<Code, Failure> {
    let found = Code::ALL.iter().copied().find(|code| code.name() == name);
    found.ok_or_else(|| {
        Failure::usage(format!(
            "no warning has the code '{}': doorbell diagnose --codes lists them",
            one_line(name)
        ))
    })
}

fn text(diagnosis: &Diagnosis) -> String {
    let mut lines = vec![format!("{:<12} {:<20} what", "#about", "code")];
    lines.extend(
        diagnosis
            .warnings
            .iter()
            .map(|Finding { about, warning }| format!("{about:<12} {:<20} {}", warning.code, warning.message)),
    );
    if diagnosis.warnings.is_empty() {
        let checked: Vec<&str> = std::iter::once(MACHINE)
            .chain(diagnosis.devices.iter().map(String::as_str))
            .collect();
        lines.push(format!("# no warnings; checked {}", checked.join(", ")));
    }
    lines.join("\n")
}

fn subjects(sources: &Sources, args: &DiagnoseArgs) -> Result<Vec<Subject>, Failure> {
    // This machine's library does not concern the folder of another machine.
    let library = match sources.fake() {
        None => Library::system().ok(),
        Some(_) => None,
    };
    let of_sysfs = sources.names("sys/class/infiniband");
    let system = |name: &str| system_subject(sources, name, library.as_ref());
    let Some(named) = &args.device else {
        let of_library = library.as_ref().and_then(|library| library.devices().ok());
        let mut names: Vec<String> = of_library.into_iter().flatten().map(|device| device.name).collect();
        names.extend(of_sysfs);
        names.sort();
        names.dedup();
        return Ok(names.iter().map(|name| system(name)).collect());
    };
    let soft = Soft::configured(&args.soft, 0, Side::Single)?;
    if soft.has(named) {
        let context = soft.library()?.open(named).map_err(|e| device::explain(named, &e))?;
        return Ok(vec![subject(named, LinkKind::SoftUdp, Port::of_context(&context))]);
    }
    if SoftArgs::is_set(&args.soft) {
        return Err(device::not_userspace(named));
    }
    let opened: Option<Context> = library.as_ref().and_then(|library| library.open(named).ok());
    if opened.is_none() && !(is_file_name(named) && of_sysfs.contains(named)) {
        let there: Vec<String> = of_sysfs.iter().map(|name| one_line(name)).collect();
        let there = there.iter().map(String::as_str).chain(soft.names());
        return Err(Failure::usage(format!(
            "no device '{}': there is {}",
            one_line(named),
            there.collect::<Vec<_>>().join(", ")
        )));
    }
    Ok(vec![system(named)])
}

fn system_subject(sources: &Sources, name: &str, library: Option<&Library>) -> Subject {
    let context = library.and_then(|library| library.open(name).ok());
    let port = context
        .and_then(|context| Port::of_context(&context))
        .or_else(|| Port::of_sysfs(sources, name));
    subject(name, device::of_system_device(name), port)
}

fn subject(name: &str, link: LinkKind, port: Option<Port>) -> Subject {
    Subject {
        registers_bytes: MEMORY_BUDGET,
        ..Subject::of(name, link, port)
    }
}
