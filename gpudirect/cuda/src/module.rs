//! Modules of kernels, JIT-compiled by the driver from PTX or assembled, and kernel launches.

use core::ffi::{CStr, c_int, c_void};
use core::fmt;
use std::ffi::CString;
use std::ptr;
use std::sync::Arc;

use crate::context::Context;
use crate::driver::Driver;
use crate::error::Error;
use crate::memory::Span;
use crate::resource::{Body, Region, Resource};
use crate::stream::{RelaxedCapture, Stream};
use crate::sys::{self, RawFunction, RawModule, status};

/// The maximum number of launch arguments.
pub const MAX_ARGUMENTS: usize = 64;

/// The number of spans that a launch records without allocating.
const INLINE_USES: usize = 16;

/// Compiled kernels, loaded in a context as long as a handle or one of its [`Kernel`]s exists.
#[derive(Clone)]
#[doc(alias = "CUmodule")]
pub struct Module(Arc<Resource>, RawModule);

// SAFETY: any thread may use a CUDA module, and this crate never dereferences the pointer.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Compiles PTX for the device of `context` and loads it.
    ///
    /// # Errors
    /// [`Error::Compile`] with the compiler's log, [`Error::Nul`], or another driver error.
    #[doc(alias("cuModuleLoadDataEx", "cuModuleLoadData"))]
    pub fn from_ptx(context: &Context, ptx: &str) -> Result<Self, Error> {
        let text = CString::new(ptx).map_err(|_| Error::Nul("the PTX".to_owned()))?;
        let mut log = [0u8; 4096];
        let mut options = [sys::JIT_ERROR_LOG, sys::JIT_ERROR_LOG_BYTES];
        // The second value is a number passed in place of a pointer, as the driver specifies.
        let mut values = [
            log.as_mut_ptr().cast::<c_void>(),
            ptr::without_provenance_mut(log.len()),
        ];
        let mut raw = ptr::null_mut();

        let _entered = context.enter()?;
        let driver = context.driver();
        let _relaxed = RelaxedCapture::enter(driver);
        // SAFETY: the text is NUL-terminated, there are two options with a value each, and the log
        // has the given size.
        let status = unsafe {
            (driver.table().module_load_data_ex)(
                &raw mut raw,
                text.as_ptr().cast(),
                2,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        if status != status::SUCCESS {
            let failure = driver.failure(
                status,
                "cuModuleLoadDataEx",
                format_args!("PTX for {}", context.device()),
            );
            return Err(match CStr::from_bytes_until_nul(&log).ok().and_then(first_line) {
                Some(log) => Error::Compile { failure, log },
                None => failure.into(),
            });
        }
        Ok(Self::of(context, raw))
    }

    /// Loads machine code of this crate, an ELF.
    pub(crate) fn from_code(context: &Context, code: &[u8]) -> Result<Self, Error> {
        let _entered = context.enter()?;
        let driver = context.driver();
        let _relaxed = RelaxedCapture::enter(driver);
        let (mut raw, none, no_values) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        // SAFETY: the ELF is whole, as its archive is the crate's own; there are no options.
        let status =
            unsafe { (driver.table().module_load_data_ex)(&raw mut raw, code.as_ptr().cast(), 0, none, no_values) };
        driver.check(
            status,
            "cuModuleLoadDataEx",
            format_args!("machine code for {}", context.device()),
        )?;
        Ok(Self::of(context, raw))
    }

    fn of(context: &Context, raw: RawModule) -> Self {
        let loaded = Loaded(raw.expose_provenance());
        Self(Resource::new(context, Region::NONE, loaded), raw)
    }

    /// The kernel of this name.
    ///
    /// # Errors
    /// The driver's error: `CUDA_ERROR_NOT_FOUND` if there is none of that name.
    #[doc(alias = "cuModuleGetFunction")]
    pub fn kernel(&self, name: &str) -> Result<Kernel, Error> {
        let text = CString::new(name).map_err(|_| Error::Nul(name.to_owned()))?;
        let context = self.0.context();
        let driver = context.driver();
        let _entered = context.enter()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the module is loaded, and the name is NUL-terminated.
        let status = unsafe { (driver.table().module_get_function)(&raw mut raw, self.1, text.as_ptr()) };
        driver.check(status, "cuModuleGetFunction", format_args!("the kernel {name}"))?;
        Ok(Kernel {
            module: Arc::clone(&self.0),
            raw,
            name: name.into(),
        })
    }
}

fn first_line(log: &CStr) -> Option<String> {
    let log = log.to_string_lossy();
    log.lines()
        .map(str::trim)
        .find(|line| !line.is_empty())
        .map(str::to_owned)
}

struct Loaded(usize);

impl Body for Loaded {
    fn release(&mut self, driver: Driver) -> Result<(), Error> {
        // SAFETY: loaded once by this value; none of its kernels exists or runs any more.
        let status = unsafe { (driver.table().module_unload)(ptr::with_exposed_provenance_mut(self.0)) };
        driver.check(status, "cuModuleUnload", format_args!("a module"))
    }
}

/// A kernel of a [`Module`].
#[derive(Clone)]
#[doc(alias = "CUfunction")]
pub struct Kernel {
    module: Arc<Resource>,
    raw: RawFunction,
    name: Arc<str>,
}

// SAFETY: any thread may use a CUDA function, and this crate never dereferences the pointer.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// A launch configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Thread blocks of the grid, in three dimensions.
    pub grid: [u32; 3],
    /// Threads per block, in three dimensions.
    pub block: [u32; 3],
    /// Dynamic shared memory per block, in bytes.
    pub shared_bytes: u32,
    /// Cooperative launch: blocks are all resident, so they may synchronize; or it is refused.
    pub cooperative: bool,
    /// Blocks of a cluster, which are placed together, clusters apart from each other; 1: without
    /// clusters. Not for cooperative launches; drivers before CUDA 11.8 have no clusters.
    pub cluster: u32,
    /// How many bytes of a single argument are copied, if the kernel reads no others; `None`: all.
    /// Cooperative launches, and those with several arguments, copy all.
    pub argument_bytes: Option<usize>,
}

impl Launch {
    /// A one-dimensional grid of `blocks` with `threads` each.
    #[must_use]
    pub const fn linear(blocks: u32, threads: u32) -> Self {
        Self {
            grid: [blocks, 1, 1],
            block: [threads, 1, 1],
            shared_bytes: 0,
            cooperative: false,
            cluster: 1,
            argument_bytes: None,
        }
    }
}

/// A kernel argument: a number, [`DevicePtr`](crate::DevicePtr), or `#[repr(C)]` struct.
pub trait Argument {
    /// The address of its bytes.
    fn bytes(&self) -> *const c_void;
}

// Only values without borrows: a reference would be passed as its own bytes, a host address.
impl<T: Copy + 'static> Argument for T {
    fn bytes(&self) -> *const c_void {
        ptr::from_ref(self).cast()
    }
}

/// A kernel attribute: `CUfunction_attribute`, with its numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
#[repr(i32)]
#[doc(alias = "CUfunction_attribute")]
pub enum KernelAttribute {
    /// The maximum number of threads per block.
    MaxThreadsPerBlock = 0,
    /// Bytes of static shared memory.
    SharedBytes = 1,
    /// Bytes of local memory per thread: more than 0 if registers were spilled.
    LocalBytes = 3,
    /// Registers per thread.
    Registers = 4,
    /// Maximum bytes of dynamic shared memory per launch.
    MaxDynamicSharedBytes = 8,
}

impl Kernel {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Enqueues a launch on `stream`. `uses` is kept until the kernel is done, even if dropped.
    ///
    /// # Safety
    /// The arguments must match the kernel's parameters in number, order and type. Of a single
    /// argument the kernel reads only the first [`Launch::argument_bytes`], if given, and it has as
    /// many. The memory that it accesses through them must stay valid until it is done,
    /// which holds for memory in `uses`, and must be accessible to it: no host slice of it may
    /// exist.
    ///
    /// # Errors
    /// [`Error::Arguments`], or the driver's error: for more threads, shared memory or registers
    /// than available, or blocks that are no whole clusters. Failures while the kernel runs are
    /// reported by a later call.
    #[doc(alias("cuLaunchKernel", "cuLaunchCooperativeKernel", "cudaLaunchKernel"))]
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        launch: Launch,
        arguments: &[&dyn Argument],
        uses: &[Span<'_>],
    ) -> Result<(), Error> {
        let mut parameters = [ptr::null_mut(); MAX_ARGUMENTS];
        let Some(parameters) = parameters.get_mut(..arguments.len()) else {
            return Err(Error::Arguments(arguments.len()));
        };
        for (parameter, argument) in parameters.iter_mut().zip(arguments) {
            // Fully qualified: a reference to the argument is itself no `Argument`.
            *parameter = <dyn Argument>::bytes(*argument).cast_mut();
        }
        let Launch {
            grid: [gx, gy, gz],
            block: [bx, by, bz],
            shared_bytes: shared,
            cooperative,
            cluster,
            argument_bytes,
        } = launch;
        let mut bytes = argument_bytes.unwrap_or(0);
        let mut buffer = match &*parameters {
            [single] if argument_bytes.is_some() && !cooperative => Some(sys::parameter_buffer(*single, &mut bytes)),
            _ => None,
        };
        let (parameters, extra) = match &mut buffer {
            Some(extra) => (ptr::null_mut(), extra.as_mut_ptr()),
            None => (parameters.as_mut_ptr(), ptr::null_mut()),
        };

        let run = |driver: Driver, stream: sys::RawStream| {
            let table = driver.table();
            if cluster > 1
                && !cooperative
                && let Some(launch) = table.launch_kernel_ex
            {
                let mut attributes = [
                    sys::LaunchAttribute::cluster(cluster),
                    sys::LaunchAttribute::spread_clusters(),
                ];
                let config = sys::LaunchConfig {
                    grid: [gx, gy, gz],
                    block: [bx, by, bz],
                    shared,
                    stream,
                    attributes: attributes.as_mut_ptr(),
                    count: 2,
                };
                // SAFETY: the function and the stream are live; the driver copies the configuration
                // and the arguments, and the caller vouches for them and their use.
                return unsafe { launch(&raw const config, self.raw, parameters, extra) };
            }
            if cooperative {
                let launch = table.launch_cooperative_kernel;
                // SAFETY: as above, without a configuration.
                unsafe { launch(self.raw, gx, gy, gz, bx, by, bz, shared, stream, parameters) }
            } else {
                let launch = table.launch_kernel;
                // SAFETY: as above, without a configuration.
                unsafe { launch(self.raw, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra) }
            }
        };
        let mut few = [&self.module; INLINE_USES];
        if uses.len() < INLINE_USES {
            for (place, span) in few[1..].iter_mut().zip(uses) {
                *place = span.resource();
            }
            stream.enqueue("cuLaunchKernel", &few[..=uses.len()], run)
        } else {
            let mut many = vec![&self.module];
            many.extend(uses.iter().map(|span| span.resource()));
            stream.enqueue("cuLaunchKernel", &many, run)
        }
    }

    /// Loads it onto the device now. Loading at the first launch waits for all other work of the
    /// device: a deadlock if that work waits for this kernel, or for a rank that does.
    #[doc(alias = "cuFuncLoad")]
    pub fn load(&self) -> Result<(), Error> {
        let context = self.module.context();
        let driver = context.driver();
        let Some(load) = driver.table().func_load else {
            // Before CUDA 12.4: querying an attribute forces loading.
            return self.attribute(KernelAttribute::Registers).map(|_| ());
        };
        let _entered = context.enter()?;
        let _relaxed = RelaxedCapture::enter(driver);
        // SAFETY: the function is live.
        let status = unsafe { load(self.raw) };
        driver.check(status, "cuFuncLoad", format_args!("the kernel {}", self.name))
    }

    /// The value of `attribute`.
    #[doc(alias("cuFuncGetAttribute", "cudaFuncGetAttributes"))]
    pub fn attribute(&self, attribute: KernelAttribute) -> Result<i32, Error> {
        let context = self.module.context();
        let driver = context.driver();
        let _entered = context.enter()?;
        let mut value = 0;
        // SAFETY: the pointer is to a local c_int; the function is live.
        let status = unsafe { (driver.table().func_get_attribute)(&raw mut value, attribute as c_int, self.raw) };
        driver.check(
            status,
            "cuFuncGetAttribute",
            format_args!("{attribute:?} of the kernel {}", self.name),
        )?;
        Ok(value)
    }

    /// Allows launches with up to `bytes` of dynamic shared memory, beyond the default of 48 KiB.
    ///
    /// # Errors
    /// The driver's error, for more than the device has.
    #[doc(alias("cuFuncSetAttribute", "cudaFuncSetAttribute"))]
    pub fn allow_shared_bytes(&self, bytes: u32) -> Result<(), Error> {
        let context = self.module.context();
        let driver = context.driver();
        let _entered = context.enter()?;
        let attribute = KernelAttribute::MaxDynamicSharedBytes as c_int;
        let value = c_int::try_from(bytes).unwrap_or(c_int::MAX);
        // SAFETY: the function is live.
        let status = unsafe { (driver.table().func_set_attribute)(self.raw, attribute, value) };
        driver.check(
            status,
            "cuFuncSetAttribute",
            format_args!("{bytes} bytes of shared memory for the kernel {}", self.name),
        )
    }
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Module").field(&self.0.context().device()).finish()
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Kernel").field(&self.name).finish()
    }
}

/// A kernel in PTX.
pub(crate) struct Entry<'a> {
    pub(crate) name: &'a str,
    head: &'a str,
    text: &'a str,
}

impl Entry<'_> {
    /// PTX of this kernel alone, with the common header; kernels share no other definitions.
    pub(crate) fn ptx(&self) -> String {
        [self.head, self.text].concat()
    }
}

/// The kernels in PTX.
pub(crate) fn entries(ptx: &str) -> impl Iterator<Item = Entry<'_>> {
    const ENTRY: &str = ".visible .entry ";
    let head = ptx.find(ENTRY).map_or(ptx, |first| &ptx[..first]);
    ptx.match_indices(ENTRY).filter_map(move |(start, _)| {
        let (name, rest) = ptx[start + ENTRY.len()..].split_once('(')?;
        let end = ptx.len() - rest.len() + rest.find("\n}\n")? + "\n}\n".len();
        Some(Entry {
            name,
            head,
            text: &ptx[start..end],
        })
    })
}
