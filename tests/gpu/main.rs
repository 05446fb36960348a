//! The GPU's reduction kernels without a GPU: their source is compiled for the processor (`stand_in.cpp`) and put through every case that `gpu-reduce` puts them through on one. What that leaves out is what only a GPU has: its
//! conversions between floats, its minimum and maximum, and the loads and stores themselves.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use doorbell_cuda::reduce::{Arguments, Reduction};
use doorbell_tests::gpu::{Device, sweep};
use libloading::Library;

/// The processor, as a GPU.
struct StandIn {
    library: Library,
    memory: Vec<u8>,
    /// Where in it the part begins that is given out.
    start: usize,
}

type Kernel = unsafe extern "C" fn();
type Launch = unsafe extern "C" fn(Kernel, u32, u32, *const Arguments);

impl StandIn {
    /// Compiles the kernels as a library in `folder`; none where there is no C++ compiler.
    fn compile(folder: &Path) -> Result<Option<Self>> {
        if Command::new("c++").arg("--version").output().is_err() {
            return Ok(None);
        }
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let library = folder.join("libkernels.so");
        let output = Command::new("c++")
            .args([
                "-std=c++17",
                "-O2",
                "-fPIC",
                "-shared",
                "-ffp-contract=off",
                "-Wall",
                "-Werror",
                "-Wno-unknown-pragmas",
            ])
            .arg("-I")
            .arg(here.join("../gpudirect/cuda/kernels"))
            .arg("-o")
            .arg(&library)
            .arg(here.join("gpu/stand_in.cpp"))
            .output()
            .context("cannot run c++")?;
        if !output.status.success() {
            bail!("c++: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
        }
        let memory = vec![0; sweep::MEMORY + 256];
        let start = memory.as_ptr().align_offset(256);
        Ok(Some(Self {
            // SAFETY: loading it runs nothing but the C++ library's own.
            library: unsafe { Library::new(&library)? },
            memory,
            start,
        }))
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
        // SAFETY: the source has a kernel of each name, and `launch`; both take what they are declared with. The reduction's addresses are of the memory, as the trait has it.
        unsafe {
            let kernel = self.library.get::<Kernel>(&name)?;
            let launch = self.library.get::<Launch>("launch")?;
            launch(
                *kernel,
                reduction.blocks,
                reduction.threads,
                &raw const reduction.arguments,
            );
        }
        bytes.copy_from_slice(&self.memory[part]);
        Ok(())
    }
}

#[test]
fn kernels_on_the_processor_give_the_collectives_bits() {
    let folder = tempfile::tempdir().unwrap();
    let Some(mut device) = StandIn::compile(folder.path()).unwrap() else {
        assert!(std::env::var_os("CI").is_none(), "no C++ compiler (g++)");
        eprintln!("skipped: no C++ compiler (g++)");
        return;
    };
    let cases = sweep::run(&mut device, sweep::Extent::Full).unwrap();
    assert_eq!(cases, 12 * 6 * 8 * 17 * 3 * 2);
}
