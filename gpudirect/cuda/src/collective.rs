//! The kernels of GPU collectives: `kernels/collective.cu`, `small.cu` for short operations, and
//! `exchange.cu` for messages between pairs of ranks. `doorbell-collectives` defines their launch
//! arguments.

use core::fmt;
use std::borrow::Cow;
use std::collections::HashMap;

use parking_lot::Mutex;

use crate::context::Context;
use crate::error::Error;
use crate::kernels::KernelFile;
use crate::module::{Kernel, Module};

/// The kernels of a context; each is loaded on first use.
pub struct CollectiveKernels {
    context: Context,
    ptx: Cow<'static, str>,
    kernels: Mutex<HashMap<String, Kernel>>,
}

impl CollectiveKernels {
    /// The embedded kernels.
    #[must_use]
    pub fn new(context: &Context) -> Self {
        Self::with_ptx(context, KernelFile::Collective.ptx())
    }

    /// The embedded kernels of short operations.
    #[must_use]
    pub fn small(context: &Context) -> Self {
        Self::with_ptx(context, KernelFile::Small.ptx())
    }

    /// The embedded kernel of messages between pairs of ranks.
    #[must_use]
    pub fn exchange(context: &Context) -> Self {
        Self::with_ptx(context, KernelFile::Exchange.ptx())
    }

    /// Kernels of another build, for comparison.
    #[must_use]
    pub fn with_ptx(context: &Context, ptx: impl Into<Cow<'static, str>>) -> Self {
        Self {
            context: context.clone(),
            ptx: ptx.into(),
            kernels: Mutex::new(HashMap::new()),
        }
    }

    /// The kernel of this name, if there is one; compiled on first use (tens of milliseconds).
    pub fn kernel(&self, name: &str) -> Result<Option<Kernel>, Error> {
        let mut kernels = self.kernels.lock();
        if let Some(kernel) = kernels.get(name) {
            return Ok(Some(kernel.clone()));
        }
        let Some(ptx) = crate::module::excerpt(&self.ptx, name) else {
            return Ok(None);
        };
        let kernel = Module::from_ptx(&self.context, &ptx)?.kernel(name)?;
        kernels.insert(name.to_owned(), kernel.clone());
        Ok(Some(kernel))
    }
}

impl fmt::Debug for CollectiveKernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CollectiveKernels")
            .field("device", &self.context.device())
            .finish_non_exhaustive()
    }
}
