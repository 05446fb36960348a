//! The kernels' source as a library for the processor.

use std::ffi::{CStr, c_char, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context as _, Result};
use doorbell_cuda::reduce::{Arguments, Reduction};
use doorbell_tests::gpu::{Device, sweep};
use libloading::Library;

/// The kernels and what runs one.
pub(super) struct Kernels {
    library: Library,
    launch: Launch,
}

/// Runs a kernel with so many blocks and threads, and its argument.
pub(super) type Launch = unsafe extern "C" fn(*const c_void, u32, u32, *const Arguments);

impl Kernels {
    /// Compiled once; none where there is no C++ compiler, which is said, and wrong under CI.
    pub(super) fn compiled() -> Option<&'static Self> {
        static COMPILED: OnceLock<Option<Kernels>> = OnceLock::new();
        COMPILED.get_or_init(Self::compile).as_ref()
    }

    fn compile() -> Option<Self> {
        if Command::new("c++").arg("--version").output().is_err() {
            assert!(std::env::var_os("CI").is_none(), "no C++ compiler (g++)");
            eprintln!("skipped: no C++ compiler (g++)");
            return None;
        }
        let kernels = repository("gpudirect/cuda/kernels");
        let library = compile(
            "kernels",
            Command::new("c++")
                .args([
                    "-std=c++17",
                    "-O2",
                    "-ffp-contract=off",
                    "-Wall",
                    "-Werror",
                    "-Wno-unknown-pragmas",
                    "-I",
                ])
                .arg(kernels)
                .arg(repository("tests/gpu/stand_in.cpp")),
        );
        // SAFETY: the source has `launch`, of this type.
        let launch = unsafe { *library.get::<Launch>("launch").unwrap() };
        Some(Self { library, launch })
    }

    /// What runs a kernel.
    pub(super) fn launch(&self) -> Launch {
        self.launch
    }

    /// Where a kernel is; null where there is none of that name.
    pub(super) fn find(&self, name: &str) -> *const c_void {
        // SAFETY: it is not called as what it is declared here.
        let found = unsafe { self.library.get::<unsafe extern "C" fn()>(name) };
        found.map_or(std::ptr::null(), |kernel| *kernel as *const c_void)
    }

    /// The same for the driver of the tests.
    pub(super) extern "C" fn find_for_driver(name: *const c_char) -> *const c_void {
        // SAFETY: the driver gives the name that it was called with.
        let name = unsafe { CStr::from_ptr(name) };
        match (Self::compiled(), name.to_str()) {
            (Some(kernels), Ok(name)) => kernels.find(name),
            _ => std::ptr::null(),
        }
    }
}

/// A path from the repository's root.
pub(super) fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// Makes a library with a compiler and loads it. Its file is gone when this returns: no test finds another one's.
pub(super) fn compile(name: &str, compiler: &mut Command) -> Library {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(format!("lib{name}.so"));
    let output = compiler
        .args(["-fPIC", "-shared", "-pthread", "-o"])
        .arg(&path)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{name}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    // SAFETY: loading it runs nothing but the language's own.
    unsafe { Library::new(&path).unwrap() }
}

/// The processor, as a GPU.
pub(super) struct StandIn {
    kernels: &'static Kernels,
    memory: Vec<u8>,
    /// Where in it the part begins that is given out.
    start: usize,
}

impl StandIn {
    pub(super) fn new(kernels: &'static Kernels) -> Self {
        let memory = vec![0; sweep::MEMORY + 256];
        let start = memory.as_ptr().align_offset(256);
        Self { kernels, memory, start }
    }
}

impl Device for StandIn {
    fn address(&self) -> u64 {
        self.memory[self.start..].as_ptr().expose_provenance() as u64
    }

    fn len(&self) -> usize {
        self.memory.len() - self.start
    }

    fn reduce(&mut self, reduction: &Reduction, bytes: &mut [u8]) -> Result<()> {
        let part = self.start..self.start + bytes.len();
        self.memory[part.clone()].copy_from_slice(bytes);
        let name = reduction.kernel.to_string();
        let kernel = Some(self.kernels.find(&name))
            .filter(|kernel| !kernel.is_null())
            .context(name)?;
        // SAFETY: the kernel takes these arguments, whose addresses are of the memory, as the trait has it.
        unsafe {
            (self.kernels.launch())(
                kernel,
                reduction.blocks,
                reduction.threads,
                &raw const reduction.arguments,
            )
        };
        bytes.copy_from_slice(&self.memory[part]);
        Ok(())
    }
}
