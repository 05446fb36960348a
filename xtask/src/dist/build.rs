//! The programs and libraries of a release: for old systems, and the same bytes wherever they are
//! built.
//!
//! zig links against the symbols of an old glibc, whatever the build machine has; it comes from
//! PyPI, as does cargo's wrapper for it.

use super::symbols;
use crate::{cargo_home, ci, pip, sanitize, target_folder, workspace};
use anyhow::{Context, Result, ensure};
use std::{
    env, fs,
    path::{Path, PathBuf},
};

/// That of RHEL 8, and of the wheels' tag `manylinux_2_28`.
const GLIBC: &str = "2.28";
const LINKER: [&str; 2] = ["cargo-zigbuild==0.24.1", "ziglang==0.17.1"];
/// What is installed.
pub(super) const PACKAGES: [&str; 6] = [
    "doorbell-perftest",
    "doorbell-dropin",
    "doorbell-sysfs",
    "doorbell-python",
    "doorbell-nccl",
    "doorbell-c",
];

const LIBRARIES: [&str; 2] = ["libdoorbell_dropin.so", "libdoorbell_sysfs.so"];

pub(super) struct Built {
    /// As x86_64-unknown-linux-gnu.
    pub(super) target: String,
    /// What has all of it.
    pub(super) folder: PathBuf,
    pub(super) program: PathBuf,
    pub(super) libraries: [PathBuf; 2],
    /// The extension module of Python, which the wheel alone has.
    pub(super) extension: PathBuf,
    pub(super) nccl: PathBuf,
    /// The newest glibc that one of them needs.
    pub(super) glibc: symbols::Version,
}

pub(super) fn build() -> Result<Built> {
    let linker = linker(&target_folder()?);
    pip::provide(&linker, &LINKER, &[])?;
    let target = sanitize::host()?;
    let wrapper = linker.join("bin/cargo-zigbuild");
    let path = env::join_paths(
        [linker.join("bin")]
            .into_iter()
            .chain(env::var_os("PATH").iter().flat_map(env::split_paths)),
    )?;
    let mut cargo = ci::command(&["zigbuild", "--profile", "dist", "--locked"]);
    cargo
        .args(PACKAGES.iter().flat_map(|package| ["--package", package]))
        .args(["--target", &format!("{target}.{GLIBC}")])
        .env("PATH", path)
        .env("CARGO_ZIGBUILD_ZIG_PATH", linker.join("ziglang/zig"))
        .env("CARGO_ENCODED_RUSTFLAGS", flags()?)
        // The extension is for every Python: none of this machine takes part.
        .env("PYO3_NO_PYTHON", "1")
        .env("CARGO_PROFILE_DIST_DEBUG", "false")
        .env("CARGO_PROFILE_DIST_STRIP", "symbols");
    ensure!(wrapper.is_file(), "{} is missing", wrapper.display());
    ci::succeed(&mut cargo)?;
    let folder = target_folder()?.join(&target).join("dist");
    let program = folder.join("doorbell");
    let libraries = LIBRARIES.map(|name| folder.join(name));
    let mut glibc = symbols::Version::default();
    let [extension, nccl, of_c] =
        ["libdoorbell_python.so", "libdoorbell_nccl.so", "libdoorbell.so"].map(|name| folder.join(name));
    for file in libraries.iter().chain([&program, &extension, &nccl, &of_c]) {
        no_path_of_this_machine(file)?;
        glibc = glibc.max(symbols::needed(file)?);
    }
    no_path_of_this_machine(&folder.join("libdoorbell.a"))?;
    Ok(Built {
        target,
        folder,
        program,
        libraries,
        extension,
        nccl,
        glibc,
    })
}

/// Where the linker is, below a target folder.
pub(super) fn linker(target: &Path) -> PathBuf {
    target.join("pip/zig")
}

/// Paths of this machine become those of none, in this order: the last one that fits is taken.
fn flags() -> Result<String> {
    // As in a toolchain without the sources of the standard library.
    let standard = format!("/rustc/{}", sanitize::rustc_version("commit-hash")?);
    let maps = [
        (rust()?, "/rust"),
        (rust()?.join("lib/rustlib/src/rust"), &standard),
        (cargo_home()?, "/cargo"),
        (workspace(), "/doorbell"),
        (target_folder()?, "/doorbell/target"),
    ];
    let flags = maps.map(|(from, to)| format!("--remap-path-prefix={}={to}", from.display()));
    Ok(flags.join("\x1f"))
}

fn rust() -> Result<PathBuf> {
    sanitize::rustc("--print=sysroot").map(PathBuf::from)
}

fn no_path_of_this_machine(file: &Path) -> Result<()> {
    let bytes = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    for folder in [workspace(), cargo_home()?, target_folder()?, rust()?] {
        let folder = folder.to_string_lossy();
        let found = bytes.windows(folder.len()).any(|window| window == folder.as_bytes());
        ensure!(!found, "{} has {folder} in it", file.display());
    }
    Ok(())
}
