//! The step `package`: the crates as they would be published.

use super::{Scope, Verdict, command, stdout, steps::CLI, succeed};
use crate::{cargo_home, target_folder, workspace};
use anyhow::{Context, Result, bail, ensure};
use flate2::read::GzDecoder;
use serde_json::Value;
use std::{
    collections::BTreeSet,
    fs::{self, File},
    path::Path,
    process::{Command, Stdio},
};
use tar::Archive;

/// What crates.io and docs.rs show of a crate.
const FIELDS: [&str; 7] = [
    "categories",
    "description",
    "documentation",
    "keywords",
    "license",
    "readme",
    "repository",
];
const FILES: [&str; 4] = ["Cargo.lock", "LICENSE-APACHE", "LICENSE-MIT", "README.md"];

/// Packs them; with `--full` also builds them from what was packed, and installs the command.
pub(super) fn check(scope: Scope) -> Result<Verdict> {
    let published = published("Cargo.toml")?;
    forget_unpacked(&published)?;
    let mut cargo = command(&["package", "--locked", "--allow-dirty"]);
    for package in &published {
        cargo.args(["--package", package.name()]);
    }
    if scope == Scope::Short {
        cargo.arg("--no-verify");
    }
    succeed(&mut cargo)?;
    let crates = target_folder()?.join("package");
    for package in &published {
        package.complete()?;
        package.packed(&crates)?;
    }
    for package in self::published(CLI)? {
        package.complete()?;
    }
    if scope == Scope::Full {
        install(&crates)?;
    }
    Ok(Verdict::Passed)
}

/// Removes what cargo has unpacked of them before: it builds a crate with the earlier one of another
/// of the same version.
fn forget_unpacked(published: &[Package]) -> Result<()> {
    let unpacked = cargo_home()?.join("registry/src");
    for registry in fs::read_dir(&unpacked).into_iter().flatten() {
        let registry = registry?;
        // The registry of crates that were packed here has no host in its name.
        if !registry.file_name().as_encoded_bytes().starts_with(b"-") {
            continue;
        }
        for package in published {
            let folder = registry.path().join(package.full_name());
            if folder.exists() {
                fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
            }
        }
    }
    Ok(())
}

fn install(crates: &Path) -> Result<Verdict> {
    let mut script = Command::new(workspace().join("tests/packages/install.sh"));
    script.arg(crates).arg(target_folder()?.join("install"));
    succeed(script.current_dir(workspace()).stdin(Stdio::null()))
}

/// A package as `cargo metadata` has it.
struct Package(Value);

/// Those that are published, of the workspace of this manifest.
fn published(manifest: &str) -> Result<Vec<Package>> {
    let arguments = [
        "metadata",
        "--format-version",
        "1",
        "--no-deps",
        "--manifest-path",
        manifest,
    ];
    let metadata: Value = serde_json::from_slice(&stdout(&mut command(&arguments))?)?;
    let packages = metadata["packages"].as_array().cloned().unwrap_or_default();
    let published = packages.into_iter().filter(|package| package["publish"].is_null());
    Ok(published.map(Package).collect())
}

impl Package {
    fn name(&self) -> &str {
        self.0["name"].as_str().unwrap_or_default()
    }

    /// As cargo names its file and folder.
    fn full_name(&self) -> String {
        let version = self.0["version"].as_str().unwrap_or_default();
        format!("{}-{version}", self.name())
    }

    fn complete(&self) -> Result<()> {
        let is_missing = |field: &&str| match &self.0[*field] {
            Value::Null => true,
            Value::Array(values) => values.is_empty(),
            _ => false,
        };
        let missing: Vec<_> = FIELDS.into_iter().filter(is_missing).collect();
        ensure!(missing.is_empty(), "{} has no {}", self.name(), missing.join(", "));
        Ok(())
    }

    /// Whether what was packed is complete, too.
    fn packed(&self, crates: &Path) -> Result<()> {
        let name = self.full_name();
        let path = crates.join(format!("{name}.crate"));
        let file = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
        let mut files = BTreeSet::new();
        for entry in Archive::new(GzDecoder::new(file)).entries()? {
            let entry = entry?;
            // A link would name what is not packed.
            if entry.header().entry_type().is_file() {
                files.insert(entry.path()?.into_owned());
            }
        }
        match FILES.iter().find(|file| !files.contains(&Path::new(&name).join(file))) {
            Some(missing) => bail!("{name}.crate has no {missing}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_crate_without_a_field_is_found() {
        let mut package: Value = FIELDS
            .map(|field| (field.to_owned(), json!(["x"])))
            .into_iter()
            .collect();
        package["name"] = json!("x");
        assert!(Package(package.clone()).complete().is_ok());
        package["keywords"] = json!([]);
        package["readme"] = Value::Null;
        let error = Package(package).complete().unwrap_err().to_string();
        assert_eq!(error, "x has no keywords, readme");
    }
}
