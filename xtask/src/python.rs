//! `cargo xtask python`: the tests of the Python package that need packages from PyPI, and
//! PyTorch's own tests of torch.distributed on its backend.
//!
//! PyPI's PyTorch links to CUDA's libraries, which are larger than it, and which tensors of the CPU
//! do not use. The runtime's finds no driver; others take the place of the rest, whose functions
//! all fail.

use crate::{
    ci::{self, Scope, Verdict, command},
    pip, setup, target_folder,
};
use anyhow::{Context, Result, ensure};
use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

const HELP: &str = "\
Run the tests of the Python package that need NumPy, mpi4py or PyTorch, which pip installs

Usage: cargo xtask python [OPTIONS]

Options:
      --full  also Ray's actors, and all of PyTorch's own tests that are for tensors of the CPU, not a sample
  -h, --help  show this

Exit status: 0 all passed, 1 a failure, 2 a wrong call.
";

/// With what each needs, as pip is not to choose.
const WHEELS: [&str; 14] = [
    "numpy==2.4.6",
    "mpi4py==4.1.2",
    "torch==2.15.0",
    "nvidia-cuda-runtime==13.2.86",
    "filelock==4.3.1",
    "fsspec==2026.9.0",
    "jinja2==3.1.6",
    "markupsafe==3.0.4",
    "mpmath==1.4.1",
    "networkx==3.6.1",
    "sympy==1.14.0",
    "typing-extensions==4.16.0",
    // Of PyTorch's tests alone.
    "expecttest==0.3.0",
    "setuptools==65.5.0",
];

const RAY: [&str; 17] = [
    "ray==2.60.0",
    "attrs==26.1.0",
    "certifi==2026.10.19.post1",
    "charset-normalizer==3.5.3",
    "click==8.5.1",
    "filelock==4.3.1",
    "idna==3.20",
    "jsonschema==4.26.0",
    "jsonschema-specifications==2025.9.1",
    "msgpack==1.2.4",
    "packaging==26.4",
    "protobuf==7.36.2",
    "pyyaml==6.0.4",
    "referencing==0.37.0",
    "requests==2.34.2",
    "rpds-py==2026.9.1",
    "urllib3==2.8.0",
];

/// How the names of CUDA's libraries begin, and of their functions.
const LIBRARIES: [&str; 3] = ["libcu", "libnccl", "libnv"];
const SYMBOLS: [&str; 4] = ["cu", "nv", "nccl", "__cuda"];

/// The command-line form. Returns the exit status.
pub(crate) fn main(mut arguments: lexopt::Parser) -> Result<u8> {
    use lexopt::prelude::*;
    let mut scope = Scope::Short;
    while let Some(argument) = arguments.next()? {
        match argument {
            Short('h') | Long("help") => {
                print!("{HELP}");
                return Ok(0);
            }
            Long("full") => scope = Scope::Full,
            other => return Err(other.unexpected().into()),
        }
    }
    let started = Instant::now();
    let line = ci::judge("python", check(scope), started.elapsed());
    println!("-- {line}");
    Ok(u8::from(line.counts.failed + line.counts.skipped > 0))
}

pub(crate) fn check(scope: Scope) -> Result<Verdict> {
    // Open MPI's wheel keeps its libraries where pip's --target does not install.
    match setup::provide(&[setup::COLLECTIVE_PEERS[0], setup::KERNELS[1]])?.as_slice() {
        [] => {}
        missing => return ci::lacking(missing),
    }
    let folder = target_folder()?.join("pip");
    let wheels = folder.join("python");
    pip::provide(&wheels, &WHEELS, &[])?;
    let mut paths = vec![wheels.clone()];
    if scope == Scope::Full {
        let ray = folder.join("ray");
        pip::provide(&ray, &RAY, &[])?;
        paths.push(ray);
    }
    let cuda = [wheels.join("nvidia/cu13/lib"), folder.join("python-cuda")];
    in_place_of_cuda(&wheels.join("torch/lib"), &cuda)?;
    // They build the extension module and the command themselves.
    let mut test = command(&["test", "--test", "python", "--workspace", "--locked"]);
    test.env("PYTHONPATH", env::join_paths(paths)?);
    test.env("DOORBELL_TEST_CUDA_LIBRARIES", env::join_paths(cuda)?);
    if scope == Scope::Full {
        test.env("DOORBELL_SWEEP", "all");
    }
    // One after the other: each has up to four processes that busy-poll.
    ci::tests(test.args(["--", "--test-threads", "1", "torch", "examples", "import"]))
}

/// Links a library for each of CUDA's that the libraries in `torch` need and that is not `there`.
fn in_place_of_cuda(torch: &Path, [there, folder]: &[PathBuf; 2]) -> Result<()> {
    let mut needed = BTreeSet::new();
    let mut of_version = BTreeMap::<String, BTreeSet<String>>::new();
    for library in fs::read_dir(torch).with_context(|| format!("cannot read {}", torch.display()))? {
        let library = library?.path();
        if !library.to_string_lossy().contains(".so") {
            continue;
        }
        let dynamic = printed(Command::new("readelf").arg("-dW").arg(&library))?;
        needed.extend(dynamic.lines().filter_map(needed_library));
        let undefined = printed(Command::new("nm").args(["-D", "--undefined-only"]).arg(&library))?;
        for symbol in undefined.lines().filter_map(|line| line.split_whitespace().last()) {
            let (name, version) = symbol.split_once('@').unwrap_or((symbol, ""));
            of_version
                .entry(version.to_owned())
                .or_default()
                .insert(name.to_owned());
        }
    }
    // Most have their own names as versions; the others are given whatever may be theirs.
    let others = of_version.iter().filter(|(version, _)| !needed.contains(*version));
    let others = others.flat_map(|(_, names)| names);
    let others = others.filter(|name| SYMBOLS.iter().any(|beginning| name.starts_with(beginning)));
    let others: BTreeSet<_> = others.cloned().collect();
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    for library in needed.iter().filter(|library| !there.join(library).exists()) {
        match of_version.get(library) {
            Some(symbols) => link(folder, library, symbols, true)?,
            None => link(folder, library, &others, false)?,
        }
    }
    Ok(())
}

/// `0x0000000000000001 (NEEDED)  Shared library: [libcudart.so.13]`.
fn needed_library(line: &str) -> Option<String> {
    let name = line.split_once("(NEEDED)")?.1.split_once('[')?.1.strip_suffix(']')?;
    LIBRARIES
        .iter()
        .any(|beginning| name.starts_with(beginning))
        .then(|| name.to_owned())
}

/// Links a library whose functions return 1, an error of each of CUDA's interfaces.
fn link(folder: &Path, name: &str, symbols: &BTreeSet<String>, has_version: bool) -> Result<()> {
    let (source, versions) = (folder.join("functions.c"), folder.join("versions"));
    let functions = symbols
        .iter()
        .map(|symbol| format!("int {symbol}(void) {{ return 1; }}\n"));
    fs::write(&source, functions.collect::<String>())?;
    let mut link = Command::new("cc");
    link.args([
        "-shared",
        "-fPIC",
        "-fno-builtin",
        "-w",
        &format!("-Wl,-soname,{name}"),
        "-o",
    ]);
    link.arg(folder.join(name)).arg(&source);
    if has_version {
        let exported: String = symbols.iter().map(|symbol| format!("{symbol}; ")).collect();
        fs::write(&versions, format!("{name} {{ global: {exported}}};\n"))?;
        link.arg(format!("-Wl,--version-script={}", versions.display()));
    }
    printed(&mut link).map(drop)
}

fn printed(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {}: {errors}", output.status);
    Ok(String::from_utf8(output.stdout)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_libraries_of_cuda_are_those_that_are_needed() {
        let line = |name: &str| needed_library(&format!(" 0x0000000000000001 (NEEDED)   Shared library: [{name}]"));
        assert_eq!(line("libcudart.so.13").as_deref(), Some("libcudart.so.13"));
        assert_eq!(line("libc.so.6"), None);
        assert_eq!(
            needed_library(" 0x000000000000000e (SONAME)  Library soname: [libcudart.so.13]"),
            None
        );
    }
}
