//! What a device and a GPU can do together: every path tried by itself, for people to read.

use doorbell_cuda::{Context, Error};
use doorbell_verbs::{Local, ProtectionDomain};

use crate::memory::GpuMemory;
use crate::ordering::{Flush, Scope};
use crate::path::{Path, Refusal};
use crate::register::GpuRegistration;

/// What a device and a GPU can do together.
#[derive(Debug)]
pub struct Survey {
    /// Every path, the best first: whether it works, or why not.
    pub paths: Vec<(Path, Result<(), Refusal>)>,
    /// What the GPU needs to see what an adapter has written over the bus.
    pub flush: Result<Flush, Error>,
}

impl Survey {
    /// The best path that works.
    #[must_use]
    pub fn best(&self) -> Option<Path> {
        let works = self.paths.iter().find(|(_, outcome)| outcome.is_ok());
        works.map(|(path, _)| *path)
    }
}

/// Tries every path from the device of `pd` to some memory of the GPU of `context`, whatever the environment forces.
///
/// # Errors
/// The CUDA driver's error, where it has no memory to try with.
pub fn survey(pd: &ProtectionDomain, context: &Context) -> Result<Survey, Error> {
    const BYTES: usize = 64 << 10;
    let memory = GpuMemory::alloc(context, BYTES)?;
    let paths = Path::ALL.map(|path| {
        let outcome = GpuRegistration::new(pd).try_path(path, &memory, BYTES, Local);
        (path, outcome.map(drop))
    });
    Ok(Survey {
        paths: paths.into(),
        flush: Flush::of(context.device(), Scope::Owner),
    })
}
