//! Tests and examples of crates that others wrote, for the rows that run them. `tests/peers` pins
//! the versions; the sources are where cargo unpacks them.

use crate::{
    ci::{command, stdout},
    setup, workspace,
};
use anyhow::{Context, Result};
use serde_json::{Deserializer, Value};
use std::{
    fs,
    path::{Path, PathBuf},
};

pub(super) const CRATES: [&str; 2] = ["ibverbs", "sideway"];

/// Compiles programs that must not compile: that needs cargo where it runs, and no device.
const COMPILES: &str = "compiletest";

/// Builds into `folder`: `CRATE/tests/NAME` and `CRATE/examples/NAME`.
pub(super) fn build(folder: &Path) -> Result<()> {
    for name in CRATES {
        for (kind, target, program) in programs(&manifest(name)?, &folder.join("target"))? {
            let link = folder.join(name).join(kind).join(target);
            fs::create_dir_all(link.parent().context("no folder")?)?;
            let _ = fs::remove_file(&link);
            fs::hard_link(program, link)?;
        }
    }
    Ok(())
}

/// The crate's own manifest, below cargo's home.
fn manifest(name: &str) -> Result<String> {
    let peer = workspace().join("tests/peers").join(name).join("Cargo.toml");
    let mut cargo = command(&["metadata", "--format-version", "1", "--locked", "--manifest-path"]);
    let metadata: Value = serde_json::from_slice(&stdout(cargo.arg(peer))?)?;
    let packages = metadata["packages"].as_array().context("no packages")?;
    let package = packages.iter().find(|package| package["name"] == name);
    let manifest = package.and_then(|package| package["manifest_path"].as_str());
    Ok(manifest.with_context(|| format!("no package {name}"))?.to_owned())
}

/// Of each target: `tests` or `examples`, its name, and the program.
fn programs(manifest: &str, folder: &Path) -> Result<Vec<(&'static str, String, PathBuf)>> {
    let mut cargo = command(&["test", "--no-run", "--release", "--locked", "--message-format", "json"]);
    cargo.args(["--manifest-path", manifest, "--target-dir"]).arg(folder);
    let messages = stdout(cargo.env("LIBCLANG_PATH", setup::LIBCLANG))?;
    let mut programs = Vec::new();
    for message in Deserializer::from_slice(&messages).into_iter::<Value>() {
        let message = message?;
        let (target, program) = (message["target"]["name"].as_str(), message["executable"].as_str());
        let kind = if message["profile"]["test"] == true {
            "tests"
        } else {
            "examples"
        };
        if let (Some(target), Some(program)) = (target, program)
            && target != COMPILES
        {
            programs.push((kind, target.to_owned(), program.into()));
        }
    }
    Ok(programs)
}
