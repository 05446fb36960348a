//! The GPU whose memory the messages of a test lie in.

use std::fmt;
use std::str::FromStr;

use doorbell_cuda::{Context, Driver};
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

/// A GPU, and how its memory is registered.
#[derive(Debug)]
pub(crate) struct Gpu {
    /// Where its work is done.
    pub(crate) context: Context,
    /// What the command line calls it.
    pub(crate) number: usize,
    /// What no other GPU has.
    pub(crate) uuid: String,
    /// Its product's name.
    pub(crate) name: String,
    /// The best path that works.
    pub(crate) path: Path,
}

impl Gpu {
    /// The GPU of this number, of whose memory some is registered to learn by which path that goes.
    ///
    /// # Errors
    /// [`Failure::Usage`] when there is no such GPU, or the environment forces a path that is none; [`Failure::Test`] when no path works.
    pub(crate) fn open(number: usize, device: &doorbell_verbs::Context) -> Result<Gpu, Failure> {
        const BYTES: usize = 64 << 10;
        let driver =
            Driver::load().map_err(|e| Failure::usage(format!("--gpu {number}: {}", one_line(&e.to_string()))))?;
        let found = driver
            .device(number)
            .map_err(|e| Failure::usage(format!("--gpu {number}: {}", one_line(&e.to_string()))))?;
        let tell = |e: &dyn fmt::Display| Failure::test(one_line(&e.to_string()));
        let identity = || Ok::<_, doorbell_cuda::Error>((found.context()?, found.uuid()?.to_string(), found.name()?));
        let (context, uuid, name) = identity().map_err(|e| tell(&e))?;
        // The thread that measures: each call is a little quicker so.
        context.make_current().map_err(|e| tell(&e))?;
        let memory = GpuMemory::alloc(&context, BYTES).map_err(|e| tell(&e))?;
        let pd: ProtectionDomain = device.protection_domain().map_err(|e| tell(&e))?;
        let registration =
            GpuRegistration::from_environment(&pd).map_err(|e| Failure::usage(one_line(&e.to_string())))?;
        let path = registration
            .register(&memory, Local)
            .map_err(|e| tell(&e))?
            .region()
            .path();
        Ok(Gpu {
            context,
            number,
            uuid,
            name,
            path,
        })
    }
}
