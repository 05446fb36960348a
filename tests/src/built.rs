//! The programs and libraries of the workspace. Cargo builds none of another package for a test, so
//! the first that needs them runs it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The folder that they are in; panics when they do not build.
pub fn built() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        // This program is in TARGET/PROFILE/deps.
        let program = std::env::current_exe().expect("this program is somewhere");
        let folder = program.ancestors().nth(2).expect("cargo put it there").to_owned();
        let target = folder.parent().expect("cargo put it there");
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--locked", "--target-dir"]).arg(target);
        if folder.ends_with("release") {
            cargo.arg("--release");
        }
        // The features of `cargo test --workspace`: with others most packages would be built again.
        cargo.args(["--workspace", "--lib", "--examples", "--bin", "doorbell"]);
        let status = cargo
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .status()
            .expect("cargo runs");
        assert!(status.success(), "the libraries do not build");
        folder
    })
}
