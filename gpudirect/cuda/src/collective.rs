//! The kernels of GPU collectives: `kernels/collective.cu`, `small.cu` for short operations,
//! `exchange.cu` for messages between pairs of ranks, `moe.cu` for expert parallelism, and
//! `reduce.cu` for what copy engines move.
//! `doorbell-collectives` defines their launch arguments.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::context::Context;
use crate::error::Error;
use crate::kernels::KernelFile;
use crate::loader::Loader;
use crate::module::Kernel;
use crate::reduce::Reducer;

/// The kernels of a context.
///
/// A driver that loads a kernel waits for all work of the context, which may wait for another rank,
/// and so for this one. So the communicators of a process share what is loaded, and load all that
/// they need when they are made.
pub struct CollectiveKernels {
    context: Context,
    /// By file.
    loaders: [Loader; KernelFile::ALL.len()],
    /// Locked while kernels are loaded, so that each is loaded once.
    loaded: Mutex<HashMap<String, Kernel>>,
    reducer: Reducer,
}

/// The kernels of each context, as long as a communicator has them.
static SHARED: Mutex<Vec<Weak<CollectiveKernels>>> = Mutex::new(Vec::new());

impl CollectiveKernels {
    /// Those of `context`, which all callers share.
    #[must_use]
    pub fn of(context: &Context) -> Arc<Self> {
        let mut shared = SHARED.lock();
        shared.retain(|kernels| kernels.strong_count() > 0);
        let mut known = shared.iter().filter_map(Weak::upgrade);
        if let Some(known) = known.find(|known| known.context == *context) {
            return known;
        }
        let new = Arc::new(Self::new(context));
        shared.push(Arc::downgrade(&new));
        new
    }

    /// With another build of `collective.cu`, for comparison; not shared.
    #[must_use]
    pub fn with_ptx(context: &Context, ptx: impl Into<Cow<'static, str>>) -> Self {
        let mut kernels = Self::new(context);
        kernels.loaders[KernelFile::Collective as usize] = Loader::with_ptx(context, ptx);
        kernels
    }

    fn new(context: &Context) -> Self {
        Self {
            context: context.clone(),
            loaders: KernelFile::ALL.map(|file| Loader::new(context, file)),
            loaded: Mutex::default(),
            reducer: Reducer::new(context),
        }
    }

    /// Loads those of a file with a `wanted` name that are not loaded. Without machine code for the
    /// device, each takes the driver tens to hundreds of milliseconds the first time on a machine.
    pub fn load(&self, file: KernelFile, wanted: impl Fn(&str) -> bool) -> Result<(), Error> {
        let loader = &self.loaders[file as usize];
        let mut loaded = self.loaded.lock();
        for entry in loader.entries() {
            if wanted(entry.name) && !loaded.contains_key(entry.name) {
                loaded.insert(entry.name.to_owned(), loader.kernel(&entry)?);
            }
        }
        Ok(())
    }

    /// The kernel of this name, if it is loaded.
    #[must_use]
    pub fn kernel(&self, name: &str) -> Option<Kernel> {
        self.loaded.lock().get(name).cloned()
    }

    /// Reductions for what copy engines move, which [`Reducer::prepare`] loads.
    #[must_use]
    pub fn reducer(&self) -> &Reducer {
        &self.reducer
    }
}

debug_fields!(CollectiveKernels, self, device = self.context.device());
