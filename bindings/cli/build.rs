//! Builds the drop-in libraries, and writes the list of them that `main.rs` includes.
//!
//! A cdylib cannot be linked as a dependency, so another cargo builds them. It has this manifest,
//! in which a cfg makes them dependencies: their sources are where those of this package's others
//! are, in the repository or a registry. Its target folder is its own, as the outer cargo holds the
//! lock of the other one.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use miniz_oxide::deflate::compress_to_vec;
use sha2::{Digest, Sha256};

const LIBRARIES: [(&str, &str); 2] = [
    ("doorbell-dropin", "libdoorbell_dropin.so"),
    ("doorbell-sysfs", "libdoorbell_sysfs.so"),
];
/// Smaller by a tenth than at 6, for a second or two.
const LEVEL: u8 = 9;

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let sources = Path::new(env!("CARGO_MANIFEST_DIR"));
    // In a registry nothing changes.
    let beside = [
        "softroce",
        "gpudirect/cuda",
        "verbs/sys",
        "verbs/threads",
        "verbs/trust",
    ];
    let beside = beside.map(|folder| sources.join("../..").join(folder));
    let watched = beside.into_iter().filter(|folder| folder.is_dir());
    for path in watched.chain([sources.join("Cargo.lock")]) {
        println!("cargo::rerun-if-changed={}", path.display());
    }
    let folder = build(sources, &out.join("libraries"));
    let mut list = "[\n".to_owned();
    for (_, name) in LIBRARIES {
        let bytes = fs::read(folder.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        let deflated = out.join(format!("{name}.deflated"));
        fs::write(&deflated, compress_to_vec(&bytes, LEVEL)).expect("OUT_DIR is writable");
        let digest: [u8; 32] = Sha256::digest(&bytes).into();
        let _ = writeln!(
            list,
            "EmbeddedLibrary {{ name: {name:?}, deflated: include_bytes!({deflated:?}), bytes: {}, sha256: {digest:?} }},",
            bytes.len()
        );
    }
    fs::write(out.join("libraries.rs"), list + "]\n").expect("OUT_DIR is writable");
}

/// Returns the folder with the libraries.
fn build(sources: &Path, target: &Path) -> PathBuf {
    let triple = env::var("TARGET").expect("cargo sets TARGET");
    let flags = env::var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default();
    let flags = flags.split('\x1f').filter(|flag| !flag.is_empty());
    let flags: Vec<_> = flags.chain(["--cfg", "doorbell_libraries"]).collect();
    let mut cargo = Command::new(env::var_os("CARGO").expect("cargo sets CARGO"));
    cargo
        .args(["build", "--release", "--locked", "--target", &triple])
        .args(LIBRARIES.iter().flat_map(|(package, _)| ["--package", package]))
        .arg("--target-dir")
        .arg(target)
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"))
        .current_dir(sources);
    // What the outer cargo says of this package is not for those.
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_FEATURE_") || text.starts_with("CARGO_CFG_") || text.starts_with("CARGO_PKG_") {
            cargo.env_remove(name);
        }
    }
    let status = cargo
        .status()
        .unwrap_or_else(|error| panic!("cannot run cargo: {error}"));
    assert!(status.success(), "the drop-in libraries cannot be built: {status}");
    target.join(triple).join("release")
}
