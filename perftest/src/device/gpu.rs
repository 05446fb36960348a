//! The GPU whose memory the messages of a test lie in.

use std::fmt;
use std::str::FromStr;

use doorbell_cuda::{Context, Device as CudaDevice, Driver};
use doorbell_gpudirect::{GpuMemory, GpuRegistration, Path};
use doorbell_verbs::{Local, ProtectionDomain};

use crate::failure::{Failure, one_line};

/// Where the messages of one end lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    /// In the host's memory.
    Host,
    /// In that of this GPU, as this process counts them.
    Gpu(usize),
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Place, String> {
        match text.parse() {
            _ if text == "host" => Ok(Place::Host),
            Ok(number) => Ok(Place::Gpu(number)),
            Err(_) => Err(format!("'{text}' is no GPU: give its number, from 0, or host")),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Host => f.write_str("host"),
            Place::Gpu(number) => number.fmt(f),
        }
    }
}

/// How a GPU is named.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Which {
    /// By its number, as this process counts them.
    Number(usize),
    /// By its address on the PCIe bus.
    Bus(String),
}

impl Which {
    fn find(&self, driver: Driver) -> Result<CudaDevice, String> {
        let tell = |e: doorbell_cuda::Error| one_line(&e.to_string());
        let wanted = match self {
            Which::Number(number) => return driver.device(*number).map_err(tell),
            Which::Bus(id) => long_bus_id(id),
        };
        let mut there = Vec::new();
        for device in driver.devices().map_err(tell)? {
            let id = device.pci_bus_id().map_err(tell)?;
            if long_bus_id(&id) == wanted {
                return Ok(device);
            }
            there.push(id);
        }
        Err(format!("there is no such GPU: there is {}", there.join(", ")))
    }
}

/// A PCI address with its domain, and in small letters: `0000:18:00.0`.
fn long_bus_id(id: &str) -> String {
    let id = id.to_ascii_lowercase();
    match id.matches(':').count() {
        1 => format!("0000:{id}"),
        // NVIDIA's own tools write the domain with eight digits.
        _ => id
            .strip_prefix("0000")
            .filter(|rest| rest.find(':') == Some(4))
            .map_or(id.clone(), str::to_owned),
    }
}

/// A GPU, and how its memory is registered.
#[derive(Clone, Debug)]
pub(crate) struct Gpu {
    /// Where its work is done.
    pub(crate) context: Context,
    /// What the command line calls it.
    pub(crate) number: usize,
    /// What no other GPU has.
    pub(crate) uuid: String,
    /// Its product's name.
    pub(crate) name: String,
    /// The best path that works, or the one that is forced.
    pub(crate) path: Path,
    /// Whether it is the command line that forces it.
    forced: bool,
}

impl Gpu {
    /// The GPU of this number, of whose memory some is registered to learn by which path that goes.
    ///
    /// # Errors
    /// [`Failure::Usage`] when there is no such GPU, or the environment forces a path that is none; [`Failure::Test`] when no path works.
    pub(crate) fn open(number: usize, device: &doorbell_verbs::Context) -> Result<Gpu, Failure> {
        Gpu::choose(&format!("--gpu {number}"), &Which::Number(number), None, device)
    }

    /// As [`Gpu::open`], of a GPU that `flag` names, by this path or not at all.
    ///
    /// # Errors
    /// As [`Gpu::open`].
    pub(crate) fn choose(
        flag: &str,
        which: &Which,
        forced: Option<Path>,
        device: &doorbell_verbs::Context,
    ) -> Result<Gpu, Failure> {
        const BYTES: usize = 64 << 10;
        let refused = |reason: &str| Failure::usage(format!("{flag}: {}", one_line(reason)));
        let driver = Driver::load().map_err(|e| refused(&e.to_string()))?;
        let found = which.find(driver).map_err(|e| refused(&e))?;
        let tell = |e: &dyn fmt::Display| Failure::test(one_line(&e.to_string()));
        let identity = || Ok::<_, doorbell_cuda::Error>((found.context()?, found.uuid()?.to_string(), found.name()?));
        let (context, uuid, name) = identity().map_err(|e| tell(&e))?;
        // The thread that measures: each call is a little quicker so.
        context.make_current().map_err(|e| tell(&e))?;
        let memory = GpuMemory::alloc(&context, BYTES).map_err(|e| tell(&e))?;
        let pd: ProtectionDomain = device.protection_domain().map_err(|e| tell(&e))?;
        let registration = match forced {
            Some(path) => GpuRegistration::new(&pd).path(path),
            None => GpuRegistration::from_environment(&pd).map_err(|e| Failure::usage(one_line(&e.to_string())))?,
        };
        let path = registration
            .register(&memory, Local)
            .map_err(|e| tell(&e))?
            .region()
            .path();
        Ok(Gpu {
            context,
            number: found.ordinal(),
            uuid,
            name,
            path,
            forced: forced.is_some(),
        })
    }

    /// How its memory is to be registered.
    ///
    /// # Errors
    /// When the environment forces a path that is none.
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
