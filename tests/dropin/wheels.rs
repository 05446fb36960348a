//! Packages of Python that bring libraries: a copy of libibverbs under a name of its own, as
//! auditwheel makes them, and NCCL.

use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

use tempfile::TempDir;

use crate::{doorbell, missing, texts};

const COPY: &str = "libibverbs-0badcafe.so.1.14.48.0";

/// Prints the number of devices that a module of a package finds.
const SCRIPT: &str = "import ctypes, pathlib, os\n\
    folder = pathlib.Path(os.environ['PYTHONPATH'])\n\
    print(ctypes.CDLL(folder / 'package/module.so').devices())\n";

/// An import folder with such a package.
struct Packages(TempDir);

impl Packages {
    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A shared library; `None` without a compiler.
    fn compile(&self, name: &str, source: &str, options: &[&str]) -> Option<()> {
        let (file, text) = (self.path(name), self.path("source.c"));
        fs::create_dir_all(file.parent().expect("a folder")).expect("a folder");
        fs::write(&text, source).expect("a file");
        let compiled = Command::new("cc")
            .args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"])
            .args([file.as_path(), &text])
            .args(options)
            .status();
        compiled.is_ok_and(|status| status.success()).then_some(())
    }

    /// The copy finds no device, as rdma-core's library does without adapters. The module's path to
    /// it is a DT_RPATH or a DT_RUNPATH.
    fn new(tags: &str) -> Option<Self> {
        let packages = Self(tempfile::tempdir().expect("a temporary folder"));
        let versions = packages.path("versions");
        fs::write(
            &versions,
            "IBVERBS_1.0 { }; IBVERBS_1.1 { global: ibv_get_device_list; local: *; } IBVERBS_1.0;\n",
        )
        .expect("a file");
        let copy = format!("package.libs/{COPY}");
        let source = "void *ibv_get_device_list(int *count) { *count = 0; return 0; }\n";
        let soname = format!("-Wl,-soname,{COPY}");
        let script = format!("-Wl,--version-script={}", versions.display());
        packages.compile(&copy, source, &[&soname, &script])?;
        let source = "void *ibv_get_device_list(int *);\n\
            int devices(void) { int count = -1; ibv_get_device_list(&count); return count; }\n";
        let tags = format!("-Wl,{tags},-rpath,$ORIGIN/../package.libs");
        let copy = packages.path(&copy);
        packages.compile(
            "package/module.so",
            source,
            &[&tags, copy.to_str().expect("a plain path")],
        )?;
        Some(packages)
    }

    /// What a command with this import folder prints, on stdout and on stderr.
    fn run(&self, options: &[&str], command: &[&OsStr]) -> (String, String) {
        let mut doorbell = doorbell(&[&["run"], options, &["--"]].concat());
        doorbell.args(command).env("PYTHONPATH", self.0.path());
        doorbell.env_remove("VIRTUAL_ENV").env_remove("LD_LIBRARY_PATH");
        texts(&doorbell.output().expect("doorbell was built"))
    }
}

fn has_python() -> bool {
    Command::new("python3")
        .arg("-V")
        .output()
        .is_ok_and(|output| output.status.success())
}

#[test]
fn a_copy_of_the_library_in_a_wheel_is_the_drop_in() {
    let tags = ["--enable-new-dtags", "--disable-new-dtags"];
    let packages = tags.map(Packages::new);
    let ([Some(runpath), Some(rpath)], true) = (&packages, has_python()) else {
        return missing("a C compiler (gcc) and python3");
    };
    let python = ["python3", "-c", SCRIPT].map(OsStr::new);
    for packages in [runpath, rpath] {
        let alone = Command::new(python[0])
            .args(&python[1..])
            .env("PYTHONPATH", packages.0.path())
            .output();
        assert_eq!(texts(&alone.expect("python3 runs")).0, "0\n");
        assert_eq!(packages.run(&[], &python), ("1\n".into(), String::new()));
    }
    // By a script, and without LD_PRELOAD, which the DT_RPATH needs.
    let script = rpath.path("script");
    fs::write(&script, format!("#!/usr/bin/env python3\n{SCRIPT}")).expect("a file");
    fs::set_permissions(&script, Permissions::from_mode(0o755)).expect("it is ours");
    let script = [script.as_os_str()];
    assert_eq!(rpath.run(&[], &script), ("1\n".into(), String::new()));
    assert_eq!(runpath.run(&["--no-sysfs"], &python).0, "1\n");
    let (stdout, stderr) = rpath.run(&["--no-sysfs"], &script);
    assert_eq!((stdout.as_str(), stderr.lines().count()), ("0\n", 1), "{stderr}");
    assert!(
        stderr.contains(COPY) && stderr.contains("bypass the device"),
        "{stderr}"
    );
}

#[test]
fn an_nccl_that_would_crash_is_configured() {
    if !has_python() {
        return missing("python3");
    }
    let packages = Packages(tempfile::tempdir().expect("a temporary folder"));
    let library = packages.path("nvidia/nccl/lib/libnccl.so.2");
    fs::create_dir_all(library.parent().expect("a folder")).expect("a folder");
    let version = |version: &str| {
        let text = format!("\x7fELF, and NCCL version {version}+cuda13.0, and its kernels");
        fs::write(&library, text).expect("a file");
    };
    let shown = "import os; print(os.environ.get('NCCL_GIN_TYPE'))";
    let shows = |words: &[&str]| packages.run(&[], &words.iter().map(OsStr::new).collect::<Vec<_>>());
    let python = ["python3", "-c", shown];
    version("2.28.9");
    let (stdout, stderr) = shows(&python);
    assert_eq!((stdout.as_str(), stderr.lines().count()), ("0\n", 1), "{stderr}");
    assert!(
        stderr.contains("NCCL 2.28.9") && stderr.contains("NCCL_GIN_TYPE=0"),
        "{stderr}"
    );
    // Of a launcher's words; and by the folders of LD_LIBRARY_PATH, without Python.
    assert_eq!(shows(&[&["env"], &python[..]].concat()).0, "0\n");
    let folder = library.parent().expect("a folder");
    let mut by_path = doorbell(&["run", "--", "printenv", "NCCL_GIN_TYPE"]);
    let output = by_path
        .env("LD_LIBRARY_PATH", folder)
        .output()
        .expect("doorbell was built");
    assert_eq!(texts(&output).0, "0\n");
    // One that the user sets, and other versions, are left alone.
    let mut set = doorbell(&["run", "--", "printenv", "NCCL_GIN_TYPE"]);
    set.env("LD_LIBRARY_PATH", folder).env("NCCL_GIN_TYPE", "2");
    let output = set.output().expect("doorbell was built");
    assert_eq!(texts(&output), ("2\n".into(), String::new()));
    version("2.28.10");
    assert_eq!(shows(&python), ("None\n".into(), String::new()));
}
