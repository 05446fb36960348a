//! Stock programs, which are not built with a sanitizer, on drop-in libraries that are.
//!
//! Such a library calls AddressSanitizer's runtime, which must be the first library of its process:
//! a preloaded one. The toolchain has only an archive for executables; all of it but the object
//! with their `.preinit_array` is linked as a library. A compiler's own (`libasan.so`) is of
//! another version.

use super::{folder, host};
use crate::{
    ci::{self, Verdict, rows},
    target_folder, workspace,
};
use anyhow::{Context, Result};
use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

/// Not `libasan.so`, by which the runtime recognizes a second one.
const RUNTIME: &str = "runtime.so";
const OF_EXECUTABLES: &str = "asan_preinit.cpp.o";

/// The programs end without freeing what they have.
const OPTIONS: &str = "detect_leaks=0";

pub(super) fn run() -> Result<Verdict> {
    let Some(archive) = archive()? else {
        return Ok(Verdict::Skipped(
            "the toolchain has no runtime of AddressSanitizer (rustup's have)".into(),
        ));
    };
    let folder = folder("dropin")?;
    fs::create_dir_all(&folder)?;
    let runtime = runtime(&archive, &folder)?;
    let libraries = ["--package", "doorbell-dropin", "--package", "doorbell-sysfs", "--lib"];
    let mut build = super::cargo("build", "dropin", "-Zsanitizer=address")?;
    ci::succeed(build.args(libraries).arg("--locked"))?;
    let programs = [
        "--package",
        "doorbell-perftest",
        "--package",
        "doorbell-tests",
        "--bins",
    ];
    ci::succeed(ci::command(&["build", "--locked"]).args(programs))?;
    let programs = target_folder()?.join("debug");
    let libraries = folder.join(host()?).join("debug");
    let reports = reports(&folder)?;
    let script = format!(
        "#!/bin/sh\nexport DOORBELL_LIBRARY_DIR='{}' LD_PRELOAD='{}' ASAN_OPTIONS='{OPTIONS}:log_path={}'\nexec '{}' \"$@\"\n",
        libraries.display(),
        runtime.display(),
        reports.join("report").display(),
        programs.join("doorbell").display(),
    );
    let doorbell = folder.join("doorbell");
    fs::write(&doorbell, script)?;
    fs::set_permissions(&doorbell, Permissions::from_mode(0o755))?;
    let arguments = ["host", "--quick", "--doorbell", doorbell.to_str().context("not text")?];
    let rows = rows::run(&programs.join("stock"), &arguments, &[])?;
    // Of processes that were killed, too, and of rows that passed when they were repeated.
    if let Some(text) = text(&reports)? {
        return Ok(Verdict::Counted(ci::Counts::default(), Some(text)));
    }
    rows::verdict(&[rows])
}

fn archive() -> Result<Option<PathBuf>> {
    let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    let output = rustc
        .args(["--print", "target-libdir"])
        .current_dir(workspace())
        .output();
    let output = output.context("cannot run rustc")?;
    for file in fs::read_dir(String::from_utf8_lossy(&output.stdout).trim())? {
        let path = file?.path();
        if path.to_string_lossy().ends_with("_rt.asan.a") {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

fn runtime(archive: &Path, folder: &Path) -> Result<PathBuf> {
    let (objects, library) = (folder.join("runtime.a"), folder.join(RUNTIME));
    fs::copy(archive, &objects)?;
    ci::succeed(Command::new("ar").arg("d").arg(&objects).arg(OF_EXECUTABLES))?;
    let mut link = Command::new("cc");
    link.arg("-shared").arg("-o").arg(&library).arg("-Wl,--whole-archive");
    link.arg(&objects)
        .args(["-Wl,--no-whole-archive", "-lpthread", "-ldl", "-lm", "-lrt"]);
    ci::succeed(&mut link)?;
    Ok(library)
}

/// An empty folder that the programs, which run as another user, can write to.
fn reports(folder: &Path) -> Result<PathBuf> {
    let reports = folder.join("reports");
    if reports.exists() {
        fs::remove_dir_all(&reports)?;
    }
    fs::create_dir(&reports)?;
    fs::set_permissions(&reports, Permissions::from_mode(0o777))?;
    Ok(reports)
}

fn text(reports: &Path) -> Result<Option<String>> {
    let mut text = String::new();
    for file in fs::read_dir(reports)? {
        text += &String::from_utf8_lossy(&fs::read(file?.path())?);
    }
    Ok((!text.is_empty()).then_some(text))
}
