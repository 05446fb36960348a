//! The device of a test: one of the system's library, or a userspace one.

mod gpu;
mod link_kind;
mod soft;

use doorbell_softroce_ibverbs::{api, process_group};
use doorbell_verbs::cm::{CmError, ConnectionManager};
use doorbell_verbs::{Context, DeviceError, Library, PortState};

use crate::cli::SoftArgs;
use crate::failure::{Failure, one_line};
use crate::report::LinkKind;

pub(crate) use gpu::{Gpu, GpuSelector, MemoryPlace};
pub(crate) use link_kind::of_system_device;
pub(crate) use soft::{Side, Soft, Variable, copy_mode_names, devices_of, explain};

/// The port a test uses.
pub(crate) const PORT: u8 = 1;

#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) context: Context,
    /// What carries its packets.
    pub(crate) link: LinkKind,
    /// The process group that it reaches by the shared-memory link, as a unique number.
    pub(crate) group: Option<u64>,
    /// The faults injected, if any.
    pub(crate) faults: Option<String>,
    /// The connection manager for it.
    pub(crate) manager: Manager,
    pub(crate) gpu: Option<Gpu>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Manager {
    /// The system's.
    System,
    /// That of this process's userspace devices.
    Own,
}

impl Manager {
    pub(crate) fn get(self) -> Result<ConnectionManager, CmError> {
        match self {
            Manager::System => ConnectionManager::system(),
            Manager::Own => Ok(ConnectionManager::new(&doorbell_softroce_rdmacm::API, api())),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Reach {
    Here,
    Elsewhere,
}

/// Opens the device that the command line names, or the default one: `soft0` when both ends run
/// here, else the first system device whose port is active, else `soft0`.
///
/// # Errors
/// [`Failure::Usage`] when there is no such device or options do not fit it; [`Failure::Test`] when
/// it cannot be opened.
pub(crate) fn open(
    named: Option<&str>,
    soft: &SoftArgs,
    seed: u64,
    side: Side,
    reach: Reach,
) -> Result<Device, Failure> {
    let soft_devices = Soft::configured(soft, seed, side)?;
    let soft_name = match named {
        Some(name) => soft_devices.has(name).then_some(name),
        None if reach == Reach::Here => Some("soft0"),
        None => None,
    };
    if let Some(name) = soft_name {
        return open_soft(soft_devices, name);
    }
    let name = match (named, reach) {
        (Some(name), _) => Some(name.to_owned()),
        (None, _) => first_active(),
    };
    match name {
        Some(name) => {
            if soft.is_set() {
                return Err(not_userspace(&name));
            }
            open_system(&name, &soft_devices)
        }
        None => open_soft(soft_devices, "soft0"),
    }
}

/// Opens several devices, for one process to spread its connections over; without names the default
/// one, as [`open`] does.
pub(crate) fn open_all(names: &[String], soft: &SoftArgs, seed: u64, reach: Reach) -> Result<Vec<Device>, Failure> {
    let soft_devices = Soft::configured(soft, seed, Side::Every)?;
    let named: Vec<String> = match names {
        [] if reach == Reach::Elsewhere => first_active().into_iter().collect(),
        names => names.to_vec(),
    };
    if named.is_empty() {
        return Ok(vec![open_soft(soft_devices, "soft0")?]);
    }
    if !named.iter().all(|name| soft_devices.has(name)) {
        return named
            .iter()
            .map(|name| {
                if soft.is_set() {
                    return Err(not_userspace(name));
                }
                open_system(name, &soft_devices)
            })
            .collect();
    }
    let faults: Vec<_> = named.iter().map(|name| soft_devices.faults(name)).collect();
    let library = soft_devices.library()?;
    let named = named.iter().zip(faults);
    named.map(|(name, faults)| opened(&library, name, faults)).collect()
}

/// The name of a device, its link, and the device if it could be opened.
type Opened = (String, LinkKind, Result<Context, String>);

/// Opens every device of the system's library, and every userspace one. A missing library is a
/// note.
///
/// # Errors
/// [`Failure::Test`] when the userspace devices are in use already.
pub(crate) fn open_each(soft: Soft, notes: &mut Vec<String>) -> Result<Vec<Opened>, Failure> {
    let mut all = Vec::new();
    match Library::system().and_then(|library| library.devices().map(|devices| (library, devices))) {
        Ok((library, devices)) => all.extend(devices.into_iter().map(|found| {
            let context = library.open(&found.name).map_err(|e| e.to_string());
            (found.name.clone(), of_system_device(&found.name), context)
        })),
        Err(e) => notes.push(format!("no system devices: {}", one_line(&e.to_string()))),
    }
    let names: Vec<String> = soft.names().into_iter().map(str::to_owned).collect();
    let library = soft.library()?;
    all.extend(names.into_iter().map(|name| {
        let context = library.open(&name).map_err(|e| explain(&name, &e).to_string());
        (name, LinkKind::SoftUdp, context)
    }));
    Ok(all)
}

pub(crate) fn not_userspace(name: &str) -> Failure {
    Failure::usage(format!(
        "{name} is not a userspace device: --soft-*, --pcap and faults are for those; use --device soft0 or leave them out"
    ))
}

fn open_soft(devices: Soft, name: &str) -> Result<Device, Failure> {
    let faults = devices.faults(name);
    opened(&devices.library()?, name, faults)
}

fn opened(library: &Library, name: &str, faults: Option<String>) -> Result<Device, Failure> {
    let context = library.open(name).map_err(|e| explain(name, &e))?;
    Ok(Device {
        context,
        link: LinkKind::SoftUdp,
        group: process_group(name),
        faults,
        manager: Manager::Own,
        gpu: None,
    })
}

fn open_system(name: &str, soft_devices: &Soft) -> Result<Device, Failure> {
    let library = Library::system().map_err(|e| {
        Failure::usage(format!(
            "no device '{}': there is {}, and the system has no RDMA library ({})",
            one_line(name),
            soft_devices.names().join(", "),
            one_line(&e.to_string())
        ))
    })?;
    let context = library.open(name).map_err(|e| match e {
        DeviceError::NoDevice { available: there, .. } => Failure::usage(format!(
            "no device '{}': there is {}",
            one_line(name),
            there
                .iter()
                .map(String::as_str)
                .chain(soft_devices.names())
                .collect::<Vec<_>>()
                .join(", ")
        )),
        other => Failure::test(one_line(&other.to_string())),
    })?;
    Ok(Device {
        context,
        link: of_system_device(name),
        group: None,
        faults: None,
        manager: Manager::System,
        gpu: None,
    })
}

/// The first device of the system's library with an active port; none without a library, a device
/// or permission.
fn first_active() -> Option<String> {
    let library = Library::system().ok()?;
    let devices = library.devices().ok()?;
    devices.into_iter().map(|device| device.name).find(|name| {
        library
            .open(name)
            .and_then(|context| context.port(PORT))
            .is_ok_and(|port| port.state == PortState::Active)
    })
}
