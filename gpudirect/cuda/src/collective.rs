//! The kernels of collectives among GPUs: `kernels/collective.cu`, and `kernels/small.cu` of short ones, of which the PTX is part of this crate. What a launch of one is given, `doorbell-collectives` knows.

use core::fmt;
use std::borrow::Cow;
use std::collections::HashMap;

use parking_lot::Mutex;

use crate::context::Context;
use crate::error::Error;
use crate::kernels::KernelFile;
use crate::module::{Kernel, Module};

/// The kernels of a context, each loaded when it is first asked for.
pub struct CollectiveKernels {
    context: Context,
    ptx: Cow<'static, str>,
    kernels: Mutex<HashMap<String, Kernel>>,
}

impl CollectiveKernels {
    /// The kernels of this crate.
    #[must_use]
    pub fn new(context: &Context) -> Self {
        Self::with(context, KernelFile::Collective.ptx())
    }

    /// Those of this crate for short operations.
    #[must_use]
    pub fn small(context: &Context) -> Self {
        Self::with(context, KernelFile::Small.ptx())
    }

    /// Kernels built otherwise, to be compared.
    #[must_use]
    pub fn with_ptx(context: &Context, ptx: String) -> Self {
        Self::with(context, ptx)
    }

    fn with(context: &Context, ptx: impl Into<Cow<'static, str>>) -> Self {
        Self {
            context: context.clone(),
            ptx: ptx.into(),
            kernels: Mutex::new(HashMap::new()),
        }
    }

    /// The kernel of a name, which is compiled if it has not been: tens of milliseconds. `None` where there is none of that name.
    ///
    /// # Errors
    /// What the driver says.
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
