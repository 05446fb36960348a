//! The processor as a stand-in for a GPU: a driver of CUDA (`driver/`, in C++) that doorbell-cuda loads in the place of `libcuda.so.1`, so that everything above it is tested where there is no GPU. A dependency of tests alone.
//!
//! [`Standin::load`] gives a test a driver of its own; a program that is run is given one by [`environment`]. Either has two [manners](Manner) of doing work.
//!
//! - Device memory is memfds, which go between processes as NVIDIA's descriptors, IPC handles and imports do. Device addresses fault when the program follows one. What is freed is mapped nowhere.
//! - Kernels are their sources of `gpudirect/cuda/kernels`, compiled for the processor; which of them there are the PTX says that is loaded. `kernels/host.cuh` there has the convention.
//! - Streams, events, words, batches, host functions, captures and graphs do as CUDA's.
//!
//! What it does not show: how long anything takes, what a GPU's weaker order of memory does, that peers see what is written without being told, and how many blocks run at once.

mod build;

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, OsString, c_char, c_int, c_void};
use std::fs;
use std::path::{Path, PathBuf};
use std::process;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use doorbell_cuda::{Absent, Driver};
use libloading::os::unix::Library;

pub use build::{build, missing};

/// How work is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    /// When somebody waits for it (or has asked very often), and then only what that needs: all that is asynchronous on a GPU is as late and as unordered as it can be. Finds what is not waited for, and what is freed too early. For one process: what another one
    /// waits for is not hurried.
    Lazy,
    /// At once, by a thread for each stream and one for each block of a kernel: several ranks in a process, or several processes, run for real.
    Prompt,
}

/// Everything that the driver counts.
const COUNTED: [&str; 12] = [
    "allocation",
    "mapping",
    "reservation",
    "host",
    "registered",
    "stream",
    "event",
    "module",
    "graph",
    "exec",
    "context",
    "work",
];

/// A driver that no other test has.
pub struct Standin {
    library: Library,
    path: PathBuf,
}

/// The environment of a program that is to take the stand-in for its driver, with so many devices (8 at most).
///
/// `DOORBELL_STANDIN` has words with commas between them: `lazy` or `prompt`; `devices=N`; `apart`, so that devices do not reach each other's memory; `open` as by [`Standin::open`]; `late` as by [`Standin::set_late_loading`]; `fail=CALL:NTH:CODE` as by [`Standin::fail_nth`]; `ATTRIBUTE=VALUE` as by [`Standin::set_attribute`].
///
/// # Panics
/// As [`build`].
#[must_use]
pub fn environment(manner: Manner, devices: usize) -> [(&'static str, OsString); 2] {
    let manner = match manner {
        Manner::Lazy => "lazy",
        Manner::Prompt => "prompt",
    };
    [
        ("DOORBELL_CUDA_LIBRARY", build().into()),
        ("DOORBELL_STANDIN", format!("{manner},devices={devices}").into()),
    ]
}

impl Standin {
    /// One of two devices.
    ///
    /// # Panics
    /// As [`build`], and where the library cannot be loaded.
    #[must_use]
    pub fn load(manner: Manner) -> Self {
        Self::load_without(manner, &[])
    }

    /// The same, without some of the driver's functions, as an older one is.
    ///
    /// # Panics
    /// As [`Standin::load`].
    #[must_use]
    pub fn load_without(manner: Manner, functions: &[&str]) -> Self {
        let mut bytes = fs::read(build()).expect("the stand-in, which was just built");
        for function in functions {
            rename(&mut bytes, function);
        }
        let path = unused();
        // The dynamic loader gives each file a copy of its own of what the library knows.
        fs::write(&path, bytes).expect("a file in the folder of the build");
        // SAFETY: the library's initialisers read the environment and no more.
        let library = unsafe { Library::new(&path) }.expect("the stand-in is a library");
        let standin = Self { library, path };
        standin.call("standin_manner", (manner == Manner::Prompt).into());
        standin
    }

    /// The driver, started.
    ///
    /// # Errors
    /// As [`Driver::load`], where [`Standin::set_start`] or [`Standin::fail`] make it so.
    pub fn driver(&self) -> Result<Driver, Absent> {
        // SAFETY: the stand-in does as NVIDIA's driver, in what it is called for.
        unsafe { Driver::load_from(&self.path) }
    }

    /// The library's file, of this driver alone.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn function<T: Copy>(&self, name: &str) -> T {
        // SAFETY: the callers name functions of `driver/` with their types.
        unsafe {
            *self
                .library
                .get::<T>(name.as_bytes())
                .expect("a function of the driver")
        }
    }

    fn call(&self, name: &str, value: c_int) {
        // SAFETY: the callers name functions that have this type.
        unsafe { self.function::<unsafe extern "C" fn(c_int)>(name)(value) }
    }

    /// How many of a kind are live: "allocation", "mapping", "reservation", "host", "registered", "stream", "event", "module", "graph", "exec", "context"; and "work", pieces of work that are being done.
    ///
    /// # Panics
    /// Of any other name.
    #[must_use]
    pub fn count(&self, name: &str) -> i32 {
        let text = CString::new(name).expect("a name");
        // SAFETY: the function has this type, and the text ends with a NUL.
        let count =
            unsafe { self.function::<unsafe extern "C" fn(*const c_char) -> c_int>("standin_count")(text.as_ptr()) };
        assert!(
            count >= 0,
            "nothing of the name {name} is counted, or more were destroyed than made"
        );
        count
    }

    /// The next call of `call`, such as `cuMemCreate`, answers `code`.
    ///
    /// # Panics
    /// Of a name with a NUL.
    pub fn fail(&self, call: &str, code: i32) {
        self.fail_nth(call, 1, code);
    }

    /// Of the calls of `call` from now on, the `nth` answers `code`; 1 is the next.
    ///
    /// # Panics
    /// Of a name with a NUL.
    pub fn fail_nth(&self, call: &str, nth: i32, code: i32) {
        type Fail = unsafe extern "C" fn(*const c_char, c_int, c_int);
        let call = CString::new(call).expect("a name");
        // SAFETY: the function has this type, and the text ends with a NUL.
        unsafe { self.function::<Fail>("standin_fail")(call.as_ptr(), nth, code) }
    }

    /// Whether a call is to fail that has not failed so far.
    #[must_use]
    pub fn is_failing(&self) -> bool {
        // SAFETY: the function has this type.
        unsafe { self.function::<unsafe extern "C" fn() -> c_int>("standin_failing")() != 0 }
    }

    /// The functions that were called so far, by name, and how often.
    #[must_use]
    pub fn calls(&self) -> BTreeMap<String, i32> {
        type Calls = unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int;
        let calls = self.function::<Calls>("standin_calls");
        let mut all = BTreeMap::new();
        for index in 0.. {
            let mut name = ptr::null();
            // SAFETY: the function has this type, and the pointer is to one of ours.
            let count = unsafe { calls(index, &raw mut name) };
            if count < 0 {
                break;
            }
            // SAFETY: a string of the library's, which ends with a NUL and is there as long as the library.
            let name = unsafe { CStr::from_ptr(name) };
            all.insert(name.to_string_lossy().into_owned(), count);
        }
        all
    }

    /// From now on every call answers `code` and no work is done, as when a kernel has touched memory that it must not (700).
    pub fn lose(&self, code: i32) {
        self.call("standin_lose", code);
    }

    /// Whether devices reach each other's memory, as they do at first.
    pub fn set_peers(&self, can: bool) {
        self.call("standin_peers", can.into());
    }

    /// The driver's error when it is started: how many devices (8 at most), and for which version of CUDA it is (13000 for 13.0).
    pub fn set_start(&self, devices: i32, version: i32) {
        // SAFETY: the function has this type.
        unsafe { self.function::<unsafe extern "C" fn(c_int, c_int)>("standin_start")(devices, version) }
    }

    /// What devices answer of an attribute from now on: a `CUdevice_attribute` by its number, such as 124 for dma-bufs.
    pub fn set_attribute(&self, attribute: i32, value: i32) {
        // SAFETY: the function has this type.
        unsafe { self.function::<unsafe extern "C" fn(c_int, c_int)>("standin_attribute")(attribute, value) }
    }

    /// Whether a kernel's first launch waits for all work of its device, unless `cuFuncLoad` was called before, as NVIDIA's driver may: whoever launches while a stream waits for a peer is found to hang.
    pub fn set_late_loading(&self, late: bool) {
        self.call("standin_late", late.into());
    }

    /// Lets the program follow device addresses, which fault otherwise. Before any memory is made.
    pub fn open(&self) {
        self.call("standin_open", 1);
    }

    /// How many contexts the calling thread has pushed.
    #[must_use]
    pub fn depth(&self) -> i32 {
        // SAFETY: the function has this type.
        unsafe { self.function::<unsafe extern "C" fn() -> c_int>("standin_depth")() }
    }

    /// Runs a kernel here and now, with the addresses of its arguments; whether there is one of this name. Addresses in them may be the processor's.
    ///
    /// # Safety
    /// The arguments must be those that the kernel takes.
    ///
    /// # Panics
    /// Of a name with a NUL.
    pub unsafe fn run(&self, kernel: &str, blocks: u32, threads: u32, arguments: &mut [*mut c_void]) -> bool {
        type Run = unsafe extern "C" fn(*const c_char, u32, u32, *mut *mut c_void) -> c_int;
        let kernel = CString::new(kernel).expect("a name");
        // SAFETY: the function has this type, and the text ends with a NUL; for the arguments the caller answers.
        unsafe { self.function::<Run>("standin_run")(kernel.as_ptr(), blocks, threads, arguments.as_mut_ptr()) == 0 }
    }

    /// That everything has been given back, and that the calling thread captures as it did at first.
    ///
    /// # Panics
    /// Where it has not.
    pub fn assert_nothing_left(&self, after: &str) {
        let left: Vec<_> = COUNTED
            .into_iter()
            .map(|name| (name, self.count(name)))
            .filter(|(_, count)| *count != 0)
            .collect();
        assert!(left.is_empty(), "{after}: left are {left:?}");
        // SAFETY: the function has this type.
        let mode = unsafe { self.function::<unsafe extern "C" fn() -> c_int>("standin_mode")() };
        assert_eq!(mode, 0, "{after}: this thread's mode of capture has changed");
    }
}

impl Drop for Standin {
    fn drop(&mut self) {
        // A file that stays behind in the folder of the build harms nobody.
        drop(fs::remove_file(&self.path));
    }
}

/// Gives a function's symbol another name, by which nobody looks for it.
fn rename(library: &mut [u8], function: &str) {
    let symbol = [b"\0", function.as_bytes(), b"\0"].concat();
    let mut found = 0;
    for at in 0..library.len() - symbol.len() {
        if library[at..].starts_with(&symbol) {
            library[at + 1] = b'-';
            found += 1;
        }
    }
    assert!(found > 0, "the stand-in has no {function}");
}

/// A file's name that no other test has, in the folder of the build.
fn unused() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    build::folder().join(format!("copy-{}-{next}.so", process::id()))
}
