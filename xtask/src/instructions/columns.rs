//! Builds the columns of the table: ours, C, and the peers.

use crate::{
    ci,
    setup::{self, Need},
    target_folder, workspace,
};
use anyhow::{Context, Result, bail};
use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

pub(super) struct Column {
    pub(super) title: &'static str,
    /// The program, or why it cannot be built here.
    pub(super) program: Result<PathBuf, String>,
}

pub(super) struct Programs {
    /// The folder of the C programs, the provider and callgrind's output.
    pub(super) folder: PathBuf,
    /// Ours, C with accounting, then the others.
    pub(super) columns: Vec<Column>,
    /// A program that does everything a data path must not.
    pub(super) guilty: PathBuf,
}

/// Peer crates: title, which is also the folder in `tests/peers`, and required packages.
pub(crate) const PEERS: [(&str, &[Need]); 3] = [
    ("ibverbs", &setup::RDMA_CORE),
    ("sideway", &setup::RDMA_CORE),
    ("rdma-sys", &setup::ABI),
];

impl Programs {
    /// Builds everything; the C programs with `gcc -O2`.
    pub(super) fn build(with_peers: bool) -> Result<Self> {
        let folder = target_folder()?.join("instructions");
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let source = workspace().join("tests/instructions");
        let provider = folder.join("libibverbs.so.1");
        let versions = format!("-Wl,--version-script={}", source.join("provider.map").display());
        gcc(
            &["-shared", "-fPIC", "-Wl,-soname,libibverbs.so.1", &versions],
            &[source.join("provider.c"), source.join("datapath.c")],
            &provider,
        )?;
        let c = |name: &str, also: &[PathBuf]| -> Result<PathBuf> {
            let program = folder.join(name);
            let own = source.join(name).with_extension("c");
            gcc(&["-pthread"], &[&[own], also].concat(), &program)?;
            Ok(program)
        };
        let peer = [source.join("peer.c"), provider];
        let column = |title, program| Column { title, program };
        let mut columns = vec![
            column("ours", Ok(build_ours()?)),
            column("C with accounting", Ok(c("accounting", &peer)?)),
            column("bare C", Ok(c("bare", &peer)?)),
        ];
        if with_peers {
            for (title, needs) in PEERS {
                columns.push(column(title, build_peer(title, needs)?));
            }
        }
        Ok(Self {
            columns,
            guilty: c("guilty", &[])?,
            folder,
        })
    }
}

fn gcc(options: &[&str], sources: &[PathBuf], output: &Path) -> Result<()> {
    let status = Command::new("gcc")
        .args(["-O2", "-Wall", "-Wextra", "-Werror"])
        .args(options)
        .arg("-o")
        .arg(output)
        .args(sources)
        .status()
        .context("cannot run gcc")?;
    if !status.success() {
        bail!("gcc for {}: {status}", output.display());
    }
    Ok(())
}

fn cargo_build(profile: &str) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .args(["build", "--profile", profile, "--locked"])
        .current_dir(workspace());
    command
}

fn build_ours() -> Result<PathBuf> {
    let status = cargo_build("dist")
        .args(["--package", "doorbell-instructions"])
        .status()
        .context("cannot run cargo")?;
    if !status.success() {
        bail!("cargo build: {status}");
    }
    Ok(target_folder()?.join("dist/instructions"))
}

fn lacking(needs: &[Need]) -> Option<String> {
    match setup::provide(needs) {
        Ok(missing) if missing.is_empty() => None,
        Ok(missing) => Some(format!("missing: {} (as root: apt-get install {0})", missing.join(" "))),
        Err(error) => Some(format!("{error:#}").lines().next().unwrap_or_default().to_owned()),
    }
}

/// A peer's program, or why it cannot be built here; under `CI=true` that is an error.
fn build_peer(name: &str, needs: &[Need]) -> Result<Result<PathBuf, String>> {
    let not_built = |why: String| {
        if ci::under_ci() {
            bail!("{name}: {why}")
        } else {
            Ok(Err(why))
        }
    };
    if let Some(lacking) = lacking(needs) {
        return not_built(lacking);
    }
    let folder = target_folder()?.join("peers");
    let status = cargo_build("release")
        .arg("--manifest-path")
        .arg(workspace().join("tests/peers").join(name).join("Cargo.toml"))
        .arg("--target-dir")
        .arg(&folder)
        .env("LIBCLANG_PATH", setup::LIBCLANG)
        .status()
        .context("cannot run cargo")?;
    if !status.success() {
        return not_built(format!("not built: cargo build: {status} (cargo says why above)"));
    }
    Ok(Ok(folder.join(format!("release/doorbell-peer-{name}"))))
}
