//! A CUDA driver on the CPU (`driver/`, in C++), which doorbell-cuda loads in place of
//! `libcuda.so.1`, so that everything above it is tested without a GPU. A dev-dependency only.
//!
//! [`Standin::load`] gives a test a driver of its own; [`environment`] configures a program's.
//!
//! - Device memory is memfds, shared by descriptors, IPC handles and imports like NVIDIA's. Host
//!   access to device addresses faults; freed memory is unmapped.
//! - Kernels are compiled for the CPU from `gpudirect/cuda/kernels` (see `host.cuh` there); the
//!   loaded PTX determines which exist.
//!
//! - Thread blocks are resident together as far as multiprocessors
//!   ([`Attribute::MultiprocessorCount`](doorbell_cuda::Attribute), 132) have room for 512 threads
//!   of one kernel each; others wait for room. A kernel whose threads do not wait is one block. In
//!   one process: other processes have room of their own.
//!
//! It does not model timing, a GPU's weaker memory order, or peers' visibility of writes without
//! synchronization.

mod build;

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, OsString, c_char, c_int, c_void};
use std::fs;
use std::path::{Path, PathBuf};
use std::process;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use doorbell_cuda::{Driver, LoadError};
use libloading::os::unix::Library;

pub use build::{build, missing};

/// How work is executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExecutionMode {
    /// Only when something waits for it (or has polled very often), and then only what that needs:
    /// as late and unordered as possible, which finds missing waits and premature frees. For a
    /// single process: another's waits do not trigger execution.
    Lazy,
    /// Immediately, by a thread per stream and per thread block: several ranks run concurrently.
    Prompt,
}

const COUNTED: [&str; 13] = [
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
    "object",
    "context",
    "work",
];

/// A driver private to a test.
pub struct Standin {
    library: Library,
    path: PathBuf,
}

/// The environment of a program that should use the driver, with `devices` devices (at most 8).
///
/// `DOORBELL_STANDIN` is a comma-separated list: `lazy` or `prompt`; `devices=N`; `apart` for no
/// peer access between devices; `open` as [`Standin::open`]; `implicit` as
/// [`Standin::set_implicit_synchronization`]; `queue=N` for the operations that a stream holds: the
/// call that finds no space waits, and all others of its context with it; `fail=CALL:NTH:CODE` as
/// [`Standin::fail_nth`]; `ATTRIBUTE=VALUE` as [`Standin::set_attribute`].
///
/// # Panics
/// As [`build`].
#[must_use]
pub fn environment(manner: ExecutionMode, devices: usize) -> [(&'static str, OsString); 2] {
    let manner = match manner {
        ExecutionMode::Lazy => "lazy",
        ExecutionMode::Prompt => "prompt",
    };
    [
        ("DOORBELL_CUDA_LIBRARY", build().into()),
        ("DOORBELL_STANDIN", format!("{manner},devices={devices}").into()),
    ]
}

impl Standin {
    /// A driver with two devices.
    ///
    /// # Panics
    /// As [`build`], and if the library cannot be loaded.
    #[must_use]
    pub fn load(manner: ExecutionMode) -> Self {
        Self::load_without(manner, &[])
    }

    /// The same without some of the driver's functions, like an older driver.
    ///
    /// # Panics
    /// As [`Standin::load`].
    #[must_use]
    pub fn load_without(manner: ExecutionMode, functions: &[&str]) -> Self {
        let mut bytes = fs::read(build()).expect("the stand-in, which was just built");
        for function in functions {
            rename(&mut bytes, function);
        }
        let path = unique_path();
        // The dynamic loader gives each file its own copy of the library's state.
        fs::write(&path, bytes).expect("a file in the folder of the build");
        // SAFETY: the library's initialisers only read the environment.
        let library = unsafe { Library::new(&path) }.expect("the stand-in is a library");
        let standin = Self { library, path };
        standin.call("standin_manner", (manner == ExecutionMode::Prompt).into());
        standin
    }

    /// The initialized driver.
    ///
    /// # Errors
    /// As [`Driver::load`], if [`Standin::set_start`] or [`Standin::fail`] cause it.
    pub fn driver(&self) -> Result<Driver, LoadError> {
        // SAFETY: the stand-in implements the called functions like NVIDIA's driver.
        unsafe { Driver::load_from(&self.path) }
    }

    /// The path of the library file, private to this driver.
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

    /// The number of live objects of a kind: "allocation", "mapping", "reservation", "host",
    /// "registered", "stream", "event", "module", "graph", "exec", "object" (of users), "context";
    /// and "work", operations in progress.
    ///
    /// # Panics
    /// For any other name.
    #[must_use]
    pub fn count(&self, name: &str) -> i32 {
        let text = CString::new(name).expect("a name");
        // SAFETY: the function has this type, and the text is NUL-terminated.
        let count =
            unsafe { self.function::<unsafe extern "C" fn(*const c_char) -> c_int>("standin_count")(text.as_ptr()) };
        assert!(
            count >= 0,
            "nothing of the name {name} is counted, or more were destroyed than made"
        );
        count
    }

    /// Makes the next call of `call`, such as `cuMemCreate`, return `code`.
    ///
    /// # Panics
    /// For a name with a NUL.
    pub fn fail(&self, call: &str, code: i32) {
        self.fail_nth(call, 1, code);
    }

    /// Makes the `nth` call of `call` from now on return `code`; 1 is the next.
    ///
    /// # Panics
    /// For a name with a NUL.
    pub fn fail_nth(&self, call: &str, nth: i32, code: i32) {
        type Fail = unsafe extern "C" fn(*const c_char, c_int, c_int);
        let call = CString::new(call).expect("a name");
        // SAFETY: the function has this type, and the text is NUL-terminated.
        unsafe { self.function::<Fail>("standin_fail")(call.as_ptr(), nth, code) }
    }

    /// Whether an injected failure is still pending.
    #[must_use]
    pub fn is_failing(&self) -> bool {
        // SAFETY: the function has this type.
        unsafe { self.function::<unsafe extern "C" fn() -> c_int>("standin_failing")() != 0 }
    }

    /// The functions called so far, by name, with their counts.
    #[must_use]
    pub fn calls(&self) -> BTreeMap<String, i32> {
        type Calls = unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int;
        let calls = self.function::<Calls>("standin_calls");
        let mut all = BTreeMap::new();
        for index in 0.. {
            let mut name = ptr::null();
            // SAFETY: the function has this type, and the pointer is to a local one.
            let count = unsafe { calls(index, &raw mut name) };
            if count < 0 {
                break;
            }
            // SAFETY: a NUL-terminated string of the library, valid as long as the library.
            let name = unsafe { CStr::from_ptr(name) };
            all.insert(name.to_string_lossy().into_owned(), count);
        }
        all
    }

    /// From now on calls return `code` and no work runs, as after an illegal access (700).
    pub fn lose(&self, code: i32) {
        self.call("standin_lose", code);
    }

    /// Whether devices have peer access, as they do initially.
    pub fn set_peers(&self, can: bool) {
        self.call("standin_peers", can.into());
    }

    /// Sets the number of devices (at most 8) and CUDA version (13000 is 13.0) seen at start.
    pub fn set_start(&self, devices: i32, version: i32) {
        // SAFETY: the function has this type.
        unsafe { self.function::<unsafe extern "C" fn(c_int, c_int)>("standin_start")(devices, version) }
    }

    /// Sets a device attribute, by its `CUdevice_attribute` number, such as 124 for dma-buf.
    pub fn set_attribute(&self, attribute: i32, value: i32) {
        // SAFETY: the function has this type.
        unsafe { self.function::<unsafe extern "C" fn(c_int, c_int)>("standin_attribute")(attribute, value) }
    }

    /// Whether calls wait for all work of the device where NVIDIA's driver may: loading modules and
    /// kernels, at their first launch at the latest, allocating and freeing pinned memory.
    /// Such a call while a stream waits for a peer then hangs.
    pub fn set_implicit_synchronization(&self, implicit: bool) {
        self.call("standin_implicit", implicit.into());
    }

    /// Makes device addresses accessible to the host; call it before allocating memory.
    pub fn open(&self) {
        self.call("standin_open", 1);
    }

    /// The depth of the calling thread's context stack.
    #[must_use]
    pub fn depth(&self) -> i32 {
        // SAFETY: the function has this type.
        unsafe { self.function::<unsafe extern "C" fn() -> c_int>("standin_depth")() }
    }

    /// Runs a kernel synchronously, with the addresses of its arguments; returns whether there is
    /// one of this name. The arguments may contain host addresses.
    ///
    /// # Safety
    /// The arguments must match the kernel's parameters.
    ///
    /// # Panics
    /// For a name with a NUL.
    pub unsafe fn run(&self, kernel: &str, blocks: u32, threads: u32, arguments: &mut [*mut c_void]) -> bool {
        type Run = unsafe extern "C" fn(*const c_char, u32, u32, *mut *mut c_void) -> c_int;
        let kernel = CString::new(kernel).expect("a name");
        // SAFETY: the function has this type, and the text is NUL-terminated; the caller vouches
        // for the arguments.
        unsafe { self.function::<Run>("standin_run")(kernel.as_ptr(), blocks, threads, arguments.as_mut_ptr()) == 0 }
    }

    /// Asserts that everything is released, user objects within ten seconds, and that the thread's
    /// capture mode is the initial one.
    ///
    /// # Panics
    /// Otherwise.
    pub fn assert_nothing_left(&self, after: &str) {
        // A thread of the driver releases them.
        for _ in 0..10_000 {
            match self.count("object") {
                0 => break,
                _ => thread::sleep(Duration::from_millis(1)),
            }
        }
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
        // A leftover file in the build folder is harmless.
        drop(fs::remove_file(&self.path));
    }
}

/// Renames a function's symbol, so that it cannot be resolved.
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

fn unique_path() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    build::folder().join(format!("copy-{}-{next}.so", process::id()))
}
