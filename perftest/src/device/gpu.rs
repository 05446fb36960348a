//! The GPU whose memory the messages of a test lie in.

use std::fmt;
use std::str::FromStr;

use doorbell_cuda::{Context, Device as CudaDevice, Driver};
use doorbell_gpudirect::{GpuMemory, GpuRegistration, Path};
use doorbell_verbs::{Local, ProtectionDomain};

use crate::failure::{Failure, one_line, refused};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum MemoryPlace {
    Host,
    /// Memory of the GPU with this ordinal.
    Gpu(usize),
}

impl FromStr for MemoryPlace {
    type Err = String;

    fn from_str(text: &str) -> Result<MemoryPlace, String> {
        match text.parse() {
            _ if text == "host" => Ok(MemoryPlace::Host),
            Ok(number) => Ok(MemoryPlace::Gpu(number)),
            Err(_) => Err(format!("'{text}' is no GPU: give its number, from 0, or host")),
        }
    }
}

impl fmt::Display for MemoryPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MemoryPlace::Host => f.write_str("host"),
            MemoryPlace::Gpu(number) => number.fmt(f),
        }
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum GpuSelector {
    /// By its ordinal in this process.
    Number(usize),
    /// By its PCI address.
    Bus(String),
}

impl GpuSelector {
    fn find(&self, driver: Driver) -> Result<CudaDevice, String> {
        let error = |e: doorbell_cuda::Error| one_line(&e.to_string());
        let wanted = match self {
            GpuSelector::Number(number) => return driver.device(*number).map_err(error),
            GpuSelector::Bus(id) => long_bus_id(id),
        };
        let mut known = Vec::new();
        for device in driver.devices().map_err(error)? {
            let id = device.pci_bus_id().map_err(error)?;
            if long_bus_id(&id) == wanted {
                return Ok(device);
            }
            known.push(id);
        }
        Err(format!("there is no such GPU: there is {}", known.join(", ")))
    }
}

/// A PCI address with its domain, in lower case: `0000:18:00.0`.
fn long_bus_id(id: &str) -> String {
    let id = id.to_ascii_lowercase();
    match id.matches(':').count() {
        1 => format!("0000:{id}"),
        // NVIDIA's tools print the domain with eight digits.
        _ => id
            .strip_prefix("0000")
            .filter(|rest| rest.find(':') == Some(4))
            .map_or(id.clone(), str::to_owned),
    }
}

/// A GPU, and how its memory is registered.
#[derive(Clone, Debug)]
pub(crate) struct Gpu {
    pub(crate) context: Context,
    pub(crate) number: usize,
    pub(crate) uuid: String,
    pub(crate) name: String,
    /// The best path that works, or the forced one.
    pub(crate) path: Path,
    forced: bool,
}

impl Gpu {
    /// # Errors
    /// [`Failure::Usage`] when there is no such GPU, or the environment forces an unknown path;
    /// [`Failure::Test`] when no path works.
    pub(crate) fn open(number: usize, device: &doorbell_verbs::Context) -> Result<Gpu, Failure> {
        Gpu::choose(&format!("--gpu {number}"), &GpuSelector::Number(number), None, device)
    }

    pub(crate) fn choose(
        flag: &str,
        which: &GpuSelector,
        forced: Option<Path>,
        device: &doorbell_verbs::Context,
    ) -> Result<Gpu, Failure> {
        const BYTES: usize = 64 << 10;
        let unusable = |reason: &str| Failure::usage(format!("{flag}: {}", one_line(reason)));
        let driver = Driver::load().map_err(|e| unusable(&e.to_string()))?;
        let found = which.find(driver).map_err(|e| unusable(&e))?;
        let identity = || Ok::<_, doorbell_cuda::Error>((found.context()?, found.uuid()?.to_string(), found.name()?));
        let (context, uuid, name) = identity().map_err(refused)?;
        // In the thread that measures: a current context makes each call slightly faster.
        context.make_current().map_err(refused)?;
        let memory = GpuMemory::alloc(&context, BYTES).map_err(refused)?;
        let pd: ProtectionDomain = device.protection_domain().map_err(refused)?;
        let registration = match forced {
            Some(path) => GpuRegistration::new(&pd).path(path),
            None => GpuRegistration::from_environment(&pd).map_err(|e| Failure::usage(one_line(&e.to_string())))?,
        };
        let path = registration.register(&memory, Local).map_err(refused)?.region().path();
        Ok(Gpu {
            context,
            number: found.ordinal(),
            uuid,
            name,
            path,
            forced: forced.is_some(),
        })
    }

    pub(crate) fn registration<'a>(&self, pd: &'a ProtectionDomain) -> Result<GpuRegistration<'a>, Failure> {
        if self.forced {
            return Ok(GpuRegistration::new(pd).path(self.path));
        }
        GpuRegistration::from_environment(pd).map_err(|e| Failure::usage(one_line(&e.to_string())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bus_id_has_many_spellings() {
        for id in ["3b:00.0", "0000:3B:00.0", "00000000:3b:00.0"] {
            assert_eq!(long_bus_id(id), "0000:3b:00.0", "{id}");
        }
        assert_eq!(long_bus_id("0001:3b:00.0"), "0001:3b:00.0");
    }
}
