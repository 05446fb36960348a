//! Kernels of one source, loaded in a context: from machine code where this crate has it for the
//! device, else from PTX, of which the driver compiles each kernel alone, as a whole file takes it
//! seconds.

use std::borrow::Cow;
use std::sync::OnceLock;

use crate::context::Context;
use crate::error::Error;
use crate::kernels::KernelFile;
use crate::module::{Entry, Kernel, Module, entries};
use crate::sys::status;

/// Loads kernels of one source.
pub(crate) struct Loader {
    context: Context,
    origin: Origin,
    /// `None` if there is none for the device, or the driver does not know its format.
    code: OnceLock<Option<Module>>,
}

enum Origin {
    File(KernelFile),
    /// Of another build, for comparison.
    Ptx(Cow<'static, str>),
}

impl Loader {
    pub(crate) fn new(context: &Context, file: KernelFile) -> Self {
        Self::of(context, Origin::File(file))
    }

    pub(crate) fn with_ptx(context: &Context, ptx: impl Into<Cow<'static, str>>) -> Self {
        Self::of(context, Origin::Ptx(ptx.into()))
    }

    fn of(context: &Context, origin: Origin) -> Self {
        Self {
            context: context.clone(),
            origin,
            code: OnceLock::new(),
        }
    }

    /// All kernels of the source.
    pub(crate) fn entries(&self) -> impl Iterator<Item = Entry<'_>> {
        entries(match &self.origin {
            Origin::File(file) => file.ptx(),
            Origin::Ptx(ptx) => ptx,
        })
    }

    /// Loads a kernel onto the device.
    pub(crate) fn kernel(&self, entry: &Entry<'_>) -> Result<Kernel, Error> {
        let kernel = match self.code()? {
            Some(module) => module.kernel(entry.name)?,
            None => Module::from_ptx(&self.context, &entry.ptx())?.kernel(entry.name)?,
        };
        kernel.load()?;
        Ok(kernel)
    }

    fn code(&self) -> Result<Option<&Module>, Error> {
        if let Some(known) = self.code.get() {
            return Ok(known.as_ref());
        }
        let code = match self.origin {
            Origin::File(file) => file.code(self.context.device().compute_capability()?),
            Origin::Ptx(_) => None,
        };
        let loaded = match code.map(|code| Module::from_code(&self.context, &code)).transpose() {
            Ok(loaded) => loaded,
            // A driver older than the assembler.
            Err(error) if is_unknown(&error) => None,
            Err(error) => return Err(error),
        };
        // Another thread may have loaded it meanwhile.
        Ok(self.code.get_or_init(|| loaded).as_ref())
    }
}

fn is_unknown(error: &Error) -> bool {
    let code = error.failure().map(|failure| failure.code);
    code.is_some_and(|code| [status::INVALID_IMAGE, status::NO_BINARY_FOR_GPU].contains(&code))
}
