//! Modules of kernels, compiled by the driver from PTX, and launching them.

use core::ffi::{CStr, c_int, c_uint, c_void};
use core::fmt;
use std::ffi::CString;
use std::ptr;
use std::sync::Arc;

use crate::context::Context;
use crate::driver::Driver;
use crate::error::Error;
use crate::memory::Span;
use crate::resource::{Body, Region, Resource};
use crate::stream::Stream;
use crate::sys::{self, RawFunction, RawModule, status};

/// How many arguments a launch passes at most.
pub const MAX_ARGUMENTS: usize = 64;

/// How many spans a launch is told of without allocating.
const FEW_USES: usize = 16;

/// Compiled kernels, loaded into a context as long as a handle or one of its [`Kernel`]s is there.
#[derive(Clone)]
pub struct Module(Arc<Resource>, RawModule);

// SAFETY: CUDA's modules may be used by any thread, and the pointer is never followed here.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Compiles PTX for the device of `context` and loads it.
    ///
    /// # Errors
    /// [`Error::Compile`] with what the driver's compiler says, [`Error::Nul`], or what the driver says otherwise.
    pub fn from_ptx(context: &Context, ptx: &str) -> Result<Self, Error> {
        let text = CString::new(ptx).map_err(|_| Error::Nul("the PTX".to_owned()))?;
        let mut log = [0u8; 4096];
        let mut options = [sys::JIT_ERROR_LOG, sys::JIT_ERROR_LOG_BYTES];
        // The second value is a number in the place of a pointer, as the driver has it.
        let mut values = [
            log.as_mut_ptr().cast::<c_void>(),
            ptr::without_provenance_mut(log.len()),
        ];
        let mut raw = ptr::null_mut();

        let _entered = context.enter()?;
        let driver = context.driver();
        // SAFETY: the text ends with a NUL, there are two options with a value each, and the log has so many bytes.
        let answer = unsafe {
            (driver.table().module_load_data_ex)(
                &raw mut raw,
                text.as_ptr().cast(),
                2,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        if answer != status::SUCCESS {
            let failure = driver.failure(
                answer,
                "cuModuleLoadDataEx",
                format_args!("PTX for {}", context.device()),
            );
            return Err(match CStr::from_bytes_until_nul(&log).ok().and_then(first_line) {
                Some(log) => Error::Compile { failure, log },
                None => failure.into(),
            });
        }
        let loaded = Loaded(raw.expose_provenance());
        Ok(Self(Resource::new(context, Region::NONE, loaded), raw))
    }

    /// The kernel of this name.
    ///
    /// # Errors
    /// What the driver says: `CUDA_ERROR_NOT_FOUND` where there is none of that name.
    pub fn kernel(&self, name: &str) -> Result<Kernel, Error> {
        let text = CString::new(name).map_err(|_| Error::Nul(name.to_owned()))?;
        let context = self.0.context();
        let driver = context.driver();
        let _entered = context.enter()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the module is loaded, and the name ends with a NUL.
        let answer = unsafe { (driver.table().module_get_function)(&raw mut raw, self.1, text.as_ptr()) };
        driver.check(answer, "cuModuleGetFunction", format_args!("the kernel {name}"))?;
        Ok(Kernel {
            module: Arc::clone(&self.0),
            raw,
            name: name.into(),
        })
    }
}

/// The first line that says something.
fn first_line(log: &CStr) -> Option<String> {
    let log = log.to_string_lossy();
    log.lines()
        .map(str::trim)
        .find(|line| !line.is_empty())
        .map(str::to_owned)
}

/// A `CUmodule`.
struct Loaded(usize);

impl Body for Loaded {
    fn release(&mut self, driver: Driver) -> Result<(), Error> {
        // SAFETY: loaded once by this; none of its kernels is there any more, nor runs.
        let answer = unsafe { (driver.table().module_unload)(ptr::with_exposed_provenance_mut(self.0)) };
        driver.check(answer, "cuModuleUnload", format_args!("a module"))
    }
}

/// A kernel of a [`Module`].
#[derive(Clone)]
pub struct Kernel {
    module: Arc<Resource>,
    raw: RawFunction,
    name: Arc<str>,
}

// SAFETY: CUDA's functions may be used by any thread, and the pointer is never followed here.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// How many threads a kernel is launched with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Blocks, by three dimensions.
    pub grid: [u32; 3],
    /// Threads of each block, by three dimensions.
    pub block: [u32; 3],
    /// Bytes of shared memory for each block, beside what the kernel names itself.
    pub shared_bytes: u32,
    /// All blocks run at once, so that they can wait for each other; refused where there are more than fit.
    pub cooperative: bool,
}

impl Launch {
    /// `blocks` of `threads` each.
    #[must_use]
    pub const fn linear(blocks: u32, threads: u32) -> Self {
        Self {
            grid: [blocks, 1, 1],
            block: [threads, 1, 1],
            shared_bytes: 0,
            cooperative: false,
        }
    }
}

/// An argument of a kernel: any value whose bytes are the parameter's, such as `u32`, `f64`, [`DevicePtr`](crate::DevicePtr), or a `#[repr(C)]` struct.
pub trait Argument {
    /// Where its bytes are.
    fn bytes(&self) -> *const c_void;
}

// Of values that borrow nothing: a reference would be passed as its own bytes, an address of the host.
impl<T: Copy + 'static> Argument for T {
    fn bytes(&self) -> *const c_void {
        ptr::from_ref(self).cast()
    }
}

/// What a kernel can be asked about: `CUfunction_attribute`, whose numbers these are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
#[repr(i32)]
pub enum KernelAttribute {
    /// Threads that a block can have at most.
    MaxThreadsPerBlock = 0,
    /// Bytes of shared memory that it names itself.
    SharedBytes = 1,
    /// Bytes of local memory of each thread: more than 0 where registers were spilled.
    LocalBytes = 3,
    /// Registers of each thread.
    Registers = 4,
    /// Bytes of shared memory that a launch may ask for.
    MaxDynamicSharedBytes = 8,
}

impl Kernel {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Puts a run of it into `stream`. `uses` is kept until the run is done, whoever drops it.
    ///
    /// # Safety
    /// The arguments must be those of the kernel, in number, order and type. Whatever it reads and writes with them must be there until it is done, which
    /// it is for what lies in `uses`, and must be free for it to be read and written: nobody may have a slice of it on the host.
    ///
    /// # Errors
    /// [`Error::Arguments`], or what the driver says: of more threads, shared memory or registers than there are. What fails while it runs is the error of a later call.
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
            // Named in full: a reference to the argument is no argument.
            *parameter = <dyn Argument>::bytes(*argument).cast_mut();
        }
        let parameters = parameters.as_mut_ptr();

        let run = |driver: Driver, stream: sys::RawStream| {
            let table = driver.table();
            let Launch {
                grid: [gx, gy, gz],
                block: [bx, by, bz],
                shared_bytes: shared,
                cooperative,
            } = launch;
            if cooperative {
                let launch = table.launch_cooperative_kernel;
                // SAFETY: the function and the stream are live; the caller answers for the arguments, which the driver copies, and for what they are used for.
                unsafe { launch(self.raw, gx, gy, gz, bx, by, bz, shared, stream, parameters) }
            } else {
                let launch = table.launch_kernel;
                let extra = ptr::null_mut();
                // SAFETY: as above.
                unsafe { launch(self.raw, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra) }
            }
        };
        let mut few = [&self.module; FEW_USES];
        if uses.len() < FEW_USES {
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

    /// Has it ready on the device. A driver leaves that to the first launch, and waits for all other work of the device then: for ever, if that waits for this kernel, or for another rank that does.
    ///
    /// # Errors
    /// What the driver says.
    pub fn load(&self) -> Result<(), Error> {
        let context = self.module.context();
        let driver = context.driver();
        let Some(load) = driver.table().func_load else {
            // Before CUDA 12.4: to be asked about, it must be there.
            return self.attribute(KernelAttribute::Registers).map(|_| ());
        };
        let _entered = context.enter()?;
        // SAFETY: the function is live.
        let answer = unsafe { load(self.raw) };
        driver.check(answer, "cuFuncLoad", format_args!("the kernel {}", self.name))
    }

    /// What the driver says of `attribute`.
    ///
    /// # Errors
    /// What the driver says.
    pub fn attribute(&self, attribute: KernelAttribute) -> Result<i32, Error> {
        let context = self.module.context();
        let driver = context.driver();
        let _entered = context.enter()?;
        let mut value = 0;
        // SAFETY: the pointer is to a c_int of ours; the function is live.
        let answer = unsafe { (driver.table().func_get_attribute)(&raw mut value, attribute as c_int, self.raw) };
        driver.check(
            answer,
            "cuFuncGetAttribute",
            format_args!("{attribute:?} of the kernel {}", self.name),
        )?;
        Ok(value)
    }

    /// Lets launches ask for up to `bytes` of shared memory, beyond the 48 KiB that they may by default.
    ///
    /// # Errors
    /// What the driver says, of more than the device has.
    pub fn allow_shared_bytes(&self, bytes: u32) -> Result<(), Error> {
        let context = self.module.context();
        let driver = context.driver();
        let _entered = context.enter()?;
        let attribute = KernelAttribute::MaxDynamicSharedBytes as c_int;
        let value = c_int::try_from(bytes).unwrap_or(c_int::MAX);
        // SAFETY: the function is live.
        let answer = unsafe { (driver.table().func_set_attribute)(self.raw, attribute, value) };
        driver.check(
            answer,
            "cuFuncSetAttribute",
            format_args!("{bytes} bytes of shared memory for the kernel {}", self.name),
        )
    }

    /// How many blocks of `threads`, with `shared_bytes` each, run at once on one multiprocessor.
    ///
    /// # Errors
    /// What the driver says.
    pub fn resident_blocks(&self, threads: u32, shared_bytes: u32) -> Result<u32, Error> {
        let context = self.module.context();
        let driver = context.driver();
        let _entered = context.enter()?;
        let mut blocks = 0;
        let threads = c_int::try_from(threads).unwrap_or(c_int::MAX);
        // SAFETY: the pointer is to a c_int of ours; the function is live.
        let answer = unsafe {
            (driver.table().occupancy_max_active_blocks)(&raw mut blocks, self.raw, threads, shared_bytes as usize)
        };
        driver.check(
            answer,
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
            format_args!("the kernel {}", self.name),
        )?;
        Ok(c_uint::try_from(blocks).unwrap_or(0))
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

/// The PTX of one kernel: what is before the first, and the kernel itself. The kernels share nothing.
pub(crate) fn excerpt(ptx: &str, name: &str) -> Option<String> {
    let head = &ptx[..ptx.find(".visible .entry ")?];
    let entry = &ptx[ptx.find(&format!(".visible .entry {name}("))?..];
    let end = entry.find("\n}\n")? + "\n}\n".len();
    Some([head, &entry[..end]].concat())
}
