//! A report of what a device and a GPU support: every path tried by itself.

use doorbell_cuda::{Context, Error};
use doorbell_verbs::{Local, ProtectionDomain};

use crate::memory::GpuMemory;
use crate::ordering::{Flush, Scope};
use crate::path::{Path, Refusal};
use crate::register::GpuRegistration;

/// The capabilities of a device and a GPU together.
#[derive(Debug)]
pub struct PathSurvey {
    /// Every path, best first, with the reason if it fails.
    pub paths: Vec<(Path, Result<(), Refusal>)>,
    /// The flush that the GPU needs after writes of an adapter over the bus.
    pub flush: Result<Flush, Error>,
}

impl PathSurvey {
    /// The best path that works.
    #[must_use]
    pub fn best(&self) -> Option<Path> {
        let works = self.paths.iter().find(|(_, outcome)| outcome.is_ok());
        works.map(|(path, _)| *path)
    }
}

/// Tries every path from `pd` to memory of the GPU of `context`, ignoring the environment.
///
/// # Errors
/// The CUDA driver's error, if no memory can be allocated.
pub fn survey(pd: &ProtectionDomain, context: &Context) -> Result<PathSurvey, Error> {
    const BYTES: usize = 64 << 10;
    let memory = GpuMemory::alloc(context, BYTES)?;
    let paths = Path::ALL.map(|path| {
        let outcome = GpuRegistration::new(pd).try_path(path, &memory, BYTES, Local);
        (path, outcome.map(drop))
    });
    Ok(PathSurvey {
        paths: paths.into(),
        flush: Flush::of(context.device(), Scope::Owner),
    })
}
