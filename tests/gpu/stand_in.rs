//! The kernels' source compiled for the CPU, without a driver's streams and memory.

use std::ffi::c_void;

use anyhow::{Result, ensure};
use doorbell_cuda::reduce::Reduction;
use doorbell_cuda_standin::{ExecutionMode, Standin, missing};
use doorbell_tests::gpu::{Device, sweep};

/// `None`, with a message, if it cannot be compiled, which is a failure under CI.
pub(super) fn driver() -> Option<Standin> {
    if let Some(what) = missing() {
        assert!(std::env::var_os("CI").is_none(), "{what}");
        eprintln!("skipped: {what}");
        return None;
    }
    Some(Standin::load(ExecutionMode::Lazy))
}

pub(super) struct Processor {
    driver: Standin,
    memory: Vec<u8>,
    /// The offset of the aligned part that is used.
    start: usize,
}

impl Processor {
    pub(super) fn new(driver: Standin) -> Self {
        let memory = vec![0; sweep::MEMORY + 256];
        let start = memory.as_ptr().align_offset(256);
        Self { driver, memory, start }
    }
}

impl Device for Processor {
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
        let mut arguments = reduction.arguments;
        let arguments = &mut [(&raw mut arguments).cast::<c_void>()];
        // SAFETY: the kernel's arguments, whose addresses lie in the memory, as the trait requires.
        let found = unsafe { self.driver.run(&name, reduction.blocks, reduction.threads, arguments) };
        ensure!(found, "the stand-in has no {name}");
        bytes.copy_from_slice(&self.memory[part]);
        Ok(())
    }
}
