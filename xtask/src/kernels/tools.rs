//! CUDA's compiler, assembler and disassembler, installed by pip into target/cuda: pinned packages
//! that need neither a GPU nor root.

use crate::{pip, setup, target_folder, workspace};
use anyhow::{Context, Result, bail};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Of CUDA 13.0, for drivers of branch 580; the disassembler is published from 13.2 on.
const WHEELS: [&str; 5] = [
    COMPILER,
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-nvdisasm==13.2.51",
];

/// The compiler's package, as the manifest names it.
pub(super) const COMPILER: &str = "nvidia-cuda-nvcc==13.0.88";

pub(super) struct Tools {
    bin: PathBuf,
}

impl Tools {
    /// Installs them if missing. `Ok(Err(missing))` names what the machine lacks for that.
    pub(super) fn provide() -> Result<Result<Self, Vec<&'static str>>> {
        let missing = setup::provide(&setup::KERNELS)?;
        if !missing.is_empty() {
            return Ok(Err(missing));
        }
        let folder = target_folder()?.join("cuda");
        pip::provide(&folder, &WHEELS, &[])?;
        Ok(Ok(Self {
            bin: folder.join("nvidia/cu13/bin"),
        }))
    }

    /// Nothing may be fused: results are the processor's bits.
    pub(super) fn compile(&self, source: &Path, architecture: &str, definitions: &[String]) -> Result<String> {
        let ptx = super::folder()?.join("compiled.ptx");
        let mut nvcc = Command::new(self.bin.join("nvcc"));
        nvcc.args([
            "-std=c++17",
            "-O3",
            "-fmad=false",
            "--ptx",
            "--Werror=all-warnings",
            "-arch",
            architecture,
        ])
        .args(definitions)
        .arg("-o")
        .arg(&ptx)
        .arg(source)
        .current_dir(workspace());
        output(&mut nvcc)?;
        fs::read_to_string(&ptx).with_context(|| format!("cannot read {}", ptx.display()))
    }

    /// The machine code of PTX, and what the assembler says of each kernel.
    pub(super) fn assemble(&self, ptx: &Path, architecture: &str) -> Result<(PathBuf, String)> {
        let cubin = super::folder()?.join(format!("{architecture}.cubin"));
        let mut ptxas = Command::new(self.bin.join("ptxas"));
        ptxas.args(["-v", "-arch", architecture, "-o"]).arg(&cubin).arg(ptx);
        let said = output(&mut ptxas)?;
        Ok((cubin, said))
    }

    pub(super) fn disassemble(&self, cubin: &Path) -> Result<String> {
        output(Command::new(self.bin.join("nvdisasm")).arg("-c").arg(cubin))
    }
}

/// What a program says, standard output first.
fn output(command: &mut Command) -> Result<String> {
    let program = Path::new(command.get_program())
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let output = command.output().with_context(|| format!("cannot run {program}"))?;
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!("{program}: {}\n{said}", output.status);
    }
    Ok(said.into_owned())
}
