//! A classic tool from its command line to its exit status.

use std::env;
use std::process::ExitCode;

use doorbell_gpudirect::Path;
use doorbell_verbs::LinkLayer;

use super::control::TestStart;
use super::options::{self, Request};
use super::printer::Printer;
use super::settings::{Cuda, Settings, Transport};
use super::tool::{Kind, Tool, Verb};
use super::{bw, getopt, help, lat};
use crate::cli::SoftArgs;
use crate::device::{self, Device, Gpu, GpuSelector, Reach};
use crate::diagnose::{self, Port, Sources, Subject};
use crate::failure::{Failure, one_line};
use crate::interrupt::Interrupt;
use crate::report::{Code, Warning, print_line};

pub(crate) fn main(tool: Tool) -> ExitCode {
    match run(tool) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("{}: {failure}", tool.name());
            failure.exit_code()
        }
    }
}

fn run(tool: Tool) -> Result<(), Failure> {
    let arguments: Vec<String> = env::args_os()
        .skip(1)
        .map(|argument| {
            argument
                .into_string()
                .map_err(|argument| Failure::usage(format!("'{}' is not UTF-8", one_line(&argument.to_string_lossy()))))
        })
        .collect::<Result<_, _>>()?;
    match options::interpret(tool, getopt::parse(tool, arguments)?)? {
        Request::Help => print_line(help::text(tool).trim_end()),
        Request::Version => print_line(&help::version()),
        Request::Test(settings) => test(*settings),
    }
}

fn test(mut settings: Settings) -> Result<(), Failure> {
    let interrupt = Interrupt::catch()?;
    let mut device = open(&settings)?;
    if let Some(cuda) = &settings.cuda {
        device.gpu = Some(gpu(cuda, &device)?);
    }
    fit(&mut settings, &device)?;
    for warning in warnings(&settings, &device) {
        eprintln!("{}: warning: {warning}", settings.tool.name());
    }
    let mut printer = Printer::new(&settings)?;
    let start = TestStart {
        settings: &settings,
        device: &device,
        interrupt: &interrupt,
        printer: &mut printer,
    };
    let result = match settings.tool.kind {
        Kind::Bw => bw::run(start),
        Kind::Lat => lat::run(start),
    };
    match result {
        Ok(()) | Err(Failure::Interrupted) => printer.finish().and(result),
        Err(failure) => Err(failure),
    }
}

/// Opens the device of `-d`, or the first one whose port is active, or the userspace one.
fn open(settings: &Settings) -> Result<Device, Failure> {
    let names: Vec<String> = settings.device.iter().cloned().collect();
    let devices = device::open_all(&names, &SoftArgs::default(), 0, Reach::Elsewhere)?;
    devices
        .into_iter()
        .next()
        .ok_or_else(|| Failure::usage("there is no RDMA device: see doorbell devices"))
}

fn gpu(cuda: &Cuda, device: &Device) -> Result<Gpu, Failure> {
    let flag = match &cuda.gpu {
        GpuSelector::Number(number) => format!("--use_cuda {number}"),
        GpuSelector::Bus(id) => format!("--use_cuda_bus_id {}", one_line(id)),
    };
    let forced = cuda.dmabuf.then_some(Path::DmaBuf);
    Gpu::choose(&flag, &cuda.gpu, forced, &device.context)
}

/// Checks the settings against the port, and shortens messages to what a datagram carries.
fn fit(settings: &mut Settings, device: &Device) -> Result<(), Failure> {
    let name = device.context.name();
    let port = device.context.port(settings.device_port).map_err(|e| {
        Failure::usage(format!(
            "{name} has no port {}: {}",
            settings.device_port,
            one_line(&e.to_string())
        ))
    })?;
    if let Some(infiniband) = settings.infiniband
        && infiniband != (port.link_layer == LinkLayer::InfiniBand)
    {
        return Err(Failure::usage(format!(
            "port {} of {name} is {:?}: --force-link names another kind",
            settings.device_port, port.link_layer
        )));
    }
    if settings.group.is_some() && port.link_layer == LinkLayer::InfiniBand {
        return Err(Failure::usage(format!(
            "-g: port {} of {name} is InfiniBand, where a group is joined at the subnet administrator: leave it out",
            settings.device_port
        )));
    }
    let active = port.active_mtu.bytes();
    if let Some(mtu) = settings.mtu
        && mtu > active
    {
        return Err(Failure::usage(format!(
            "-m {mtu} is more than port {} of {name} has now: {active}",
            settings.device_port
        )));
    }
    if settings.transport == Transport::Ud {
        let most = u64::from(settings.mtu.unwrap_or(active));
        if settings.all {
            settings.sizes.retain(|size| *size <= most);
        } else if settings.sizes.iter().any(|size| *size > most) {
            eprintln!(
                "{}: warning: a datagram carries at most the MTU: messages are of {most} B",
                settings.tool.name()
            );
            settings.sizes = vec![most];
        }
    }
    Ok(())
}

/// The warnings of the conditions under which this test measures.
fn warnings(settings: &Settings, device: &Device) -> Vec<Warning> {
    let subject = Subject {
        gid_index: settings.gid_index.map(u32::from),
        mtu_bytes: settings.mtu,
        ..Subject::of(device.context.name(), device.link, Port::of_context(&device.context))
    };
    let mut warnings = diagnose::before(&Sources::of_this_machine(), &subject);
    if device.gpu.as_ref().is_some_and(|gpu| !gpu.path.is_direct()) {
        warnings.push(Warning::staged(settings.tool.verb == Verb::Write));
    }
    warnings.extend(device.faults.as_deref().map(Warning::faults));
    let frequency = [Code::CpuGovernor, Code::CpuFrequencyCapped, Code::CpuFrequency];
    warnings.retain(|warning| !(settings.no_frequency_warning && frequency.contains(&warning.code)));
    warnings
}
